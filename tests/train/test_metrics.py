from __future__ import annotations

from pathlib import Path

from onecard.train.metrics import RunLog, peak_memory_bytes, read_lines


def test_lines_after_a_step_are_cut_and_events_stay(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.update(step=step, loss=1.0)
        log.sample(step, "p", "你好")
        log.event("checkpoint", step=step)
    log.cut_after(2)
    assert [row["step"] for row in log.metrics()] == [1, 2]
    assert [row["step"] for row in log.samples()] == [1, 2]
    assert [row["step"] for row in read_lines(tmp_path / "events.jsonl")] == [1, 2, 3]


def test_a_line_cut_in_a_character_is_left_out_and_the_next_is_whole(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.event("start", step=0, note="好")
    log.sample(1, "p", "好")
    for name in ("events.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write('{"step": 2, "text": "好'.encode()[:-1])
    log.cut_after(5)
    log.event("resume", step=1)
    log.sample(2, "p", "再")
    assert [row["event"] for row in read_lines(tmp_path / "events.jsonl")] == ["start", "resume"]
    assert [row["text"] for row in log.samples()] == ["好", "再"]


def test_without_files_there_is_nothing_to_cut(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.cut_after(0)
    log.flush()
    assert list(tmp_path.iterdir()) == []


def test_peak_memory_is_that_of_this_process() -> None:
    before = peak_memory_bytes("cpu")
    assert 50 << 20 < before < 64 << 30
    block = bytearray(before + (64 << 20) - before % 4096)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_memory_bytes("cpu") > before
