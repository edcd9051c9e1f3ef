"""The verb `merge`: a base and what was learned from it go in, adapters or whole models; one model comes out.

W = base + the sum of w_i (W_i - base), where W_i is the weight of the model i, or what the adapter i alone makes of the
base; of LoRA that is base + the sum of w_i scale_i B_i A_i. Sums are made in fp64 and rounded once. What cannot be
added is refused: parts of another base or with another tokenizer, weights of few bits. What rounding does to the logits
is measured on text.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import artifact, console
from onecard.compress import comparison
from onecard.compress.directories import (
    check_room,
    check_same,
    copy_companions,
    read_by_others,
    weight_bytes,
    write_model,
    written_settings,
)
from onecard.compress.reading_back import strings
from onecard.config import MergeConfig
from onecard.errors import ConfigError
from onecard.model.adapter_base import TEMPLATES, tokenizer_files
from onecard.model.adapter_files import AdapterFile, is_adapter, merged_weights, open_adapter, put_beside, weighed
from onecard.model.load import load_model, load_tokenizer, model_directory, weights_hash
from onecard.tokenizer.difference import first_difference

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# What rounding to 16 bits may do to logits, as a share of their spread; more is another model.
ROUNDED = 0.05
# A model whose weights are further than their own length from the base was not trained from it: of two models that have
# nothing to do with each other it is 1.4.
FAR = 1.0
_TEXT_TOKENS = 512
# What an adapter is called beside the layers; a number alone would be taken for that of a layer.
_NAME = "part{}"


@dataclass(slots=True)
class Part:
    """An adapter of the base, or a model that was trained from it; how much of it is added, and how far it is."""

    path: Path
    weight: float
    adapter: AdapterFile | None
    directory: Path | None
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def distance(self) -> float:
        """Length of its difference from the base, over the length of the matrices that it may change."""
        return float((self.squares[0] / self.squares[1]) ** 0.5) if self.squares[1] else 0.0

    def plain(self) -> dict[str, Any]:
        """For the record."""
        kind = "model" if self.adapter is None else "adapter"
        return {"path": str(self.path), "kind": kind, "weight": self.weight, "distance": self.distance}


def merge(config: MergeConfig) -> dict[str, Any]:
    """Check, add, read back, compare. ConfigError, before anything is written, for parts that cannot be added."""
    base = model_directory(config.model)
    inputs = [config.model, *config.parts]
    artifact.check_output(config.output, overwrite=config.overwrite, inputs=inputs)
    parts = _opened(config)
    _check_base(config, base, parts)
    speaking = _speaking(parts) or base
    material = comparison.gather(config, speaking)
    check_room(config.output, 2 * weight_bytes(base))
    text_ids = _ids(speaking, [item.text for item in material.texts] or strings())
    with artifact.new_output(config.output, overwrite=config.overwrite, inputs=inputs) as folder:
        facts = _write(config, base, parts, speaking, folder, text_ids)
        compared = comparison.compare(base, folder, material, config, "The merged form")
        result = {"method": config.method, "parts": [part.plain() for part in parts], **facts, **compared.result()}
        notes = _notes(config, parts, facts)
        compared.write(folder, "Merged", notes)
        artifact.write_manifest(folder, "model", settings=config.plain(), parents=inputs, result=result)
    compared.show(f"Merged: {config.output}")
    for note in notes:
        console.result(note)
    return {**result, "output": str(config.output)}


# --- what may be added --------------------------------------------------------------------------------------------


def _opened(config: MergeConfig) -> list[Part]:
    """The parts with their weights. Of a run that trained adapters, the adapters are taken."""
    weights = config.weights or [1 / len(config.parts)] * len(config.parts)
    if len(weights) != len(config.parts):
        raise ConfigError(
            f"There are {len(config.parts)} parts and {len(weights)} weights.", "Give a weight for each part, or none."
        )
    if config.method == "ties" and min(weights) <= 0:
        raise ConfigError("method = ties wants positive weights.", "Set method = linear to take something away.")
    made = []
    for path, weight in zip(config.parts, weights):
        place = next((place for place in (path, path / "adapter") if is_adapter(place)), None)
        adapter = None if place is None else open_adapter(place)
        made.append(Part(path, weight, adapter, None if adapter is not None else model_directory(path)))
    return made


def _check_base(config: MergeConfig, base: Path, parts: Sequence[Part]) -> None:
    """ConfigError for parts of another base, with other tokens, or with weights of few bits."""
    tokenizer, mark = load_tokenizer(base), weights_hash(base)
    for path, directory in [(config.model, base), *((part.path, part.directory) for part in parts)]:
        if directory is not None and "quantization_config" in written_settings(directory):
            raise ConfigError(
                f"The weights of the model in {path} are rounded to few bits: what is added to them would be rounded "
                "away.",
                "Give the model that it was made of.",
            )
    for part in parts:
        if part.adapter is not None:
            if part.adapter.base_weights is None:
                console.warn(f"Which base the adapter in {part.path} was trained beside is not recorded in it.")
            elif part.adapter.base_weights != mark:
                named = part.adapter.settings.get("base_model_name_or_path")
                raise ConfigError(
                    f"The adapter in {part.path} was trained beside other weights than those in {config.model}.",
                    f"Give the base that it was trained beside ({named}).",
                )
        spoken = part.directory if part.adapter is None else _beside(part)
        if spoken is None:
            continue
        difference = first_difference(tokenizer, load_tokenizer(spoken))
        if difference is not None:
            raise ConfigError(
                f"The tokenizers of {config.model} and {part.path} are not the same: {difference}.",
                "Rows of their embeddings stand for other tokens; give models of one base.",
            )
        if part.directory is not None:
            _check_tensors(base, part)


def _beside(part: Part) -> Path | None:
    """The folder of an adapter, where a tokenizer lies in it, as other programs leave it there."""
    folder = part.adapter.path if part.adapter is not None else None
    return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


def _check_tensors(base: Path, part: Part) -> None:
    assert part.directory is not None
    ours, theirs = Tensors(base), Tensors(part.directory)
    shapes = ({name: each.shape(name) for name in each.names()} for each in (ours, theirs))
    one, other = next(shapes), next(shapes)
    odd = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    if odd:
        told = [str(shape) if shape else "absent" for shape in (one.get(odd[0]), other.get(odd[0]))]
        raise ConfigError(
            f"The model in {part.path} is of another shape than the base: {odd[0]} is {told[1]}, not {told[0]}.",
            "Give models of one base.",
        )


def _speaking(parts: Sequence[Part]) -> Path | None:
    """Whose chat template and generation settings the merged model gets: the first part's that has its own."""
    for part in parts:
        for place in (part.directory, part.path / "model"):
            if place is not None and (place / "tokenizer.json").is_file():
                return place
    return None


