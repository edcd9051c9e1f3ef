"""Model cards: what is recorded stands in them, what is not is said to be unknown."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from onecard import artifact
from onecard.compress.card import card
from onecard.compress.card_words import WORDS
from onecard.config import CardConfig
from onecard.errors import ConfigError
from onecard.evaluate.ancestry import runs


@pytest.fixture
def made(tmp_path: Path, tiny_model_directory: Path) -> Path:
    """A corpus, a run that pretrained on it, and one that fine-tuned that model."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "documents.txt").write_text("text")
    counts = {"kept": 9, "characters": 1200, "bytes": 3000}
    found = {
        "read": 12, "kept": 9, "rejected": {"too_short": 3}, "held_out": 1, "by_source": {"novel|one": counts},
        "by_language": {"zh": counts},
    }  # fmt: skip
    settings: dict[str, Any] = {"personal_data": "mask", "personal_data_kinds": ["email", "mobile"]}
    artifact.write_manifest(corpus, "corpus", settings=settings, result=found)
    plan = {"optimizer": "muon", "learning_rate": 0.004, "precision": "bf16", "device": "cpu"}
    numbers = {"parameters": 1000, "updates": 5, "tokens": 2000, "seconds": 61.0, "held_out_loss": 1.5}
    for verb, parents, more in (
        ("pretrain", [corpus], {}),
        ("finetune", [tmp_path / "pretrain" / "model"], {"rows": {"read": 30, "kept": 28, "held_out": 2}}),
    ):
        run = tmp_path / verb
        shutil.copytree(tiny_model_directory, run / "model")
        artifact.write_manifest(run / "model", "model", settings={})
        asked = {"sources": [{"path": "chats.jsonl", "name": ""}], "lora_rank": 8} if verb == "finetune" else {}
        artifact.write_manifest(
            run, "run", settings={"plan": {**plan, "verb": verb}, "asked": asked}, parents=parents,
            result={**numbers, **more},
        )  # fmt: skip
    return tmp_path / "finetune"


def test_a_card_tells_what_is_recorded(made: Path, tmp_path: Path) -> None:
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "report.json").write_text("{}")
    result = {"verdict": ["Better than xz."], "bits_per_byte": {"zh": 2.264}, "asked": 20}
    artifact.write_manifest(evaluation, "evaluation", settings={}, result=result)
    card(
        CardConfig.model_validate(
            {"model": made, "evaluations": [evaluation], "licences": {"novel|one": "public domain"}, "name": "mine"}
        )
    )
    text = (made / "model" / "README.md").read_text(encoding="utf-8")
    for part in (
        "# mine", "Made with onecard: pretrain → finetune.", "language:\n- zh",
        "| novel\\|one | 9 | 1,200 | 2.9 KiB | public domain |", "| chats |  |  |  | not given |",
        "Of 12 documents 9 were kept (1 of them held out); dropped: too_short 3.", "taken out: email, mobile",
        "`finetune` read 30 rows and kept 28, 2 of them held out.",
        "| finetune (LoRA, rank 8) | 5 | 2,000 | muon, 0.004 | bf16 | cpu | 1 min 01 s | 1.500 |",
        "Better than xz.", "| bits per byte, zh | 2.264 |", "It saw 2,000 tokens, 2.0 for each parameter",
        "in these languages only: zh", 'AutoTokenizer.from_pretrained("mine")', "apply_chat_template",
    ):  # fmt: skip
        assert part in text, part
    assert "energy" not in text  # nothing was measured
    assert artifact.verify(made)
    card(CardConfig(model=made))  # its own card may be written again
    assert "No evaluation was given" in (made / "model" / "README.md").read_text()


def test_what_nobody_wrote_down_is_unknown(tiny_model_directory: Path, tmp_path: Path) -> None:
    card(CardConfig(model=tiny_model_directory, output=tmp_path, language="zh"))
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert WORDS["zh"].not_made_here in text and WORDS["zh"].data_unknown in text


def test_nothing_of_others_is_lost_and_sources_are_known(made: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="not written by onecard"):
        card(CardConfig(model=made, output=tmp_path))
    with pytest.raises(ConfigError, match="no source other") as caught:
        card(CardConfig(model=made, licences={"other": "MIT"}))
    assert "novel|one, chats" in caught.value.remedy


def test_both_languages_fill_in_the_same() -> None:
    import re

    for name, text in vars(WORDS["en"]).items():
        assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", vars(WORDS["zh"])[name])), name


def test_a_compressed_model_has_the_card_of_what_it_was_made_of(made: Path, tmp_path: Path) -> None:
    smaller = tmp_path / "pruned"
    shutil.copytree(made / "model", smaller)
    artifact.write_manifest(smaller, "model", settings={}, parents=[made])
    card(CardConfig(model=smaller, output=tmp_path / "out"))
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "Made with onecard: pretrain → finetune." in text
    assert "| novel\\|one | 9 |" in text


def test_a_merged_model_has_the_card_of_all_its_parts(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other)
    merged = tmp_path / "merged"
    shutil.copytree(made / "model", merged)
    artifact.write_manifest(merged, "model", settings={}, parents=[tmp_path / "pretrain", made, other])
    found = [run.name for run, _ in runs(merged)]
    assert sorted(found) == ["finetune", "other", "pretrain"]
