"""Toner et al. 2025: Lemmas 4.1 to 4.4 in numbers, Figures 3 and 4, and where a run departs from them."""

import torch
from torch import Tensor

from benchmarks.objective import OBJECTIVES, accepted, best, breakpoints, conditions
from benchmarks.papers.run import Run
from foretoken.audit import enumerate as exact
from foretoken.core.laws import Coins
from foretoken.verify import VERIFIERS

GRID = tuple(i / 10 for i in range(11))
LAMBDA = 0.6  # the paper's pair, OPT 6.7B and 2.7B
PAPER_FIGURE_4 = {0.0: 1.0, 0.8: 1.1, 1.0: 1.08}  # citations: section 4.2, "approximately"
STEPS, QUICK_STEPS = 200_000, 20_000


def randomised_drafting(run: Run) -> None:
    _lemmas(run)
    p, q = run.scored().rows(1.0)
    _figures(run, p, q)


def _lemmas(run: Run) -> None:
    run.progress("lemmas, by enumeration")
    rule = VERIFIERS["randomised"]
    pairs = exact.all_pairs(run.seed, most=run.count(4, 3), num_random=run.count(6, 1))
    table = run.report.table("Lemmas 4.1 to 4.4", ["lemma", "says", "checked on", "largest deviation"])
    rate, fidelity, falls = 0.0, 0.0, 0.0
    for p, q in pairs:
        p, q = p / p.sum(), q / q.sum()
        last = 1.0
        for a in GRID[1:]:
            law = Coins(a)(1)
            fidelity = max(fidelity, exact.deviation(rule, law, p, q))
            lemma = float(1 + a - (p - a * q).abs().sum()) / (2 * a)
            rate = max(rate, abs(_accept(p, q, a) - lemma))
            falls = max(falls, lemma - last)
            last = lemma
    table.add("4.1", "acceptance rate of a draft", f"{len(pairs)} pairs, 10 values of a", rate)
    table.add("4.1", "it falls in a", "the same", max(falls, 0.0))
    table.add("4.2", "the output is distributed as p", "the same, enumerated", fidelity)
    toys = [(p[None], q[None]) for p, q in pairs]
    wrong, worst = 0, 0.0
    for p, q in toys:
        p, q = p / p.sum(), q / q.sum()
        for lam in (0.2, 0.45, 0.6, 0.9):
            near = torch.tensor([1 - 1e-7, 1.0], dtype=torch.float64)
            below, at = OBJECTIVES["paper"](near, accepted(p, q, near), lam)
            margin = abs(conditions(p, q, lam).under - lam)
            wrong += int(margin > 1e-6 and bool(below > at) != (conditions(p, q, lam).under < lam))
            found = torch.tensor([best(p, q, lam, OBJECTIVES["paper"]).a], dtype=torch.float64)
            every = torch.cat([breakpoints(p, q), torch.linspace(0, 1, 501, dtype=torch.float64)])
            worst = max(worst, float(_lemma_4_4(p, q, found, lam) - _lemma_4_4(p, q, every, lam).min()))
    table.add("4.3", "a < 1 raises the paper's rate iff lambda > sum of q where p > q", f"{4 * len(toys)} cases", wrong)
    table.add("4.4", "the best a minimises abs(p - a q) + a (2 lambda - 1)", f"{4 * len(toys)} cases", worst)
    table.notes.append("4.3: number of cases in which the condition decides wrongly. 4.4: excess over a grid of 501 a.")


def _lemma_4_4(p: Tensor, q: Tensor, a: Tensor, lam: float) -> Tensor:
    return (p - a[:, None] * q).abs().sum(1) + a * (2 * lam - 1)


def _accept(p: Tensor, q: Tensor, a: float) -> float:
    """Of a draft, by Algorithm 2's step 5."""
    chance = torch.where(q > 0, (p / (a * q)).clamp(max=1), 0.0)
    return float((q * chance).sum())


def simulate(p: Tensor, q: Tensor, a: float, lam: float, num_steps: int, rng: torch.Generator) -> float:
    """Tokens over time of so many steps, in units of plain decoding, at random contexts; a step of its own each."""
    context = torch.randint(len(p), (num_steps,), generator=rng)
    drafted = torch.rand(num_steps, generator=rng) < a
    chance = torch.minimum(p, a * q).sum(1) / a if a > 0 else torch.zeros(len(p))
    hit = torch.rand(num_steps, generator=rng, dtype=torch.float64) < chance[context]
    return (num_steps + int((drafted & hit).sum())) / (num_steps + lam * int(drafted.sum()))


def _figures(run: Run, p: Tensor, q: Tensor) -> None:
    rng = torch.Generator().manual_seed(run.seed)
    grid = torch.tensor(GRID, dtype=torch.float64)
    z = accepted(p, q, grid)
    table = run.report.table(
        f"Figures 3 and 4 on our pair, lambda = {LAMBDA}: one draft a step",
        ["a", "acceptance of a draft", "paper's formula", "tokens over time", "simulated", "paper, figure 4 (OPT)"],
    )
    for i, a in enumerate(GRID):
        run.progress(f"simulating a = {a:g}")
        table.add(
            f"{a:g}",
            float(z[i]) / a if a else None,
            *(float(objective(grid, z, LAMBDA)[i]) for objective in OBJECTIVES.values()),
            simulate(p, q, a, LAMBDA, run.count(STEPS, QUICK_STEPS), rng),
            PAPER_FIGURE_4.get(a),
        )
    c = conditions(p, q, LAMBDA)
    for name, bound in (("paper", c.paper), ("throughput", c.corrected)):
        found = best(p, q, LAMBDA, OBJECTIVES[name])
        table.notes.append(
            f"{name}: best a = {found.a:.3f}, {found.value:.3f} of plain decoding; a < 1 wins iff "
            f"{c.under:.3f} < {bound:.3f}."
        )
    table.notes += [
        "All in units of plain decoding's tokens/s. The simulation tosses the coins and adds up tokens and time: it "
        "agrees with tokens over time, and the paper's mean of rates is above or below it between the ends.",
        "Acceptance of a draft here is its mean over contexts; the paper's Figure 3 is of one prompt.",
    ]
