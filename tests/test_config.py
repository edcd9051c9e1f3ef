"""Settings: names, kinds, limits, places, and errors that name what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecard.config import ChatConfig, CleanConfig, EvaluateConfig, FinetuneConfig, PretrainConfig, RunConfig
from onecard.errors import ConfigError
from onecard.settings import Source, build, nearest, read_toml, relative_to


def refused(kind: type, values: dict) -> ConfigError:  # type: ignore[type-arg]
    with pytest.raises(ConfigError) as caught:
        build(kind, values, where="[here] of r.toml")
    assert "\n" not in caught.value.what + caught.value.remedy
    assert caught.value.what.startswith("[here] of r.toml: ")
    return caught.value


def test_an_unknown_setting_names_the_nearest() -> None:
    fault = refused(PretrainConfig, {"lerning_rate": 1})
    assert fault.what == "[here] of r.toml: unknown setting lerning_rate."
    assert fault.remedy == "Did you mean learning_rate?"
    # A hyphen is not another name.
    assert refused(PretrainConfig, {"max-steps": 1}).remedy == "Did you mean max_steps?"


def test_an_unknown_setting_near_to_none_lists_the_known() -> None:
    assert "Known: " in refused(PretrainConfig, {"zzzzz": 1}).remedy


def test_an_unknown_key_of_a_source_names_the_source_and_the_nearest() -> None:
    fault = refused(CleanConfig, {"sources": ["a", {"path": "b", "langage": "zh"}]})
    assert fault.what == "[here] of r.toml: unknown setting langage in sources[2]."
    assert fault.remedy == "Did you mean language?"


def test_a_source_without_a_path_says_what_is_missing() -> None:
    fault = refused(CleanConfig, {"sources": [{"name": "b"}]})
    assert "the setting sources[1].path is missing" in fault.what
    assert "file, folder or glob" in fault.remedy


def test_a_wrong_value_in_a_source_names_its_choices() -> None:
    fault = refused(CleanConfig, {"sources": [{"path": "b", "split": "word"}]})
    assert "sources[1].split" in fault.what
    assert "'word'" in fault.what
    assert "auto, file, line, paragraph" in fault.remedy


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (PretrainConfig, {"max_steps": 0}, "max_steps"),
        (PretrainConfig, {"max_steps": "many"}, "max_steps"),
        (PretrainConfig, {"learning_rate": -1}, "learning_rate"),
        (PretrainConfig, {"warmup_ratio": 1.5}, "warmup_ratio"),
        (PretrainConfig, {"optimizer": "sgd"}, "optimizer"),
        (PretrainConfig, {"max_length": 7}, "max_length"),
        (PretrainConfig, {"mix": {"a": -1}}, "mix"),
        (PretrainConfig, {"compile": "perhaps"}, "compile"),
        (CleanConfig, {"sources": ["a"], "held_out": 2}, "held_out"),
        (CleanConfig, {"sources": 3}, "sources"),
        (CleanConfig, {}, "sources"),
        (ChatConfig, {"top_p": 1.01}, "top_p"),
    ],
)
def test_kinds_and_limits(kind: type, values: dict, named: str) -> None:  # type: ignore[type-arg]
    fault = refused(kind, values)
    assert named in fault.what
    assert fault.remedy


def test_a_long_value_is_shortened() -> None:
    assert len(refused(PretrainConfig, {"max_steps": "x" * 1000}).what) < 250


def test_values_on_their_limits_are_taken() -> None:
    made = build(
        PretrainConfig, {"size": "2M", "max_steps": "1", "warmup_ratio": 1, "max_length": 8, "learning_rate": "1e-3"}
    )
    assert (made.max_steps, made.warmup_ratio, made.max_length, made.learning_rate) == (1, 1.0, 8, 0.001)


def test_none_leaves_a_setting_open_and_is_no_value_elsewhere() -> None:
    assert build(EvaluateConfig, {"corpus": "none"}).corpus is None
    assert build(PretrainConfig, {"size": "2M", "time_limit_minutes": "none"}).time_limit_minutes is None
    assert "size" not in refused(PretrainConfig, {"max_steps": "none"}).what
    assert build(PretrainConfig, {"size": "none"}).size == "none"


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        build(ChatConfig, {}).top_p = 0.5  # type: ignore[misc]


def test_paths_of_a_recipe_are_meant_from_its_folder() -> None:
    base = Path("/recipes")
    given = {
        "sources": ["texts", "/absolute", "package:name/inside", {"path": "more/*.txt", "name": "m"}, {"name": "x"}],
        "output": "out",
        "held_out": 0.1,
    }
    made = relative_to(base, CleanConfig, given)
    assert made["sources"] == [
        "/recipes/texts",
        "/absolute",
        "package:name/inside",
        {"path": "/recipes/more/*.txt", "name": "m"},
        {"name": "x"},
    ]
    assert (made["output"], made["held_out"]) == ("/recipes/out", 0.1)
    assert given["output"] == "out"  # what was given is not changed
    assert relative_to(base, CleanConfig, {"sources": "texts"})["sources"] == ["/recipes/texts"]
    assert relative_to(base, EvaluateConfig, {"corpus": "none"})["corpus"] == "none"


def test_the_label_of_a_source() -> None:
    assert Source(path="a/b.txt").label == "b.txt"
    assert Source(path="package:bible/data/kjv.jsonl").label == "kjv.jsonl"
    assert Source(path="a/b.txt", name="poems").label == "poems"


def test_without_places_keeps_all_but_where_things_lie() -> None:
    def told(folder: str) -> dict[str, object]:
        return build(FinetuneConfig, {"model": f"{folder}/m", "sources": [f"{folder}/chats"]}).without_places()

    assert told("here") == told("/elsewhere")
    assert "model" not in told("here")
    assert told("here")["max_length"] == "auto"
    other = build(FinetuneConfig, {"model": "m", "sources": [{"path": "chats", "encoding": "gbk"}]})
    assert other.without_places() != told("here")


def test_nearest() -> None:
    assert nearest("finetun", ["pretrain", "finetune"]) == " Did you mean finetune?"
    assert nearest("xyz", ["pretrain"]) == ""


def test_a_mistake_in_toml_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[clean]\nheld_out = 0.1\nstrict = maybe\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3"):
        read_toml(path)


def test_a_byte_order_mark_is_no_mistake_and_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes('\ufefftitle = "数据"'.encode())
    assert read_toml(path) == {"title": "数据"}
    path.write_bytes('title = "数据"'.encode("gbk"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_toml(path)


def test_a_recipe_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no recipe"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        read_toml(tmp_path)


def test_run_needs_a_recipe() -> None:
    assert "recipe is missing" in refused(RunConfig, {}).what


def test_a_size_cannot_be_chosen_without_a_time() -> None:
    with pytest.raises(ConfigError, match="how long pretraining may take"):
        build(PretrainConfig, {})
    assert build(PretrainConfig, {"time_limit_minutes": 5}).size == "auto"
