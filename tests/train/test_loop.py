"""The loop by itself: exact gradients of an update, exact means, odd tails, skipped updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import lines
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from onecard.data.batches import RowOrder
from onecard.data.packing import PackedRows, RowBatch
from onecard.data.tokens import Encoded, write_store
from onecard.errors import OnecardError
from onecard.model import attention
from onecard.train import checkpoint, loop, optimizers
from onecard.train.loop import Loop, LoopSettings
from onecard.train.objectives import NextToken, Objective
from onecard.train.precision import Precision
from onecard.train.schedule import Schedule
from onecard.train.watchdog import Limits, Watchdog

VOCABULARY = 40


def make_model(**changes: Any) -> Any:
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**settings | changes))
    attention.switch(model)
    return model.train()


def make_rows(folder: Path, learned: list[int], *, max_length: int = 8) -> PackedRows:
    """One row for each entry: 8 tokens, of which so many have a label."""
    documents = [
        Encoded("rows", [(7 * i + 3 * j) % (VOCABULARY - 1) + 1 for j in range(8)], [j >= 8 - count for j in range(8)])
        for i, count in enumerate(learned)
    ]
    store = write_store(folder / "store", documents, vocabulary=VOCABULARY, tokenizer_hash="", learned=True)
    return PackedRows(store, max_length)


def make_loop(
    folder: Path,
    rows: PackedRows,
    *,
    model: Any = None,
    batch_size: int = 1,
    rows_per_update: int = 4,
    max_steps: int = 6,
    optimizer: str = "adamw",
    held_out: tuple[PackedRows, list[int]] | None = None,
    objective: Any = None,
    weight_decay: float = 0.1,
    **settings: Any,
) -> Loop:
    model = model if model is not None else make_model()
    return Loop(
        run=folder,
        model=model,
        objective=objective or NextToken(),
        rows=rows,
        order=RowOrder(rows.per_source, [1.0], seed=0, rows_per_update=rows_per_update),
        held_out=held_out,
        optimizers=optimizers.build(
            model, optimizer, learning_rate=0.01, muon_learning_rate=0.02, weight_decay=weight_decay
        ),
        schedule=Schedule("wsd", max_steps, 0.5, 0.5, 0.0),
        precision=Precision("fp32", "cpu", 1e9),
        settings=LoopSettings(
            max_steps=max_steps,
            batch_size=batch_size,
            pad_id=0,
            **{"max_grad_norm": 0.0, "evaluate_every": 100, "save_every": 100, "keep_last": 2, "log_every": 1}
            | settings,
        ),
    )


def gradients_of_update(made: Loop, update: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Any]:
    taken: dict[str, Any] = {}

    def take() -> None:
        taken.update({name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(made.optimizers, "step", take)
    return taken, made.update(update)


# --- gradients ----------------------------------------------------------------------------------------------------


def test_the_update_is_the_same_for_every_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with 1 to 7 labels and one without any; the mean is over the labels of the whole update."""
    rows = make_rows(tmp_path, [1, 7, 3, 0, 5, 2])
    model = make_model()
    model.set_attn_implementation("sdpa")
    total, count = torch.zeros(()), 0
    for number in range(6):
        segment = rows.segments(number)[0]
        ids = torch.from_numpy(rows.store.tokens[segment.begin : segment.end].astype("int64"))
        assert rows.store.learned is not None
        learned = torch.from_numpy(rows.store.learned[segment.begin : segment.end] == 1)
        labels = torch.where(learned, ids, -100)[1:]
        total = total + F.cross_entropy(model(ids[None]).logits[0, :-1], labels, reduction="sum")
        count += int((labels != -100).sum())
    assert count == 18
    (total / count).backward()
    meant = {name: p.grad for name, p in model.named_parameters()}
    for size in (1, 2, 3, 4, 6):
        made = make_loop(tmp_path, rows, batch_size=size, rows_per_update=6)
        taken, result = gradients_of_update(made, 0, monkeypatch)
        assert result.loss == pytest.approx(total.item() / 18, rel=1e-5)
        assert result.tokens == 48
        for name, gradient in meant.items():
            torch.testing.assert_close(taken[name], gradient, rtol=1e-5, atol=1e-6)


