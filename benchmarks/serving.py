"""`python -m benchmarks serving`: the load of several users on servers that speak OpenAI's protocol, in turn.

Start the servers first, each with the same weights, and name them:

    foretoken serve smollm2-135m-instruct --port 8001 &
    python -m benchmarks serving --server ours=http://127.0.0.1:8001 --server other=http://127.0.0.1:8002

With --long N a prompt of some N tokens comes while all users read their answers: what that does to the time between
their tokens, and how much sooner the first token comes when the same prompt comes again.

With --library MODEL the same load is put on an engine in this process too, drafted by --drafter: what a server costs.

Every server meets the same prompts in every round, before any of them meets the next round. A server whose name ends in
"-plain" is asked for plain decoding (`speculation: off`), so that one server of ours can stand in the table twice.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

import httpx

from foretoken.cli import options
from foretoken.cli.measuring import chosen_prompts, show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_temperatures
from foretoken.engine import Engine
from foretoken.measure.harness import Block, blocks, interleave
from foretoken.measure.report import Report, Spread, Table
from foretoken.recipe import AUTO

PLAIN = "-plain"
TIMEOUT_S = 600.0
LONG_TOKENS = 2000  # of the answers that go on while a long prompt comes: none ends meanwhile
SETTLED = 5  # pieces of every answer before it comes
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they")
TOKEN_SHARE = 0.99  # words per token: these are a token each in most vocabularies
LONG_COLUMNS = ["server", "users", "gap, ms", "p99", "p99 / median", "first token, ms", "again, ms", "again / first"]
COLUMNS = ["server", "users", "tokens/s", "x first named", "first token, ms", "between tokens, ms: median", "p99"]
LIBRARY = "library"


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

    def gaps_ms(self, since: float = -inf, until: float = inf) -> list[float]:
        """Milliseconds between pieces, of those gaps that are a part of the time between two moments."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [1000 * (b - a) for a, b in pairs if b > since and a < until]


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
        """Milliseconds between pieces of an answer, of all answers."""
        return [gap for answer in self.answers for gap in answer.gaps_ms()]


@dataclass(frozen=True)
class Interference:
    """gaps_ms: between the tokens of all users while the long prompt was read.

    first_ms, again_ms: until the first token after it, at its first and at its second coming.
    """

    gaps_ms: Sequence[float]
    first_ms: float
    again_ms: float


@asynccontextmanager
async def _named(server: Server) -> AsyncIterator[None]:
    """Raises ForetokenError where the connection breaks."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ForetokenError(f"{server.url} broke off an answer ({error or type(error).__name__}).") from error


async def ask(
    client: httpx.AsyncClient,
    server: Server,
    messages: Any,
    new: int,
    temperature: float,
    answer: Answer | None = None,
    **more: Any,
) -> Answer:
    """One streamed answer. answer: where it is noted, for one who looks meanwhile. more: fields of the request.

    Raises ForetokenError, with what the server says, where it refuses.
    """
    body = {
        "model": server.model,
        "messages": messages,
        "max_tokens": new,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"speculation": "off"} if server.plain else {}),
        **more,
    }
    answer, pieces = answer or Answer(0.0), 0
    answer.begun = time.perf_counter()
    async with _named(server), client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
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


async def all_at_once(server: Server, prompts: Sequence[Any], new: int, temperature: float, **more: Any) -> Load:
    """As many users as prompts, who all ask at one time. more: as in `ask`."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, server, prompt, new, temperature, **more) for prompt in prompts))
        return Load(answers, time.perf_counter() - began)


def in_process(engine: Engine, prompts: Sequence[Any], new: int, temperature: float) -> Load:
    """The same load on an engine, whose sequences are decoded side by side."""
    began = time.perf_counter()
    answers = [Answer(began) for _ in prompts]
    for chunk in engine.stream(prompts, max_new_tokens=new, temperature=temperature):
        answers[chunk.index].arrivals.append(time.perf_counter())
        answers[chunk.index].tokens += len(chunk.token_ids)
    return Load(answers, time.perf_counter() - began)


