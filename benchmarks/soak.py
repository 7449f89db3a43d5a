"""`python -m benchmarks soak`: a server of ours under users who come, go and send nonsense, for minutes.

First the engine alone writes the text of every request that will be asked; then the server is started, and users ask
for minutes: greedy and seeded texts of several lengths, whole and as streams. Some hang up in mid-answer, and some
send bodies that are wrong. What must come out: every whole text is the engine's, every wrong body is refused with 4xx,
nothing is answered with 5xx, no request is left in work, and memory does not grow after the first minute.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from resource import getpagesize
from statistics import median
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving import conversations
from foretoken.cli import options
from foretoken.cli.measuring import show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_seed
from foretoken.measure.report import Report

GROWTH = 0.02  # of memory after the first minute, above which something is kept that should not be
LEFT = ("vllm:num_requests", "vllm:kv_cache_usage")  # figures that are 0 once all users have gone
MUST_NOT_BE = ("another text", "failed", "left", "exit code", "refused with 5", "odd body: 5")  # beginnings of outcomes
NONSENSE = 10  # wrong bodies in a row
LENGTHS = (8, 32, 64, 128)
TEMPERATURES = (0.0, 0.7, 1.0)
HANG_UP, WRONG = 0.3, 0.1  # shares of the requests that are left in mid-answer, and that no server can answer
START_S, END_S = 180.0, 60.0  # for the server to be ready, and to end
WRONG_VALUES: tuple[Any, ...] = (None, -1, 0, 1e9, "", "x", [], {}, [1], {"a": 1}, True, "\ud800", float("nan"), 2**70)
FIELDS = (
    "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "stream", "logit_bias", "nonsense",
    "response_format", "tools", "speculation", "stream_options", "logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A request, and the text that the engine alone gives it."""

    body: dict[str, Any]
    text: str


@dataclass
class Found:
    """What the users saw. differing: sentences on texts that are not the engine's. memory: (seconds since the start,
    bytes) of the server's process."""

    outcomes: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


def tasks(target: str, drafter: str | None, dtype: str | None, prompts: Sequence[Any], seed: int) -> list[Task]:
    """Every prompt with a length and a temperature, as the engine alone continues it."""
    import foretoken

    engine = foretoken.load(target, drafter=drafter, dtype=dtype, max_batch=len(prompts))
    found = []
    for number, messages in enumerate(prompts):
        new, temperature = LENGTHS[number % len(LENGTHS)], TEMPERATURES[number % len(TEMPERATURES)]
        result = engine.chat(messages, max_new_tokens=new, temperature=temperature, seed=seed + number)
        body = {"messages": messages, "max_tokens": new, "temperature": temperature, "seed": seed + number}
        assert not isinstance(result, list)
        found.append(Task(body, result.text))
    return found


async def use(
    client: httpx.AsyncClient,
    server: subprocess.Popen[bytes],
    all_tasks: Sequence[Task],
    rng: random.Random,
    end: float,
    found: Found,
) -> None:
    """One user until the end. Raises ForetokenError where the server has died."""
    while time.monotonic() < end:
        task, kind = rng.choice(all_tasks), rng.random()
        try:
            if kind < WRONG:
                for _ in range(NONSENSE):
                    await _nonsense(client, task, rng, found)
            elif kind < WRONG + HANG_UP:
                await _hang_up(client, task, rng, found)
            elif rng.random() < 0.5:
                await _whole(client, task, found)
            else:
                await _streamed(client, task, found)
        except httpx.HTTPError as error:
            _failed(error, server, found)


def _failed(error: httpx.HTTPError, server: subprocess.Popen[bytes], found: Found) -> None:
    """Note a request that had no answer. Raises ForetokenError where the server has died."""
    if server.poll() is not None:
        raise ForetokenError(
            f"The server died after {sum(found.outcomes.values())} requests, with exit code {server.returncode}: run "
            "`foretoken serve` with the same options, and the users against it, to see why."
        )
    found.outcomes[f"failed: {type(error).__name__}"] += 1


async def _whole(client: httpx.AsyncClient, task: Task, found: Found) -> None:
    response = await client.post("/v1/chat/completions", json=task.body)
    if response.status_code != 200:
        found.outcomes[f"refused with {response.status_code}"] += 1
        return
    _compare(task, response.json()["choices"][0]["message"]["content"] or "", found)


async def _streamed(client: httpx.AsyncClient, task: Task, found: Found) -> None:
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json={**task.body, "stream": True}) as response:
        if response.status_code != 200:
            found.outcomes[f"refused with {response.status_code}"] += 1
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    _compare(task, text, found)


def _compare(task: Task, text: str, found: Found) -> None:
    same = text == task.text
    found.outcomes["right text" if same else "another text"] += 1
    if not same:
        found.differing.append(f"{task.body!r:.200}: {text!r:.200}, not {task.text!r:.200}")


async def _hang_up(client: httpx.AsyncClient, task: Task, rng: random.Random, found: Found) -> None:
    """Leave after some pieces of a stream."""
    pieces = rng.randrange(6)
    async with client.stream("POST", "/v1/chat/completions", json={**task.body, "stream": True}) as response:
        async for _ in response.aiter_lines():
            pieces -= 1
            if pieces < 0:
                break
    found.outcomes["hung up"] += 1


