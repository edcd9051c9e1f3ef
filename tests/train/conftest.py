"""Fixtures of the tests that train: a tiny size that starts at once, and a corpus for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import quicken, write_corpus


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size `tiny`; no figures, no products measured. Use it as a mark: pytest.mark.usefixtures("quick")."""
    quicken(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, for the runs of one module."""
    made = tmp_path_factory.mktemp("runs")
    write_corpus(made)
    return made
