"""What a step costs: forwards by nodes and context, measured, and what is left of whole steps, by depth.

    step of a tree with w_1, .., w_D nodes per level  =  target(1 + w_1 + .. + w_D) + drafter(1) + drafter(w_1) + ..
        + drafter(w_{D-1}) + plain + rest(D)

w: expected nodes (acceptance.py). Of a chain that may end early w_i is the probability of its i-th draft, which then
counts as so much of a forward and of a level. plain: what a plain step takes beyond its forward. rest(D): what drafting
D levels takes beyond forwards, by kind of tree and rule; below 0 where it saves something, as chains do, which are
drafted in one compiled call. With coins the rest has what of q is computed beside the target's forward.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import fsum
from statistics import median
from typing import Any

from foretoken.measure.forwards import OurPath, Place, measure
from foretoken.models.causal_lm import CausalLM
from foretoken.names import tree_policy
from foretoken.recipe import PLAIN, Recipe

NODES = (1, 2, 3, 5, 9, 15)
CONTEXTS = (128, 512)
ROUNDS = 5


def kind_of(recipe: Recipe) -> str:
    """What shares its overheads with other recipes."""
    return " ".join(filter(None, (recipe.vocab, recipe.tree.partition(":")[0], recipe.verifier)))


def most_nodes(recipe: Recipe) -> list[int]:
    """The most nodes that a recipe drafts at depth 1, 2, .."""
    if recipe.tree == PLAIN:
        return []
    return [below - above for above, below in pairwise(tree_policy(recipe.tree).sizes())]


@dataclass(frozen=True)
class ForwardCosts:
    """seconds[i][j]: of a forward with nodes[j] nodes after contexts[i] committed tokens."""

    nodes: Sequence[int]
    contexts: Sequence[int]
    seconds: Sequence[Sequence[float]]

    def at(self, nodes: int | float, context: int | float) -> float:
        """Linear between what was measured, and beyond it."""
        return _line(self.contexts, [_line(self.nodes, row, nodes) for row in self.seconds], context)

    def rows(self, model: str) -> list[dict[str, Any]]:
        """For people: milliseconds."""
        return [
            {"model": model, "context": context, **{str(n): 1000 * s for n, s in zip(self.nodes, row, strict=True)}}
            for context, row in zip(self.contexts, self.seconds, strict=True)
        ]


def _line(x: Sequence[int | float], y: Sequence[float], at: int | float) -> float:
    if len(x) == 1:
        return y[0]
    i = min(max(bisect_left(x, at), 1), len(x) - 1)
    return y[i - 1] + (y[i] - y[i - 1]) * (at - x[i - 1]) / (x[i] - x[i - 1])


def forward_costs(
    lms: Mapping[str, CausalLM], now: Callable[[], float], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds of a forward of every model, [context][nodes], medians of interleaved turns; as plain values."""
    limit = min([lm.context for lm in lms.values() if lm.context is not None], default=2**31) - max(NODES) - 1
    contexts = sorted({max(1, min(context, limit)) for context in CONTEXTS})
    places = [Place(nodes, context, 1) for context in contexts for nodes in NODES]
    times: dict[tuple[str, Place], list[float]] = {}
    for turn in measure({name: OurPath(lm) for name, lm in lms.items()}, places, ROUNDS, now, progress):
        times.setdefault((turn.name, turn.block.place), []).append(turn.result)
    return {
        name: {
            "nodes": list(NODES),
            "contexts": contexts,
            "seconds": [[median(times[name, Place(n, c, 1)]) for n in NODES] for c in contexts],
        }
        for name in lms
    }


def levels(widths: Sequence[float]) -> float:
    """Expected number of levels that are drafted."""
    return fsum(min(1.0, width) for width in widths)


@dataclass(frozen=True)
class StepCosts:
    """drafter: None where it is no model: its time is then in `rest`. context: tokens before a step, typically.

    plain, rest[kind]: seconds, see above; of some depths D, in between and beyond a line.
    """

    target: ForwardCosts
    drafter: ForwardCosts | None
    context: int | float
    plain: float = 0.0
    rest: Mapping[str, tuple[Sequence[int | float], Sequence[float]]] = field(default_factory=dict)

    def forwards(self, widths: Sequence[float]) -> float:
        """Seconds of a step inside forwards, with so many nodes expected at depth 1, 2, .."""
        drafting = 0.0
        if self.drafter is not None:
            for width, above in zip(widths, [1.0, *widths], strict=False):
                drafting += min(1.0, width) * self.drafter.at(max(1.0, above), self.context)
        return self.target.at(1 + sum(widths), self.context) + drafting

    def step(self, kind: str, widths: Sequence[float]) -> float:
        """Seconds of a step with a tree of this kind; of a plain one if there are no levels."""
        rest = _line(*self.rest[kind], levels(widths)) if widths else 0.0
        return self.forwards(widths) + self.plain + rest

    def calibrated(self, measured: Sequence[tuple[str, Sequence[float], float]]) -> "StepCosts":
        """With what is left of measured steps (kind, widths, seconds): a plain one, and some depths of every kind."""
        plain = next(seconds for _, widths, seconds in measured if not widths) - self.forwards([])
        rest: dict[str, tuple[list[float], list[float]]] = {}
        for kind, widths, took in sorted(measured, key=lambda x: levels(x[1])):
            if widths:
                depths, seconds = rest.setdefault(kind, ([], []))
                depths.append(levels(widths))
                seconds.append(took - self.forwards(widths) - plain)
        return replace(self, plain=plain, rest=rest)
