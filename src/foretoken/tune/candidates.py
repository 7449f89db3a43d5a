"""The recipes that `foretoken tune` tries for a drafter."""

from collections.abc import Sequence

import torch

from foretoken.core.errors import ForetokenError
from foretoken.engine import Engine
from foretoken.measure.machine import num_cores
from foretoken.names import usual_rule
from foretoken.recipe import KINDS, LOOKUPS, SAME, Recipe
from foretoken.vocab.source import TranslatedSource

# Names of tree policies: chains; chains that end where the drafter is unsure; trees of a fixed shape that branch.
CHAINS = [f"chain:{depth}" for depth in (1, 2, 3, 4, 6, 8, 12, 20)]
UNSURE = [f"chain:{depth}@{floor}" for depth, floor in ((6, 0.4), (10, 0.5), (12, 0.2), (20, 0.3))]
BRANCHING = ["kary:2x1", "kary:2x2", "kary:3x2"]
NODES = (8, 16, 32)  # draft tokens of trees that follow q
COINS = (0.25, 0.5, 0.75)  # draft probabilities of randomised drafting


def candidates(engine: Engine, vocabs: Sequence[str], temperature: float) -> list[Recipe]:
    """Return the recipes to try for the engine's drafter, each with the usual rule of its tree.

    vocabs: the methods to try for a drafter with another vocabulary, empty otherwise. Those that need tokens in common
        are left out where there are none.
    temperature: at which recipes are measured; some make sense above 0 only.

    Raises ForetokenError where none of these methods fits the drafter.
    """
    source, found = engine.source, []
    for vocab in vocabs or (None,):
        if isinstance(source, TranslatedSource) and vocab in ("tli", "union") and not source.has_common_tokens:
            continue
        kind = vocab or engine.kind
        trees = list(CHAINS)
        if not KINDS[kind].own_draws and kind not in LOOKUPS:  # its trees may follow its probabilities, and branch
            trees += [*UNSURE, *BRANCHING]
        if KINDS[kind].rule is None:
            trees += [f"{by_q}:{n}" for by_q in (("dynamic", "budget") if temperature else ("dynamic",)) for n in NODES]
        found += [Recipe(tree, usual_rule(Recipe(tree), kind), vocab) for tree in trees]
        if kind in (SAME, "tli") and temperature > 0 and at_the_same_time(engine):
            found += [Recipe(tree, "randomised", vocab, a) for tree in CHAINS[:2] for a in COINS]
    if not found:
        raise ForetokenError(f"Drafter {engine.drafter.name} shares no tokens with its target: take vocab slem.")
    return found


def at_the_same_time(engine: Engine) -> bool:
    """Whether the engine's drafter and target can run at the same time, without which no coin pays: docs/theory.md."""
    return engine.target.lm.device.type == "cpu" and torch.get_num_threads() == 1 < num_cores()
