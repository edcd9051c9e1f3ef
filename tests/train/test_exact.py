"""One update, whatever its split: gradients and loss are those of plain transformers in fp64, document by document."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from families import FAMILIES, PAD, STATEFUL, VOCABULARY, make_family, make_stateful
from onecard.data.batches import RowOrder
from onecard.data.packing import PackedRows, PaddedRows, Rows
from onecard.data.tokens import Encoded, TokenStore, write_store
from onecard.model import attention
from onecard.train import optimizers
from onecard.train.loop import Loop, LoopSettings, UpdateResult
from onecard.train.objectives import NextToken
from onecard.train.precision import Precision
from onecard.train.schedule import Schedule

MAX_LENGTH = 24
# Longer and shorter than the windows, of one token, and (the fourth) without any label.
LENGTHS = [3, 17, 1, 9, 24, 2, 6, 12, 21, 5, 8, 14]
WITHOUT_LABEL = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    generator = np.random.default_rng(0)
    documents = [
        Encoded(
            "chats",
            generator.integers(3, VOCABULARY, length).tolist(),
            ((generator.random(length) < 0.6) & (number != WITHOUT_LABEL)).tolist(),
        )
        for number, length in enumerate(LENGTHS)
    ]
    folder = tmp_path_factory.mktemp("exact") / "store"
    return write_store(folder, documents, vocabulary=VOCABULARY, tokenizer_hash="", learned=True)


Reference = tuple[dict[str, torch.Tensor], float, int]


def reference(model: Any, store: TokenStore, documents: list[int]) -> Reference:
    """Gradients and value of the token mean over documents, each alone through the model in fp64; labels."""
    model = copy.deepcopy(model).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    assert store.learned is not None
    for document in documents:
        span = slice(int(store.starts[document]), int(store.starts[document + 1]))
        ids = torch.from_numpy(store.tokens[span].astype(np.int64))
        labels = ids.masked_fill(torch.from_numpy(store.learned[span] == 0), -100)[1:]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, labels, reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}, total.item() / count, count


def make_loop(
    folder: Path, model: Any, rows: Rows, *, padded: bool, batch_size: int, rows_per_update: int, seed: int = 0
) -> Loop:
    return Loop(
        run=folder,
        model=model,
        objective=NextToken(padded=padded),
        rows=rows,
        order=RowOrder(rows.per_source, [1.0], seed=seed, rows_per_update=rows_per_update),
        held_out=(rows, list(range(sum(rows.per_source)))),
        optimizers=optimizers.build(model, "adamw", learning_rate=0.01, muon_learning_rate=0.02, weight_decay=0.1),
        schedule=Schedule("wsd", 6, 0.5, 0.5, 0.0),
        precision=Precision("fp32", "cpu", 1e9),
        settings=LoopSettings(
            max_steps=6,
            batch_size=batch_size,
            max_grad_norm=0.0,
            evaluate_every=100,
            save_every=100,
            keep_last=2,
            log_every=1,
            pad_id=PAD,
        ),
    )


def gradients_of(made: Loop, update: int = 0) -> tuple[dict[str, torch.Tensor], UpdateResult]:
    """The gradients with which the optimizer would step; no weight is changed."""
    taken: dict[str, torch.Tensor] = {}

    def take() -> None:
        taken.update({name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None})

    made.optimizers.step = take  # type: ignore[method-assign]
    result = made.update(update)
    made.close()
    return taken, result


def assert_same(made: dict[str, torch.Tensor], meant: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """By the largest entry of each. What is zero but for rounding (biases of keys) is measured by all gradients."""
    assert made.keys() == meant.keys()
    overall = max(float(gradient.abs().max()) for gradient in meant.values())
    for name, gradient in meant.items():
        error = float((made[name].double() - gradient).abs().max())
        assert error <= tolerance * max(float(gradient.abs().max()), 1e-3 * overall), name


def prepared(name: str, *, padded: bool) -> Any:
    model = make_family(name)
    assert attention.switch(model) or padded
    if padded:
        attention.use_own(model)
    return model


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_update_is_the_same_for_every_split(tmp_path: Path, store: TokenStore, name: str, padded: bool) -> None:
    model = prepared(name, padded=padded)
    own = make_family(name)
    meant, mean_loss, labels = reference(own, store, list(range(len(LENGTHS))))
    rows: Rows = PaddedRows(store, MAX_LENGTH) if padded else PackedRows(store, MAX_LENGTH)
    count = sum(rows.per_source)
    assert count == len(LENGTHS) if padded else count < 8
    # Sizes that divide the rows and such that leave a smaller last micro-batch; two orders.
    for batch_size, seed in ((1, 0), (2, 0), (5, 1), (count, 1)):
        made = make_loop(tmp_path, model, rows, padded=padded, batch_size=batch_size, rows_per_update=count, seed=seed)
        assert sum(batch.labelled for batch in made.micro_batches(0)) == labels
        gradients, result = gradients_of(made)
        assert result.loss == pytest.approx(mean_loss, rel=1e-5)
        assert result.tokens == sum(LENGTHS)
        assert_same(gradients, meant)
        assert made.evaluate() == pytest.approx(mean_loss, rel=1e-5)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_model_that_carries_state_is_trained_padded(tmp_path: Path, store: TokenStore, name: str) -> None:
    model = make_stateful(name)
    own = model.config._attn_implementation
    assert not attention.switch(model)
    assert model.config._attn_implementation == own
    meant, mean_loss, _ = reference(make_stateful(name), store, list(range(len(LENGTHS))))
    rows = PaddedRows(store, MAX_LENGTH)
    for batch_size in (1, 5):
        made = make_loop(tmp_path, model, rows, padded=True, batch_size=batch_size, rows_per_update=len(LENGTHS))
        gradients, result = gradients_of(made)
        assert result.loss == pytest.approx(mean_loss, rel=1e-5)
        assert_same(gradients, meant, 5e-5)  # their scans compute in fp32 even in the reference


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_an_odd_tail_is_the_mean_of_its_own_tokens(tmp_path: Path, padded: bool) -> None:
    """10 batches, accumulation 4: updates of 4, 4 and 2, each the token mean of its rows, of unequal length."""
    generator = np.random.default_rng(1)
    lengths = [13, 24, 14, 20, 17, 23, 15, 22, 19, 16]  # no two fit into one row
    documents = [
        Encoded("chats", generator.integers(3, VOCABULARY, n).tolist(), [i > n // 3 for i in range(n)]) for n in lengths
    ]
    store = write_store(tmp_path / "store", documents, vocabulary=VOCABULARY, tokenizer_hash="", learned=True)
    model = prepared("llama", padded=padded)
    rows: Rows = PaddedRows(store, MAX_LENGTH) if padded else PackedRows(store, MAX_LENGTH)
    made = make_loop(tmp_path, model, rows, padded=padded, batch_size=1, rows_per_update=4)
    assert made.order.updates_per_epoch == 3
    assert [len(made.micro_batches(update)) for update in range(6)] == [4, 4, 2, 4, 4, 2]
    for update in range(3):
        begins = [rows.segments(row)[0].begin for row in made.order.rows_of_update(update)]
        inside = [store.starts.tolist().index(begin) for begin in begins]
        meant, mean_loss, _ = reference(make_family("llama"), store, inside)
        gradients, result = gradients_of(made, update)
        assert result.loss == pytest.approx(mean_loss, rel=1e-5)
        assert_same(gradients, meant)


class _Squared(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).square()


def test_logits_that_no_head_describes_are_taken_from_the_model(tmp_path: Path, store: TokenStore) -> None:
    def make() -> Any:
        model = make_family("mistral")
        head = _Squared(32, VOCABULARY, bias=False)
        head.load_state_dict(model.lm_head.state_dict())
        model.lm_head = head
        return model

    model = make()
    assert not attention.switch(model)
    meant, mean_loss, _ = reference(make(), store, list(range(len(LENGTHS))))
    rows = PaddedRows(store, MAX_LENGTH)
    made = make_loop(tmp_path, model, rows, padded=True, batch_size=5, rows_per_update=len(LENGTHS))
    gradients, result = gradients_of(made)
    assert result.loss == pytest.approx(mean_loss, rel=1e-5)
    assert_same(gradients, meant)
    assert made.evaluate() == pytest.approx(mean_loss, rel=1e-5)
