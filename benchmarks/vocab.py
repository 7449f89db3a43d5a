"""`python -m benchmarks vocab`: speed, acceptance and losslessness of each method with another vocabulary."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.expand import Expand, expanded_pair
from benchmarks.overlap import longest_overlap
from foretoken.audit import fit
from foretoken.audit.models import last_logits, sample
from foretoken.build import assembled, plain
from foretoken.cli import options
from foretoken.cli.measuring import chosen_prompts, encoded, show
from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import Drafter
from foretoken.core.limits import check_choice, check_seed, check_temperatures
from foretoken.core.sampling import Sampling
from foretoken.core.verifier import Verifier
from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.measure.harness import WARM_TOKENS, Block, Progress, blocks, interleave
from foretoken.measure.machine import machine
from foretoken.measure.methods import OURS, Foretoken, Run, Transformers
from foretoken.measure.pair import constant_drafts, load_pair, theirs_of
from foretoken.measure.report import Report
from foretoken.models.causal_lm import CausalLM
from foretoken.models.load import load_model, load_tokenizer
from foretoken.models.target import LMTarget
from foretoken.models.text import Tokenizer
from foretoken.recipe import PLAIN, SAME, VOCABS, Recipe
from foretoken.trees.forms import read_tree
from foretoken.vocab.slem import SLEMDrafter
from foretoken.vocab.slrs import SLRSDrafter
from foretoken.vocab.source import TranslatedSource
from foretoken.vocab.strings import continuation
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary

NUM_TOKENS = 3  # of the joint law that is tested, as in the audit
FALSE_ALARM = 1e-4  # of one test
LOSSLESS, WRONG = "equal", "WRONG"
COLUMNS = [
    "way",
    "drafter",
    "tree",
    "tokens/s",
    "x plain",
    "x plain, CPU",
    "tokens/forward",
    "accepted",
    "none",
    "own share",
    "TTFT ms",
    "TPOT ms",
    "law",
]
NOTES = [
    "tokens/s, x plain: medians, of wall clock; the ratios are taken on the same prompt in the same round, over the "
    "plain decoding of the same side. x plain, CPU: the same of this thread's CPU seconds, which other programs do not "
    "disturb.",
    "tokens/forward: emitted tokens per target forward, bonus included. accepted: of the drafted tokens. none: share "
    "of the drafts that were no token of the target. own share: propose and observe without the drafter's forwards, of "
    "the wall clock: translating and growing the tree. TTFT: time to the first token; TPOT: per later token; medians.",
]


TREES = {SAME: "chain:5", "union": "chain:3", "tli": "chain:3", "slem": "chain:8", "slrs": "chain:3"}
ALIGNMENTS = (
    ("overlap", longest_overlap, True),
    ("unhealed", continuation, False),
    ("overlap unhealed", longest_overlap, False),
)
BYTES_TREE = "chain:12"  # of slem where the drafter's tokens are bytes
THEIR_DRAFTS = 5  # transformers' num_assistant_tokens


@dataclass(frozen=True)
class Settings:
    """temperatures, prompts in the target's ids; samples: generations for the test of the law, 0 for none."""

    temperatures: Sequence[float]
    prompts: Sequence[list[int]]
    max_new_tokens: int
    rounds: int
    samples: int
    seed: int


@dataclass(frozen=True)
class TwoVocabularies(Transformers):
    """transformers' own mode: strings at temperature 0, the intersection above it.

    tokenizers: of the target and of the assistant. The mode rewrites the assistant, so each of the two gets a copy.
    """

    tokenizers: tuple[Tokenizer, Tokenizer] | None = None
    copies: dict[bool, PreTrainedModel] = field(default_factory=dict, init=False)

    def assisted(self, assistant: PreTrainedModel, sampled: bool) -> dict[str, Any]:
        if sampled not in self.copies:
            self.copies[sampled] = copy.deepcopy(assistant)
        assert self.tokenizers is not None
        names = ("tokenizer", "assistant_tokenizer")
        return super().assisted(self.copies[sampled], sampled) | dict(zip(names, self.tokenizers, strict=True))


@dataclass(frozen=True)
class Way:
    """One of the ways to draft that are compared. method: "plain", "same", one of --vocab, or transformers' own."""

    method: str
    drafter_name: str
    tree: str
    runs: Foretoken | Transformers

    @property
    def system(self) -> str:
        return self.runs.system

    def run(self, ids: list[int], new: int, temperature: float, seed: int) -> Run:
        return self.runs.run([ids], new, temperature, seed)


