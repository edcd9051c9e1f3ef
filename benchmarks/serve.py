"""Tokens a second of answers: one at a time and eight at once, beside transformers and llama.cpp.

Every answer has exactly `TOKENS` tokens, greedily. onecard is asked through its engine, transformers through `generate`
(one, and a padded batch of eight), llama.cpp through node-llama-cpp in a folder that is named. Engines take turns; each
gives the median of its turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measurement import say

TOKENS = 64
AT_ONCE = 8
QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Tell me a story about a cat.",
    "Explain gravity to a child.",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Describe the sea in a few sentences.",
    "What is a computer made of?",
    "Give me three reasons to read books.",
]
_LLAMA = """
import {getLlama} from "node-llama-cpp";
const [file, count, prompts] = [process.argv[2], Number(process.argv[3]), JSON.parse(process.argv[4])];
const threads = Number(process.argv[5]);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: threads});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({sequences: prompts.length, contextSize: 512, threads});
const sequences = prompts.map(() => context.getSequence());
async function answer(sequence, prompt) {
  let said = 0;
  for await (const token of sequence.evaluate(model.tokenize(prompt, true), {temperature: 0, yieldEogToken: true}))
    if (++said === count) break;
  await sequence.clearHistory();
}
await answer(sequences[0], prompts[0]);
let begun = performance.now();
for (const prompt of prompts) await answer(sequences[0], prompt);
const alone = performance.now() - begun;
begun = performance.now();
await Promise.all(prompts.map((prompt, at) => answer(sequences[at], prompt)));
console.log(JSON.stringify([alone / 1000, (performance.now() - begun) / 1000]));
process.exit(0);
"""


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _onecard(path: Path, precision: str, prompts: Sequence[list[int]]) -> tuple[Callable[[], dict[str, float]], Any]:
    """What measures onecard's engine in one precision, and the engine (to be closed)."""
    from onecard.serve.opening import open_engine
    from onecard.serve.requests import GenerationParameters, TokenEvent
    from onecard.serve.sampling import SamplingParameters

    engine, _ = open_engine(path, max_concurrent=AT_ONCE, max_length=512, precision=precision)
    parameters = GenerationParameters(max_tokens=TOKENS, sampling=SamplingParameters(temperature=0), ignore_eos=True)

    def together(asked: Sequence[list[int]]) -> float:
        begun = time.perf_counter()
        firsts: list[float] = []

        def listen(place: int) -> Callable[[Any], None]:
            def on(event: Any) -> None:
                if isinstance(event, TokenEvent) and place not in seen:
                    seen.add(place)
                    firsts.append(time.perf_counter() - begun)
                if not isinstance(event, TokenEvent):
                    ended.append(place)

            return on

        seen: set[int] = set()
        ended: list[int] = []
        for place, ids in enumerate(asked):
            engine.submit(ids, parameters, listen(place))
        while len(ended) < len(asked):
            time.sleep(0.001)
        return max(firsts)

    def measure() -> dict[str, float]:
        alone = _timed(lambda: [together([ids]) for ids in prompts])
        begun = time.perf_counter()
        first = together(prompts)
        return {"alone": alone, "together": time.perf_counter() - begun, "first": first}

    together(prompts[:1])
    return measure, engine


def _transformers(path: Path, prompts: Sequence[list[int]]) -> tuple[Callable[[], dict[str, float]], Any]:
    import torch

    from onecard.model.load import load_model

    model: Any = load_model(path)
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}

    def padded() -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        model.generate(ids, attention_mask=mask, **settings)

    def measure() -> dict[str, float]:
        with torch.inference_mode():
            alone = _timed(lambda: [model.generate(torch.tensor([one]), **settings) for one in prompts])
            return {"alone": alone, "together": _timed(padded)}

    return measure, None


def _llama(folder: Path, file: Path, texts: Sequence[str]) -> dict[str, float]:
    """llama.cpp of node-llama-cpp in `folder`; a process of its own each time."""
    import torch

    script = folder / "onecard-serve.mjs"
    script.write_text(_LLAMA, encoding="utf-8")
    command = ["node", str(script), str(file), str(TOKENS), json.dumps(list(texts)), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, timeout=300)
    alone, together = json.loads(done.stdout.strip().splitlines()[-1])
    return {"alone": alone, "together": together}


def part(path: Path, turns: int, llama: tuple[Path, Path] | None = None) -> list[str]:
    """The section of RESULTS.md. `llama`: the folder of node-llama-cpp, and the GGUF file it reads."""
    from onecard.model.load import load_tokenizer
    from onecard.tokenizer.template import encode_chat

    tokenizer = load_tokenizer(path)
    prompts = [
        encode_chat(tokenizer, [{"role": "user", "content": text}], add_generation_prompt=True).ids
        for text in QUESTIONS[:AT_ONCE]
    ]
    engines: dict[str, Callable[[], dict[str, float]]] = {}
    opened = []
    for precision in ("fp32", "int8", "int4"):
        engines[f"onecard, {precision}"], engine = _onecard(path, precision, prompts)
        opened.append(engine)
    engines["transformers generate, fp32"], _ = _transformers(path, prompts)
    if llama is not None:
        texts = [tokenizer.decode(ids) for ids in prompts]
        engines[f"llama.cpp, {llama[1].name}"] = lambda: _llama(*llama, texts)
    found: dict[str, list[dict[str, float]]] = {}
    try:
        for turn in range(turns):
            for name, measure in engines.items():
                made = measure()
                found.setdefault(name, []).append(made)
                alone, together = (len(prompts) * TOKENS / made[key] for key in ("alone", "together"))
                say(f"{turn + 1}/{turns} {name}: {alone:.0f} alone, {together:.0f} together")
    finally:
        for engine in opened:
            engine.close()
    total = len(prompts) * TOKENS
    lines = [
        "### Serving",
        "",
        f"{path.name}, {AT_ONCE} questions, {TOKENS} tokens each, greedy; tokens a second, medians of {turns} turns. "
        "One at a time, and all at once; the longest wait for a first token when all are asked at once.",
        "",
        "| engine | one at a time | eight at once | times | longest wait for a first token |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    rates = {}
    for name, rows in found.items():
        alone, together = (total / statistics.median(row[key] for row in rows) for key in ("alone", "together"))
        rates[name] = (alone, together)
        wait = [row["first"] for row in rows if "first" in row]
        waited = f"{statistics.median(wait):.2f} s" if wait else ""
        lines.append(f"| {name} | {alone:.0f} | {together:.0f} | {together / alone:.1f} | {waited} |")
    ours, lines = rates["onecard, fp32"], [*lines, ""]
    for name, (alone, together) in rates.items():
        if not name.startswith("onecard"):
            lines.append(
                f"- onecard in fp32 / {name}: {ours[0] / alone:.1f} times alone, {ours[1] / together:.1f} at once."
            )
    return lines
