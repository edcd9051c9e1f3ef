"""The verb `prune`: a model directory in, one with fewer layers, heads, channels or weights out, compared with it.

What goes is what matters least on calibration text. Layers, heads and channels are cut out: the directory is that of a
smaller model. Single weights become zeros in a model of the same size. A structural cut is put in place only after
transformers has read it and found the logits of the original with the same parts silenced. Healing lets the smaller
model learn what the original would say.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.compress import comparison
from onecard.compress.directories import (
    check_room,
    check_same,
    copy_companions,
    read_by_others,
    stored_tensors,
    weight_bytes,
    write_model,
    written_settings,
)
from onecard.config import PruneConfig
from onecard.errors import ArtifactError, ConfigError
from onecard.model.load import load_model, load_tokenizer, model_directory, weights_hash

if TYPE_CHECKING:
    from torch import Tensor

    from onecard.compress.structure import Kept, Shape


def prune(config: PruneConfig) -> dict[str, Any]:
    """Choose, cut, read back, heal, compare. ConfigError before any work for what a model of this kind cannot be."""
    directory = model_directory(config.model)
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=[config.model])
    _check_settings(config, directory)
    tokenizer = load_tokenizer(directory)
    material = comparison.gather(config, directory)
    check_room(config.output, weight_bytes(directory))
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=[config.model]) as folder:
        if config.heal_updates:
            facts = _write_healed(config, directory, tokenizer, folder)
        else:
            facts = write_pruned(config, directory, tokenizer, folder)
        compared = comparison.compare(directory, folder, material, config, "The pruned form")
        result = {**facts, **compared.result()}
        notes = _notes(facts)
        compared.write(folder, "Pruned", notes)
        assert config.corpus is not None
        parents = [config.model, config.corpus]
        artifact.write_manifest(folder, "model", settings=config.plain(), parents=parents, result=result)
    if config.heal_updates:
        shutil.rmtree(_healing_place(config), ignore_errors=True)
    compared.show(f"Pruned: {config.output}")
    for note in notes:
        console.result(note)
    return {**result, "output": str(config.output)}


def _check_settings(config: PruneConfig, directory: Path) -> None:
    if "quantization_config" in written_settings(directory):
        raise ConfigError(f"The model in {config.model} is quantized.", "Give the model that it was made of.")
    if not (structural(config) or config.sparsity is not None):
        raise ConfigError(
            "Nothing is said to be left out.", "Give --drop-layers, --heads, --intermediate-size or --sparsity."
        )
    if not config.heal_updates:
        for name in ("heal_learning_rate", "heal_tokens"):
            if getattr(config, name) != PruneConfig.model_fields[name].default:
                console.warn(f"{name} is not used: heal_updates = 0 heals nothing.")
    if config.corpus is None:
        raise ConfigError("What matters least is measured on text.", "Give a --corpus (from clean).")
    if structural(config):
        _goal(config, directory)


def structural(config: PruneConfig) -> bool:
    """Whether the model becomes smaller, and not only emptier."""
    return bool(config.drop_layers or config.heads or config.key_value_heads or config.intermediate_size)


def _goal(config: PruneConfig, directory: Path) -> tuple[Shape, Shape]:
    """The shape of the original and of what is asked for. ConfigError where there is no such model."""
    from onecard.compress.structure import shape_of, smaller_settings

    old = shape_of(directory)
    groups = config.key_value_heads or old.key_value_heads
    heads = config.heads or groups * old.group
    new = replace(
        old,
        layers=old.layers - config.drop_layers,
        heads=heads,
        key_value_heads=groups,
        channels=config.intermediate_size or old.channels,
    )
    if new.layers < 1:
        raise ConfigError(f"The model has {old.layers} layers: one at least stays.", "Lower drop_layers.")
    for name, asked, there in (
        ("heads", heads, old.heads),
        ("key_value_heads", groups, old.key_value_heads),
        ("intermediate_size", new.channels, old.channels),
    ):
        if asked > there:
            raise ConfigError(f"{name} = {asked} is more than the {there} of the model.", "Nothing is added here.")
    if heads % groups or heads // groups > old.group:
        raise ConfigError(
            f"{heads} query heads cannot share {groups} key/value heads: each has {old.group} here, and all keep as "
            "many.",
            f"Set heads to a multiple of {groups} up to {groups * old.group}, or set key_value_heads too.",
        )
    smaller_settings(directory, old, new)
    return old, new


# --- cutting ------------------------------------------------------------------------------------------------------


def write_pruned(config: PruneConfig, directory: Path, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Write the pruned model, not healed, into `folder`; what was left out and what that says."""
    from onecard.compress.calibration import sample_rows

    assert config.corpus is not None
    model: Any = load_model(directory)
    row_tokens = min(config.calibration_tokens, int(getattr(model.config, "max_position_embeddings", 1 << 20)))
    rows = sample_rows(config.corpus, tokenizer, config.calibration_rows, row_tokens)
    console.note(f"  {len(rows)} rows of {row_tokens} tokens to measure with")
    facts: dict[str, Any] = {}
    copy_companions(directory, folder)
    if structural(config):
        facts |= _cut(config, directory, model, rows, folder)
        del model
        model = load_model(folder)
    if config.sparsity is not None:
        facts |= _empty(config, model, rows, folder if structural(config) else directory, folder)
    return facts


