"""The run-time controller beside plain decoding and every fixed depth, in one interleaved run.

Three cases: the drafter named; a useless one, its weights random; and a text that is new at first and then repeats what
came before, under prompt lookup: what the target writes there is set by a processor, in all methods alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.bench.interleaved import Runs
from foretoken.choices import AUTO, METHODS
from foretoken.core.errors import ForetokenError
from foretoken.draft.auto import auto_drafter
from foretoken.draft.lm import LMDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.drafters import plain, with_tree
from foretoken.engine import Engine
from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import pack
from foretoken.names import tree_policy
from foretoken.profile import PLAIN
from foretoken.verify import VERIFIERS


@dataclass(frozen=True)
class Row:
    """vs_plain: the median of ratios, each of one prompt and round. vs_best: of tokens/s, to the best fixed one's."""

    name: str
    tokens_per_s: float
    vs_plain: float
    vs_best: float
    tokens_per_step: float


def rows(runs: Mapping[str, Runs]) -> list[Row]:
    """Fixed configurations, plain among them, then auto."""
    best = max(of.tokens_per_s for name, of in runs.items() if name != AUTO)
    plain_runs = runs[PLAIN].runs
    found = []
    for name, of in runs.items():
        ratios = [x.tokens_per_s / y.tokens_per_s for x, y in zip(of.runs, plain_runs, strict=True)]
        found.append(Row(name, of.tokens_per_s, median(ratios), of.tokens_per_s / best, of.tokens_per_step))
    return found


def methods(engine: Engine, trees: Sequence[str]) -> dict[str, Engine]:
    """Plain, the drafter with every tree, and the drafter under the controller."""
    deepest = with_tree(engine, METHODS[AUTO])
    sizes, device = tree_policy(METHODS[AUTO]).sizes(), engine.target.lm.device
    controlled = replace(deepest, drafter=auto_drafter(deepest.drafter, sizes, device), tree=AUTO)
    return {PLAIN: plain(engine), **{tree: with_tree(engine, tree) for tree in trees}, AUTO: controlled}


def useless(engine: Engine, seed: int) -> Engine:
    """The same with random weights in the drafter."""
    if not isinstance(engine.drafter, LMDrafter) or not isinstance(engine.drafter.lm, CausalLM):
        raise ForetokenError(f"Drafter {engine.drafter.name} has no weights: name a model folder, --drafter.")
    torch.manual_seed(seed)  # transformers draws initial weights from the global generator
    lm = engine.drafter.lm
    model = AutoModelForCausalLM.from_config(lm.model.config).to(device=lm.device, dtype=lm.dtype).eval()
    pack(model)
    return replace(engine, drafter=replace(engine.drafter, lm=CausalLM(model, "random weights")))


@dataclass(frozen=True)
class Replay:
    """A processor that leaves one token at each place: the one of `text`, prompt included."""

    text: list[int]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self.text[ids.shape[1]] if ids.shape[1] < len(self.text) else 0] = 0.0
        return kept


def changing(prompts: Sequence[list[int]], fresh: Sequence[list[int]], length: int) -> list[Replay]:
    """Each prompt, then `length` tokens of a text of its own, then the same again."""
    long = [text for text in fresh if len(text) >= length]
    if len(long) < len(prompts):
        raise ForetokenError(f"{len(long)} held-out texts have {length} tokens: lower --prompts or --max-new-tokens.")
    return [Replay([*ids, *text[:length], *text[:length]]) for ids, text in zip(prompts, long, strict=False)]


def by_lookup(engine: Engine) -> Engine:
    return replace(engine, drafter=NgramDrafter(tree_policy("chain:5")), verifier=VERIFIERS["exact-match"])


def halves(runs: Runs, length: int) -> tuple[float, float]:
    """Tokens a step in the first `length` tokens of a text, and after them."""
    first, second = [], []
    for run in runs.runs:
        for place, tokens in zip(accumulate(run.tokens), run.tokens, strict=True):
            (first if place <= length else second).append(tokens)
    return sum(first) / max(len(first), 1), sum(second) / max(len(second), 1)