class Tensors:
    """The tensors of a model directory by name, each read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)
        if written_settings(directory).get("tie_word_embeddings"):
            self._files.pop("lm_head.weight", None)

    def names(self) -> list[str]:
        """In the order of the files."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """As it is stored."""
        found: Tensor = self._files[name].get_tensor(name)
        return found


# --- adding -------------------------------------------------------------------------------------------------------


def _write(
    config: MergeConfig, base: Path, parts: list[Part], speaking: Path, folder: Path, text_ids: list[int]
) -> dict[str, Any]:
    """Write the merged model; how far its logits are from what they should be."""
    import torch

    from onecard.model.lora import apart, deviation, logits

    kept = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(config.kept_precision)
    adapters = {_NAME.format(number): part for number, part in enumerate(parts) if part.adapter is not None}
    facts: dict[str, Any] = {}
    model: Any = None
    meant: Tensor | None = None
    if adapters:
        model = load_model(base)
        for name, part in adapters.items():
            assert part.adapter is not None
            put_beside(model, part.adapter, name)
        facts |= _beside_four_bits(base, model, adapters, text_ids)
        if len(adapters) == len(parts) and config.method == "linear":
            with weighed(model, {name: part.weight for name, part in adapters.items()}):
                meant = logits(model, text_ids)
    tensors: dict[str, Tensor] = {}
    for name, tensor, stored in _merged(config, base, parts, model, adapters):
        tensors[name] = tensor.to(kept or stored)
    far = [part for part in parts if part.adapter is None and part.distance > FAR]
    if far:
        raise ConfigError(
            f"The weights of {far[0].path} are {far[0].distance:.2f} times their own length away from the base: they "
            "were not trained from it.",
            "Give models of one base.",
        )
    del model
    settings = written_settings(base)
    if speaking != base:
        theirs = written_settings(speaking)
        settings |= {key: theirs[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in theirs}
    dtype = str(tensors[next(iter(tensors))].dtype).removeprefix("torch.")
    write_model(folder, tensors, {**settings, "dtype": dtype, "torch_dtype": dtype})
    copy_companions(speaking, folder)
    spoken = next((place for part in parts if (place := _beside(part)) is not None), None)
    if spoken is not None:
        for name in TEMPLATES if (spoken / "tokenizer_config.json").is_file() else ():
            (folder / name).unlink(missing_ok=True)
        for item in tokenizer_files(spoken):
            shutil.copyfile(item, folder / item.name)
    made = read_by_others(folder)
    facts["read_back_deviation"] = check_same(deviation(made, load_model(folder)))
    facts["written_in"] = dtype
    if meant is not None:
        exact = dtype == "float32"
        facts["logit_deviation"] = check_same(apart(logits(made, text_ids), meant), 1e-4 if exact else ROUNDED)
        facts["logit_deviation_tokens"] = len(text_ids)
    return facts


def _merged(
    config: MergeConfig, base: Path, parts: list[Part], model: Any, adapters: Mapping[str, Part]
) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Every tensor of the base by name, with the parts added, and the format that the base has it in; one at a time."""
    from onecard.compress.merging import linear, ties

    stored = Tensors(base)
    others = {number: Tensors(part.directory) for number, part in enumerate(parts) if part.directory is not None}
    names = {number: _NAME.format(number) for number, part in enumerate(parts) if part.adapter is not None}
    left = dict.fromkeys(stored.names())

    def added(name: str, of_adapters: Mapping[str, Tensor]) -> tuple[Tensor, torch.dtype]:
        before = stored.read(name)
        found = {number: of_adapters[name] for number, name in names.items() if name in of_adapters}
        found |= {number: each.read(name) for number, each in others.items()}
        # Norms are near one in every model and would hide how far the rest is.
        for number, tensor in found.items() if before.ndim > 1 else ():
            parts[number].squares[0] += float((tensor.double() - before.double()).square().sum())
            parts[number].squares[1] += float(before.double().square().sum())
        if not found:
            return before, before.dtype
        weights = [parts[number].weight for number in sorted(found)]
        models = [found[number] for number in sorted(found)]
        if config.method == "ties":
            # A part that leaves this tensor as it is has no say in it.
            return ties(before, models, weights, config.density), before.dtype
        return linear(before, models, weights), before.dtype

    if model is not None:
        for place, _, found in merged_weights(model, list(adapters)):
            name = f"{place}.weight"
            if name not in left:
                raise ConfigError(f"The base stores no tensor {name}, which an adapter changes.", "Merge without it.")
            del left[name]
            yield name, *added(name, found)
    for name in left:
        yield name, *added(name, {})


