"""Rows of p and q after every path of tokens, and the law of a text of which a step writes the beginning."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from foretoken.audit.branching import outcomes
from foretoken.core.laws import IID
from foretoken.core.tree import Siblings, TokenTree, chain
from foretoken.core.verifier import Verifier
from foretoken.core.walk import walk_of
from tables import each

Path = tuple[int, ...]
Table = dict[Path, Tensor]
Outcomes = dict[tuple[Path, int | None], float]  # accepted tokens, and the token after them; None: there is none


def paths(v: int, length: int) -> Iterable[Path]:
    return itertools.product(range(v), repeat=length)


def table(v: int, depth: int, rng: torch.Generator, sharpness: float = 1.5) -> Table:
    """A row after every path of up to `depth` tokens."""
    every = [path for n in range(depth + 1) for path in paths(v, n)]
    return {path: torch.softmax(sharpness * torch.randn(v, generator=rng, dtype=torch.float64), 0) for path in every}


def pair(v: int, length: int, seed: int) -> tuple[Table, Table]:
    """p and q after every path of up to `length` tokens."""
    rng = torch.Generator().manual_seed(seed)
    return table(v, length, rng), table(v, length, rng)


def chance(of: Table, path: Path, first: int = 0) -> float:
    """The probability of a path's tokens from number `first` on, after those before."""
    return math.prod(float(of[path[:i]][path[i]]) for i in range(first, len(path)))


def add_text(law: dict[Path, float], out: Path, prob: float, p: Table, length: int) -> None:
    """Add a step's outcome to the law of texts of `length` tokens; after it the target writes."""
    for rest in paths(len(p[()]), length - len(out)):
        law[*out, *rest] = law.get((*out, *rest), 0.0) + prob * chance(p, (*out, *rest), len(out))


def deviation(law: dict[Path, float], p: Table) -> float:
    return max(abs(law[path] - chance(p, path)) for path in law)


def backwards(path: Path, accept: list[float], rows: list[Tensor]) -> Outcomes:
    """Scan from the whole path back: stop at t with accept[t], at 0 for certain, and draw the next token from rows[t].

    Where a row is 0 nothing is drawn after one token more.
    """
    found: Outcomes = defaultdict(float)
    reached = 1.0
    for t in reversed(range(len(path) + 1)):
        total = float(rows[t].sum())
        stops = reached * (accept[t] if t else 1.0)
        for x in range(len(rows[t])):
            if total > 0:
                found[path[:t], x] += stops * float(rows[t][x]) / total
        if total == 0:
            found[path[: t + 1], None] += stops
        reached -= stops
    return found


def drafted(q: Table, tokens: Path) -> TokenTree:
    """A chain of drafts from q."""
    records = [Siblings((x,), q[tokens[:i]], IID(1)) for i, x in enumerate(tokens)]
    return chain([0, *tokens], [*records, None])


def steps(rule: Verifier, p: Table, q: Table, tokens: Path) -> Iterable[tuple[tuple[Path, int], float]]:
    """((accepted tokens, the token after them), probability) given a chain of drafts."""
    tree = drafted(q, tokens)
    for (path, token), prob in outcomes(lambda rng: walk_of(rule)(tree, each(lambda node: p[tokens[:node]]), rng)):
        assert path == tuple(range(len(path)))
        yield (tokens[: len(path) - 1], token), prob
