"""`python -m benchmarks heads`: draft heads side by side on one target.

Tokens per step, speed against plain decoding, and where the time goes. What a whole run takes is processor time where
one thread does all the work, so that other programs do not count; what the parts of a step take is wall clock, the
median over steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from benchmarks.decoding import opened
from benchmarks.expand import SIZES, Expand
from benchmarks.expand import expand as expanded
from benchmarks.head_clocks import PARTS, record_parts
from foretoken.build import assembled
from foretoken.cli import options
from foretoken.cli.measuring import show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_seed, check_temperatures
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence as Running
from foretoken.core.shapes import Float
from foretoken.core.verifier import Verifier
from foretoken.decode import NoDrafter
from foretoken.draft.heads import HeadDrafter, HeadDraftSession
from foretoken.draft.lm import LMDrafter
from foretoken.draft.source import Source
from foretoken.draft.wrapped import WrappedDrafter, WrappedSession
from foretoken.heads.checkpoint import load_head
from foretoken.heads.eagle import Gumiho
from foretoken.heads.lm import HeadLM, ready
from foretoken.measure.clocks import DRAFTING, Clock, clock_named, record, seconds, timed
from foretoken.measure.harness import WARM_TOKENS, Block, blocks, interleave
from foretoken.measure.machine import machine
from foretoken.measure.report import Report
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.models.load import choose_device, choose_dtype, load_frozen, load_model, load_tokenizer
from foretoken.models.named import check_head_folder
from foretoken.models.panels import pack
from foretoken.models.parts import parts
from foretoken.models.target import LMTarget
from foretoken.models.text import encode
from foretoken.names import verifier_named
from foretoken.recipe import HEAD, SAME, Recipe
from foretoken.trees.forms import check_size, read_tree

STEP, DRAFT, TARGET = "step", "draft", "target"
# Sampled trees, measured above temperature 0.
SAMPLED = (
    ("kary:2x3", "rrsw"), ("kary:2x3", "hub"), ("kary:2x3", "transport"), ("budget:{}", "transport"),
    ("budget:{}", "block-transport"),
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """drafter None: plain decoding. sampled: children are drawn, so that at temperature 0 it has nothing to show."""

    name: str
    drafter: LMDrafter | None
    verifier: Verifier
    sampled: bool = False


@dataclass
class Tally:
    """Counts over the runs of one method at one temperature, and the seconds of every step by what was running.

    total_s: of all runs, by the clock that `seconds` gives, which costs too much to be read at every step.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    total_s: float = 0.0
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in (STEP, DRAFT, TARGET, *PARTS)}
    )

    @property
    def steps(self) -> int:
        return len(self.seconds[STEP])

    @property
    def tau(self) -> float:
        """Tokens per step, the bonus token included."""
        return self.tokens / self.steps

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.total_s / self.tokens

    def ms(self, name: str) -> float:
        """Median milliseconds per step spent in component `name`."""
        return 1000 * median(self.seconds[name])

    def record(self) -> dict[str, Any]:
        return {
            "tokens_per_step": self.tau,
            "accepted_per_step": self.accepted / self.steps,
            "nodes_per_step": self.drafted / self.steps,
            "steps": self.steps,
            "ms_per_token": self.ms_per_token,
            "draft_ms_per_step": self.ms(DRAFT),
            "target_ms_per_step": self.ms(TARGET),
            "other_ms_per_step": self.ms(STEP) - self.ms(DRAFT) - self.ms(TARGET),
            "components_ms_per_step": {name: self.ms(name) for name in PARTS},
        }


@dataclass(frozen=True)
class Narrow:
    """How a head of a small model reads the states of its expansion: the first d of each layer's, from where the small
    model's layers stand in the large one (expand.py)."""

    hidden: int
    wide: int
    small_layers: int
    layers: int

    def layer(self, layer: int) -> int:
        return layer if layer == FINAL else layer * self.layers // self.small_layers

    def states(self, features: Float[Tensor, "t f"]) -> Float[Tensor, "t _"]:
        return features.view(len(features), -1, self.wide)[..., : self.hidden].flatten(1)


@dataclass(frozen=True)
class OnExpansion(WrappedDrafter[HeadDrafter]):
    """A head's drafter in front of the expansion of its target."""

    narrow: Narrow

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.narrow.layer(layer) for layer in self.inner.feature_layers)

    def open(self, batch: int, slots: int) -> "ExpansionSession":
        return ExpansionSession(self.inner.open(batch, slots), self.narrow)


class ExpansionSession(WrappedSession[HeadDraftSession]):
    def __init__(self, inner: HeadDraftSession, narrow: Narrow) -> None:
        super().__init__(inner)
        self.narrow = narrow

    def learn(self, features: list[Float[Tensor, "_ f"]]) -> None:
        self.inner.learn([self.narrow.states(of_row) for of_row in features])