# --- what it does to logits ---------------------------------------------------------------------------------------


def _ids(directory: Path, texts: Sequence[str]) -> list[int]:
    """The first tokens of real text: what the model is told apart on."""
    tokenizer: Any = load_tokenizer(directory)
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= _TEXT_TOKENS:
            break
    positions = int(written_settings(directory).get("max_position_embeddings") or _TEXT_TOKENS)
    return ids[: min(_TEXT_TOKENS, positions)]


def _beside_four_bits(base: Path, model: Any, adapters: Mapping[str, Part], text_ids: list[int]) -> dict[str, Any]:
    """How far each adapter that was trained beside weights in 4 bits is from itself there: what merging it changes."""
    import torch

    from onecard.model.lora import apart, logits
    from onecard.model.quantized import quantize

    found = {}
    for name, part in adapters.items():
        assert part.adapter is not None
        if part.adapter.quantization != "nf4":
            continue
        if importlib.util.find_spec("bitsandbytes") is None:
            console.warn(f"{part.path} was trained beside weights in 4 bits; what merging changes is not measured.")
            continue
        small: Any = load_model(base)
        quantize(small, torch.float32, "cpu")
        put_beside(small, part.adapter, name)
        trained = logits(small, text_ids)
        with weighed(model, {name: 1.0}):
            found[str(part.path)] = apart(logits(model, text_ids), trained)
    return {"deviation_from_four_bits": found} if found else {}


# --- words --------------------------------------------------------------------------------------------------------


def _notes(config: MergeConfig, parts: Sequence[Part], facts: Mapping[str, Any]) -> list[str]:
    told = "; ".join(
        f"{part.weight:g} x {part.path.name} ({'model' if part.adapter is None else 'adapter'}, {part.distance:.2%} of "
        "the length of the weights that it changes)"
        for part in parts
    )
    how = "" if config.method == "linear" else f", by TIES, {config.density:.0%} of each difference"
    notes = [f"The base and {told}{how}. Written in {facts['written_in']}."]
    if "logit_deviation" in facts:
        notes.append(
            "Its logits differ from those of the base with the adapters beside it by "
            f"{facts['logit_deviation']:.2g} of their spread in the mean, on {facts['logit_deviation_tokens']} tokens "
            "of text."
        )
    for path, off in facts.get("deviation_from_four_bits", {}).items():
        notes.append(
            f"{path} was trained beside weights in 4 bits and is added to the whole ones: there its logits differ by "
            f"{off:.1%} of their spread from those that it was trained with."
        )
    return notes
