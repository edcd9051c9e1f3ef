"""Terms are found where strings are frequent, hold together and stand in many surroundings."""

from __future__ import annotations

import math
import random

from onecard.tokenizer.mining import LEAST_COUNT, LEAST_INFORMATION, mine

OTHERS = [chr(0x5000 + index) for index in range(1200)]


def text_with(term: str, times: int, seed: int = 0) -> str:
    """A term between random characters, so that what stands beside it varies."""
    draw = random.Random(seed)
    return "".join("".join(draw.choices(OTHERS, k=60)) + term for _ in range(times))


def test_a_frequent_term_is_found_whole_and_its_parts_are_not() -> None:
    found = mine([text_with("冠状动脉", 50)], most=10)
    assert [(term.text, term.count, term.origin) for term in found] == [("冠状动脉", 50, "mined")]


def test_a_rare_one_is_not() -> None:
    assert mine([text_with("冠状动脉", LEAST_COUNT - 1)], most=10) == []


def test_chance_neighbours_are_no_term() -> None:
    """Two frequent characters that stand together no more than chance has it: 2,000 of 4 gives each pair about 125."""
    draw = random.Random(1)
    assert mine(["".join(draw.choices("甲乙丙丁", k=2000))], most=10) == []


def test_what_goes_on_always_alike_is_part_of_something_longer() -> None:
    text = text_with("糖尿病人", 60)
    assert [term.text for term in mine([text], most=10)] == ["糖尿病人"]
    both = text + text_with("糖尿病", 60, seed=4)
    assert {term.text for term in mine([both], most=10)} == {"糖尿病人", "糖尿病"}


def test_function_words_begin_and_end_no_term() -> None:
    assert mine([text_with("的冠脉", 50)], most=10) == []


def test_terms_do_not_cross_punctuation_and_line_ends() -> None:
    draw = random.Random(2)
    text = "".join("".join(draw.choices(OTHERS, k=20)) + "冠脉，造影\n" for _ in range(50))
    # One neighbour is always the same mark, so that neither half varies on both sides.
    assert mine([text], most=10) == []


def test_long_english_words_are_found_and_phrases_are_not() -> None:
    text = "thrombocytopenia of the patient, severe thrombocytopenia " * LEAST_COUNT
    found = {term.text: term.count for term in mine([text], most=10, longest=16)}
    assert found == {"thrombocytopenia": 2 * LEAST_COUNT, "patient": LEAST_COUNT, "severe": LEAST_COUNT}


def test_the_most_useful_come_first_and_no_more_than_asked() -> None:
    text = text_with("冠状动脉", 50) + text_with("心绞痛", 60, seed=3)
    # 50 x 3 pieces saved against 60 x 2.
    assert [term.text for term in mine([text], most=10)] == ["冠状动脉", "心绞痛"]
    assert [term.text for term in mine([text], most=1)] == ["冠状动脉"]


def test_the_information_of_a_term() -> None:
    """By hand: ab stands 50 times in 3,100 characters, a and b nowhere else: log(50 x 3100 / (50 x 50)) = 4.13."""
    assert LEAST_INFORMATION < math.log(50 * 3100 / 2500) < 4.2
    assert [term.text for term in mine([text_with("甲乙", 50)], most=3)] == ["甲乙"]
