"""What a server did, as numbers for Prometheus: counted while it answers, written as text when asked.

Nothing of what was asked or answered is in it. It does not know HTTP or the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

# Bounds in seconds of the histograms.
_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Histogram:
    def __init__(self, name: str, explanation: str) -> None:
        self.name, self.explanation = name, explanation
        self._within = [0] * len(_BOUNDS)
        self._count, self._sum = 0, 0.0

    def add(self, seconds: float) -> None:
        self._count += 1
        self._sum += seconds
        for place, bound in enumerate(_BOUNDS):
            self._within[place] += seconds <= bound

    def lines(self) -> list[str]:
        made = [f"# HELP {self.name} {self.explanation}", f"# TYPE {self.name} histogram"]
        made += [f'{self.name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(_BOUNDS, self._within)]
        made += [f'{self.name}_bucket{{le="+Inf"}} {self._count}']
        return [*made, f"{self.name}_sum {self._sum:.6f}", f"{self.name}_count {self._count}"]


class Metrics:
    """Counts of one server. Used from one thread, that of its event loop."""

    def __init__(self) -> None:
        self._answers: Counter[int] = Counter()
        self._ended: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._first = _Histogram("onecard_time_to_first_token_seconds", "From a request to the first token.")
        self._whole = _Histogram("onecard_request_seconds", "From a request to the end of its answer.")

    def count_answer(self, status: int) -> None:
        """An HTTP answer was begun."""
        self._answers[status] += 1

    def count_first_token(self, begun: float) -> None:
        """The first token of an answer came."""
        self._first.add(time.monotonic() - begun)

    def count_end(self, begun: float, reason: str, prompt: int, cached: int, completion: int) -> None:
        """An answer ended, with its tokens: of the prompt, of those that were not read again, of the answer."""
        self._whole.add(time.monotonic() - begun)
        self._ended[reason] += 1
        self._tokens.update(prompt=prompt, cached_prompt=cached, completion=completion)

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All of it in Prometheus' text format; `gauges` are what is so now, with an explanation each."""
        lines = []
        for name, (explanation, value) in gauges.items():
            lines += [f"# HELP {name} {explanation}", f"# TYPE {name} gauge", f"{name} {value:g}"]
        for name, label, explanation, counts in (
            ("onecard_http_answers_total", "status", "Answers by HTTP status.", self._answers),
            ("onecard_finished_total", "reason", "Generated answers by why they ended.", self._ended),
            ("onecard_tokens_total", "kind", "Tokens of prompts, of those found in memory, of answers.", self._tokens),
        ):
            lines += [f"# HELP {name} {explanation}", f"# TYPE {name} counter"]
            lines += [f'{name}{{{label}="{key}"}} {count}' for key, count in sorted(counts.items(), key=str)]
        return "\n".join([*lines, *self._first.lines(), *self._whole.lines(), ""])
