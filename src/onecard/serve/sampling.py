"""From logits to the next token of one request.

In: the logits of one position (a tensor of V numbers), the parameters of the request, what it has said so far. Out: one
token id. The functions are pure; `Sampler` keeps what one request carries from token to token (its random generator,
the tokens seen). It does not know of batches, slots or text: what a request is given does not depend on its neighbours.

Shape legend: V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from onecard.serve.structure import Structure

# Below these, dividing by the temperature or cutting the nucleus leaves the likeliest token only.
_GREEDY_TEMPERATURE = 1e-5
_GREEDY_TOP_P = 1e-8
# A nucleus is nearly always within so many: to sort a whole vocabulary takes as long as a small model's step.
_LIKELIEST = 1024
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True)
class SamplingParameters:
    """How the next token is chosen.

    Defaults change nothing: the model's own distribution. `top_k` 0 is off. `seed` None draws one from the system.
    `top_logprobs` None wants no log-probabilities, n wants those of the chosen token and of the n likeliest.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    top_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken: no random number is drawn."""
        return self.temperature < _GREEDY_TEMPERATURE or self.top_p <= _GREEDY_TOP_P or self.top_k == 1


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before any penalty, temperature or cut."""

    logprob: float
    top: list[tuple[int, float]]


def apply_repetition_penalty(logits_V: torch.Tensor, token_ids: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide positive logits of the given tokens by `penalty`, multiply negative ones by it (CTRL, arXiv 1909.05858).

    A token that occurs many times is penalised once: each is read from the untouched logits.
    """
    chosen = logits_V[token_ids]
    changed = logits_V.clone()
    changed[token_ids] = chosen.where(chosen <= 0, chosen / penalty).where(chosen > 0, chosen * penalty)
    return changed


def apply_count_penalties(
    logits_V: torch.Tensor, counts_V: torch.Tensor, presence: float, frequency: float
) -> torch.Tensor:
    """Subtract `presence` from each token said before, and `frequency` times how often it was said."""
    return logits_V - presence * (counts_V > 0) - frequency * counts_V


def apply_temperature(logits_V: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide by a temperature above 0 (`SamplingParameters.is_greedy` catches 0)."""
    return logits_V / temperature


def apply_top_k(logits_V: torch.Tensor, top_k: int) -> torch.Tensor:
    """Keep exactly the k largest (ties by lower place); 0 is off, a k above V is V."""
    if top_k <= 0 or top_k >= logits_V.shape[-1]:
        return logits_V
    kept = logits_V.topk(top_k)
    return logits_V.new_full(logits_V.shape, -float("inf")).scatter(-1, kept.indices, kept.values)


def apply_top_p(logits_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens whose probability reaches `top_p` (arXiv 1904.09751), at least one."""
    if top_p >= 1:
        return logits_V
    everything = logits_V.double().logsumexp(-1)
    values, order = logits_V.topk(min(_LIKELIEST, logits_V.shape[-1]))
    before = _before(values, everything)
    if bool(before[-1] < top_p) and len(values) < logits_V.shape[-1]:
        values, order = logits_V.sort(descending=True, stable=True)
        before = _before(values, everything)
    dropped = before >= top_p
    dropped[0] = False
    return logits_V.new_full(logits_V.shape, -float("inf")).scatter(
        -1, order, values.masked_fill(dropped, -float("inf"))
    )


def _before(values: torch.Tensor, everything: torch.Tensor) -> torch.Tensor:
    """The probability of all that is likelier, for logits in falling order; `everything` is their log-sum-exp."""
    probabilities = (values.double() - everything).exp()
    return probabilities.cumsum(-1) - probabilities


def apply_min_p(logits_V: torch.Tensor, min_p: float) -> torch.Tensor:
    """Keep tokens whose probability is at least `min_p` times that of the likeliest (arXiv 2407.01082)."""
    if min_p <= 0:
        return logits_V
    probabilities = logits_V.double().softmax(-1)
    return logits_V.masked_fill(probabilities < min_p * probabilities.max(), -float("inf"))


def draw(logits_V: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one id by inverting the cumulative distribution with one uniform number of the (CPU) generator."""
    import torch

    cumulative = logits_V.double().softmax(-1).cumsum(-1)
    uniform = torch.rand((), dtype=torch.float64, generator=generator).to(cumulative.device)
    total = cumulative[-1]
    # Strictly below the total, so that the place found always carries probability.
    place = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, place, right=True).clamp_max(logits_V.shape[-1] - 1)


def token_logprobs(logits_V: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities of `token` and of the `top` likeliest, finite."""
    logprobs_V = logits_V.float().log_softmax(-1).clamp_min(LOWEST_LOGPROB)
    best = logprobs_V.topk(top) if top else None
    pairs = [] if best is None else list(zip(best.indices.tolist(), best.values.tolist()))
    return TokenLogprobs(float(logprobs_V[token]), pairs)


class Sampler:
    """The sampling state of one request.

    The repetition penalty looks at the prompt and the answer; presence and frequency at the answer only. Tokens that do
    not fit into the `structure` are never chosen.
    """

    def __init__(
        self,
        parameters: SamplingParameters,
        prompt: Sequence[int],
        vocabulary: int,
        device: torch.device | str,
        structure: Structure | None = None,
    ) -> None:
        import torch

        self.parameters, self.structure = parameters, structure
        self._generator = torch.Generator()
        if parameters.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(parameters.seed)
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if parameters.repetition_penalty != 1:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[torch.tensor([i for i in prompt if i < vocabulary], dtype=torch.long, device=device)] = True
        if parameters.presence_penalty or parameters.frequency_penalty:
            self._counts = torch.zeros(vocabulary, device=device)
        if parameters.logit_bias:
            self._bias = (
                torch.tensor(list(parameters.logit_bias), dtype=torch.long, device=device),
                torch.tensor(list(parameters.logit_bias.values()), device=device),
            )

    def choose(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The next id as a 0-d tensor (nothing waits for the device); -1 if no likelihood is finite."""
        wanted = self.parameters
        logits_V = logits_V.float()
        if self._seen is not None:
            logits_V = apply_repetition_penalty(logits_V, self._seen.nonzero()[:, 0], wanted.repetition_penalty)
        if self._counts is not None:
            logits_V = apply_count_penalties(logits_V, self._counts, wanted.presence_penalty, wanted.frequency_penalty)
        if self._bias is not None:
            logits_V = logits_V.index_add(-1, self._bias[0], self._bias[1])
        if self.structure is not None:
            logits_V = logits_V.masked_fill(~self.structure.allowed().to(logits_V.device), -float("inf"))
        if wanted.is_greedy:
            token = logits_V.argmax(-1)
        else:
            logits_V = apply_top_k(apply_temperature(logits_V, wanted.temperature), wanted.top_k)
            logits_V = apply_min_p(apply_top_p(logits_V, wanted.top_p), wanted.min_p)
            token = draw(logits_V, self._generator)
        # The maximum of anything with a NaN in it is NaN.
        return token.where(logits_V.max().isfinite(), -1)

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is taken of the logits as they are."""
        untouched = self._seen is None and self._counts is None and self._bias is None and self.structure is None
        return self.parameters.is_greedy and untouched

    def accept(self, token: int) -> None:
        """Take note that `token` was said."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        if self.structure is not None:
            self.structure.accept(token)


def choose_all(samplers: Sequence[Sampler], logits_NV: torch.Tensor) -> list[int]:
    """The next id of each row, each by its own sampler; the likeliest ones of all rows are found in one operation."""
    import torch

    largest, likeliest = logits_NV.max(-1)
    tokens = likeliest.where(largest.isfinite(), -1)
    others = [row for row, sampler in enumerate(samplers) if not sampler.is_plain]
    if others:
        tokens[others] = torch.stack([samplers[row].choose(logits_NV[row]) for row in others])
    chosen: list[int] = tokens.tolist()
    return chosen


def sampling_defaults(model: PreTrainedModel) -> SamplingParameters:
    """What generation_config.json says of sampling: `do_sample` false is greedy; what it leaves out changes nothing."""
    config: Any = model.generation_config
    greedy = getattr(config, "do_sample", None) is False
    names = ("repetition_penalty",) if greedy else ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {name: getattr(config, name, None) for name in names}
    given: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    return SamplingParameters(**(given | {"temperature": 0.0} if greedy else given))


def generation_stop_ids(model: Any) -> frozenset[int]:
    """The ids that generation_config.json ends an answer with."""
    found = getattr(model.generation_config, "eos_token_id", None)
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)
