"""One measurement of the memory of pretraining, in a process of its own, by onecard or by Hugging Face's Trainer.

A Llama of 137M: 30 layers of 576, vocabulary 49,152, input and output embeddings one matrix; 8 x 1024 tokens an update
for every engine, in one micro-batch or in several.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from dense import arguments_of, run

VOCABULARY = 49152


def model_of(layers: int, vocabulary: int, length: int) -> Any:
    """The Llama, random from a fixed seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=length,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def flops_per_token(layers: int, vocabulary: int, length: int) -> float:
    """Of training: three times the forward pass, whose products are two operations a weight; and the attention."""
    head = 576 // 9
    matrices = layers * (576 * 576 * 2 + 2 * 576 * 3 * head + 3 * 576 * 1536) + 576 * vocabulary
    return 6.0 * matrices + 3 * 4 * layers * 576 * length / 2


def main() -> None:
    """Measure one engine and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    arguments = arguments_of(parser, batch=8, length=1024, updates=2)
    run(
        arguments,
        lambda: model_of(arguments.layers, arguments.vocabulary, arguments.length),
        vocabulary=arguments.vocabulary,
        flops_per_token=flops_per_token(arguments.layers, arguments.vocabulary, arguments.length),
        warm_up=1,
    )


if __name__ == "__main__":
    main()
