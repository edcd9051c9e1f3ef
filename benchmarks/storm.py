"""A thousand requests of mixed kinds, a third of whose clients leave early: does the server stay whole?

`onecard serve` is a process of its own. Each question is asked once alone; then many clients ask them at random, as
chats, texts to continue, streams, JSON of a schema, with stop strings. All are greedy, so that every answer must be the
one that was given alone, and what a client that left has seen must be how that one begins. At the end no slot may be
taken, and memory must not have grown while the second half was answered.

    python benchmarks/storm.py MODEL [--requests 1000] [--clients 24]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from measurement import machine, say

THINGS = ["rain", "a fox", "gold", "the sea", "bread", "a clock", "snow", "tea", "a bridge", "月亮", "茶", "孔子"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kinds": {"type": "array", "items": {"enum": ["thing", "place", "person"]}, "maxItems": 2},
        "old": {"type": "boolean"},
    },
    "required": ["name", "kinds", "old"],
    "additionalProperties": False,
}
TOKENS = 8
PATIENCE_SECONDS = 120.0


@dataclass
class Question:
    """A request, and the answer that it got alone, in so many seconds."""

    kind: str
    path: str
    body: dict[str, Any]
    answer: tuple[str, str] = ("", "")
    seconds: float = 0.0


@dataclass
class Tally:
    """What happened."""

    done: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0
    distinct: int = 0
    memory: list[int] = field(default_factory=list)


def questions(name: str) -> list[Question]:
    """Each thing is asked about in each way."""
    made = []
    for thing in THINGS:
        chat = {"model": name, "messages": [{"role": "user", "content": f"What is {thing}?"}]}
        text = {"model": name, "prompt": f"Once there was {thing}, and"}
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        common = {"temperature": 0, "max_tokens": TOKENS}
        made += [
            Question("chat", "/chat/completions", chat | common),
            Question("streamed chat", "/chat/completions", chat | common | {"stream": True}),
            Question("text", "/completions", text | common),
            Question("streamed text", "/completions", text | common | {"stream": True}),
            Question("structured", "/chat/completions", chat | common | {"response_format": form, "max_tokens": 80}),
            Question("stop strings", "/completions", text | common | {"stop": [" the", ".", "，"], "stream": True}),
        ]
    return made


async def ask(client: httpx.AsyncClient, question: Question, pieces: int | None = None) -> tuple[str, str]:
    """Text and finish reason; after so many `pieces` of a stream the client leaves (reason "left")."""
    if not question.body.get("stream"):
        answer = await client.post(question.path, json=question.body)
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]
    text, reason, seen = "", "", 0
    async with client.stream("POST", question.path, json=question.body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            reason, seen = choice["finish_reason"] or reason, seen + 1
            if pieces is not None and seen >= pieces:
                return text, "left"
    return text, reason


async def one(client: httpx.AsyncClient, question: Question, chance: random.Random, tally: Tally) -> None:
    """Ask once; a third of the clients leave, in the midst of a stream or at any moment of a whole answer."""
    begun, leaves = time.monotonic(), chance.random() < 1 / 3
    pieces = chance.randint(1, 8) if leaves and question.body.get("stream") else None
    patience = chance.uniform(0, 3 * question.seconds) if leaves and pieces is None else PATIENCE_SECONDS
    try:
        async with asyncio.timeout(patience):
            text, reason = await ask(client, question, pieces)
    except TimeoutError:
        if not leaves:
            tally.wrong.append(f"{question.kind}: no answer within {patience:.0f} s")
        tally.left[question.kind] += 1
        return
    except (httpx.HTTPError, ValueError, KeyError) as fault:
        tally.wrong.append(f"{question.kind}: {type(fault).__name__}: {fault}")
        return
    if reason == "left":
        tally.left[question.kind] += 1
        if not question.answer[0].startswith(text):
            tally.wrong.append(f"{question.kind}: {text!r} does not begin {question.answer[0]!r}")
        return
    tally.done[question.kind] += 1
    tally.longest = max(tally.longest, time.monotonic() - begun)
    if (text, reason) != question.answer:
        tally.wrong.append(f"{question.kind}: {(text, reason)!r} instead of {question.answer!r}")


async def storm(url: str, name: str, wanted: argparse.Namespace, process: psutil.Process) -> Tally:
    """All requests, `clients` at a time."""
    chance, tally, asked = random.Random(wanted.seed), Tally(), questions(name)
    limits = httpx.Limits(max_connections=wanted.clients, max_keepalive_connections=wanted.clients)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, limits=limits) as client:
        for question in asked:
            begun = time.monotonic()
            question.answer = await ask(client, question)
            question.seconds = time.monotonic() - begun
            if question.kind == "structured" and question.answer[1] == "stop":
                json.loads(question.answer[0])
        tally.distinct = len({question.answer for question in asked})
        say(f"{len(asked)} questions asked alone, {tally.distinct} different answers")
        left = wanted.requests

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                if left % 100 == 0:
                    tally.memory.append(process.memory_info().rss)
                    say(f"{left} left, {tally.memory[-1] / 2**20:.0f} MiB, {len(tally.wrong)} wrong")
                await one(client, chance.choice(asked), chance, tally)

        await asyncio.gather(*(work() for _ in range(wanted.clients)))
        async with asyncio.timeout(30):
            while (busy := (await client.get("../health")).json())["active"] or busy["waiting"]:
                await asyncio.sleep(0.05)
        again = await ask(client, asked[0])
        if again != asked[0].answer:
            tally.wrong.append("after the storm another answer is given")
    return tally


def main() -> int:
    """Exit status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    command = [sys.executable, "-m", "onecard.cli", "serve", wanted.model, "--port", "0", "--name", "storm"]
    command += ["--max-length", "512", "--prefix-megabytes", "32"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    begun = time.monotonic()
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("Serving"))
        url = line.rpartition(" ")[2].strip()
        tally = asyncio.run(storm(url, "storm", wanted, psutil.Process(server.pid)))
    finally:
        server.send_signal(signal.SIGINT)
        status = server.wait(60)
    half = tally.memory[len(tally.memory) // 2]
    growth = tally.memory[-1] - half
    rows = [f"| {kind} | {tally.done[kind]} | {tally.left[kind]} |" for kind in sorted(tally.done | tally.left)]
    summary = [
        f"{wanted.requests} requests by {wanted.clients} clients in {time.monotonic() - begun:.0f} s on {machine()}",
        f"{tally.done.total()} answered to the end, {tally.left.total()} left early",
        f"{len(tally.wrong)} wrong ({tally.distinct} different answers are right)",
        f"longest wait for a whole answer {tally.longest:.1f} s",
        f"memory {half / 2**20:.0f} MiB at half, {growth / 2**20:+.1f} MiB at the end",
        f"all slots free; server's exit status {status}.",
    ]
    table = ["; ".join(summary), "", "| kind | answered | left |", "| --- | ---: | ---: |", *rows, *tally.wrong[:20]]
    print("\n".join(table))  # noqa: T201 - a measurement's table
    return int(bool(tally.wrong) or status != 0 or growth > 32 << 20)


if __name__ == "__main__":
    raise SystemExit(main())
