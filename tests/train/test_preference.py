"""The losses of preferences beside hand-made ones in fp64, whatever the rows, micro-batches and padding."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from onecard.data.batches import RowOrder
from onecard.data.packing import PairRows
from onecard.data.tokens import Encoded, TokenStore, write_store
from onecard.model import attention
from onecard.train import optimizers
from onecard.train.loop import Loop, LoopSettings
from onecard.train.precision import Precision
from onecard.train.preference import GOOD, REFERENCE, Preference, PreferenceSettings
from onecard.train.schedule import Schedule

VOCABULARY = 61
# Tokens of the question, of the first and of the second answer.
SHAPES = [(3, 4, 6), (5, 2, 2), (1, 7, 3), (4, 1, 9)]
# What the untrained model is said to have given: far enough from what it gives to tell terms apart.
REFERENCES = [[-17.0, -25.5], [-8.25, -8.0], [-30.0, -12.0], [-4.0, -36.5]]
JUDGED = [1.0, 0.0, 0.0, 1.0]


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings: Any = LlamaConfig
    made = LlamaForCausalLM(
        settings(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    draw = np.random.default_rng(0)
    documents = []
    for question, *answers in SHAPES:
        shared = draw.integers(0, VOCABULARY, question).tolist()
        for answer in answers:
            ids = shared + draw.integers(0, VOCABULARY, answer).tolist()
            documents.append(Encoded("s", ids, [False] * question + [True] * answer))
    made = write_store(tmp_path / "store", documents, vocabulary=VOCABULARY, tokenizer_hash="", learned=True)
    values = np.empty((2 * len(SHAPES), 2))
    values[:, REFERENCE] = np.ravel(REFERENCES)
    values[:, GOOD] = np.repeat(JUDGED, 2)
    made.write_values(values)
    return TokenStore(made.directory)  # as a later process finds it


def sums(model: Any, store: TokenStore) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each answer, alone through the model in fp64, and its tokens: pairs x 2."""
    assert store.learned is not None
    found, counts = [], []
    for document in range(len(store.source_of)):
        span = slice(int(store.starts[document]), int(store.starts[document + 1]))
        ids = torch.from_numpy(store.tokens[span].astype(np.int64))
        learned = torch.from_numpy(store.learned[span] == 1)[1:]
        each = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(each.gather(1, ids[1:, None]).squeeze(1)[learned].sum())
        counts.append(float(learned.sum()))
    return torch.stack(found).view(-1, 2), torch.tensor(counts, dtype=torch.float64).view(-1, 2)


def by_hand(model: Any, store: TokenStore, settings: PreferenceSettings) -> torch.Tensor:
    """The loss of every pair, written down from the papers."""
    total, count = sums(model, store)
    reference = torch.tensor(REFERENCES, dtype=torch.float64)
    beta, gain, mean = settings.beta, total - reference, total / count
    if settings.kind == "dpo":
        gain = gain / count if settings.length_normalised else gain
        margin = beta * (gain[:, 0] - gain[:, 1])
        flipped = settings.label_smoothing
        losses = -(1 - flipped) * F.logsigmoid(margin) - flipped * F.logsigmoid(-margin)
    elif settings.kind == "ipo":
        gain = gain / count
        losses = (gain[:, 0] - gain[:, 1] - 1 / (2 * beta)) ** 2
    elif settings.kind == "simpo":
        losses = -F.logsigmoid(beta * (mean[:, 0] - mean[:, 1]) - settings.margin)
    elif settings.kind == "orpo":
        probability = mean.exp()
        odds = torch.log(probability / (1 - probability))
        losses = -mean[:, 0] - beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
    else:
        point = max(0.0, gain[:, 1].mean().item())
        good = torch.tensor(JUDGED) == 1
        losses = torch.where(
            good, 1 - torch.sigmoid(beta * (gain[:, 0] - point)), 1 - torch.sigmoid(beta * (point - gain[:, 0]))
        )
    return losses - settings.likelihood_weight * mean[:, 0]


def make_loop(
    folder: Path, model: Any, rows: PairRows, settings: PreferenceSettings, *, padded: bool, batch_size: int
) -> Loop:
    count = sum(rows.per_source)
    return Loop(
        run=folder,
        model=model,
        objective=Preference(settings, padded=padded),
        rows=rows,
        order=RowOrder(rows.per_source, [1.0], seed=0, rows_per_update=count),
        held_out=(rows, list(range(count))),
        optimizers=optimizers.build(model, "adamw", learning_rate=0.01, muon_learning_rate=0.02, weight_decay=0.1),
        schedule=Schedule("wsd", 6, 0.5, 0.5, 0.0),
        precision=Precision("fp32", "cpu", 1e9),
        settings=LoopSettings(6, batch_size, 0.0, 100, 100, 2, 1, 0),
    )


