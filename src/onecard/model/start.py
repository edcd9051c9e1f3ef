"""Where a new language model starts: at the statistics of neighbouring tokens instead of at chance.

A short run spends most of its updates on learning which tokens are frequent and which follow which. That much can be
had from counts: input and output embeddings are fitted so that the model without its layers, normalise(embedding) @
head, gives the smoothed distribution of the next token after each token of the whole training text. The layers' last
matrices start at zero, so the new model begins as exactly that and its layers learn the rest. Input and output
embeddings differ, for what follows a token is not what comes before it.

Knows Llama's names of parameters. Needs vocabulary x vocabulary numbers, so it is for small vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from onecard.data.tokens import TokenStore

# Counts take 4 bytes x vocabulary squared, several times over: 256 MiB each at this size.
LARGEST_VOCABULARY = 8192
# Statistics of so many tokens of a source are as good as those of all.
MOST_TOKENS = 20_000_000
# Each context's distribution is mixed with the overall one as if that had been seen this often after it.
SMOOTHING = 10.0
# Frequent contexts count less than proportionally (the power that word embeddings use for the same purpose).
FREQUENCY_POWER = 0.75
ITERATIONS = 40
LEARNING_RATE = 0.03
CHUNK_CONTEXTS = 512


@dataclass(frozen=True)
class BigramStart:
    """Fitted embeddings (vocabulary x width each) and their loss on the weighted counts, in nats."""

    embedding_VD: Tensor
    head_VD: Tensor
    loss: float


def bigram_counts(store: TokenStore, weights: list[float], *, vocabulary: int) -> Tensor:
    """How often each token (row) is followed by each (column) inside a document; sources weighted. V x V, fp32."""
    counts = np.zeros(vocabulary * vocabulary, dtype=np.float64)
    ends = store.starts[1:] - 1
    for source, weight in enumerate(weights):
        if not weight:
            continue
        documents = np.flatnonzero(store.source_of == source)
        keep = np.zeros(store.count, dtype=bool)
        used = 0
        for document in documents:
            begin, end = int(store.starts[document]), int(ends[document])
            keep[begin:end] = True
            used += end - begin
            if used >= MOST_TOKENS:
                break
        at = np.flatnonzero(keep)
        pairs = store.tokens[at].astype(np.int64) * vocabulary + store.tokens[at + 1]
        counts += weight * np.bincount(pairs, minlength=vocabulary * vocabulary)
    return torch.from_numpy(counts.astype(np.float32)).view(vocabulary, vocabulary)


def fit_flops(vocabulary: int, width: int) -> float:
    """What `fit_bigram` computes: three products of vocabulary x vocabulary x width an iteration."""
    return 6.0 * ITERATIONS * vocabulary * vocabulary * width


def fit_bigram(counts_VV: Tensor, width: int, *, seed: int, epsilon: float) -> BigramStart:
    """Fit embedding and head to the smoothed counts by Adam over all contexts at once.

    `epsilon` is that of the model's RMS normalisation. Deterministic for a seed, a device and a number of threads.
    """
    vocabulary, device = counts_VV.shape[0], counts_VV.device
    context_V1 = counts_VV.sum(1, keepdim=True)
    overall_V = counts_VV.sum(0) + 0.5
    overall_V /= overall_V.sum()
    share_V1 = context_V1.pow(FREQUENCY_POWER)
    share_V1 /= share_V1.sum()
    target_VV = (counts_VV + SMOOTHING * overall_V).div_(context_V1 + SMOOTHING).mul_(share_V1)
    generator = torch.Generator().manual_seed(seed)
    tables = [(0.02 * torch.randn(vocabulary, width, generator=generator)).to(device) for _ in range(2)]
    # One direction that all contexts share carries the overall frequencies.
    tables[0][:, 0] = 0.16
    # The target sums to 1 over all V x V entries, so gradients are tiny: epsilon must be far smaller still.
    optimizer = torch.optim.Adam(tables, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-15)
    loss = 0.0
    for iteration in range(ITERATIONS):
        rise, fall = (iteration + 1) / 4, (ITERATIONS - iteration) / (0.6 * ITERATIONS)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, rise, fall)
        loss = _set_gradients(tables[0], tables[1], target_VV, share_V1, epsilon)
        optimizer.step()
    # Only the direction of an embedding matters here. Its size decides how much a layer's first steps change it: at 1,
    # what the layers add is small beside it until it is useful.
    normalised_VD = tables[0] * torch.rsqrt(tables[0].pow(2).mean(1, keepdim=True) + epsilon)
    return BigramStart(normalised_VD, tables[1], loss)


def _set_gradients(embedding_VD: Tensor, head_VD: Tensor, target_VV: Tensor, share_V1: Tensor, epsilon: float) -> float:
    """Cross-entropy of the target under softmax(normalise(embedding) @ head.T), gradients put into `.grad`.

    A chunk of contexts at a time, in place: logits of one chunk stay in the processor's cache, ten times faster here
    than letting autograd keep several V x V tensors.
    """
    scale_V1 = torch.rsqrt(embedding_VD.pow(2).mean(1, keepdim=True) + epsilon)
    normalised_VD = embedding_VD * scale_V1
    grad_head_VD = torch.zeros_like(head_VD)
    grad_normalised_VD = torch.empty_like(embedding_VD)
    loss = 0.0
    for begin in range(0, embedding_VD.shape[0], CHUNK_CONTEXTS):
        part = slice(begin, begin + CHUNK_CONTEXTS)
        logits_CV = normalised_VD[part] @ head_VD.T
        logits_CV -= torch.logsumexp(logits_CV, dim=1, keepdim=True)
        loss -= float(torch.dot(logits_CV.flatten(), target_VV[part].flatten()))
        grad_CV = logits_CV.exp_().mul_(share_V1[part]).sub_(target_VV[part])
        grad_head_VD.addmm_(grad_CV.T, normalised_VD[part])
        torch.mm(grad_CV, head_VD, out=grad_normalised_VD[part])
    # The derivative of x / rms(x): what is not along x, over rms.
    along_V1 = (grad_normalised_VD * normalised_VD).mean(1, keepdim=True)
    embedding_VD.grad = (grad_normalised_VD - normalised_VD * along_V1) * scale_V1
    head_VD.grad = grad_head_VD
    return loss


def apply_start(model: Any, start: BigramStart) -> None:
    """Put the fitted embeddings into a Llama with a head of its own and make its layers add nothing yet."""
    assert not model.config.tie_word_embeddings, "what follows a token is not what comes before it"
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(start.embedding_VD)
        model.get_output_embeddings().weight.copy_(start.head_VD)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
