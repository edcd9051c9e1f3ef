"""Cleaning on Ray: the same files to the byte, nothing open to other machines, errors that name the remedy."""

from __future__ import annotations

import gc
import importlib.util
import json
import random
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from onecard.config import CleanConfig
from onecard.data import ray_workers, refinery
from onecard.data.clean import clean
from onecard.data.ray_workers import RayWorkers
from onecard.errors import ConfigError, MachineError, MissingExtra
from onecard.settings import Source


def config(folder: Path, name: str, **settings: object) -> CleanConfig:
    return CleanConfig(sources=[Source(path=str(folder / "texts"))], output=folder / name, **settings)  # type: ignore[arg-type]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    draw = random.Random(0)
    (tmp_path / "texts").mkdir()
    rows: list[str] = []
    for number in range(3):
        for _ in range(60):
            fresh = "".join(f"第{draw.randrange(10**6)}回，话说天下大势。" for _ in range(6))
            rows.append(
                draw.choice([fresh, fresh, rows[-1] + "改" if rows else fresh, draw.choice(rows or [fresh]), "短"])
            )
        lines = (json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows[-60:])
        (tmp_path / f"texts/{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_without_the_package_one_line_says_how_to_install_it(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else found(name))
    with pytest.raises(MissingExtra) as fault:
        clean(config(texts, "out", engine="ray"))
    assert fault.value.what == "engine = ray needs the package ray."
    assert fault.value.remedy == "Install it: pip install 'onecard[ray]'"
    assert not (texts / "out").exists()


def test_the_engine_is_no_part_of_what_decides_the_result(texts: Path) -> None:
    files = [sorted((texts / "texts").iterdir())]
    names = {
        refinery.fingerprint(config(texts, "out", **settings), files)
        for settings in ({}, {"engine": "ray"}, {"engine": "ray", "ray_address": "10.0.0.5:6379"})
    }
    assert len(names) == 1
    assert names != {refinery.fingerprint(config(texts, "out", minimum_characters=21), files)}


@pytest.mark.parametrize("address", ["auto", "10.0.0.5", ":6379", "ray://host"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match="no host and port"):
        ray_workers._reached(address)


def test_a_cluster_that_does_not_answer_is_said_at_once() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(MachineError, match="No Ray cluster answers at 127.0.0.1:"):
            ray_workers._reached(f"127.0.0.1:{taken.getsockname()[1]}")


# --- with Ray -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayWorkers]:
    if importlib.util.find_spec("ray") is None:  # not importorskip: Ray reads its settings when it is imported
        pytest.skip("Ray is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray ends its processes, but does not wait for them
        with RayWorkers(2, None, tmp_path_factory.mktemp("not there") / "folder") as started:
            assert list(started.map(len, [("",), ("ab",)])) == [0, 2]
            yield started
        gc.collect()


def _content(output: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in output.iterdir()
        if path.name[:3] in ("doc", "rej") or path.name == "report.json"
    }


def test_the_same_to_the_byte_as_without(texts: Path, workers: RayWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinery, "BATCH_CHARACTERS", 4000)
    calls: list[str] = []

    class Shared(RayWorkers):
        """The Ray that runs already, which outlives this use."""

        def __init__(self, *asked: object) -> None:
            vars(self).update(vars(workers))

        def __exit__(self, *_: object) -> None:
            pass

        def map(self, function, given):  # type: ignore[no-untyped-def]
            calls.append(function.__name__)
            return super().map(function, given)

    local = clean(config(texts, "local", workers=1))
    monkeypatch.setattr(ray_workers, "RayWorkers", Shared)
    clean(config(texts, "ray", engine="ray"))
    assert {"tidy", "group_band", "write_part"} <= set(calls)
    kept, same = _content(texts / "ray"), _content(texts / "local")
    assert {"documents-00000.parquet", "rejected-00000.jsonl", "report.json"} == set(kept)
    assert kept == same
    assert local["rejected"].keys() == {"too_short", "exact_duplicate", "near_duplicate"}


def test_answers_come_in_order_and_faults_are_their_own(workers: RayWorkers) -> None:
    answers = workers.map(int, [("1",), ("x",), ("3",)])
    assert next(answers) == 1
    with pytest.raises(ValueError, match="invalid literal"):
        next(answers)
    with pytest.raises(ConfigError) as fault:
        list(workers.map(ray_workers._reached, [("auto",)]))
    assert fault.value.what == "ray_address = auto is no host and port."
    assert fault.value.remedy == "Write it as in ray_address = '10.0.0.5:6379'."


def test_a_node_that_does_not_see_the_folder_is_named(workers: RayWorkers) -> None:
    with pytest.raises(ConfigError, match="does not see .*not there"):
        workers._check_nodes("10.0.0.5:6379")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the sockets of other processes")
def test_nothing_listens_to_other_machines(workers: RayWorkers) -> None:
    import psutil

    own = psutil.Process()
    ports = [
        socket.laddr
        for process in [own, *own.children(recursive=True)]
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    ]
    assert len(ports) >= 3  # the store of the cluster's state, the node, its workers
    assert {address.ip for address in ports} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
