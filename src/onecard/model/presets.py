"""Model sizes by one dial: a name gives depth, width, heads and feed-forward of a Llama.

Rules: heads are 64 wide; the feed-forward is 8/3 of the width, rounded up to a multiple of 64 (Shazeer 2020: the gated
form with the products of a plain 4x one); from 125M on, three or more heads share a key-value head (Ainslie et al.
2023); input and output embeddings are one matrix up to 1B, where it would be a large share of a small model (Press and
Wolf 2017). Names say the parameters with a vocabulary of about 6,000 (small) or 32,000 (from 125M).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onecard.errors import ConfigError


@dataclass(frozen=True)
class Preset:
    """The shape of a model."""

    name: str
    layers: int
    width: int
    heads: int
    key_value_heads: int
    tied: bool = True

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


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("2M", layers=3, width=192, heads=3, key_value_heads=3),
        Preset("4M", layers=4, width=256, heads=4, key_value_heads=4),
        Preset("12M", layers=6, width=384, heads=6, key_value_heads=6),
        Preset("26M", layers=8, width=512, heads=8, key_value_heads=8),
        Preset("60M", layers=12, width=640, heads=10, key_value_heads=10),
        Preset("125M", layers=12, width=768, heads=12, key_value_heads=4),
        Preset("350M", layers=24, width=1024, heads=16, key_value_heads=4),
        Preset("1B", layers=18, width=2048, heads=32, key_value_heads=8),
        Preset("3B", layers=28, width=3072, heads=48, key_value_heads=8, tied=False),
    )
}


def preset(name: str) -> Preset:
    """The preset of that name; ConfigError names the nearest."""
    if name not in PRESETS:
        raise ConfigError(f"There is no model size {name}.", f"One of: {', '.join(PRESETS)}.")
    return PRESETS[name]


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
