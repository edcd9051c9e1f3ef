"""The model that is trained further, and its run: opened, built with or without adapters, completed after training.

In: the settings of a verb that begins with a model. What can be wrong with that model's directory is found in
`Base.open`, before any row is read; what with its weights when they are loaded, before the first update.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from onecard import artifact, console
from onecard.config import ClassifyConfig, FurtherConfig
from onecard.data.sources import source_files
from onecard.data.tokens import TokenStore
from onecard.errors import ConfigError
from onecard.model import lora
from onecard.model.gguf_file import is_gguf
from onecard.model.load import (
    check_finite,
    check_tokenizer_fits,
    load_architecture,
    load_model,
    load_tokenizer,
    model_directory,
    weights_hash,
)
from onecard.model.quantization_aware import make_aware
from onecard.train.directory import RunDirectory
from onecard.train.precision import Precision, choose
from onecard.train.session import check, fingerprint, free_settings_removed

AnyFurther = TypeVar("AnyFurther", bound=FurtherConfig)
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Base:
    """A model directory, its tokenizer, and its configuration as written.

    `source` is what decides its content: the directory itself, or the GGUF file that it was unpacked from.
    """

    source: Path
    directory: Path
    tokenizer: Any
    written: dict[str, Any]

    @classmethod
    def open(cls, config: FurtherConfig, *, chats: bool = True) -> Base:
        """ArtifactError if it is no model; ConfigError if it has no template for `chats`. Says what goes unused."""
        check_adapters(config)
        directory = model_directory(config.model)
        tokenizer = load_tokenizer(directory)
        if chats and not tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer in {directory} has no chat template.",
                "Fine-tune a model made with onecard, or one made for chat.",
            )
        source = config.model if is_gguf(config.model) else directory
        return cls(source, directory, tokenizer, json.loads((directory / "config.json").read_text(encoding="utf-8")))

    @property
    def width(self) -> int:
        """Of the hidden states."""
        return int(self.written.get("hidden_size", 768))

    @property
    def positions(self) -> int | None:
        """Tokens that the model can tell the places of; None where its configuration does not say."""
        found = (self.written.get("text_config") or self.written).get("max_position_embeddings")
        return found or self.written.get("n_positions")

    def row_tokens(self, config: FurtherConfig, usual: int, documents: int = 1) -> int:
        """Tokens of a row: those asked for (ConfigError beyond the positions that the model knows), else the usual.

        Where a row holds several `documents`, each begins at position 0.
        """
        if config.max_length == "auto":
            return min(usual, documents * (self.positions or usual))
        if self.positions is not None and documents == 1 and config.max_length > self.positions:
            raise ConfigError(
                f"max_length {config.max_length} is more than the {self.positions} positions of the model in "
                f"{config.model}.",
                f"Set max_length to at most {self.positions}.",
            )
        return config.max_length

    def architecture(self) -> Any:
        """The transformers configuration."""
        return load_architecture(self.directory)

    def build(self, config: FurtherConfig, precision: Precision) -> Any:
        """The model, with adapters beside frozen weights where the settings want them."""
        return self.adapted(load_model(self.directory, dtype=_loaded_in(config, precision)), config, precision)

    def adapted(self, model: Any, config: FurtherConfig, precision: Precision, besides: Sequence[str] = ()) -> Any:
        """`model` as it is trained: quantized and with adapters where the settings say so; all but `besides` frozen."""
        check_tokenizer_fits(self.tokenizer, model, self.directory)
        check_finite(model, self.directory)
        if config.quantization == "nf4":
            _quantize(model, precision)
        if config.lora_rank:
            _add_adapters(config, model, besides)
        if config.quantization_aware != "none":
            scheme = make_aware(model, config.quantization_aware)
            group = f", groups of {scheme.group}" if scheme.group else ""
            console.note(f"  products are made with weights rounded to {scheme.bits} bits{group}")
        return model

    def completion(
        self,
        config: FurtherConfig,
        run: RunDirectory,
        besides: Callable[[Any], Sequence[str]] = lambda _: (),
        load: Callable[[Path], Any] = load_model,
    ) -> Callable[[Any], tuple[Any, dict[str, Any]]] | None:
        """What makes of the trained model the one that is saved, and what there is to tell; None without adapters."""
        if not config.lora_rank:
            return None

        def complete(model: Any) -> tuple[Any, dict[str, Any]]:
            """The adapters alone for whoever keeps the base, then merged, so that every verb reads the model."""
            facts = {"quantization": config.quantization, "base_weights": weights_hash(self.directory)}
            lora.save(model, run.path / "adapter", self.directory, besides(model), facts)
            if config.quantization == "none":
                lora.merge(model)
                return model, {}
            merged = load(self.directory)
            lora.merge_into(merged, model, besides(model))
            off = lora.deviation(model, merged)
            console.note(
                f"  merged into the weights of {self.directory} before quantization: logits differ from those of the "
                f"trained model by {off:.1%} of their spread in the mean"
            )
            return merged, {"merged_into": str(self.directory), "merge_deviation": off}

        return complete


@dataclass(frozen=True)
class Opened(Generic[AnyFurther]):
    """A verb's settings in force, the model that it begins with, its run directory, and the files of its rows."""

    config: AnyFurther
    base: Base
    run: RunDirectory
    precision: Precision
    files: list[Path]

    @property
    def parents(self) -> list[Path]:
        """What the run was made from."""
        return [self.base.source, *self.files]