def test_an_update_without_any_label_changes_nothing_but_is_counted(tmp_path: Path) -> None:
    made = make_loop(tmp_path, make_rows(tmp_path, [0, 0]), rows_per_update=2, weight_decay=0.0)
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    result = made.update(0)
    assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, False)
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())


def test_an_odd_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 micro-batches, accumulation 4: 3 updates an epoch; the last is the mean of its own two."""
    made = make_loop(tmp_path, make_rows(tmp_path, [3] * 10), max_steps=6)
    assert made.order.updates_per_epoch == 3
    assert [len(made.micro_batches(update)) for update in range(6)] == [4, 4, 2, 4, 4, 2]
    alone = []
    for number in made.order.rows_of_update(2):
        single = make_loop(tmp_path, made.rows, model=made.model)  # type: ignore[arg-type]
        monkeypatch.setattr(single.order, "rows_of_update", lambda update, number=number: [number])
        alone.append(gradients_of_update(single, 0, monkeypatch))
    taken, result = gradients_of_update(made, 2, monkeypatch)
    assert result.loss == pytest.approx(sum(part.loss for _, part in alone) / 2, rel=1e-5)
    for name, gradient in taken.items():
        torch.testing.assert_close(gradient, (alone[0][0][name] + alone[1][0][name]) / 2, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_counts_real_updates(tmp_path: Path) -> None:
    """Two epochs of three updates; warm-up 3 of 6: 1/4, 2/4, 3/4; then 1, 2/3, 1/3 of the peak of 0.01."""
    made = make_loop(tmp_path, make_rows(tmp_path, [3] * 10), max_steps=6)
    made.run("test")
    rates = [row["lr"] for row in lines(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.02 / 3, 0.01 / 3])


@pytest.mark.parametrize(("limit", "factor"), [(1e-3, 1e-3), (1e3, None), (0.0, None)])
def test_clipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, factor: float | None) -> None:
    made = make_loop(tmp_path, make_rows(tmp_path, [7] * 4), max_grad_norm=limit)
    taken, result = gradients_of_update(made, 0, monkeypatch)
    norm = math.sqrt(sum(float(g.square().sum()) for g in taken.values()))
    assert result.grad_norm > 0.01  # the norm before clipping is reported
    assert norm == pytest.approx(factor if factor is not None else result.grad_norm, rel=1e-4)


# --- evaluation ---------------------------------------------------------------------------------------------------


class _FixedLoss(Objective):
    """A loss of 1 for each label of rows with four, of 3 for each label of others."""

    def loss(self, model: Any, batch: RowBatch, *, scale: float, row_tokens: int, **_: Any) -> torch.Tensor:
        labelled = (torch.from_numpy(batch.labels) != -100).view(-1, row_tokens).sum(1)
        return scale * torch.where(labelled == 4, labelled * 1.0, labelled * 3.0).sum()


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_mean_of_an_evaluation_is_over_tokens(tmp_path: Path, batch_size: int) -> None:
    """4 tokens at 1.0 and 60 at 3.0: 184 / 64 = 2.875, whatever the batch."""
    documents = [Encoded("rows", list(range(1, 31)), [j >= 30 - count for j in range(30)]) for count in (4, 20, 20, 20)]
    store = write_store(tmp_path / "held", documents, vocabulary=VOCABULARY, tokenizer_hash="", learned=True)
    rows = PackedRows(store, 32)
    made = make_loop(
        tmp_path, rows, batch_size=batch_size, held_out=(rows, [0, 1, 2, 3]), objective=_FixedLoss(), model=make_model()
    )
    loss = made.evaluate()
    assert loss == pytest.approx(2.875)
    assert math.exp(loss) == pytest.approx(17.73, abs=0.01)


@pytest.mark.parametrize("probability", [0.0, 0.4])
def test_an_evaluation_is_exact_and_leaves_no_trace(tmp_path: Path, probability: float) -> None:
    """With dropout too: no random number is drawn, and training mode comes back."""
    rows = make_rows(tmp_path, [3, 5, 7])
    made = make_loop(tmp_path, rows, held_out=(rows, [0, 1, 2]), model=make_model(attention_dropout=probability))
    state = torch.get_rng_state()
    losses = {made.evaluate() for _ in range(3)}
    plain = make_loop(tmp_path, rows, held_out=(rows, [0, 1, 2]))
    assert losses == {plain.evaluate()}
    assert torch.equal(torch.get_rng_state(), state)
    assert made.model.training and all(module.training for module in made.model.modules())
    assert all(p.grad is None for p in made.model.parameters())


def test_without_held_out_rows_there_is_no_evaluation(tmp_path: Path) -> None:
    assert make_loop(tmp_path, make_rows(tmp_path, [3])).evaluate() is None


# --- updates that are not finite ----------------------------------------------------------------------------------


class _Poisoned(NextToken):
    """NaN gradients at chosen updates, whose loss is finite."""

    def __init__(self, at: set[int]) -> None:
        self.at, self.owner = at, None

    def loss(self, model: Any, batch: RowBatch, **settings: Any) -> torch.Tensor:
        made = super().loss(model, batch, **settings)
        assert self.owner is not None
        return made * torch.tensor(math.nan) if self.owner.taken in self.at else made


def poisoned_loop(folder: Path, at: set[int], **settings: Any) -> Loop:
    objective: Any = _Poisoned(at)
    made = make_loop(folder, make_rows(folder, [3] * 8), objective=objective, **settings)
    objective.owner = made
    return made


def state_of(made: Loop) -> dict[str, torch.Tensor]:
    model = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    return model | {name: value.clone() for name, value in made.optimizers.state_tensors().items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_that_is_not_finite_leaves_no_trace(
    tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = poisoned_loop(tmp_path, {5}, optimizer=optimizer, max_steps=8)
    states = []
    original = made.update

    def update(number: int) -> loop.UpdateResult:
        states.append(state_of(made))
        return original(number)

    made.update = update  # type: ignore[method-assign]
    made.run("test")
    states.append(state_of(made))
    for name, value in states[5].items():  # before update 6, and before update 7
        assert torch.equal(value, states[6][name]), name
    assert any(not torch.equal(value, states[7][name]) for name, value in states[6].items())
    assert made.skipped == 1
    skips = [row for row in lines(tmp_path / "events.jsonl") if row["event"] == "skip"]
    assert [(row["step"], row["rows"]) for row in skips] == [(6, made.order.rows_of_update(5))]
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["loss"] is None for row in rows] == [False] * 5 + [True] + [False] * 2
    assert "Update 6 is skipped" in capsys.readouterr().err


def test_a_run_of_failures_gives_up_with_finite_weights(tmp_path: Path) -> None:
    """5 in a row four times, with nothing to go back to: after update 3 + 20."""
    made = poisoned_loop(tmp_path, set(range(3, 40)), max_steps=40)
    with pytest.raises(OnecardError, match="gives up after update 23: 5 updates in a row") as fault:
        made.run("test")
    assert fault.value.exit_status == 2
    assert made.step == 23
    newest = checkpoint.newest_whole(tmp_path)
    assert newest is not None and newest[0] == 23
    again = poisoned_loop(tmp_path, set(), max_steps=40)
    assert again.resume()
    assert all(torch.isfinite(p).all() for p in again.model.parameters())
    again.run("test")
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == list(range(1, 41))
    assert again.skipped == 20


def test_four_skipped_in_a_row_change_nothing_else(tmp_path: Path) -> None:
    made = poisoned_loop(tmp_path, set(range(3, 7)) | {8}, max_steps=12)
    made.run("test")
    assert made.skipped == 5
    assert not [row for row in lines(tmp_path / "events.jsonl") if row["event"] == "rollback"]


def test_a_roll_back_goes_on_with_other_rows_and_is_exact_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after 3, 6, 9; the 8th to 12th fail; from 6 on with the 13th rows, at half the rate."""

    def fresh(name: str) -> Loop:
        (tmp_path / name).mkdir(exist_ok=True)
        made = poisoned_loop(
            tmp_path / name,
            set(range(7, 12)),
            max_steps=13,
            save_every=3,
            keep_last=9,
            roll_back_learning_rate_factor=0.5,
        )
        monkeypatch.setattr(made.control, "due", lambda *_: [])
        return made

    whole = fresh("whole")
    drawn: list[tuple[int, int]] = []
    original = whole.update

    def update(number: int) -> loop.UpdateResult:
        drawn.append((whole.step, number))
        return original(number)

    whole.update = update  # type: ignore[method-assign]
    whole.run("test")
    assert drawn == [(n, n) for n in range(12)] + [(n, n + 6) for n in range(6, 13)]
    assert [row["step"] for row in lines(tmp_path / "whole" / "metrics.jsonl")] == list(range(1, 14))
    [event] = [row for row in lines(tmp_path / "whole" / "events.jsonl") if row["event"] == "rollback"]
    assert (event["step"], event["failed"], event["learning_rate"]) == (6, 12, 0.005)
    assert whole.optimizers.peak_learning_rate == 0.005 and whole.watchdog.roll_backs == 1
    parts = fresh("parts")
    crash = parts.update

    def fail(number: int) -> loop.UpdateResult:
        if number == 14:
            raise KeyboardInterrupt
        return crash(number)

    parts.update = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        parts.run("test")
    again = fresh("parts")
    assert again.resume() and (again.step, again.taken) == (6, 12)
    again.run("test")
    meant, made = state_of(whole), state_of(again)
    assert all(torch.equal(value, made[name]) for name, value in meant.items())


