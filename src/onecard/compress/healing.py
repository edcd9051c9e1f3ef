"""A pruned model learns on text what the original would say: distillation, through the one training loop.

In: both model directories, a corpus, and a place for the run. Out: the tensors of the healed model, in the formats of
the pruned one. What was set to zero stays zero: such weights get no gradient, and AdamW moves nothing that never had
one. The run is an ordinary run directory; interrupted, it goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from onecard import artifact, console
from onecard.compress.directories import stored_tensors
from onecard.config import PruneConfig, TrainingConfig
from onecard.data.corpus import Split, read_documents
from onecard.data.packing import StreamRows
from onecard.data.tokens import TokenStore, write_store
from onecard.errors import ArtifactError
from onecard.model.divergence import Mixture
from onecard.model.load import load_architecture, load_model, load_tokenizer, tokenizer_hash, vocabulary_rows
from onecard.model.lora import linear_layers
from onecard.tokenizer.stream import encode_stream
from onecard.train.directory import RunDirectory
from onecard.train.distillation import Distill, Teacher
from onecard.train.precision import choose
from onecard.train.session import check, fingerprint, free_settings_removed, train
from onecard.train.task import Defaults, Task
from onecard.train.text_mix import CHARACTERS_A_TOKEN

# The original's predictions alone: for a model that was cut out of it they teach more than the text does (Muralidharan
# et al. 2024, "Compact language models via pruning and knowledge distillation").
MIXTURE = Mixture(weight=1.0)
# Fewer updates than these do not repay compiling.
COMPILED_FROM = 200
# So much held-out text at most is there to see how healing goes.
_HELD_OUT_TOKENS = 65536


def heal(config: PruneConfig, original: Path, pruned: Path, place: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train in the run directory `place`, or go on there; the healed tensors, and what there is to tell of it."""
    settings = _settings(config, pruned)
    check(settings)
    assert config.corpus is not None
    inputs = [artifact.hash_tree(pruned), artifact.hash_tree(original), artifact.content_hash(config.corpus)]
    mark = fingerprint(settings, [*inputs, str(config.heal_tokens)])
    if not _is_healed(place, mark):
        train(_task(config, settings, original, pruned, place, mark))
    formats = {name: tensor.dtype for name, tensor in stored_tensors(pruned).items()}
    healed = stored_tensors(place / "model")
    assert healed.keys() == formats.keys(), "it is the same model"
    result = artifact.read_manifest(place, "run").result
    kept = ("updates", "tokens", "loss", "held_out_loss", "seconds", "peak_memory_bytes")
    facts = {"healing": {key: result[key] for key in kept} | {"learning_rate": _learning_rate(place)}}
    return {name: healed[name].to(form) for name, form in formats.items()}, facts


def _learning_rate(place: Path) -> float:
    return float(json.loads((place / "plan.json").read_text(encoding="utf-8"))["learning_rate"])


def _is_healed(place: Path, mark: str) -> bool:
    """Whether the run is finished already, and this one."""
    if not (place / artifact.MANIFEST).is_file():
        return False
    return artifact.read_manifest(place, "run").fingerprint == mark


def _settings(config: PruneConfig, pruned: Path) -> TrainingConfig:
    positions = int(getattr(load_architecture(pruned), "max_position_embeddings", 1 << 20))
    return TrainingConfig(
        seed=config.seed,
        max_steps=config.heal_updates,
        max_length=min(config.calibration_tokens, positions),
        learning_rate=config.heal_learning_rate,
        optimizer="adamw",
        weight_decay=0.0,
        compile=config.heal_updates >= COMPILED_FROM,
    )


def _task(config: PruneConfig, settings: TrainingConfig, original: Path, pruned: Path, place: Path, mark: str) -> Task:
    assert config.corpus is not None
    run = RunDirectory.open(place, fingerprint=mark, settings=free_settings_removed(settings), overwrite=False)
    settings = run.in_force(settings)
    precision = choose(settings.precision if run.plan is None else run.plan["precision"])
    tokenizer = load_tokenizer(pruned)
    wanted = config.heal_updates * max(config.heal_tokens, settings.row_tokens)
    store = _store(run, config, tokenizer, pruned, "train", wanted)
    held_out = _store(run, config, tokenizer, pruned, "held_out", _HELD_OUT_TOKENS)
    if store is None:
        raise ArtifactError(f"The corpus {config.corpus} has no text to heal with.", "Give a larger corpus.")
    rows = StreamRows(store, settings.row_tokens)
    teacher = Teacher(original, precision)
    width = int(load_architecture(pruned).get_text_config().hidden_size)
    return Task(
        verb="heal",
        config=settings,
        run=run,
        precision=precision,
        tokenizer=tokenizer,
        architecture=lambda: load_architecture(pruned),
        build_model=lambda: _built(config, pruned, teacher),
        rows=rows,
        held_out=None if held_out is None else StreamRows(held_out, settings.row_tokens),
        weights=[1.0] * len(store.sources),
        defaults=Defaults(
            learning_rate=min(1e-3, 1e-4 * 2048 / width),
            muon_learning_rate=0.0,
            num_epochs=1.0,
            optimizer="adamw",
            update_tokens=config.heal_tokens,
        ),
        parents=[config.corpus],
        sample_prompts=[],
        beside=teacher.beside,
        objective=lambda padded: Distill(teacher, MIXTURE, padded),
        examine=_examined,
    )


def _built(config: PruneConfig, pruned: Path, teacher: Teacher) -> Any:
    teacher.model  # noqa: B018 - what is wrong with it is found before the first update
    model = load_model(pruned)
    if config.sparsity is not None:
        hold_zeros(model)
    return model


def hold_zeros(model: Any) -> None:
    """Weights of the linear layers that are zero get no gradient from now on."""
    for name in linear_layers(model):
        weight = model.get_submodule(name).weight
        kept = weight.detach() != 0

        def masked(gradient: Tensor, kept: Tensor = kept) -> Tensor:
            return gradient * kept.to(gradient.device)

        weight.register_hook(masked)
        weight.kept_beside_zeros = kept


def _examined(model: Any) -> dict[str, Any]:
    for parameter in model.parameters():
        kept = getattr(parameter, "kept_beside_zeros", None)
        if kept is not None:
            assert not bool((parameter.detach()[~kept.to(parameter.device)] != 0).any()), "zeros stay zeros"
    return {}


def _store(
    run: RunDirectory, config: PruneConfig, tokenizer: Any, model: Path, split: Split, wanted_tokens: int
) -> TokenStore | None:
    """About so many tokens of one split, of documents spread evenly over the corpus; None if it has none."""
    directory = run.tokens / split
    if (directory / "meta.json").exists():
        return TokenStore(directory)
    assert config.corpus is not None
    characters = max(1, int(artifact.read_manifest(config.corpus, "corpus").result.get("characters", 1)))
    # Documents are of many lengths: rather twice the text than too little, which would be gone over again.
    share = min(1.0, 2 * CHARACTERS_A_TOKEN * wanted_tokens / characters)

    def chosen() -> Iterator[tuple[str, str]]:
        assert config.corpus is not None
        for document in read_documents(config.corpus, split):
            if int(artifact.hash_json([config.seed, document.id])[:8], 16) <= share * 16**8:
                yield document.source, document.text

    first = next(iter(chosen()), None)
    if first is None:
        return None
    store = write_store(
        directory,
        encode_stream(tokenizer, chosen()),
        vocabulary=vocabulary_rows(tokenizer),
        tokenizer_hash=tokenizer_hash(model),
    )
    console.note(f"  {split}: {store.count:,} tokens to heal with")
    return store