def open_run(
    config: AnyFurther, usual_length: int, *, chats: bool = True, documents: int = 1, inputs: Sequence[str] = ()
) -> Opened[AnyFurther]:
    """Everything that is decided before any row is read; `inputs` are hashes of what else decides the result."""
    check(config)
    base = Base.open(config, chats=chats)
    config = config.model_copy(update={"max_length": base.row_tokens(config, usual_length, documents)})
    files = [path for source in config.sources for path in source_files(source)]
    hashes = [artifact.hash_tree(base.source), *(artifact.hash_file(path) for path in files), *inputs]
    run = RunDirectory.open(
        config.output,
        fingerprint=fingerprint(config, hashes),
        settings=free_settings_removed(config),
        overwrite=config.overwrite,
    )
    config = run.in_force(config)
    precision = choose(config.precision if run.plan is None else run.plan["precision"])
    return Opened(config, base, run, precision, files)


def kept_rows(run: RunDirectory) -> tuple[dict[str, Any], dict[str, TokenStore]] | None:
    """What an earlier process found of the rows, and its stores; None before. ArtifactError if they are damaged."""
    if run.plan is None:
        return None
    return run.plan["rows"], {name: TokenStore(run.tokens / name) for name in SPLITS}


def say_rows(found: dict[str, Any]) -> None:
    """Say what became of the rows."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in Counter(found["dropped"]).most_common())
    parts = [
        f"{found['read']:,} rows: {found['kept']:,} kept ({found['held_out']:,} of them held out)",
        f"{found['read'] - found['kept']:,} dropped{f' ({dropped})' if dropped else ''}",
    ]
    if "truncated" in found:
        parts.append(f"{found['truncated']:,} cut")
    learned = ""
    if "learned_tokens" in found:
        learned = f"; {found['learned_tokens']:,} of {found['tokens']:,} tokens are learned"
    console.note(f"  {', '.join(parts)}{learned}")


_OF_ADAPTERS = (
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "rank_stabilised",
    "decomposed",
    "lora_start",
    "lora_plus_ratio",
)


def check_adapters(config: FurtherConfig) -> None:
    """ConfigError for what adapters alone can have; says which settings go unused without them."""
    if config.quantization != "none" and config.precision == "float8":
        raise ConfigError(
            f"quantization = {config.quantization} holds the weights in 4 bits, so precision = float8 cannot.",
            "Set precision = bf16, or quantization = none.",
        )
    if config.quantization_aware != "none" and isinstance(config, ClassifyConfig):
        raise ConfigError("quantization_aware is for language models.", "Set quantization_aware = none.")
    if config.quantization_aware != "none" and (config.lora_rank or config.precision == "float8"):
        other = "lora_rank" if config.lora_rank else "precision = float8"
        raise ConfigError(
            f"quantization_aware trains all weights as they will be rounded; {other} would train other ones.",
            "Leave one of the two away.",
        )
    if config.lora_rank:
        return
    if config.quantization != "none":
        raise ConfigError(
            f"quantization = {config.quantization} freezes the weights, so lora_rank = 0 leaves nothing to train.",
            "Set lora_rank, such as 16, or quantization = none.",
        )
    for name in _OF_ADAPTERS:
        if getattr(config, name) != FurtherConfig.model_fields[name].default:
            console.warn(f"{name} is not used: lora_rank = 0 trains all weights.")


def _loaded_in(config: FurtherConfig, precision: Precision) -> torch.dtype | None:
    """What will be 4 bits need not be 32 before, unless it shall be computed in them."""
    return torch.bfloat16 if config.quantization == "nf4" and precision.name != "fp32" else None


def _quantize(model: Any, precision: Precision) -> None:
    from onecard.model.quantized import quantize

    # All products and what is not quantized in fp32 until the proof of packing is made: rounding would hide what it
    # looks for. `precision.convert` puts both into their format.
    count = quantize(model, torch.float32, precision.device)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    console.note(f"  {count / 1e6:,.1f}M weights are frozen in 4 bits (NF4), products in {precision.name}")


def _add_adapters(config: FurtherConfig, model: Any, besides: Sequence[str] = ()) -> None:
    alpha = 2.0 * config.lora_rank if config.lora_alpha == "auto" else config.lora_alpha
    names = lora.add(
        model,
        config.lora_rank,
        alpha,
        config.lora_dropout,
        config.target_modules,
        config.seed,
        besides,
        rank_stabilised=config.rank_stabilised,
        decomposed=config.decomposed,
        start=config.lora_start,
    )
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    console.note(
        f"  adapters of rank {config.lora_rank}, alpha {alpha:g}, {trained / 1e6:.2f}M parameters, beside frozen "
        f"weights: {lora.coverage(names)}"
    )
