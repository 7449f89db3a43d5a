"""The guarantee of our kernel: scores do not depend, bit for bit, on what is computed beside them.

It holds for models that run in our compiled kernel (`CausalLM.execution` is "kernel"), in float32 or bfloat16. There
the scores after a token are the same bits whether the token is read alone, as a node of a token tree of any shape, or
beside other sequences of a batch. Greedy text with draft tokens is then plain greedy text without any exception for
rounding. Other executions (torch, GPUs) have no such guarantee: their order of sums depends on the shape of a forward.
"""

import random

import torch
from torch import Tensor

from foretoken.audit.report import NONE, Check, Section, verdict
from foretoken.core.shapes import Float
from foretoken.core.tree import path_to
from foretoken.models.causal_lm import CausalLM

NODES = 12  # of a tree
TITLE = "Bit for bit"
KERNEL = "kernel"


def bit_exact(lm: CausalLM, texts: list[list[int]], seed: int) -> Section:
    """Compare the scores of random trees after texts: all trees in one batch, each alone, and each token by itself.

    lm: the target.
    texts: token ids of prompts.
    seed: of the trees' tokens and shapes.
    """
    method = (
        "Where our kernel runs, in float32 or bfloat16, the scores after a token are the same bits whether it is read\n"
        "alone, in a token tree, or in a batch. Other executions: up to rounding."
    )
    if lm.execution != KERNEL:
        detail = f"does not apply: the target runs in {lm.execution}, which has no such guarantee"
        return Section(TITLE, method, (Check("scores of trees", NONE, detail, {"execution": lm.execution}),))
    rng = random.Random(seed)
    trees = [[rng.randrange(lm.vocab_size) for _ in range(NODES)] for _ in texts]
    parents = [[rng.randrange(-1, node) for node in range(NODES)] for _ in texts]
    together = _scores(lm, texts, trees, parents)
    each = list(zip(texts, trees, parents, strict=True))
    checks = []
    for name, other in (
        ("token by token", [_by_token(lm, text, tree, above) for text, tree, above in each]),
        ("alone", [_scores(lm, [text], [tree], [above])[0] for text, tree, above in each]),
    ):
        same = sum(torch.equal(a[i], b[i]) for a, b in zip(together, other, strict=True) for i in range(NODES))
        count = NODES * len(texts)
        detail = f"{same} of {count} rows of scores equal those of trees in a batch of {len(texts)}"
        numbers = {"num_equal": same, "num_rows": count, "execution": lm.execution}
        checks.append(Check(name, verdict(same == count), f"{detail} ({KERNEL}, {lm.dtype})", numbers))
    return Section(TITLE, method, tuple(checks))


def _scores(
    lm: CausalLM, texts: list[list[int]], trees: list[list[int]], parents: list[list[int]]
) -> list[Float[Tensor, "n v"]]:
    """Return the logits after every node of a tree after each text [NODES, v], all trees in one forward."""
    rows = lm.open(len(texts), max(map(len, texts)) + NODES)
    for text in texts:
        rows.extend(rows.join(), text)
    return [logits.clone() for logits in rows.score(trees, parents)]


def _by_token(lm: CausalLM, text: list[int], tree: list[int], parents: list[int]) -> Float[Tensor, "n v"]:
    """Return what `_scores` does, of one text, by a forward for each token on the path to each node."""
    scores: list[Float[Tensor, " v"]] = []
    for node in range(NODES):
        rows = lm.open(1, len(text) + NODES)
        rows.extend(rows.join(), text)
        for place in path_to(parents, node):
            (logits,) = rows.score([[tree[place]]], [[-1]])
            if place == node:
                scores.append(logits[0].clone())
            rows.keep([[0]])
    return torch.stack(scores)