@dataclass
class Runs:
    """What one way did at one temperature, by block, with this thread's CPU seconds; why it could not go on, if so."""

    way: Way
    taken: dict[Block, Run] = field(default_factory=dict)
    cpu_s: dict[Block, float] = field(default_factory=dict)
    failed: str | None = None


def bench(report: Report, ways: Sequence[Way], target: LMTarget, settings: Settings, progress: Progress) -> None:
    """A table per temperature. target: has the law of the ways' own target, and may be a smaller one to sample from."""
    for temperature in settings.temperatures:
        table = report.table(f"temperature {temperature:g}", COLUMNS, 2)
        runs = [Runs(way) for way in ways]
        by_side = {each.way.system: each for each in runs if each.way.method == PLAIN}
        try:
            _interleave(runs, temperature, settings, progress)
        finally:
            for each in runs:
                if each.taken or each.failed:
                    plain = by_side[each.way.system]
                    law = each.failed or _law(each, plain.taken, target, temperature, settings, progress)
                    table.add(*_cells(each, plain, law))
        table.notes += [*NOTES, _law_note(temperature, settings)]


def _interleave(every: Sequence[Runs], temperature: float, settings: Settings, progress: Progress) -> None:
    def attempt(runs: Runs, prompt: int, new: int, seed: int) -> Run | None:
        """None where transformers could not: a finding about the other software."""
        if runs.failed is not None:
            return None
        try:
            return runs.way.run(settings.prompts[prompt], new, temperature, seed)
        except Exception as error:
            if runs.way.system == OURS:
                raise
            runs.failed = f"failed: {type(error).__name__}"
            return None

    def warm(runs: Runs) -> None:
        attempt(runs, 0, WARM_TOKENS, settings.seed)

    def run(runs: Runs, block: Block) -> None:
        begin = time.thread_time()
        taken = attempt(runs, block.prompt, settings.max_new_tokens, settings.seed + 1000 * block.round + block.prompt)
        if taken is not None:
            runs.taken[block], runs.cpu_s[block] = taken, time.thread_time() - begin

    named = {f"{x.way.system} {x.way.method} {x.way.drafter_name} {x.way.tree}": x for x in every}
    for _ in interleave(named, blocks(settings.rounds, len(settings.prompts), [temperature]), run, warm, progress):
        pass


def later_s(run: Run) -> float:
    """Seconds per token after those that came first; 0 where there was none."""
    rate = run.decoding_tokens_per_s
    return 1 / rate if rate else 0.0


def own_s(run: Run) -> float | None:
    """Seconds of drafting outside of the drafter's model: translating, and growing trees; None where not measured."""
    if run.drafting_s is None or run.scoring_s is None or run.target_s is None:
        return None
    return run.drafting_s - (run.scoring_s - run.target_s)


def _cells(runs: Runs, plain: Runs, law: str) -> list[str | float | None]:
    way, done = runs.way, runs.taken.values()
    head: list[str | float | None] = [f"{way.system} {way.method}", Path(way.drafter_name).name, way.tree]
    if runs.failed is not None:
        return [*head, *[None] * 9, law]

    def total(figure: str) -> int:
        return sum(getattr(run, figure) for run in done)

    both = [(runs.taken[place], plain.taken[place], place) for place in runs.taken if place in plain.taken]
    own = [seconds for run in done if (seconds := own_s(run)) is not None]
    return [
        *head,
        median(run.num_tokens / run.wall_s for run in done),
        median(run.num_tokens / run.wall_s / (p.num_tokens / p.wall_s) for run, p, _ in both),
        median(run.num_tokens / runs.cpu_s[x] / (p.num_tokens / plain.cpu_s[x]) for run, p, x in both),
        total("num_tokens") / total("num_target_forwards"),
        total("num_accepted") / drafted if (drafted := total("num_drafted")) else None,
        total("num_empty") / nodes if (nodes := total("num_nodes")) else None,
        sum(own) / sum(run.wall_s for run in done) if own else None,
        1000 * median(run.ttft_s for run in done),
        1000 * median(later_s(run) for run in done),
        law,
    ]


