"""Sun et al. 2024, SpecHub, Figures 4 and 5: p = (.1, .6, .3), q = (.5, .3, .2), 2 drafts; what each rule accepts."""

import torch

from benchmarks.exactly import enumerated
from benchmarks.papers.run import Run
from foretoken.core.laws import Hub, Law, WithoutReplacement, outcomes
from foretoken.verify import VERIFIERS

P, Q = (0.1, 0.6, 0.3), (0.5, 0.3, 0.2)
# Citations: figure, rule, law, accepted mass of a, b, c, cost (the probability that no draft is accepted).
FIGURES: tuple[tuple[str, str, Law, tuple[float, ...], float], ...] = (
    ("4a", "ot-lp", WithoutReplacement(2), (0.1, 0.6, 0.3), 0.0),
    ("4b", "rrsw", WithoutReplacement(2), (0.1, 0.54, 0.3), 0.06),
    ("5", "spechub", Hub(2), (0.1, 0.6, 0.3), 0.0),
)
# Citations: Q(first, second) as printed above each cell of Figures 4a and 5.
PAIRS_4 = {"ab": 0.3, "ac": 0.2, "ba": 0.214, "bc": 0.086, "ca": 0.125, "cb": 0.076}
PAIRS_5 = {"ab": 0.3, "ac": 0.2, "ba": 0.3, "ca": 0.2}
MOVED_CA_5 = 0.3  # what Figure 5 moves from the pair (c, a) to c


def spechub_figures(run: Run) -> None:
    p, q = (torch.tensor(x, dtype=torch.float64) for x in (P, Q))
    columns = [f"{what}, {who}" for what in ("a", "b", "c", "cost") for who in ("paper", "ours")]
    table = run.report.table(
        "Figures 4 and 5: accepted mass of tokens a, b, c, and cost", ["figure", "rule", "law", *columns], 4
    )
    for figure, name, law, accepted, cost in FIGURES:
        outcome = enumerated(VERIFIERS[name], law, p, q)
        both = [x for pair in zip(accepted, outcome.accepted.tolist(), strict=True) for x in pair]
        table.add(figure, name, law.name, *both, cost, 1 - outcome.acceptance)
    pairs = run.report.table("Figures 4 and 5: P(first, second draft)", ["law", "pair", "paper", "ours"], 4)
    for law, printed in ((WithoutReplacement(2), PAIRS_4), (Hub(2), PAIRS_5)):
        ours = {"".join("abc"[x] for x in draws): prob for draws, prob in outcomes(law, q)}
        for pair in sorted(printed | ours):
            pairs.add(law.name, pair, printed.get(pair), ours.get(pair))
    ca = Hub(2).prob(q, (2, 0))
    pairs.notes += [
        f"Figure 4a prints {PAIRS_4['cb']} above (c, b), and {0.075} below it: q(c) q(b) / (1 - q(c)) is "
        f"{WithoutReplacement(2).prob(q, (2, 1)):.4f}.",
        f"Figure 5 moves {MOVED_CA_5} from (c, a) to c, but that pair has only {ca:.1f}: a misprint, since with "
        f"{ca:.1f} its row of accepted masses comes out as printed.",
        "Section 4 calls the acceptance of one draft sum max(p, q); Theorem 3 has it right, sum min(p, q).",
    ]
