"""Engines and decoders small enough for the audit to run on in seconds."""

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.audit import decoding
from foretoken.build import load
from foretoken.core.policy import TreePolicy
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.engine import Engine
from models_zoo import tiny


def tiny_engine(**settings: object) -> Engine:
    """Two random models of other families, whose distributions differ much."""
    return load(tiny("llama"), **{"drafter": tiny("qwen2"), "tree": "kary:2x2", **settings})


def table_decoding(
    verifier: Verifier, family: LawFamily, policy: TreePolicy, v: int, seed: int = 0, **settings: object
) -> decoding.Decoding:
    target, drafter = decoding.table_pair(policy, family, v, seed)
    return decoding.Decoding(target, drafter, verifier, **settings)


def each(p: Callable[[int], Tensor]) -> Callable[[range], Tensor]:
    """A walk's probabilities from those of one node."""
    return lambda nodes: torch.stack([p(node) for node in nodes])