def _cut(config: PruneConfig, directory: Path, model: Any, rows: Sequence[Tensor], folder: Path) -> dict[str, Any]:
    from onecard.compress.structure import silence, skipping, smaller_settings, smaller_tensors
    from onecard.model.lora import deviation

    old, new = _goal(config, directory)
    kept, facts = choose(config, model, rows, old, new)
    settings = smaller_settings(directory, old, new, kept.layers)
    write_model(folder, smaller_tensors(stored_tensors(directory), old, kept), settings)
    artifact.write_json_atomically(folder / "pruning.json", asdict(kept))
    silence(model, old, kept)
    with skipping(model.model.layers, set(range(old.layers)) - set(kept.layers)):
        facts["read_back_deviation"] = check_same(deviation(read_by_others(folder), model))
    return {**facts, "original_shape": asdict(old), "shape": asdict(new)}


def choose(
    config: PruneConfig, model: Any, rows: Sequence[Tensor], old: Shape, new: Shape
) -> tuple[Kept, dict[str, Any]]:
    """What stays, and the measures behind it: layers first, heads and channels as what is left uses them."""
    from onecard.compress.calibration import input_lengths
    from onecard.compress.importance import best_channels, best_heads, column_scores, drop_by_loss, layer_changes
    from onecard.compress.structure import Kept, skipping

    facts: dict[str, Any] = {"dropped_layers": []}
    if config.drop_layers and config.layers_by == "loss":
        whole, gone = drop_by_loss(model, rows, config.drop_layers)
        facts |= {"dropped_layers": [number for number, _ in gone], "loss": whole, "losses": [loss for _, loss in gone]}
    elif config.drop_layers:
        changes = layer_changes(model, rows)
        order = sorted(range(old.layers), key=lambda number: (changes[number], number))
        facts |= {"dropped_layers": order[: config.drop_layers], "layer_changes": changes}
    out = set(facts["dropped_layers"])
    kept = Kept(sorted(set(range(old.layers)) - out))
    if (new.heads, new.key_value_heads, new.channels) == (old.heads, old.key_value_heads, old.channels):
        return kept, facts
    layers = model.model.layers
    with skipping(layers, out):
        lengths = input_lengths(model, rows)
    heads, groups, channels = {}, {}, {}
    for number in kept.layers:
        name = f"model.layers.{number}"
        attention = column_scores(layers[number].self_attn.o_proj.weight, lengths[f"{name}.self_attn.o_proj"])
        heads[number], groups[number] = best_heads(attention, old, new.heads, new.key_value_heads)
        inner = column_scores(layers[number].mlp.down_proj.weight, lengths[f"{name}.mlp.down_proj"])
        channels[number] = best_channels(inner, new.channels)
    if (new.heads, new.key_value_heads) != (old.heads, old.key_value_heads):
        kept = replace(kept, heads=heads, key_value_heads=groups)
    return (replace(kept, channels=channels) if new.channels != old.channels else kept), facts


def _empty(config: PruneConfig, model: Any, rows: Sequence[Tensor], source: Path, folder: Path) -> dict[str, Any]:
    """Write the model in `source` with weights at zero into `folder`."""
    from onecard.compress.sparsity import check_widths, sparsify
    from onecard.model.lora import deviation, linear_layers

    assert config.sparsity is not None
    check_widths(model, linear_layers(model), config.sparsity)
    masks = sparsify(model, rows, config.sparsity)
    tensors = stored_tensors(source)
    for name, mask in masks.items():
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * mask
    write_model(folder, tensors, written_settings(source))
    read_back = check_same(deviation(read_by_others(folder), model))
    zeros = sum(int((~mask).sum()) for mask in masks.values())
    return {
        "sparsity": config.sparsity,
        "zeros": zeros,
        "sparse_weights": sum(mask.numel() for mask in masks.values()),
        "read_back_deviation": read_back,
    }


