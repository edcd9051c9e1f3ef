"""Tasks of lm-evaluation-harness on local files, with onecard's own model: the extra `harness`.

In: task files (YAML) and a loaded model. Out: for each task its metrics and their standard errors, as the harness
computes them. Texts are plain, as the harness makes them; answers always take the likeliest token. Nothing is fetched:
data sets must be local files. A task file that names Python functions is refused unless the user allows it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecard import console
from onecard.errors import ConfigError, DataError, MissingExtra
from onecard.evaluate.answers import decode, generate
from onecard.evaluate.perplexity import Group, Row, score_rows
from onecard.evaluate.scoring import Passage, costs_and_greedy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_FUNCTION = re.compile(r"!function\b")
_INCLUDE = re.compile(r"^include:\s*(\S+)", re.MULTILINE)
_USUAL_NEW_TOKENS = 256
_BATCH = 8
# Resamples for the standard errors of metrics that are no means; the harness takes 100,000.
_RESAMPLES = 1000


def check_tasks(paths: Sequence[Path], *, allow_functions: bool) -> None:
    """ConfigError for a task file that is missing or would run code; MissingExtra without the harness."""
    for path in paths:
        for file in _with_included(path):
            if not allow_functions and _FUNCTION.search(file.read_text(encoding="utf-8", errors="replace")):
                raise ConfigError(
                    f"The task file {file} runs Python functions (!function).",
                    "Read them, then allow them: --harness-functions.",
                )
    import importlib.util

    if paths and importlib.util.find_spec("lm_eval") is None:
        raise MissingExtra("lm-eval", "evaluate --harness", install='"onecard[harness]"')


def _with_included(path: Path) -> Iterator[Path]:
    """The file and those that it includes."""
    if not path.is_file():
        raise ConfigError(f"There is no task file {path}.", "Give a YAML file of lm-evaluation-harness.")
    yield path
    for name in _INCLUDE.findall(path.read_text(encoding="utf-8", errors="replace")):
        yield from _with_included(path.parent / name.strip("'\""))


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    paths: Sequence[Path],
    *,
    limit: int | None,
    window_tokens: int,
    seed: int,
) -> dict[str, dict[str, dict[str, float | None]]]:
    """By task and metric `value` and `standard_error` (None where the harness has none).

    `limit` documents of each task are asked, or all. DataError if a task cannot be read or run.
    """
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for path in paths:
        console.note(f"  lm-evaluation-harness: {path}")
        with _quiet(), contextlib.chdir(path.parent):  # paths of data are meant from the task file
            found |= _run(_adapter(model, tokenizer, window_tokens), path.name, limit, seed)
    return found


def _run(adapter: Any, name: str, limit: int | None, seed: int) -> dict[str, Any]:
    import yaml
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    named = re.search(r"^task:\s*(\S+)", Path(name).read_text(encoding="utf-8"), re.MULTILINE)
    if named is None:
        raise DataError("the task file has no name (task: ...).", "Give it one.", file=name)
    try:
        answer = simple_evaluate(
            model=adapter,
            tasks=[named[1].strip("'\"")],
            task_manager=TaskManager(include_path=".", include_defaults=False),
            limit=limit,
            log_samples=False,
            bootstrap_iters=_RESAMPLES,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except (ValueError, KeyError, OSError, TypeError, yaml.YAMLError) as fault:
        reason = " ".join(str(fault).split())[:300]
        raise DataError(f"lm-evaluation-harness cannot run it ({reason}).", "Mend the task file.", file=name) from fault
    assert answer is not None
    return {task: _metrics(values) for task, values in answer["results"].items()}


def _metrics(values: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Keys are such as "acc,none" and "acc_stderr,none": the metric and the filter before it."""
    made: dict[str, dict[str, float | None]] = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}_stderr,{kind}")
        shown = metric if kind == "none" else f"{metric} ({kind})"
        made[shown] = {"value": float(value), "standard_error": error if isinstance(error, float) else None}
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness and its data library fetch nothing and say nothing."""
    import warnings

    os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _adapter(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, window_tokens: int) -> Any:
    """The model as the harness asks it."""
    from lm_eval.api.model import LM

    from onecard.model.load import vocabulary_rows
    from onecard.tokenizer.template import stop_token_ids

    beginning = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def encode(text: str, *, begun: bool = False) -> list[int]:
        """As the harness does: with the BOS that the tokenizer itself adds, or (`begun`) with one in any case."""
        ids: list[int] = tokenizer.encode(text, add_special_tokens=not begun)
        return [int(beginning or 0), *ids] if begun else ids

    class Adapter(LM):  # type: ignore[misc]
        """Log-likelihoods by `scoring`, answers by `generate`."""

        tokenizer_name = "onecard"

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            passages = []
            for context, continuation in (request.args for request in requests):
                # Spaces at the end of a context belong to the tokens of the continuation.
                before = encode(context.rstrip()) if context.strip() else [0]
                whole = encode(context + continuation, begun=not context.strip())
                scored = max(1, len(whole) - len(before))
                ids = whole[-window_tokens:]
                passages.append(Passage(ids, [place >= len(ids) - scored for place in range(len(ids))]))
            found = costs_and_greedy(model, passages, _BATCH * window_tokens)
            return [(-nats, greedy) for nats, greedy in found]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            rows = (
                Row(Group("", str(n)), encode(request.args[0], begun=True), len(request.args[0]))
                for n, request in enumerate(requests)
            )
            groups = score_rows(model, rows, window_tokens=window_tokens, stride_tokens=window_tokens // 2)
            return [-groups[Group("", str(n))].nats for n in range(len(requests))]

        def generate_until(self, requests: list[Any]) -> list[str]:
            return _written(
                requests,
                lambda texts, longest: [
                    decode(tokenizer, item.ids)
                    for item in generate(
                        model,
                        [encode(text)[-(window_tokens - 1) :] for text in texts],
                        stop_ids=stop_token_ids(tokenizer),
                        vocabulary_size=vocabulary_rows(tokenizer),
                        limit=longest,
                        batch_size=_BATCH,
                    )
                ],
            )

    return Adapter()


def _written(requests: Sequence[Any], write: Callable[[Sequence[str], int], list[str]]) -> list[str]:
    """The answer to each request up to its first stop; requests of the same length limit are written together."""
    made = [""] * len(requests)
    by_limit: dict[int, list[int]] = {}
    for place, request in enumerate(requests):
        settings = request.args[1]
        by_limit.setdefault(int(settings.get("max_gen_toks", _USUAL_NEW_TOKENS)), []).append(place)
    for longest, places in by_limit.items():
        for place, text in zip(places, write([requests[place].args[0] for place in places], longest)):
            stops = requests[place].args[1].get("until") or []
            for stop in [stops] if isinstance(stops, str) else stops:
                text = text.split(stop)[0] if stop else text
            made[place] = text
    return made
