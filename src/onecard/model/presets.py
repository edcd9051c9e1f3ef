"""Model sizes by one dial: a number of parameters gives shape, vocabulary, context, learning rate and batch of a Llama.

The rules, and where they come from:
- heads are 64 wide; the gated feed-forward is 8/3 of the width, rounded up to a multiple of 64 (Shazeer 2020: as many
  products as a plain one of 4 x);
- from a width of 512 on, four heads share a key-value head (Ainslie et al. 2023), and widths are multiples of 256,
  which matrix units like; below, widths are multiples of 64;
- the width is about 64 times the depth, flat between 25 and 100 (Kaplan et al. 2020); the depth makes the size right;
- the vocabulary grows with the model, so that its table stays under about a quarter of it (Tao et al. 2024);
- input and output embeddings are one matrix below 2B, where two would be a large share (Press and Wolf 2017);
- AdamW's learning rate falls with the width (Yang et al. 2022); Muon's step is normalised by shape and keeps its own
  (Liu et al. 2025);
- the tokens of an update grow with the size, up to the half million of Brown et al. 2020.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from onecard.errors import ConfigError

SMALLEST, LARGEST = 1e6, 4e9
WIDTHS = (64, 128, 192, 256, 320, 384, 448, *range(512, 4097, 256))
WIDTH_OVER_DEPTH = 64
# Above these sizes: the vocabulary meant, tokens of a row, tokens of an update.
STEPS = (
    (0.0, 4096, 512, 4096),
    (10e6, 6400, 512, 16384),
    (100e6, 32000, 1024, 131072),
    (700e6, 49152, 2048, 524288),
)
UNTIED_FROM = 2e9


@dataclass(frozen=True)
class Preset:
    """The shape of a model, and what suits it: entries of its vocabulary, tokens of a row and of an update."""

    name: str
    layers: int
    width: int
    heads: int
    key_value_heads: int
    tied: bool = True
    vocabulary: int = 4096
    context_tokens: int = 512
    update_tokens: int = 4096

    @property
    def feed_forward(self) -> int:
        """Width of the gated feed-forward."""
        return -(-self.width * 8 // 3 // 64) * 64

    def layer_parameters(self) -> int:
        """Parameters of all layers (matrices only): what a token's products grow with, beside the head."""
        attention = self.width * self.width * 2 + 2 * self.width * (self.key_value_heads * self.width // self.heads)
        return self.layers * (attention + 3 * self.width * self.feed_forward)

    def parameters(self, vocabulary: int) -> int:
        """All parameters."""
        tables = vocabulary * self.width * (1 if self.tied else 2)
        return self.layer_parameters() + tables + (2 * self.layers + 1) * self.width

    def training_flops_per_token(self, vocabulary: int, mean_context_tokens: float) -> float:
        """FLOP of a token (forward, backward): 6 a parameter of layers and head, 12 a context position and width."""
        head = vocabulary * self.width
        return 6.0 * (self.layer_parameters() + head) + 12.0 * self.layers * self.width * mean_context_tokens

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of AdamW."""
        return 4e-3 * 256 / self.width


def by_rule(parameters: float, name: str) -> Preset:
    """The shape of about so many parameters (with the vocabulary meant for that size) at a good proportion."""
    _, vocabulary, context, update = [step for step in STEPS if parameters >= step[0]][-1]
    found: list[tuple[float, Preset]] = []
    for width in WIDTHS:
        heads = width // 64
        groups = heads // 4 if width >= 512 else heads
        shape = Preset(name, 1, width, heads, groups, parameters < UNTIED_FROM, vocabulary, context, update)
        rest = shape.parameters(vocabulary) - shape.layer_parameters()
        shape = replace(shape, layers=max(1, round((parameters - rest) / shape.layer_parameters())))
        wrong_size = abs(math.log(shape.parameters(vocabulary) / parameters))
        wrong_proportion = abs(math.log(width / shape.layers / WIDTH_OVER_DEPTH))
        # A tenth off in size weighs as much as twice the proportion.
        found.append((7 * wrong_size + wrong_proportion, shape))
    return min(found, key=lambda item: item[0])[1]


def _number(name: str) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MB])", name.strip().upper())
    return None if match is None else float(match[1]) * (1e6 if match[2] == "M" else 1e9)


# What `size = auto` chooses among.
PRESETS = {
    name: by_rule(_number(name) or 0, name) for name in ("2M", "4M", "12M", "26M", "60M", "125M", "350M", "1B", "3B")
}


def preset(name: str) -> Preset:
    """The preset of that name, or what the rules give for a size such as 200M; ConfigError for anything else."""
    if name in PRESETS:
        return PRESETS[name]
    wanted = _number(name)
    if wanted is None or not SMALLEST <= wanted <= LARGEST:
        raise ConfigError(
            f"There is no model size {name}.",
            f"Give {SMALLEST / 1e6:.0f}M to {LARGEST / 1e9:.0f}B, such as "
            f"{', '.join(PRESETS)}, or anything between, such as 200M.",
        )
    return by_rule(wanted, name)


def llama_config(shape: Preset, *, vocabulary: int, max_positions: int, token_ids: dict[str, int | None]) -> Any:
    """A transformers LlamaConfig; `token_ids` has bos_token_id, eos_token_id and pad_token_id."""
    from transformers import LlamaConfig

    made: Any = LlamaConfig
    return made(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        **token_ids,
    )
