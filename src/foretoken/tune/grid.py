"""What `foretoken tune` tries: configurations whose tokens/s a model predicts, and families that are run for that."""

import torch

from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.measure.machine import num_cores
from foretoken.names import usual_rule
from foretoken.recipe import Recipe
from foretoken.tune.acceptance import has_distribution
from foretoken.vocab.source import TranslatedSource

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
UNSURE = [f"chain:{d}@{c}" for d in (6, 12) for c in (0.4, 0.2, 0.1, 0.05, 0.02)]
BRANCHING = ("kary:2x1", "kary:2x2", "kary:2x3", "kary:3x2")
TOSSED = [(f"chain:{d}", a) for d in (1, 2, 3, 4) for a in (0.25, 0.5, 0.75)]
# Whose whole steps are timed before predicting: some depths of every kind of tree and rule.
PROBES = ("chain:1", "chain:4", "chain:12", "kary:2x1", "kary:2x3")
TOSSED_PROBES = (("chain:1", 0.5), ("chain:4", 0.75))
NODES_RUN, DRAFTS_RUN = (4, 8, 16, 32, 64), (1, 2, 4, 8, 16)


def modelled(engine: Engine, vocab: str | None, temperature: float) -> list[Recipe]:
    """Chains of the default rule first, whose costs method auto takes. At temperature 0 every rule is exact match, so
    one of them will do, and no coins are tossed."""
    if not has_distribution(engine):
        return [Recipe(f"chain:{d}", engine.verifier.name) for d in DEPTHS]
    chains, trees = (["block"], ["transport"]) if temperature == 0 else (["block", "rrsw"], ["transport", "hub"])
    tossed = TOSSED if temperature > 0 and at_the_same_time(engine) else []
    return [
        *(Recipe(f"chain:{d}", rule, vocab) for d in DEPTHS for rule in chains if d > 1 or rule == chains[0]),
        *(Recipe(tree, rule, vocab) for tree in UNSURE for rule in chains),
        *(Recipe(tree, rule, vocab) for tree in BRANCHING for rule in trees),
        *(Recipe(tree, "randomised", vocab, a) for tree, a in tossed),
    ]


def at_the_same_time(engine: Engine) -> bool:
    """Whether drafter and target can run side by side, without which no coin pays: docs/theory.md."""
    return engine.target.lm.device.type == "cpu" and torch.get_num_threads() == 1 < num_cores()


def probes(configurations: list[Recipe]) -> list[Recipe]:
    """The shallow ones of a kind first."""
    fixed = [c for tree in PROBES for c in configurations if c.tree == tree and c.draft_probability is None]
    return fixed + [c for c in configurations if (c.tree, c.draft_probability) in TOSSED_PROBES]


def families(engine: Engine, vocabs: list[str], temperature: float) -> list[list[Recipe]]:
    """Families of recipes by growing size: trees whose shape follows q, and chains of strings.

    vocabs: those of a drafter that has another vocabulary.
    """
    found = []
    for vocab in vocabs:
        if vocab != "tli":
            trees = [f"chain:{n}" for n in DRAFTS_RUN]
            found.append([Recipe(tree, usual_rule(Recipe(tree), vocab), vocab) for tree in trees])
    if (isinstance(engine.drafter, LMDrafter) and not vocabs) or "tli" in vocabs:
        vocab = "tli" if vocabs else None
        for kind in ("dynamic",) if temperature == 0 else ("dynamic", "budget"):  # the same at temperature 0
            trees = [f"{kind}:{n}" for n in NODES_RUN]
            found.append([Recipe(tree, usual_rule(Recipe(tree)), vocab) for tree in trees])
    return found


def able(engine: Engine, vocabs: list[str]) -> list[str]:
    """Without those that need tokens in common where there are none."""
    if not vocabs:
        return []
    source = engine.source
    assert isinstance(source, TranslatedSource)
    return [vocab for vocab in vocabs if source.has_common_tokens or vocab not in ("tli", "union")]
