"""The guarantee of our kernel: scores do not depend, bit for bit, on what is computed beside them.

Scope: models that run in our compiled kernel (`CausalLM.execution` is "kernel": the Llama family on a CPU), in float32
or bfloat16. There the scores after a token are the same bits whether the token is read alone, as one of a chain of
draft tokens, or beside other sequences of a batch; greedy text with drafted chains is then plain greedy text without
any exception for rounding. The nodes of a tree that branches stand elsewhere in the sums of attention, so that their
scores may differ in the last bit; the sections on tree scores and greedy text hold for them. Other executions (torch,
GPUs) promise nothing of the kind: their order of sums depends on the shape of a forward.
"""

import random

import torch
from torch import Tensor

from foretoken.audit.report import OK, Check, Section, verdict
from foretoken.core.shapes import Float
from foretoken.models.causal_lm import CausalLM

TOKENS = 12  # of the chain
TITLE = "Bit for bit"
KERNEL = "kernel"


def bit_exact(lm: CausalLM, texts: list[list[int]], seed: int) -> Section:
    """Scores of a chain behind every text: token by token alone, as one forward alone, and in a batch of all texts.

    Args:
        lm: the target.
        texts: token ids of prompts.
        seed: of the chains' tokens.
    """
    method = (
        "Where our kernel runs, in float32 or bfloat16, the scores after a token are the same bits whether it is read\n"
        "alone, in a chain of draft tokens, or in a batch. Other executions and trees that branch: up to rounding."
    )
    if lm.execution != KERNEL:
        detail = f"does not apply: the target runs in {lm.execution}, which has no such guarantee"
        return Section(TITLE, method, (Check("scores of chains", OK, detail, {"execution": lm.execution}),))
    rng = random.Random(seed)
    chains = [[rng.randrange(lm.vocab_size) for _ in range(TOKENS)] for _ in texts]
    together = _scores(lm, texts, chains)
    checks = []
    for name, other in (
        ("token by token", [_by_token(lm, text, chain) for text, chain in zip(texts, chains, strict=True)]),
        ("alone", [_scores(lm, [text], [chain])[0] for text, chain in zip(texts, chains, strict=True)]),
    ):
        same = sum(torch.equal(a[i], b[i]) for a, b in zip(together, other, strict=True) for i in range(TOKENS))
        count = TOKENS * len(texts)
        detail = f"{same} of {count} rows of scores equal those of chains in a batch of {len(texts)}"
        numbers = {"num_equal": same, "num_rows": count, "execution": lm.execution}
        checks.append(Check(name, verdict(same == count), f"{detail} ({KERNEL}, {lm.dtype})", numbers))
    return Section(TITLE, method, tuple(checks))


def _scores(lm: CausalLM, texts: list[list[int]], chains: list[list[int]]) -> list[Float[Tensor, "n v"]]:
    """Logits after every token of a chain behind each text, all in one forward."""
    rows = lm.open(len(texts), max(map(len, texts)) + TOKENS)
    for text in texts:
        rows.extend(rows.join(), text)
    return [logits.clone() for logits in rows.score(chains, [range(-1, TOKENS - 1)] * len(texts))]


def _by_token(lm: CausalLM, text: list[int], chain: list[int]) -> Float[Tensor, "n v"]:
    """The same of one text, each token in a forward of its own."""
    rows, scores = lm.open(1, len(text) + TOKENS), []
    rows.extend(rows.join(), text)
    for token in chain:
        (logits,) = rows.score([[token]], [[-1]])
        scores.append(logits[0].clone())
        rows.keep([[0]])
    return torch.stack(scores)
