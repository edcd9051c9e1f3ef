"""The command line: both spellings, lists, tables, recipes below flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecard.config import CleanConfig, EvaluateConfig, FinetuneConfig, PretrainConfig, RunConfig
from onecard.errors import ConfigError
from onecard.flags import from_arguments, hyphenate, parser
from onecard.settings import AnySettings


def read(kind: type[AnySettings], words: list[str], section: str = "") -> AnySettings:
    if kind is PretrainConfig:
        words = [*words, "--size=2M"]
    return from_arguments(kind, vars(parser(kind, "onecard here", section).parse_args(hyphenate(words))), section)


@pytest.mark.parametrize("flag", ["--learning-rate", "--learning_rate"])
def test_both_spellings_of_a_flag(flag: str) -> None:
    assert read(PretrainConfig, [flag, "1e-3"]).learning_rate == 0.001
    assert read(PretrainConfig, [f"{flag}=1e-3"]).learning_rate == 0.001


def test_a_value_keeps_its_underscores() -> None:
    assert read(RunConfig, ["r_e.toml", "--set=a_b.c_d=e_f"]).set == ["a_b.c_d=e_f"]


def test_booleans_have_two_flags() -> None:
    assert read(PretrainConfig, ["--no-compile"]).compile is False
    assert read(PretrainConfig, ["--no_compile"]).compile is False
    assert read(PretrainConfig, ["--compile", "--overwrite"]).overwrite is True
    assert read(PretrainConfig, []).compile is True


def test_positionals_may_be_left_out_or_given_by_name() -> None:
    assert read(PretrainConfig, []).corpus == Path("corpus")
    assert read(PretrainConfig, ["other"]).corpus == Path("other")
    assert read(PretrainConfig, ["--corpus", "other"]).corpus == Path("other")
    assert [s.path for s in read(CleanConfig, ["a", "b"]).sources] == ["a", "b"]
    assert [s.path for s in read(CleanConfig, ["--sources", "a", "b"]).sources] == ["a", "b"]


def test_lists_add_up() -> None:
    made = read(FinetuneConfig, ["m", "--sources", "a", "b", "--sources", "c"])
    assert (made.model, [source.path for source in made.sources]) == (Path("m"), ["a", "b", "c"])
    # One value a flag: the recipe after it is not taken for another.
    assert read(RunConfig, ["--set", "a.b=1", "--set", "a.c=2", "r.toml"]) == RunConfig(
        recipe=Path("r.toml"), set=["a.b=1", "a.c=2"]
    )


def test_a_table_is_written_as_name_value() -> None:
    assert read(PretrainConfig, ["--mix", "poems=2", "news=0.5"]).mix == {"poems": 2.0, "news": 0.5}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        read(PretrainConfig, ["--mix", "poems"])


def test_none_on_the_command_line() -> None:
    assert read(EvaluateConfig, ["--corpus", "none"]).corpus is None


def test_an_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        read(PretrainConfig, ["--max-step=3"])
    assert caught.value.remedy == "Did you mean --max-steps?"


def test_flags_win_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[clean]\nsources = ["texts"]\nheld_out = 0.1\nseed = 5\n', encoding="utf-8")
    made = read(CleanConfig, ["--recipe", str(recipe), "--seed", "7"], "clean")
    assert (made.held_out, made.seed) == (0.1, 7)
    assert made.sources[0].path == str(tmp_path / "texts")


def test_a_recipe_without_the_table_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[claen]\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read(CleanConfig, ["a", "--recipe", str(recipe)], "clean")
    assert "no table [clean]" in caught.value.what
    assert caught.value.remedy == "Did you mean claen?"