# --- healing ------------------------------------------------------------------------------------------------------

# In the folder of a healing: the pruned model that it begins with, and its run directory.
_PRUNED, _RUN = "pruned", "run"


def _healing_place(config: PruneConfig) -> Path:
    """Where healing is at work until the output is in place."""
    output = config.output.resolve()
    return output.with_name(f"{output.name}-healing")


def _write_healed(config: PruneConfig, directory: Path, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Prune into a folder beside the output, heal there, write the healed model into `folder`.

    Interrupted, the same command finds what was pruned and goes on with the healing.
    """
    from onecard.compress.healing import heal

    place = _healing_place(config)
    pruned = _pruned_to_heal(config, directory, tokenizer, place)
    tensors, healing = heal(config, directory, pruned, place / _RUN)
    copy_companions(pruned, folder)
    write_model(folder, tensors, written_settings(pruned))
    shutil.copyfile(place / _RUN / "report.html", folder / "healing.html")
    return {**artifact.read_manifest(pruned, "model").result, **healing}


def _pruned_to_heal(config: PruneConfig, directory: Path, tokenizer: Any, place: Path) -> Path:
    """The pruned model that healing begins with, made by an earlier process or now."""
    assert config.corpus is not None
    decides = {name: value for name, value in config.without_places().items() if not name.startswith(_NOT_PRUNING)}
    mark = artifact.hash_json([decides, weights_hash(directory), artifact.content_hash(config.corpus)])
    pruned = place / _PRUNED
    if (pruned / artifact.MANIFEST).is_file() and artifact.read_manifest(pruned, "model").fingerprint == mark:
        console.note(f"  going on with the healing in {console.short_path(place)}")
        return pruned
    begun = place.exists() and (not place.is_dir() or any(not path.name.startswith(".") for path in place.iterdir()))
    if begun and not config.overwrite:
        raise ArtifactError(
            f"{place} holds a healing that was begun with other settings, or something else.",
            "Give the settings that it was begun with, choose another --output, or pass --overwrite to begin anew.",
        )
    if begun and not (pruned / artifact.MANIFEST).is_file():
        raise ArtifactError(f"{place} was not made by a healing.", "Choose another --output.")
    shutil.rmtree(place, ignore_errors=True)
    check_room(place, 2 * weight_bytes(directory))
    with artifact.new_directory(pruned) as temporary:
        facts = write_pruned(config, directory, tokenizer, temporary)
        artifact.write_manifest(temporary, "model", settings=config.plain(), fingerprint=mark, result=facts)
    return pruned


# Settings that decide nothing of what is pruned.
_NOT_PRUNING = ("overwrite", "heal_", "question", "max_new_tokens", "text_kilobytes")


# --- words --------------------------------------------------------------------------------------------------------


def _notes(facts: dict[str, Any]) -> list[str]:
    notes = []
    gone = facts.get("dropped_layers")
    if gone:
        how = "by the loss without them" if "losses" in facts else "those that change least of what passes them"
        told = ""
        if "losses" in facts:
            told = f"; loss on that text {facts['loss']:.3f} before, {facts['losses'][-1]:.3f} without them"
        places = ", ".join(str(number + 1) for number in gone)
        begun = f"Left out of {facts['original_shape']['layers']} layers, in this order, {how}: {places}"
        notes.append(f"{begun}{told}.")
    if "shape" in facts:
        old, new = facts["original_shape"], facts["shape"]
        names = {"heads": "query heads", "key_value_heads": "key/value heads", "channels": "feed-forward channels"}
        cut = [f"{new[key]} of {old[key]} {name}" for key, name in names.items() if new[key] != old[key]]
        if cut:
            notes.append(f"In each layer stay {', '.join(cut)}: those that carry most of its output on that text.")
    if "zeros" in facts:
        share = facts["zeros"] / facts["sparse_weights"]
        notes.append(
            f"{facts['zeros']:,} of {facts['sparse_weights']:,} weights of the layers are 0 ({share:.1%}), those of "
            "least size times input in their row."
        )
        notes.append(
            "Zeros alone save neither bytes nor time: they are stored and multiplied like any other number. Only "
            "programs made for them gain (2:4: some cards)."
        )
    if "healing" in facts:
        healing = facts["healing"]
        notes.append(
            f"Healed by {healing['updates']:,} updates over {healing['tokens']:,} tokens of text, learning rate "
            f"{healing['learning_rate']:.2g}: it learned what the original would say (healing.html)."
        )
    return notes