# --- memory -------------------------------------------------------------------------------------------------------


def starved(made: Loop, most: int) -> list[int]:
    """Let every micro-batch of more than `most` rows run out of memory; the sizes that were tried."""
    tried: list[int] = []
    original = made._loss

    def loss(batch: RowBatch, scale: float, *, learn: bool = True) -> torch.Tensor:
        tried.append(len(batch.row_lengths))
        if len(batch.row_lengths) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(batch, scale, learn=learn)

    made._loss = loss  # type: ignore[method-assign]
    return tried


def test_out_of_memory_halves_the_micro_batch_and_gives_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(tmp_path, [1, 7, 3, 0, 5, 2])
    meant, plain = gradients_of_update(make_loop(tmp_path, rows, batch_size=6, rows_per_update=6), 0, monkeypatch)
    made = make_loop(tmp_path, rows, batch_size=6, rows_per_update=6)
    tried = starved(made, 2)
    taken, result = gradients_of_update(made, 0, monkeypatch)
    assert tried == [6, 3, 2, 2, 2]
    assert result.loss == pytest.approx(plain.loss, rel=1e-6)
    for name, gradient in meant.items():
        torch.testing.assert_close(taken[name], gradient, rtol=1e-5, atol=1e-7)
    found = [(row["batch_size"], row["was"]) for row in lines(tmp_path / "events.jsonl") if row["event"] == "oom"]
    assert found == [(3, 6), (2, 3)]
    assert "the same gradient" in capsys.readouterr().err
    # The smaller size is kept, also by whoever resumes.
    made.save()
    again = make_loop(tmp_path, rows, batch_size=6, rows_per_update=6)
    assert again.resume() and again.settings.batch_size == 2 and again.order.rows_per_update == 6


