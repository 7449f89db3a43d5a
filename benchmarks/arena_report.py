"""The arena's figures: accepted draft tokens with their errors, by rule, tree and depth, and a plot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.contestants import Contestant
from foretoken.measure.plot import Line, Panel
from foretoken.measure.report import Report

BRANCHING = ("kary:", "delayed:")
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
NOTES = [
    "Expected draft tokens that a step accepts, the bonus not counted, at places of answers that the target gave; "
    "±: standard error over the answers, paired in differences. Trees are sampled, what is accepted of them is not.",
    "The best of several trees is flattered by up to about its error. Left out of these three tables are trees that "
    "draft a tenth more nodes than they may; budget:N does while it spends the advance of a text's first steps.",
]
OVER = 1.1  # times the nodes that a tree may draft


@dataclass(frozen=True, eq=False)
class Score:
    """What one contestant accepted: by text, each text's places averaged.

    accepted: expected draft tokens of a step [texts]. drafted: nodes of its trees, on average.
    survival: P(at least i draft tokens are accepted), i = 1, 2, ..
    """

    contestant: Contestant
    accepted: np.ndarray
    drafted: float
    survival: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.accepted.mean())

    @property
    def error(self) -> float:
        return error(self.accepted)


def error(values: np.ndarray) -> float:
    """The standard error of their mean; nan of one."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def shown(value: float, of: float, sign: str = "") -> str:
    """A value with its error, without it where there is none."""
    return f"{value:{sign}.2f}" + ("" if np.isnan(of) else f" ± {of:.2f}")


def difference(one: Score, other: Score) -> str:
    """What one accepts more than the other, on the same answers."""
    more = one.accepted - other.accepted
    return shown(float(more.mean()), error(more), "+")


def best(scores: Sequence[Score]) -> Score:
    """The score of the largest mean; of means that are equal up to rounding the first."""
    return max(scores, key=lambda score: round(score.mean, 9))


def by_player(scores: Sequence[Score]) -> dict[str, dict[int, Score]]:
    """Of every rule with its law, at every number of nodes, the score on its best tree of no more nodes."""
    found: dict[str, dict[int, Score]] = {}
    scores = [score for score in scores if score.drafted <= OVER * score.contestant.nodes]
    for player in dict.fromkeys(score.contestant.player for score in scores):
        mine = [score for score in scores if score.contestant.player == player]
        sizes = sorted({score.contestant.nodes for score in mine})
        found[player] = {n: best([score for score in mine if score.contestant.nodes == n]) for n in sizes}
    return found


def tables(report: Report, title: str, scores: Sequence[Score], usual: Sequence[Contestant]) -> None:
    """title: the pair and the temperature. usual: of every number of nodes what is drafted where nothing is named."""
    sizes = sorted({score.contestant.nodes for score in scores})
    base = {score.contestant.nodes: score for score in scores if score.contestant in usual}
    players = by_player(scores)
    table = report.table(f"{title}: the best beside the usual", ["nodes", "usual", "accepted", "best", "more"])
    for n in sizes:
        found = best([of[n] for of in players.values() if n in of])
        mine = base.get(n)
        table.add(
            *(n, None, None) if mine is None else (n, _name(mine), shown(mine.mean, mine.error)),
            *(_name(found), None if mine is None else difference(found, mine)),
        )
    table.notes = NOTES
    table = report.table(f"{title}: every rule on its best tree", ["rule", *(f"{n} nodes" for n in sizes)])
    for player, of in players.items():
        table.add(
            player, *(f"{shown(of[n].mean, of[n].error)} {of[n].contestant.tree}" if n in of else None for n in sizes)
        )
    table = report.table(f"{title}: the same, more than the usual accepts", ["rule", *(f"{n} nodes" for n in sizes)])
    for player, of in players.items():
        table.add(player, *(difference(of[n], base[n]) if n in of and n in base else None for n in sizes))
    for n in sizes:
        _trees(report, f"{title}, {n} nodes", [score for score in scores if score.contestant.nodes == n])
    for n in sizes:
        _depths(report, f"{title}, {n} nodes", [score for score in scores if score.contestant.nodes == n])


def _name(score: Score) -> str:
    return f"{score.contestant.tree} {score.contestant.player}"


def _trees(report: Report, title: str, scores: Sequence[Score]) -> None:
    trees = list(dict.fromkeys(score.contestant.tree for score in scores))
    table = report.table(f"{title}: accepted, and nodes drafted in brackets", ["rule", *trees])
    for player in dict.fromkeys(score.contestant.player for score in scores):
        mine = {score.contestant.tree: score for score in scores if score.contestant.player == player}
        table.add(player, *(f"{mine[t].mean:.2f} ({mine[t].drafted:.1f})" if t in mine else None for t in trees))


def _depths(report: Report, title: str, scores: Sequence[Score]) -> None:
    """All rules on the branching tree of a fixed shape on which most is accepted."""
    branching = [score for score in scores if score.contestant.tree.startswith(BRANCHING)]
    if not branching:
        return
    tree = best(branching).contestant.tree
    depths = [d for d in DEPTHS if d <= max(len(score.survival) for score in branching)]
    table = report.table(f"{title}: P(at least so many accepted) on {tree}", ["rule", *map(str, depths)])
    for score in branching:
        if score.contestant.tree == tree:
            cells = [float(score.survival[d - 1]) if d <= len(score.survival) else 0.0 for d in depths]
            table.add(score.contestant.player, *cells)


def panel(title: str, scores: Sequence[Score]) -> Panel:
    """Accepted draft tokens against nodes, a line per rule on its best trees."""
    styles, lines = ["-", "--", ":"], []
    for number, (player, of) in enumerate(by_player(scores).items()):
        values, errors = [score.mean for score in of.values()], [score.error for score in of.values()]
        look = {"style": styles[number // 10 % 3], "color": f"C{number % 10}"}
        lines.append(Line(player, list(of), values, errors, **look))
    return Panel(title, "draft tokens in the tree", "accepted draft tokens of a step", lines, "x")