def _law(
    runs: Runs,
    plain: Mapping[Block, Run],
    target: LMTarget,
    temperature: float,
    settings: Settings,
    progress: Callable[[str], None],
) -> str:
    """Whether its output is the target's: texts at temperature 0, else a goodness-of-fit test of sampled tokens."""
    way = runs.way
    if temperature == 0:
        equal = sum(run.texts == plain[place].texts for place, run in runs.taken.items() if place in plain)
        return f"{equal}/{len(runs.taken)} {LOSSLESS}"
    if settings.samples == 0:
        return "-"
    prompt = settings.prompts[0][-12:]
    sampling = Sampling(temperature=temperature)

    def law(ids: Sequence[tuple[int, ...]]) -> Tensor:
        return sampling(last_logits(target, [prompt + list(x) for x in ids]))

    cells = fit.choose_cells(law, NUM_TOKENS, settings.samples)
    test = fit.FitTest(cells.probabilities(law), settings.samples, FALSE_ALARM, settings.seed)
    progress(f"temperature {temperature:g}: sampling the law of {way.system} {way.method} {way.drafter_name}")
    if isinstance(way.runs, Foretoken):
        drafter, verifier = way.runs.engine.drafter, way.runs.engine.verifier
        ids, _ = sample(target, drafter, verifier, prompt, sampling, settings.samples, settings.seed + 1)
    else:
        seeds = range(settings.seed, settings.seed + settings.samples)
        ids = [tuple(way.run(prompt, NUM_TOKENS, temperature, seed).texts[0]) for seed in seeds]
    counts = cells.count(ids)
    return f"{WRONG if test.rejects(counts) else 'p'} {test.p_value(counts):.1g}"


def _law_note(temperature: float, settings: Settings) -> str:
    if temperature == 0:
        return "law: texts equal to plain decoding's on the same side; close logits may part them (float ties)."
    return (
        f"law: p-value of {settings.samples} generations of {NUM_TOKENS} tokens against the target's own law, from "
        f"plain forwards; {WRONG} where the test rejects, which a lossless way does once in {1 / FALSE_ALARM:.0f}."
    )


def ways(
    engine: Engine,
    theirs: PreTrainedModel,
    target_tokenizer: Tokenizer,
    drafters: Sequence[str],
    methods: Sequence[str],
    trees: Mapping[str, Sequence[str]],
    lookaheads: Sequence[int] = (),
    alignments: bool = False,
) -> list[Way]:
    """Plain decoding on both sides, the engine's own drafter if it has one, then every method with every drafter.

    trees: of a method, where not the usual one. lookaheads: limits on the drafter tokens of a draft of slrs, each a way
    of its own beside the one without. alignments: slem also in the ways of ALIGNMENTS.
    """

    def ours(drafter: Drafter, rule: Verifier) -> Foretoken:
        return Foretoken(replace(engine, drafter=drafter, verifier=rule))

    found = [Way(PLAIN, "-", "-", Foretoken(plain(engine))), Way(PLAIN, "-", "-", Transformers(PLAIN, theirs))]
    if isinstance(engine.drafter, LMDrafter) and isinstance(engine.drafter.lm, CausalLM):
        drafter, rule = assembled(Recipe(TREES[SAME]), engine.source)
        found.append(Way(SAME, drafter.name, TREES[SAME], ours(drafter, rule)))
    spoken, like = vocabulary(target_tokenizer), engine.target.lm
    for name in drafters:
        tokenizer = load_tokenizer(name)
        lm = load_model(name, like.device, like.dtype)
        translation = Translation(spoken, vocabulary(tokenizer).within(lm.vocab_size))
        for method in methods:
            usual = BYTES_TREE if method == "slem" and translation.dest.longest == 1 else TREES[method]
            for tree in trees.get(method, (usual,)):
                source = TranslatedSource(method, engine.target.vocab_size, lm, translation)
                drafter, rule = assembled(Recipe(tree), source)
                found.append(Way(method, name, tree, ours(drafter, rule)))
                if alignments and isinstance(drafter, SLEMDrafter):
                    found += [
                        Way(f"slem {what}", name, tree, ours(replace(drafter, align=align, heals=heals), rule))
                        for what, align, heals in ALIGNMENTS
                    ]
                if method == "slrs" and isinstance(drafter, SLRSDrafter):
                    found += [
                        Way(f"slrs n={n}", name, tree, ours(replace(drafter, lookahead=n), rule)) for n in lookaheads
                    ]
        assistant, both = theirs_of(name, lm), (target_tokenizer, tokenizer)
        drafts = constant_drafts(THEIR_DRAFTS)
        runs = TwoVocabularies("two vocabularies", theirs, 1, {}, assistant, drafts, tokenizers=both)
        found.append(Way(runs.name, name, f"{THEIR_DRAFTS} drafts", runs))
    return found


