"""`python -m benchmarks serving`: the load of several users on servers that speak OpenAI's protocol, in turn.

Start the servers first, each with the same weights, and name them:

    foretoken serve smollm2-135m-instruct --port 8001 &
    python -m benchmarks serving --server ours=http://127.0.0.1:8001 --server other=http://127.0.0.1:8002

Every server meets the same prompts in every round, before any of them meets the next round. A server whose name ends in
"-plain" is asked for plain decoding (`speculation: off`), so that one server of ours can stand in the table twice.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any

import httpx
import typer

from foretoken.cli import options
from foretoken.cli.measuring import WorkloadFile, chosen_prompts, show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_temperatures
from foretoken.measure.harness import Block, blocks, interleave
from foretoken.measure.report import Report, Spread, Table

PLAIN = "-plain"
TIMEOUT_S = 600.0
COLUMNS = ["server", "users", "tokens/s", "first token, ms", "between tokens, ms: median", "p99"]


@dataclass(frozen=True)
class Server:
    """url: without /v1. model: its name there. plain: whether it is asked for plain decoding."""

    url: str
    model: str
    plain: bool


@dataclass
class Answer:
    """tokens: of the answer, as the server counts them. begun, arrivals: moments of its start and its pieces, s."""

    begun: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class Load:
    """What all users together got of one server: the answers, and the seconds until the last one was whole."""

    answers: Sequence[Answer]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.wall_s

    @property
    def first_ms(self) -> float:
        return 1000 * median(answer.arrivals[0] - answer.begun for answer in self.answers)

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between pieces of an answer, of all answers, in order of length."""
        gaps = [b - a for answer in self.answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
        return sorted(1000 * gap for gap in gaps) or [0.0]


async def ask(client: httpx.AsyncClient, server: Server, messages: Any, new: int, temperature: float) -> Answer:
    """One streamed answer. Raises ForetokenError, with what the server says, where it refuses."""
    body = {
        "model": server.model,
        "messages": messages,
        "max_tokens": new,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"speculation": "off"} if server.plain else {}),
    }
    answer, pieces = Answer(time.perf_counter()), 0
    async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            said = (await response.aread()).decode(errors="replace")[:300]
            raise ForetokenError(f"{server.url} answered {response.status_code}: {said}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("usage"):
                answer.tokens = chunk["usage"]["completion_tokens"]
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                answer.arrivals.append(time.perf_counter())
                pieces += 1
    if not answer.arrivals:
        answer.arrivals.append(time.perf_counter())
    answer.tokens = answer.tokens or pieces  # a server that sends no usage sends a token per piece
    return answer


async def all_at_once(server: Server, prompts: Sequence[Any], new: int, temperature: float) -> Load:
    """As many users as prompts, who all ask at one time."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, server, prompt, new, temperature) for prompt in prompts))
        return Load(answers, time.perf_counter() - began)


def served(named: Sequence[str]) -> dict[str, Server]:
    """NAME=URL -> the servers by name. Raises ForetokenError where one does not answer."""
    found = {}
    for each in named:
        name, _, url = each.partition("=")
        if not url.startswith("http"):
            raise ForetokenError(f"--server {each} names no server: give NAME=URL, as ours=http://127.0.0.1:8000.")
        try:
            models = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=TIMEOUT_S).raise_for_status().json()
            model = str(models["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ForetokenError(f"{url} does not list its models ({error}): start the server first.") from error
        found[name] = Server(url.rstrip("/"), model, name.endswith(PLAIN))
    return found


def row(table: Table, name: str, users: int, loads: Sequence[Load]) -> None:
    """The median of the rounds, and their range where there are several."""
    gaps = sorted(gap for load in loads for gap in load.gaps_ms)
    table.add(
        name,
        users,
        Spread.of([load.tokens_per_s for load in loads]).show(0),
        Spread.of([load.first_ms for load in loads]).show(0),
        median(gaps),
        gaps[min(int(0.99 * len(gaps)), len(gaps) - 1)],
    )


def command(
    server: Annotated[list[str], typer.Option(help="NAME=URL of a running server; may be repeated.")],
    users: Annotated[list[int] | None, typer.Option(help="Users at a time; may be repeated. Default: 1, 8.")] = None,
    workload: WorkloadFile = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="Temperature of all requests.")] = 0.7,
    rounds: Annotated[int, typer.Option(help="Times that every server meets every number of users.")] = 3,
    json_: options.Json = False,
) -> None:
    """Tokens per second, time to the first token and time between pieces of answers, by server and number of users."""
    numbers = users or [1, 8]
    check_counts(max_new_tokens=max_new_tokens, rounds=rounds, users=min(numbers))
    check_temperatures([temperature])
    prompts = [
        prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        for prompt in chosen_prompts(workload, max(numbers))
    ]
    servers = served(server)
    report = Report("benchmarks serving", {"max_new_tokens": max_new_tokens, "temperature": temperature})
    table = report.table("Servers under load", COLUMNS, 1)
    table.notes.append("tokens/s: of all users together. A piece of an answer is one step's tokens, or one token.")
    try:
        for count in numbers:
            loads: Mapping[str, list[Load]] = {name: [] for name in servers}

            def run(name: str, _: Block, count: int = count) -> Load:
                chosen = [prompts[i % len(prompts)] for i in range(count)]
                return asyncio.run(all_at_once(servers[name], chosen, max_new_tokens, temperature))

            def warm(name: str) -> object:
                return asyncio.run(all_at_once(servers[name], prompts[:1], 16, temperature))

            turns = interleave({name: name for name in servers}, blocks(rounds, 1, [temperature]), run, warm,
                               lambda line, count=count: options.progress(f"{count} users: {line}"))  # fmt: skip
            for turn in turns:
                loads[turn.name].append(turn.result)
            for name, found in loads.items():
                row(table, name, count, found)
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, False)