async def interrupted(server: Server, prompts: Sequence[Any], long: Any, temperature: float) -> Interference:
    """The users' answers go on while `long` comes, and once more when they have ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        answers = [Answer(0.0) for _ in prompts]
        running = [
            asyncio.create_task(ask(client, server, prompt, LONG_TOKENS, temperature, answer, ignore_eos=True))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        while any(len(answer.arrivals) < SETTLED for answer in answers):
            if any(task.done() for task in running):
                await asyncio.gather(*running)
                raise ForetokenError(
                    f"{server.url} ended an answer before the long prompt could come: try fewer users."
                )
            await asyncio.sleep(0.01)
        first = await ask(client, server, long, 1, temperature)
        last = first.arrivals[0]
        gaps = [gap for answer in answers for gap in answer.gaps_ms(first.begun, last)]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        again = await ask(client, server, long, 1, temperature)
        return Interference(gaps, 1000 * (last - first.begun), 1000 * (again.arrivals[0] - again.begun))


def long_prompt(which: str, tokens: int) -> Any:
    """A conversation of some `tokens` tokens, which no other `which` shares from its beginning on."""
    rng = random.Random(which)
    words = " ".join(rng.choice(WORDS) for _ in range(int(tokens * TOKEN_SHARE)))
    return [{"role": "user", "content": f"{which}. Summarize this: {words}"}]


def conversations(workload: str | None, count: int | None = None) -> list[Any]:
    """The prompts that `chosen_prompts` gives, a text as what a user says."""
    found = chosen_prompts(workload, count)
    return [prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] for prompt in found]


def served(named: Sequence[str]) -> dict[str, Server]:
    """NAME=URL, or NAME=URL#MODEL, -> the servers by name. Raises ForetokenError where one does not answer."""
    found = {}
    for each in named:
        name, _, url = each.partition("=")
        if not url.startswith("http"):
            raise ForetokenError(f"--server {each} names no server: give NAME=URL, as ours=http://127.0.0.1:8000.")
        url, _, model = url.partition("#")
        try:
            listed = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=TIMEOUT_S)
            model = model or str(listed.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ForetokenError(f"{url} does not list its models ({error}): start the server first.") from error
        found[name] = Server(url.rstrip("/"), model, name.endswith(PLAIN))
    return found


def spread_ms(found: Sequence[Load] | Sequence[Interference]) -> tuple[float, float]:
    """The median of the gaps of all rounds together, and their 99th percentile; 0 where there are none."""
    gaps = sorted(gap for each in found for gap in each.gaps_ms) or [0.0]
    return median(gaps), gaps[min(int(0.99 * len(gaps)), len(gaps) - 1)]


def row(table: Table, name: str, users: int, loads: Sequence[Load], first: Sequence[Load]) -> None:
    """The median of the rounds, and their range where there are several. first: the loads of the first one named, round
    by round beside these."""
    table.add(
        name,
        users,
        Spread.of([load.tokens_per_s for load in loads]).show(0),
        Spread.of([load.tokens_per_s / other.tokens_per_s for load, other in zip(loads, first, strict=False)]).show(2),
        Spread.of([load.first_ms for load in loads]).show(0),
        *spread_ms(loads),
    )


def long_row(table: Table, name: str, users: int, found: Sequence[Interference]) -> None:
    """The same of what a long prompt did; gaps of all rounds together."""
    middle, high = spread_ms(found)
    first, again = median(each.first_ms for each in found), median(each.again_ms for each in found)
    table.add(name, users, middle, high, high / middle, first, again, again / first)


def command(
    *,
    server: list[str],
    library: str | None = None,
    drafter: str | None = None,
    users: list[int] | None = None,
    workload: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.7,
    rounds: int = 3,
    long: int | None = None,
    markdown: bool = False,
    json_: bool = False,
) -> None:
    """Tokens per second, time to the first token and time between pieces of answers, by server and number of users.

    server: NAME=URL of a running server, #MODEL behind it if it lists none; may be repeated.
    library: Model for an engine in this process beside the servers.
    users: Users at a time; may be repeated. Default: 1, 8.
    max_new_tokens: Most tokens of an answer.
    temperature: Temperature of all requests.
    rounds: Times that every server meets every number of users.
    long: Tokens of a prompt that comes while all users read.
    """
    numbers = users or [1, 8]
    check_counts(max_new_tokens=max_new_tokens, rounds=rounds, users=min(numbers), long=long)
    check_temperatures([temperature])
    prompts = conversations(workload)
    servers = served(server)
    if library is not None and long is not None:
        raise ForetokenError("--library takes no prompt while it answers: leave --long out.")
    engine = None if library is None else options.load_engine(library, drafter, method=AUTO, max_batch=max(numbers))
    names = {name: name for name in ([LIBRARY] if engine is not None else []) + list(servers)}
    report = Report("benchmarks serving", {"max_new_tokens": max_new_tokens, "temperature": temperature})
    if long is None:
        table = report.table("Servers under load", COLUMNS, 1)
        table.notes.append("tokens/s: of all users together. A piece of an answer is one step's tokens, or one token.")
    else:
        table = report.table(f"While a prompt of some {long} tokens is read", LONG_COLUMNS, 2)
    try:
        for count in numbers:
            loads: Mapping[str, list[Any]] = {name: [] for name in names}

            def run(name: str, block: Block, count: int = count) -> Load | Interference:
                chosen = [prompts[(block.round * count + i) % len(prompts)] for i in range(count)]
                if name == LIBRARY and engine is not None:
                    return in_process(engine, chosen, max_new_tokens, temperature)
                if long is None:
                    return asyncio.run(all_at_once(servers[name], chosen, max_new_tokens, temperature))
                prompt = long_prompt(f"{name} {count} {block.round} {time.time()}", long)
                return asyncio.run(interrupted(servers[name], chosen, prompt, temperature))

            def warm(name: str) -> object:
                if name == LIBRARY and engine is not None:
                    return in_process(engine, prompts[:1], 16, temperature)
                return asyncio.run(all_at_once(servers[name], prompts[:1], 16, temperature))

            turns = interleave(names, blocks(rounds, 1, [temperature]), run, warm,
                               lambda line, count=count: options.progress(f"{count} users: {line}"))  # fmt: skip
            for turn in turns:
                loads[turn.name].append(turn.result)
            for name, found in loads.items():
                if long is None:
                    row(table, name, count, found, loads[next(iter(names))])
                else:
                    long_row(table, name, count, found)
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, markdown)
