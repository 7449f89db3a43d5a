"""`foretoken bench`: how fast, against plain decoding and against transformers' own generate."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from foretoken.cli import options
from foretoken.cli.acceptance import acceptance
from foretoken.cli.command import command
from foretoken.cli.measuring import WorkOptions, check_forgets, encoded, show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts, check_sampling, check_temperatures
from foretoken.measure.plot import check_plot
from foretoken.recipe import NO_DRAFTER, check_alone
from foretoken.trees.forms import read_tree

if TYPE_CHECKING:
    from foretoken.measure.comparison import Measurement
    from foretoken.measure.methods import Method
    from foretoken.measure.pair import Pair

app = typer.Typer(cls=options.DefaultCommand, help="Measure speed.")
DEFAULT_TREES = ["chain:5", "kary:2x2"]
DEFAULT_OUT = "foretoken-bench.jsonl"


@dataclass(frozen=True)
class Compared(options.EngineModels):
    """What is compared.

    drafter: Model folder, GGUF file or hub id, with the target's vocabulary or another one; folder of a draft
    head, "self" (the target's own weights in 4 bits), "ngram" (prompt lookup), "auto" (self where the compiled kernel
    runs weights of 16 or 32 bits, else ngram), or "none".
    Default: the demo drafter for the demo target, else auto.
    tree: Token tree; may be repeated. Default: chain:5 and kary:2x2.
    verifier: Rule: $rules. See docs/trees-and-rules.md. Default: the usual one of each tree.
    profile: Profile file of `foretoken tune`: the best tree and verifier it found, where none are named.
    temperature: Temperature; may be repeated. Default: 0 and 1.
    top_p: Keep the likeliest tokens with this mass.
    batch: Prompts decoded side by side; may be repeated, e.g. 1 and 8. Default: 1.
    """

    tree: list[str] | None = None
    verifier: str | None = None
    profile: str | None = None
    temperature: list[float] | None = None
    top_p: float = 1.0
    batch: list[int] | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures asked for, each once; else 0 and 1."""
        return tuple(dict.fromkeys(self.temperature or (0.0, 1.0)))

    def check(self) -> None:
        """Refuse, before torch is imported, options that cannot be."""
        check_temperatures(self.temperatures)
        check_sampling(top_p=self.top_p)
        for size in self.batch or ():
            check_counts(batch=size)
        check_alone(self.drafter)
        check_forgets(self.drafter)
        named = {"verifier": self.verifier, "vocab": self.vocab, "dtype": self.dtype, "compile": self.compile}
        options.check_models(self.target, self.drafter, self.profile, self.device, **named)
        for name in self.tree or ():
            read_tree(name)
        if self.drafter == NO_DRAFTER and self.tree:
            raise ForetokenError("With drafter none nothing is drafted: leave --tree out, or name a drafter.")

    def load(self) -> "tuple[Pair, list[Method]]":
        """Return the models, and the methods to measure: with the named trees, the profile's, or the default ones."""
        from foretoken.measure.pair import load_pair, methods
        from foretoken.profile import read_profile
        from foretoken.recipe import KINDS, PLAIN

        options.quiet()
        tuned = None if self.profile is None else read_profile(self.profile)
        if tuned is not None:
            options.spare_threads_as(tuned)
        target, drafter = options.resolve_models(self.target, self.drafter)
        pair = load_pair(
            target, drafter, verifier=self.verifier, vocab=self.vocab or (tuned and tuned.vocab), device=self.device,
            dtype=self.dtype, compile=self.compile,
        )  # fmt: skip
        usual = DEFAULT_TREES[:1] if KINDS[pair.engine.kind].own_draws else DEFAULT_TREES
        trees, verifier, coins = self.tree or usual, self.verifier, None
        if tuned is None or self.profile is None:
            options.spare_threads(pair.num_params)
        else:
            tuned.check(self.profile, pair.engine.target.lm, pair.engine.fingerprint)
            if self.tree is None and verifier is None and tuned.tree != PLAIN:
                trees, verifier, coins = [tuned.tree], tuned.verifier, tuned.draft_probability
        batches = list(dict.fromkeys(self.batch or [1]))
        return pair, methods(pair, list(dict.fromkeys(trees)), verifier, batches, coins, self.top_p)


@command
def bench(
    *,
    compared: Compared,
    work: WorkOptions,
    out: str = DEFAULT_OUT,
    plot: str | None = None,
    markdown: bool = False,
    json_: bool = False,
) -> None:
    """Compare our decoding with transformers' generate, interleaved in one process.

    `foretoken bench acceptance` counts accepted draft tokens instead, see its own --help.

    Ours: plain, and every tree. Theirs: plain, and assisted by the same drafter. The table goes to stdout.

    out: File for the single runs, JSONL; replaced if it exists.
    plot: Draw speeds, and where the time goes, to this file (needs matplotlib).
    """
    texts = work.texts()
    check_plot(plot)
    options.check_own(out, ("system", "method", "tokens_per_s"), "file of foretoken bench")
    compared.check()
    from foretoken.measure.comparison import bars, compare, report, summarise
    from foretoken.measure.harness import until_interrupted
    from foretoken.measure.machine import machine
    from foretoken.measure.plot import plot as draw
    from foretoken.measure.results import write_lines

    pair, methods = compared.load()
    lm = pair.engine.target.lm
    header: dict[str, Any] = {
        **machine(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "label": pair.label,
        "num_params": pair.num_params,
        **dict(zip(("target", "drafter"), options.resolve_models(compared.target, compared.drafter), strict=True)),
        "execution": lm.execution,
    }
    ids = encoded(pair.engine, texts, work.max_new_tokens)
    done: list[Measurement] = []
    runs = compare(methods, ids, compared.temperatures, work.max_new_tokens, work.rounds, work.seed, options.progress)
    interrupted = until_interrupted(runs, done)
    options.progress("")
    rows = summarise(done)
    counts = {"max_new_tokens": work.max_new_tokens, "num_prompts": len(ids), "rounds": work.rounds, "seed": work.seed}
    counts |= {"top_p": compared.top_p}
    try:
        write_lines(out, (each.record() for each in done), header)
        print(f"{len(done)} runs written to {out}", file=sys.stderr)
        if plot is not None:
            draw(bars(rows), f"{header['target']}, {pair.label}", plot)
    finally:  # what was measured is shown where it cannot be written
        show(report(header | counts, rows, interrupted), json_, markdown)


app.command("decoding")(bench)
app.command()(acceptance)
