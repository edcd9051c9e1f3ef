"""Sampling functions against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from onecard.serve.sampling import (
    LOWEST_LOGPROB,
    Sampler,
    SamplingParameters,
    apply_count_penalties,
    apply_min_p,
    apply_repetition_penalty,
    apply_top_k,
    apply_top_p,
    draw,
    token_logprobs,
)

OUT = -math.inf


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    logits = torch.tensor([2.0, -2.0, 3.0])
    twice_said = torch.tensor([0, 1, 0, 0, 1])
    assert apply_repetition_penalty(logits, twice_said, 2.0).tolist() == [1.0, -4.0, 3.0]
    assert logits.tolist() == [2.0, -2.0, 3.0]


def test_presence_counts_once_and_frequency_each_time() -> None:
    changed = apply_count_penalties(torch.zeros(3), torch.tensor([0.0, 1.0, 3.0]), presence=0.5, frequency=0.25)
    assert changed.tolist() == [0.0, -0.75, -1.25]


def test_top_k_keeps_exactly_k_is_off_at_zero_and_bounded_by_the_vocabulary() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert apply_top_k(logits, 2).tolist() == [OUT, 3.0, 2.0, OUT]
    assert apply_top_k(logits, 0).tolist() == logits.tolist()
    assert apply_top_k(logits, 9).tolist() == logits.tolist()
    assert apply_top_k(torch.zeros(4), 2).isfinite().sum() == 2


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert apply_top_p(logits, 0.8 - 1e-6).isfinite().tolist() == [True, True, False, False]
    assert apply_top_p(logits, 0.81).isfinite().tolist() == [True, True, True, False]
    assert apply_top_p(logits, 0.0).isfinite().tolist() == [True, False, False, False]
    assert apply_top_p(logits, 1.0).isfinite().all()


def test_min_p_is_a_share_of_the_likeliest() -> None:
    logits = torch.tensor([0.6, 0.31, 0.09]).log()
    assert apply_min_p(logits, 0.5).isfinite().tolist() == [True, True, False]
    assert apply_min_p(logits, 0.0).isfinite().all()


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(temperature=0),
        SamplingParameters(top_p=0),
        SamplingParameters(top_p=1e-8),
        SamplingParameters(top_k=1),
        SamplingParameters(temperature=1e-30),
    ],
)
def test_degenerate_settings_are_argmax(parameters: SamplingParameters) -> None:
    logits = torch.tensor([0.0, 0.1, 0.3, 0.2])
    sampler = Sampler(parameters, [], 4, "cpu")
    assert [int(sampler.choose(logits)) for _ in range(20)] == [2] * 20


def test_draws_follow_the_distribution_and_never_take_what_was_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([OUT, math.log(0.25), OUT, math.log(0.75), OUT])
    drawn = [int(draw(logits, generator)) for _ in range(2000)]
    assert set(drawn) == {1, 3}
    assert drawn.count(3) / 2000 == pytest.approx(0.75, abs=0.04)


def test_a_seed_decides_the_answer_and_no_seed_does_not() -> None:
    logits = torch.zeros(1000)

    def sequence(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParameters(seed=seed), [], 1000, "cpu")
        return [int(sampler.choose(logits)) for _ in range(8)]

    assert sequence(7) == sequence(7)
    assert sequence(-7) == sequence(-7)
    assert sequence(7) != sequence(8)
    assert sequence(None) != sequence(None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("parameters", [SamplingParameters(temperature=0), SamplingParameters(top_k=2, top_p=0.9)])
def test_logits_that_are_not_numbers_choose_nothing(bad: float, parameters: SamplingParameters) -> None:
    assert int(Sampler(parameters, [], 3, "cpu").choose(torch.tensor([0.0, bad, 1.0]))) == -1
    assert int(Sampler(parameters, [], 3, "cpu").choose(torch.full((3,), OUT))) == -1


def test_penalties_see_the_prompt_or_the_answer_as_documented() -> None:
    logits = torch.tensor([1.0, 0.9])
    repeats = Sampler(SamplingParameters(temperature=0, repetition_penalty=2), [0], 2, "cpu")
    assert int(repeats.choose(logits)) == 1
    frequency = Sampler(SamplingParameters(temperature=0, frequency_penalty=0.5), [0], 2, "cpu")
    assert int(frequency.choose(logits)) == 0
    frequency.accept(0)
    assert int(frequency.choose(logits)) == 1


def test_logit_bias_is_added() -> None:
    sampler = Sampler(SamplingParameters(temperature=0, logit_bias={1: 100.0}), [], 3, "cpu")
    assert int(sampler.choose(torch.tensor([5.0, -3.0, 1.0]))) == 1


def test_logprobs_are_the_models_own_and_finite() -> None:
    found = token_logprobs(torch.tensor([0.5, 0.25, 0.25, 0.0]).log(), token=1, top=4)
    assert found.logprob == pytest.approx(math.log(0.25))
    assert found.top[0] == (0, pytest.approx(math.log(0.5)))
    assert found.top[3] == (3, LOWEST_LOGPROB)