def test_at_one_row_there_is_nothing_left_to_halve(tmp_path: Path) -> None:
    made = make_loop(tmp_path, make_rows(tmp_path, [3, 4]), batch_size=2, rows_per_update=2)
    starved(made, 0)
    with pytest.raises(torch.OutOfMemoryError):
        made.run("test")


def test_the_longest_rows_are_tried_first(tmp_path: Path) -> None:
    made = make_loop(tmp_path, make_rows(tmp_path, [3, 4, 5, 6]), batch_size=4, rows_per_update=4)
    before = state_of(made)
    assert starved(made, 2) == []
    made.rehearse()
    assert made.settings.batch_size == 2
    assert all(torch.equal(value, before[name]) for name, value in state_of(made).items())


# --- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "dropout"), [("adamw", 0.2), ("muon", 0.0)])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_loop_equals_one_that_ran_through(tmp_path: Path, optimizer: str, dropout: float, stop: int) -> None:
    rows = make_rows(tmp_path, [3, 2, 7, 5, 1, 4, 6])  # two updates an epoch
    settings: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": 0.5}

    def fresh(name: str, save_every: int) -> Loop:
        (tmp_path / name).mkdir(exist_ok=True)
        model = make_model(attention_dropout=dropout)
        made = make_loop(tmp_path / name, rows, model=model, save_every=save_every, **settings)
        torch.manual_seed(5)
        return made

    whole = fresh("whole", 100)
    whole.run("test")
    first = fresh("parts", stop)
    original = first.save

    def save_and_end(*_: Any, **__: Any) -> None:
        original()
        raise KeyboardInterrupt

    first.save = save_and_end  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run("test")
    second = fresh("parts", 100)
    torch.manual_seed(99)  # another process
    assert second.resume()
    assert second.step == stop
    second.run("test")
    meant, made = state_of(whole), state_of(second)
    assert meant.keys() == made.keys()
    assert all(torch.equal(value, made[name]) for name, value in meant.items())
    keys = ("step", "tokens", "loss", "lr", "grad_norm")
    logs = [[[row[k] for k in keys] for row in lines(tmp_path / n / "metrics.jsonl")] for n in ("whole", "parts")]
    assert logs[0] == logs[1]