def of_head(session: Any) -> HeadDraftSession:
    """The head's own session, in front of an expansion too."""
    return session.inner if isinstance(session, ExpansionSession) else session


def method(lm: CausalLM | HeadLM, tree: str, rule: str | None = None, sampled: bool = False) -> Method:
    """A head (or a drafter LM) with a tree and a rule; refused where the pair would not be lossless."""
    kind = HEAD if isinstance(lm, HeadLM) else SAME
    drafter, verifier = assembled(Recipe(tree, rule), Source(kind, lm.vocab_size, lm))
    assert isinstance(drafter, LMDrafter)
    return Method(f"{lm.name} {tree} {verifier.name}", drafter, verifier, sampled)


def run(
    target: CausalLM, chosen: Method, narrow: Narrow | None, prompt: list[int], new: int, temperature: float,
    seed: int, tally: Tally,
) -> list[int]:  # fmt: skip
    """One continuation; the prompt's prefill is not counted."""
    clocks = {name: Clock(target.device) for name in tally.seconds}
    drafter: Any = chosen.drafter or NoDrafter()
    if isinstance(drafter, HeadDrafter) and narrow is not None:
        drafter = OnExpansion(drafter, narrow)
    clocked = LMTarget(timed(target, clocks[TARGET], Clock(target.device)))
    sequence = Running(list(prompt), Sampling(temperature=temperature), seeded(seed), new)
    decoder = opened(clocked, drafter, chosen.verifier, [sequence], len(prompt) + new + drafter.max_nodes)
    if chosen.drafter is not None:
        record(decoder.drafter, DRAFTING, clocks[DRAFT])
    if isinstance(chosen.drafter, HeadDrafter):
        record_parts(of_head(decoder.drafter).rows, clocks)
    clocks[TARGET].seconds = 0.0
    now = seconds(clock_named(target.device), target.device)
    begin = now()
    while decoder.sequences:
        with clocks[STEP]:
            steps = decoder.step()
        for _, step in steps:
            tally.tokens += len(step.tokens)
            tally.drafted += step.num_drafted
            tally.accepted += step.num_accepted
        for name, clock in clocks.items():
            tally.seconds[name].append(clock.seconds)
            clock.seconds = 0.0
    tally.total_s += now() - begin
    return sequence.ids[len(prompt) :]


@dataclass(frozen=True)
class Result:
    method: str
    temperature: float
    tally: Tally
    speedup: float

    def record(self) -> dict[str, Any]:
        return {"method": self.method, "temperature": self.temperature, "speedup": self.speedup, **self.tally.record()}


def measure(
    target: CausalLM,
    methods: Sequence[Method],
    narrow: Narrow | None,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    new: int,
    rounds: int,
    seed: int,
    progress: Callable[[str], None],
) -> list[Result]:
    """Every method continues every prompt, in turn. At temperature 0 all must write what plain decoding writes.

    Raises AssertionError where they do not: then the benchmark itself has shown a method to be wrong.
    """
    plain = Method("plain", None, verifier_named("exact-match"))
    found: list[Result] = []
    for t in temperatures:
        every = {m.name: m for m in (plain, *methods) if t > 0 or not m.sampled}
        tallies = {name: Tally() for name in every}

        def warm(chosen: Method, t: float = t) -> None:
            run(target, chosen, narrow, prompts[0], WARM_TOKENS, t, seed, Tally())

        def one(chosen: Method, block: Block, tallies: Mapping[str, Tally] = tallies) -> list[int]:
            prompt, tally = prompts[block.prompt], tallies[chosen.name]
            return run(target, chosen, narrow, prompt, new, block.temperature, seed + block.round, tally)

        texts: dict[Block, dict[str, list[int]]] = {}
        for turn in interleave(every, blocks(rounds, len(prompts), [t]), one, warm, progress):
            here = texts.setdefault(turn.block, {})
            here[turn.name] = turn.result
            if t == 0 and turn.last:
                for name, text in here.items():
                    assert text == here[plain.name], f"{name} wrote another text than plain decoding"
        base = tallies[plain.name].ms_per_token
        found += [Result(name, t, tally, base / tally.ms_per_token) for name, tally in tallies.items()]
    return found