async def _nonsense(client: httpx.AsyncClient, task: Task, rng: random.Random, found: Found) -> None:
    """A body with an odd value, most of which are wrong, or half a body."""
    body = {**task.body, "max_tokens": 2, rng.choice(FIELDS): rng.choice(WRONG_VALUES)}
    if body["max_tokens"] in (None, 2**70):  # no mistake: a text that fills the context
        body["max_tokens"] = 2
    raw = json.dumps(body).encode()
    if rng.random() < 0.2:
        raw = raw[: rng.randrange(len(raw))]
    response = await client.post("/v1/chat/completions", content=raw, headers={"Content-Type": "application/json"})
    found.outcomes[f"odd body: {response.status_code}"] += 1


def resident(pid: int) -> int:
    """Bytes of memory of a process, by Linux's /proc; 0 of one that has ended."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * getpagesize()


async def watch(pid: int, began: float, end: float, found: Found) -> None:
    """Note the server's memory every few seconds."""
    while time.monotonic() < end:
        found.memory.append((time.monotonic() - began, resident(pid)))
        options.progress(f"{sum(found.outcomes.values())} requests, {found.memory[-1][1] / 1e6:.0f} MB")
        await asyncio.sleep(5)


async def soak(
    url: str, server: subprocess.Popen[bytes], all_tasks: Sequence[Task], users: int, minutes: float, seed: int
) -> Found:
    found, began = Found(), time.monotonic()
    end = began + 60 * minutes
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        each = [use(client, server, all_tasks, random.Random(f"{seed} {i}"), end, found) for i in range(users)]
        await asyncio.gather(watch(server.pid, began, end, found), *each)
        await asyncio.sleep(5)  # those who hung up last leave within a step
        try:
            left = _gauges((await client.get("/metrics")).text)
        except httpx.HTTPError as error:
            _failed(error, server, found)
        else:
            found.outcomes |= {f"left {name}": ceil(value) for name, value in left.items()}
    return found


def _gauges(text: str) -> dict[str, float]:
    """Requests in work and in the queue, and the share of the cache that they take."""
    families = text_string_to_metric_families(text)
    return {each.name: each.samples[0].value for each in families if each.name.startswith(LEFT)}


def command(
    *,
    target: str,
    drafter: str | None = None,
    dtype: str | None = None,
    users: int = 16,
    minutes: float = 10.0,
    workload: str | None = None,
    prompts: int = 24,
    port: int = 8123,
    seed: int = 0,
    markdown: bool = False,
    json_: bool = False,
) -> None:
    """Texts, errors and memory of a server whose users come, go and send nonsense.

    target: The model that is served.
    drafter: Its drafter; by default prompt lookup.
    dtype: As for foretoken serve.
    users: Users at a time.
    minutes: How long they come and go.
    prompts: Prompts that they choose from.
    port: Port of the server.
    seed: Of the users and of the texts.
    """
    check_counts(users=users, prompts=prompts)
    check_seed(seed, prompts)
    if not 0 < minutes < 1e4:
        raise ForetokenError(f"minutes is {minutes}: it must be more than 0.")
    all_tasks = tasks(target, drafter, dtype, conversations(workload, prompts), seed)
    extra = [x for name, value in (("--drafter", drafter), ("--dtype", dtype)) if value for x in (name, value)]
    argv = [sys.executable, "-m", "foretoken", "serve", target, "--port", str(port), "--max-batch", str(users), *extra]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, server)
            found = asyncio.run(soak(url, server, all_tasks, users, minutes, seed))
            server.send_signal(signal.SIGTERM)
            try:
                found.outcomes["exit code of the server"] = server.wait(END_S)
            except subprocess.TimeoutExpired:
                found.outcomes[f"failed: the server did not end within {END_S:g} seconds"] += 1
        finally:
            server.kill()
    _report(found, {"users": users, "minutes": minutes, "seed": seed}, json_, markdown)


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise ForetokenError(f"The server at {url} did not start: run `foretoken serve` with the same options to see why.")


def _report(found: Found, settings: dict[str, Any], json_: bool, markdown: bool) -> None:
    report = Report("benchmarks soak", settings)
    table = report.table("What the users saw", ["outcome", "times"], 0)
    for outcome, times in sorted(found.outcomes.items()):
        table.add(outcome, times)
    table.notes += found.differing[:3]
    after = [size for second, size in found.memory if second >= 60] or [size for _, size in found.memory]
    memory = report.table("Memory of the server, MB", ["after a minute", "at the end", "growth, %"], 1)
    few = max(len(after) // 10, 1)
    begun, ended = median(after[:few]) / 1e6, median(after[-few:]) / 1e6
    memory.add(begun, ended, 100 * (ended / begun - 1))
    show(report, json_, markdown)
    wrong = [name for name, times in found.outcomes.items() if times and name.startswith(MUST_NOT_BE)]
    if found.memory[-1][0] >= 60 and ended / begun - 1 > GROWTH:  # before that it grows as it gets to work
        wrong.append("memory grew")
    if wrong:
        raise ForetokenError(f"The server did not stand the test: {', '.join(wrong)}. The table says how often.")
