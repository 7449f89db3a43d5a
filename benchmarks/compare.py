"""`python -m benchmarks compare`: plain decoding beside ways to draft, each named with options of `foretoken.load`.

    python -m benchmarks compare --way "in 4 bits: drafter=self tree=chain:8" --way "drafter=auto method=auto"

All ways have the same target, answer the same prompts in turn, and no text stops early.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from typing import Any

from benchmarks.by_kind import read_kinds, rows, tables
from benchmarks.peers import DEFAULT_MODEL, WORKLOAD, Answered, answered
from foretoken.build import load, plain
from foretoken.cli import options
from foretoken.cli.measuring import check_forgets, encoded, show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_seed, check_temperatures
from foretoken.engine import Engine
from foretoken.measure.harness import WARM_TOKENS, Block, Turn, blocks, interleave, until_interrupted
from foretoken.measure.machine import machine
from foretoken.measure.methods import Foretoken
from foretoken.measure.report import Report
from foretoken.recipe import AUTO, PLAIN, in_a_row, own_kind

Options = Mapping[str, Any]
NO_KIND = "prompts"  # of lines that name none
ALLOWED = ("drafter", "method", "tree", "verifier", "law", "vocab", "profile", "quantise_drafter")


def read_way(text: str) -> tuple[str, Options]:
    """(its name, options of `load`) of "NAME: option=value ..", or of the options alone, which are then its name.

    Raises ForetokenError for what is no option.
    """
    name, colon, rest = text.partition(": ")
    given: dict[str, str] = {}
    for part in (rest if colon else text).split():
        option, equals, value = part.partition("=")
        if not equals or option not in ALLOWED:
            raise ForetokenError(
                f"--way {text!r} has {part!r}: write NAME: OPTION=VALUE .. with options of foretoken.load, that is "
                f"{', '.join(ALLOWED)}."
            )
        given[option] = value
    if not given:
        raise ForetokenError(f"--way {text!r} names no option: write NAME: drafter=self tree=chain:8, for instance.")
    return (name if colon else text).strip(), given


def read_prompts(workload: str, each: int) -> tuple[list[str], list[Any]]:
    """(the kind of each prompt, the prompts): the first `each` of every kind, in turn.

    Raises ForetokenError where a kind has fewer.
    """
    of: dict[str, list[Any]] = {}
    for kind, prompt in read_kinds(workload):
        of.setdefault(kind or NO_KIND, []).append(prompt)
    for kind, found in of.items():
        if len(found) < each:
            raise ForetokenError(f"{workload} has {len(found)} prompts of kind {kind}: lower --prompts {each}.")
    places = [(kind, i) for i in range(each) for kind in of]
    return [kind for kind, _ in places], [of[kind][i] for kind, i in places]


def engines(target: str, ways: Mapping[str, Options], device: str | None, dtype: str | None) -> dict[str, Engine]:
    """Plain decoding and every way; the target stands in memory once, and once more for each way that reads it anew."""
    made: dict[str, Engine] = {}
    for name, given in sorted(ways.items(), key=lambda way: not _reads_target(way[1])):
        if not made or _reads_target(given):
            made[name] = load(target, device=device, dtype=dtype, max_batch=1, **given)
        else:
            first = next(iter(made.values()))
            made[name] = load(first.target.lm.model, dtype=dtype, tokenizer=first.tokenizer, max_batch=1, **given)
    ready = {PLAIN: plain(next(iter(made.values()))), **{name: made[name] for name in ways}}
    return {name: replace(engine, eos_ids=frozenset()) for name, engine in ready.items()}


def _reads_target(given: Options) -> bool:
    """Whether a drafter of these options reads the target's weights once more, from the place that its name gives."""
    _, last = in_a_row(given.get("drafter"))
    return last == AUTO or own_kind(last) is not None


def command(
    *,
    way: list[str],
    target: str = DEFAULT_MODEL,
    workload: str = WORKLOAD,
    prompts: int = 4,
    max_new_tokens: int = 128,
    temperature: list[float] | None = None,
    rounds: int = 1,
    seed: int = 0,
    markdown: bool = False,
    json_: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Ways to draft beside plain decoding, in turn on the same prompts, each way with its own options.

    way: "NAME: OPTION=VALUE ..", options of foretoken.load such as drafter, tree; may be repeated.
    target: Model folder, GGUF file or name.
    workload: JSONL of prompts; where lines name a "kind", figures are by kind too. Default: the chat prompts.
    prompts: Prompts of each kind.
    temperature: May be repeated. Default: 0 and 0.7.
    seed: Seed of the first round; round i uses seed + i.
    """
    ways = dict(map(read_way, way))
    if len(ways) < len(way) or PLAIN in ways:
        raise ForetokenError(f"Each --way needs a name of its own, and {PLAIN} is there already.")
    temperatures = list(dict.fromkeys(temperature or (0.0, 0.7)))
    check_temperatures(temperatures)
    check_counts(rounds=rounds, max_new_tokens=max_new_tokens, prompts=prompts)
    check_seed(seed, rounds)
    kinds, asked = read_prompts(workload, prompts)
    for given in ways.values():
        options.check_models(target, given.get("drafter"), dtype=dtype)
        check_forgets(given.get("drafter"))
    options.quiet()
    made = engines(target, ways, device, dtype)
    ids = encoded(made[PLAIN], asked, max_new_tokens)

    def run(engine: Engine, block: Block) -> Answered:
        of_round = seed + block.round
        return answered(Foretoken(engine), ids[block.prompt], max_new_tokens, block.temperature, of_round)

    def warm(engine: Engine) -> None:
        answered(Foretoken(engine), ids[0], min(WARM_TOKENS, max_new_tokens), temperatures[0], seed)

    lm = made[PLAIN].target.lm
    header = {
        "date": date.today().isoformat(), **machine(lm.device), "target": target, "execution": lm.execution,
        "dtype": str(lm.dtype).removeprefix("torch."), "prompts of each kind": prompts,
        "max_new_tokens": max_new_tokens, "rounds": rounds, "seed": seed,
        "ways": {name: dict(given) for name, given in ways.items()},
    }  # fmt: skip
    done: list[Turn[Block, Answered]] = []
    turns = interleave(made, blocks(rounds, len(ids), temperatures), run, warm, options.progress)
    interrupted = until_interrupted(turns, done)
    found: Sequence[Any] = rows(done, kinds)
    report = Report("benchmarks compare", header, [], interrupted, {"rows": [asdict(row) for row in found]})
    tables(report, found)
    show(report, json_, markdown)