def command(
    *,
    head: list[str] | None = None,
    drafter: str | None = None,
    target: str | None = None,
    nodes: int = 20,
    tree: list[str] | None = None,
    levels: list[int] | None = None,
    temperature: list[float] | None = None,
    prompts: int = 4,
    max_new_tokens: int = 64,
    rounds: int = 1,
    expand: Expand = None,
    seed: int = 0,
    markdown: bool = False,
    json_: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Tokens per step, speed-up over plain decoding and time by component, of every head with deterministic trees
    (dynamic, and product where levels are parallel) and, above temperature 0, sampled trees and their rules.

    head: Folder of a head; may be repeated. Default: the demo ones.
    drafter: A drafter LM beside them; none leaves it out.
    nodes: Nodes of the deterministic trees, drafted ones.
    tree: Also every head with this tree and its usual rule; may be repeated.
    levels: Also Gumiho's head cut to so many levels, 2 of them serial; may be repeated.
    temperature: May be repeated. Default: 0 and 1.
    prompts: Held-out prompts to continue.
    max_new_tokens: Tokens of every run.
    rounds: Times that every method continues every prompt.
    seed: Seed of the first round.
    """
    check_counts(nodes=nodes, prompts=prompts, max_new_tokens=max_new_tokens, rounds=rounds)
    temperatures = list(dict.fromkeys([0.0, 1.0] if temperature is None else temperature))
    check_temperatures(temperatures)
    check_seed(seed, rounds)
    check_size(nodes)
    for name in tree or ():
        read_tree(name)
    texts = [str(p["prompt"]) for p in options.heldout_prompts()[:prompts]]
    options.check_models(target, drafter, dtype=dtype)
    for folder in head or ():
        check_head_folder(folder)

    options.quiet()
    source = target or str(options.demo_folder() / "target")
    chosen, narrow = choose_device(device), None
    small = load_model(source, chosen, choose_dtype(dtype))
    kind = small.dtype
    plain = load_frozen(source, chosen, kind).model  # packing takes the weights off the list of parameters
    scored, params = small, plain.num_parameters()
    if expand is not None:
        big = expanded(plain, SIZES[expand], seed)
        params = big.num_parameters()
        pack(big)
        scored = CausalLM(big, f"{source} expanded to {expand}")
        narrow = Narrow(small.hidden_size, scored.hidden_size, small.num_layers, scored.num_layers)
    options.spare_threads(params)
    borrowed = parts(small)
    folders = head or [str(path) for path in sorted((options.demo_folder() / "heads").glob("*/"))]
    if not folders:
        raise ForetokenError("There are no demo heads here: name a folder with --head.")
    methods: list[Method] = []
    for folder in folders:
        lm = ready(load_head(folder, borrowed), Path(folder).name)
        methods += [*(method(lm, spec) for spec in tree or ()), *_methods(lm, nodes)]
        for number in levels or ():
            fewer = load_head(folder, borrowed)
            if isinstance(fewer, Gumiho):
                fewer.cut(number)
                methods += _methods(ready(fewer, f"{Path(folder).name}, {number} levels"), nodes, sampled=False)
    if drafter != "none" and (drafter is not None or target is None):
        path = drafter or str(options.demo_folder() / "drafter")
        model = load_model(path, chosen, kind)
        if model.vocab_size != small.vocab_size:
            raise ForetokenError(
                f"Drafter {path} has {model.vocab_size} tokens and target {source} {small.vocab_size}: take a drafter "
                "with the target's vocabulary, or none."
            )
        model.name = Path(path).name  # as the heads are called in the table
        methods += [method(model, spec) for spec in ("chain:5", f"dynamic:{nodes}")]
        methods.append(method(model, "kary:2x3", sampled=True))
    tokenizer = load_tokenizer(source)
    ids = [encode(tokenizer, text) for text in texts]
    found = measure(scored, methods, narrow, ids, temperatures, max_new_tokens, rounds, seed, options.progress)
    options.progress("")
    header = {**machine(chosen), "target": scored.name, "num_params": params, "prompts": len(ids),
              "max_new_tokens": max_new_tokens, "rounds": rounds, "seed": seed}  # fmt: skip
    show(_tables(header, found), json_, markdown)


def _methods(lm: HeadLM, nodes: int, sampled: bool = True) -> "list[Method]":
    serial = lm.head.parallel_from
    trees = ["dynamic"] if serial is None or lm.head.depth == serial else ["dynamic", "product"]
    methods = [method(lm, f"{tree}:{nodes}") for tree in trees]
    if sampled:
        methods += [method(lm, tree.format(nodes), rule, sampled=True) for tree, rule in SAMPLED]
    return methods


def _tables(header: dict[str, object], found: "list[Result]") -> Report:
    report = Report("benchmarks heads", header, figures={"results": [result.record() for result in found]})
    fields = {"ms/token": "ms_per_token", "tokens/step": "tokens_per_step", "nodes": "nodes_per_step",
              "draft ms": "draft_ms_per_step", "target ms": "target_ms_per_step",
              "other ms": "other_ms_per_step"}  # fmt: skip
    for t in dict.fromkeys(result.temperature for result in found):
        table = report.table(f"temperature {t:g}", ["method", "x plain", *fields, *PARTS], digits=2)
        for result in found:
            if result.temperature == t:
                record = result.record()
                parts = record["components_ms_per_step"].values()
                table.add(result.method, result.speedup, *(record[name] for name in fields.values()), *parts)
    report.tables[-1].notes += [
        "tokens/step: with the bonus. ms/token and x plain: processor time of whole runs where one thread does all the "
        "work; other ms: wall clock, medians over steps.",
    ]
    return report
