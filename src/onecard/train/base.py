"""The model that is trained further: opened, built with or without adapters, and completed after training.

In: the settings of a verb that begins with a model. What can be wrong with that model is found in `Base.open`, before
any row is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecard import console
from onecard.config import FinetuneConfig
from onecard.errors import ConfigError
from onecard.model import lora
from onecard.model.gguf_file import is_gguf
from onecard.model.load import check_tokenizer_fits, load_architecture, load_model, load_tokenizer, model_directory
from onecard.train.directory import RunDirectory


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
    def open(cls, config: FinetuneConfig, *, chats: bool = True) -> Base:
        """ArtifactError if it is no model; ConfigError if it has no template for `chats`. Says what goes unused."""
        if not config.lora_rank:
            for name in ("lora_alpha", "lora_dropout", "target_modules"):
                if getattr(config, name) != FinetuneConfig.model_fields[name].default:
                    console.warn(f"{name} is not used: lora_rank = 0 trains all weights.")
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

    def row_tokens(self, config: FinetuneConfig, usual: int) -> int:
        """Tokens of a row: those asked for (ConfigError beyond the positions that the model knows), else the usual."""
        if config.max_length == "auto":
            return min(usual, self.positions or usual)
        if self.positions is not None and config.max_length > self.positions:
            raise ConfigError(
                f"max_length {config.max_length} is more than the {self.positions} positions of the model in "
                f"{config.model}.",
                f"Set max_length to at most {self.positions}.",
            )
        return config.max_length

    def architecture(self) -> Any:
        """The transformers configuration."""
        return load_architecture(self.directory)

    def build(self, config: FinetuneConfig) -> Any:
        """The model, with adapters beside frozen weights where the settings want them."""
        model = load_model(self.directory)
        check_tokenizer_fits(self.tokenizer, model, self.directory)
        if config.lora_rank:
            add_adapters(config, model)
        return model

    def completion(
        self, config: FinetuneConfig, run: RunDirectory, besides: Callable[[Any], Sequence[str]] = lambda _: ()
    ) -> Callable[[Any], None] | None:
        """What is done to the trained model before it is saved; None without adapters."""
        if not config.lora_rank:
            return None

        def complete(model: Any) -> None:
            """The adapters alone for whoever keeps the base, then merged, so that every verb reads the model."""
            lora.save(model, run.path / "adapter", self.directory, besides(model))
            lora.merge(model)

        return complete


def add_adapters(config: FinetuneConfig, model: Any, besides: Sequence[str] = ()) -> None:
    """Freeze the model, all but `besides`, and put the adapters of the settings beside its layers."""
    alpha = 2.0 * config.lora_rank if config.lora_alpha == "auto" else config.lora_alpha
    names = lora.add(model, config.lora_rank, alpha, config.lora_dropout, config.target_modules, config.seed, besides)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    console.note(
        f"  adapters of rank {config.lora_rank}, alpha {alpha:g}, {trained / 1e6:.2f}M parameters, beside frozen "
        f"weights: {lora.coverage(names)}"
    )
