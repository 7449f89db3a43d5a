"""Thomas and Pal 2025, Table 4: i.i.d. paths of several steps, as SpecTr drafts them, verified node by node."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from benchmarks.papers.run import Run
from benchmarks.papers.shaped import Likeliest, ShapedDrafter
from benchmarks.papers.steps import Course, run
from foretoken.core.laws import IID, Law
from foretoken.core.policy import Plan
from foretoken.core.shapes import Float
from foretoken.core.verifier import LawFamily
from foretoken.decode import NoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.names import verifier_named

# Citations: number of paths -> tokens a call, speed-up over plain decoding (Gemma-2 27B/2B).
TABLE_4 = {2: (2.23, 1.84), 3: (2.54, 1.89), 4: (2.65, 1.98)}
RULES = ("rrs", "kseq", "global-resolution-thinned", "transport", "block-transport")
DEPTH = 4  # the paper's block length is lost in its stored text, and so is its temperature
TOP = 10  # tokens of q that are drafted from: what solvers of the general problem can take
TEMPERATURE = 1.0
WHOLE, QUICK = (31, 128), (1, 8)  # prompts, and tokens of each


@dataclass(frozen=True)
class Paths:
    """`number` i.i.d. paths of `depth` tokens: a node that m of them pass through gets m draws. State: (m, level)."""

    number: int
    depth: int
    weighs: bool = field(default=False, init=False)

    def root(self, past: None) -> tuple[int, int]:
        return self.number, 0

    def past(self, states: Sequence[tuple[int, int]]) -> None:
        return None

    @property
    def max_nodes(self) -> int:
        return 1 + self.number * self.depth

    @property
    def max_draws(self) -> int:
        return self.number

    def sizes(self) -> tuple[int, ...]:
        return tuple(self.number * d for d in range(self.depth + 1))

    def laws(self, family: LawFamily) -> tuple[Law, ...]:
        return (family(self.number),)

    def at(self, family: LawFamily, temperature: float) -> "Paths":
        return self

    def plan(
        self, states: Sequence[tuple[int, int]], q: Float[Tensor, "m v"] | None, family: LawFamily
    ) -> list[Plan | None]:
        return [Plan(IID(m), level) for m, level in states]

    def grow(
        self, plans: Sequence[Plan], q: Float[Tensor, "m v"] | None, draws: Sequence[tuple[int, ...]]
    ) -> list[list[tuple[int, int]]]:
        return [[(row.count(x), plan.memo + 1) for x in row] for plan, row in zip(plans, draws, strict=True)]

    def select(self, states: Sequence[tuple[int, int]], first: int) -> list[int]:
        return [i for i in range(first, len(states)) if states[i][1] < self.depth]

    def keep(self, states: Sequence[tuple[int, int]]) -> None:
        return None


def table4(run_: Run) -> None:
    engine, prompts = run_.pair()
    prompts = prompts[: run_.count(WHOLE[0], QUICK[0])]
    num_tokens = run_.count(WHOLE[1], QUICK[1])
    inner = engine.drafter
    assert isinstance(inner, LMDrafter)
    columns = ["paths", "paper", "paper, x plain", *(f"{rule}{what}" for rule in RULES for what in ("", ", x plain"))]
    table = run_.report.table(f"Tokens a call: i.i.d. paths of {DEPTH} tokens, top {TOP} of q", columns, 2)
    run_.progress("plain decoding")
    course = Course(engine.target, prompts, num_tokens, batch=1, seed=run_.seed)
    plain = replace(engine, drafter=NoDrafter())
    plain_s, alone = 0.0, 0  # of steps after the prompt was read, as below
    for i, prompt in enumerate(prompts):
        seed = run_.seed + i
        stats = plain.generate(prompt, max_new_tokens=num_tokens, temperature=TEMPERATURE, seed=seed).stats
        plain_s += stats.wall_s - stats.ttft_s
        alone += stats.num_tokens - stats.num_first
    for number, (tokens, speed) in TABLE_4.items():
        cells: list[str | float | None] = []
        for rule in RULES:
            run_.progress(f"{number} paths: {rule}")
            verifier = verifier_named(rule)
            drafter = ShapedDrafter(inner.lm, Paths(number, DEPTH), IID, inner.vocab_size, Likeliest(TOP))
            sample = run(drafter, verifier, TEMPERATURE, course)
            cells += [
                f"{sample.efficiency:.2f} ± {sample.error:.2f}",
                plain_s / alone * float(sample.tokens.sum()) / sample.wall_s if alone else None,
            ]
        table.add(str(number), tokens, speed, *cells)
    table.notes += [
        "Paper: Gemma-2 27B/2B with global resolution, and plain sampling where that fails; ours: the pair named "
        "above, on which a plain step is cheap. Paths that begin alike share their nodes.",
        "global-resolution-thinned is global resolution made exactly lossless. transport needs no cut of q, and no "
        "solver: its acceptance is the optimum that the paper's method approximates, node by node; block-transport "
        "decides over whole paths. x plain: wall clock of all steps, one sequence at a time, the prompt read before.",
    ]