def command(
    *,
    target: str | None = None,
    drafter: list[str] | None = None,
    same: str | None = None,
    method: list[str] | None = None,
    tree: list[str] | None = None,
    lookahead: list[int] | None = None,
    alignments: bool = False,
    temperature: list[float] | None = None,
    workload: str | None = None,
    prompts: int = 3,
    max_new_tokens: int = 64,
    rounds: int = 2,
    samples: int = 300,
    expand: Expand = None,
    seed: int = 0,
    markdown: bool = False,
    json_: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Compare union, TLI, SLEM and SLRS, a drafter with the same vocabulary, and transformers' two-vocabulary mode.

    Interleaved in one process, each with a measured losslessness column. The table goes to stdout.

    drafter: Folder of a drafter with another vocabulary; may be repeated. Default: the demo ones.
    same: Folder of a drafter with the target's vocabulary, to compare with. Default: the demo one.
    method: union, tli, slem or slrs; may be repeated. Default: all.
    tree: METHOD=TREE, e.g. tli=chain:2, for another tree than the usual one; may be repeated.
    lookahead: Most drafter tokens of a draft of slrs, measured beside no limit; may be repeated.
    alignments: Measure slem also with the paper's longest overlap, and without healing the edge.
    temperature: Temperature; may be repeated. Default: 0 and 1.
    prompts: Prompts to continue.
    max_new_tokens: Tokens of every run; end-of-text does not stop one.
    rounds: Times that every way continues every prompt.
    samples: Generations for the test of each way's law above temperature 0; 0: none.
    seed: Seed of the first run.
    """
    methods = list(dict.fromkeys(method or VOCABS))
    for name in methods:
        check_choice("method", name, VOCABS)
    trees: dict[str, list[str]] = {}
    for one in tree or ():
        name, equals, spec = one.partition("=")
        if not equals or name not in methods:
            raise ForetokenError(f"--tree {one} must be METHOD=TREE, with a method of {', '.join(methods)}.")
        read_tree(spec)
        trees.setdefault(name, []).append(spec)
    if samples < 0 or rounds < 1 or max_new_tokens < 2:
        raise ForetokenError("samples must be at least 0, rounds at least 1 and max-new-tokens at least 2.")
    if any(n < 1 for n in lookahead or ()):
        raise ForetokenError(f"lookahead is {min(lookahead or ())}: it must be at least 1.")
    check_temperatures(temperature)
    check_seed(seed, rounds)
    asked = chosen_prompts(workload, prompts)
    if target is None:
        demo = options.demo_folder()
        drafters = drafter or [str(demo / "drafter-1k"), str(demo / "drafter-bytes")]
        target, same = str(demo / "target"), same or str(demo / "drafter")
    elif drafter is None:
        raise ForetokenError("Name the drafter with --drafter: only the demo target has ones of its own.")
    else:
        drafters = drafter
    for name in drafters:
        options.check_models(target, name, dtype=dtype)

    options.quiet()
    pair = load_pair(target, same, device=device, dtype=dtype)
    pair = pair if expand is None else expanded_pair(pair, expand, seed)
    options.spare_threads(pair.num_params)
    lm, tokenizer = pair.engine.target.lm, pair.engine.tokenizer
    assert tokenizer is not None, "a target named by folder has a tokenizer"
    chosen = encoded(pair.engine, asked, max_new_tokens)
    settings = Settings(tuple(temperature or (0.0, 1.0)), chosen, max_new_tokens, rounds, samples, seed)
    small = pair.engine.target if expand is None else LMTarget(load_model(target, lm.device, lm.dtype))
    found = ways(pair.engine, pair.target, tokenizer, drafters, methods, trees, lookahead or (), alignments)
    header = {
        **machine(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "target": Path(target).name,
        "label": pair.label,
        "num_params": pair.num_params,
        "workload": workload,
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "samples": samples,
        "seed": seed,
    }
    report = Report("Drafters with another vocabulary", header)
    try:
        bench(report, found, small, settings, options.progress)
    except KeyboardInterrupt:
        report.interrupted = True
    show(report, json_, markdown)
