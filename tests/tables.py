"""Engines and decoders small enough for the audit to run on in seconds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.audit import decoding
from foretoken.audit.branching import outcomes
from foretoken.audit.decoding import Ids
from foretoken.build import load
from foretoken.core.draws import inverse_cdf
from foretoken.core.interfaces import Drafter, Target
from foretoken.core.laws import outcomes as law_outcomes
from foretoken.core.policy import TreePolicy
from foretoken.core.random import Random
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.core.walk import draw
from foretoken.decode import Decoder
from foretoken.engine import Engine
from models_zoo import tiny
from rates import summed


def tiny_engine(**settings: object) -> Engine:
    """Two random models of other families, whose distributions differ much."""
    return load(tiny("llama"), **{"drafter": tiny("qwen2"), "tree": "kary:2x2", **settings})


def table_decoding(
    verifier: Verifier, family: LawFamily, policy: TreePolicy, v: int, seed: int = 0, **settings: object
) -> decoding.Decoding:
    target, drafter = decoding.table_pair(policy, family, v, seed)
    return decoding.Decoding(target, drafter, verifier, **settings)


def off_target(case: decoding.Decoding) -> tuple[float, float]:
    """(largest deviation of a text's probability from the target's own, drafted tokens accepted), by enumeration."""
    law, accepted = decoding.enumerate_law(case)
    assert math.fsum(law.values()) == pytest.approx(1, abs=1e-12)
    return decoding.deviation(law, decoding.own_law(case)), accepted


AS_IT_IS = Sampling()


def decodings(
    make: Callable[[], Drafter],
    target: Target,
    verifier: Verifier,
    num_tokens: int,
    prompt: Ids = (0, 1),
    sampling: Sampling = AS_IT_IS,
    eos_ids: frozenset[int] = frozenset(),
    most_steps: int = 64,
) -> dict[tuple[Ids, tuple[tuple[Ids, Ids], ...]], float]:
    """{(new ids, (tokens of the tree, accepted nodes) of every step): probability}; whole decodings, each by a fresh
    decoder with a drafter of its own."""

    def run(rng: Random) -> tuple[Ids, tuple[tuple[Ids, Ids], ...]]:
        steps = []
        decoder = Decoder(
            target, make(), verifier, 1, 64, lambda seq, tree, score, path, token: steps.append((tree.tokens, path))
        )
        sequence = Sequence(list(prompt), sampling, rng, num_tokens, eos_ids)
        decoder.join(sequence)
        while decoder.sequences and len(steps) < most_steps:
            decoder.step()
        return tuple(sequence.ids[len(prompt) :]), tuple(steps)

    return summed(outcomes(run))


def trees(
    case: decoding.Decoding, prompt: tuple[int, ...] = (0, 1), past: object = None
) -> list[tuple[TokenTree, Any, float]]:
    """Every tree that the drafter proposes for one prompt with an account of `past`, and the account after it, with
    their probability."""

    def run(rng: Random) -> tuple[TokenTree, Any]:
        session: Any = case.drafter.open(1, 64)
        session.join()
        session.pasts = [past]
        tree = session.propose([Sequence(list(prompt), case.sampling, rng, 9)])[0]
        session.observe([], [tree], [(0,)])
        return tree, session.pasts[0]

    return [(tree, after, prob) for (tree, after), prob in outcomes(run)]


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is computed once for each value of its arguments, tensors on the CPU among them."""
    found: dict[tuple[object, ...], Any] = {}

    def call(*arguments: Any) -> Any:
        key = tuple((x.dtype, x.shape, x.numpy().tobytes()) if isinstance(x, Tensor) else x for x in arguments)
        if key not in found:
            found[key] = function(*arguments)
        return found[key]

    return call


enumerated_once = remembered(lambda law, q: list(law_outcomes(law, q)))


@dataclass(frozen=True)
class each:
    """The scores of a tree, or a walk's probabilities, from those of one node."""

    p_of: Callable[[int], Tensor]
    greedy: bool = False

    def __call__(self, nodes: range) -> Tensor:
        return torch.stack([self.p_of(node) for node in nodes])

    def p(self, nodes: range) -> Tensor:
        return self(nodes)

    def draw(self, node: int, rng: Random) -> int:
        return draw(self.p_of(node), rng)

    def argmax(self) -> list[int]:
        raise AssertionError


def walk_law(rule: Any, tree: TokenTree, p_of: Callable[[int], Tensor]) -> dict[tuple[Ids, int], float]:
    """{(accepted nodes, the token after them): probability} of a rule's walk through a tree."""
    return summed(outcomes(lambda rng: rule.walk(tree, each(p_of), rng)))


@dataclass(frozen=True)
class PlainNumbers:
    """A source of the same uniforms that only plain code can draw by, since they are no tensors."""

    source: Random
    gives_numbers: bool = False

    def uniforms(self, rows: int, columns: int) -> "Hidden":
        return Hidden(self.source.uniforms(rows, columns))


@dataclass(frozen=True)
class Hidden:
    """Uniforms that draw as the tensor `u` does, without being one."""

    u: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.u.shape)

    def __getitem__(self, index: Any) -> "Hidden":
        return Hidden(self.u[index])

    def choose(self, weights: Tensor) -> Tensor:
        return inverse_cdf(weights, self.u)