KINDS = [
    PreferenceSettings("dpo", 0.1),
    PreferenceSettings("dpo", 0.3, label_smoothing=0.2, length_normalised=True, likelihood_weight=0.5),
    PreferenceSettings("ipo", 0.2),
    PreferenceSettings("simpo", 2.0, margin=1.0),
    PreferenceSettings("orpo", 0.1),
    PreferenceSettings("kto", 0.1),
]


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: f"{settings.kind}-{settings.beta}")
@pytest.mark.parametrize(("padded", "batch_size"), [(False, 1), (False, 3), (True, 2)])
def test_loss_and_gradients_are_those_written_by_hand(
    model: Any, store: TokenStore, tmp_path: Path, settings: PreferenceSettings, padded: bool, batch_size: int
) -> None:
    exact = copy.deepcopy(model).double()
    losses = by_hand(exact, store, settings)
    losses.mean().backward()
    meant = {name: p.grad for name, p in exact.named_parameters()}

    mine = copy.deepcopy(model)
    assert padded or attention.switch(mine)
    rows = PairRows(store, 28)
    assert rows.per_source == [3]  # two pairs in one of them
    loop = make_loop(tmp_path, mine.train(), rows, settings, padded=padded, batch_size=batch_size)
    taken: dict[str, torch.Tensor] = {}

    def take() -> None:
        taken.update({name: p.grad.clone() for name, p in mine.named_parameters() if p.grad is not None})

    loop.optimizers.step = take  # type: ignore[method-assign]
    result = loop.update(0)
    held_out = loop.evaluate()
    loop.close()
    assert result.loss == pytest.approx(float(losses.detach().mean()), rel=1e-5)
    assert held_out == pytest.approx(result.loss, rel=1e-6)
    overall = max(float(gradient.abs().max()) for gradient in meant.values())
    for name, gradient in meant.items():
        error = float((taken[name].double() - gradient).abs().max())
        assert error <= 1e-5 * max(float(gradient.abs().max()), 1e-2 * overall), name


def test_what_is_told_beside_the_loss(model: Any, store: TokenStore, tmp_path: Path) -> None:
    total, count = sums(copy.deepcopy(model).double(), store)
    gain = 0.1 * (total - torch.tensor(REFERENCES, dtype=torch.float64))
    mine = copy.deepcopy(model)
    assert attention.switch(mine)
    rows = PairRows(store, 24)
    loop = make_loop(tmp_path, mine.train(), rows, PreferenceSettings("dpo", 0.1), padded=False, batch_size=2)
    told = loop.update(0).measures
    loop.close()
    assert told["reward_chosen"] == pytest.approx(gain[:, 0].mean().item(), rel=1e-5)
    assert told["margin"] == pytest.approx((gain[:, 0] - gain[:, 1]).mean().item(), rel=1e-5)
    assert told["accuracy"] == float((gain[:, 0] > gain[:, 1]).double().mean())
    assert told["logp_rejected"] == pytest.approx(total[:, 1].mean().item(), rel=1e-5)
    assert told["length_chosen"] == float(count[:, 0].mean()) == 3.5
    assert set(told) >= {"logp_chosen", "length_rejected", "reward_rejected"}


def test_at_its_reference_dpo_stands_at_ln_2_and_prefers_neither(model: Any, store: TokenStore, tmp_path: Path) -> None:
    assert store.values is not None
    values = store.values.copy()
    values[:, REFERENCE] = sums(copy.deepcopy(model).double(), store)[0].detach().flatten()
    store.write_values(values)
    mine = copy.deepcopy(model)
    assert attention.switch(mine)
    loop = make_loop(
        tmp_path, mine.train(), PairRows(store, 24), PreferenceSettings("dpo", 0.1), padded=False, batch_size=2
    )
    result = loop.update(0)
    loop.close()
    assert result.loss == pytest.approx(math.log(2), abs=1e-6)
    assert result.measures["margin"] == pytest.approx(0, abs=1e-5)


def test_a_pair_stands_in_one_row_and_longest_ones_first(store: TokenStore) -> None:
    rows = PairRows(store, 24)
    for row in range(sum(rows.per_source)):
        found = rows.segments(row)
        begins = [int(np.searchsorted(store.starts, segment.begin)) for segment in found]
        assert begins[::2] == [second - 1 for second in begins[1::2]]
        assert all(first % 2 == 0 for first in begins[::2])
        assert sum(segment.end - segment.begin for segment in found) <= 24
    # Pairs of 16, 14, 12 and 18 tokens: no two of them fit into 24, and 18 + 14 and 16 + 12 into 32.
    assert rows.per_source == [4]
    assert PairRows(store, 32).per_source == [2]