# --- early stopping -----------------------------------------------------------------------------------------------


def test_early_stopping_keeps_the_best_model_also_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses at the evaluations after updates 2, 4, 6 ...: 3, 2, 2.5, 2.4: after update 8 it is enough."""
    rows = make_rows(tmp_path, [3, 4, 5, 6])
    watch = Watchdog(Limits(early_stopping=2))
    settings: dict[str, Any] = {
        "max_steps": 20,
        "evaluate_every": 2,
        "keep_best": True,
        "save_every": 3,
        "keep_last": 1,
    }
    losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.4}
    best: dict[str, torch.Tensor] = {}

    def fresh() -> Loop:
        made = make_loop(tmp_path, rows, held_out=(rows, [0]), **settings)
        made.watchdog = Watchdog(watch.limits)

        def evaluate() -> float:
            if made.step == 4:
                best.update({name: p.detach().clone() for name, p in made.model.named_parameters()})
            return losses[made.step]

        monkeypatch.setattr(made, "evaluate", evaluate)
        return made

    first = fresh()
    original = first.update

    def fail(number: int) -> loop.UpdateResult:
        if number == 7:
            raise KeyboardInterrupt
        return original(number)

    first.update = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run("test")
    made = fresh()
    assert made.resume() and made.step == 6
    made.run("test")
    assert made.step == 8
    assert all(torch.equal(best[name], p) for name, p in made.model.named_parameters())
    [event] = [row for row in lines(tmp_path / "events.jsonl") if row["event"] == "early_stop"]
    assert (event["step"], event["best"], event["held_out_loss"]) == (8, 4, 2.0)
    # Whoever comes again has nothing left to do, and the same model.
    again = fresh()
    assert again.resume() and again.step == 8
    again.run("test")
    assert again.step == 8
    assert all(torch.equal(best[name], p) for name, p in again.model.named_parameters())
