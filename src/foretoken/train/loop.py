"""Training one head: checkpoints that resume, one record a report."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.files import write
from foretoken.heads.make import Head
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.train.data import Batches
from foretoken.train.losses import LOSSES, Texts
from foretoken.train.states import StateCache

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Plan:
    """What decides a run's outcome; a checkpoint resumes only under the same plan.

    Defaults are Gumiho's (paper 004, Table 5). clip: bound of each gradient value.
    """

    kind: str
    tokens: int
    data: str
    seed: int = 0
    batch: int = 4
    length: int = 2048
    lr: float = 2e-4
    warmup: float = 0.05
    clip: float = 0.5
    layers: int | None = None
    levels: int | None = None


@dataclass(frozen=True)
class Report:
    step: int
    steps: int
    tokens: int
    loss: float
    tokens_per_s: float
    left_s: float


class Trainer:
    """Steps through `batches`; `save` writes DIR/checkpoint.pt under a temporary name first.

    cache: where the target's states are read and kept; None: computed anew each time.
    """

    def __init__(
        self, head: Head, lm: CausalLM, batches: Batches, plan: Plan, folder: Path, cache: StateCache | None = None
    ) -> None:
        self.head, self.lm, self.batches, self.plan, self.folder = head, lm, batches, plan, folder
        self.cache = cache
        per_step = batches.batch * min(plan.length, max(len(row.ids) for row in batches.data))
        self.steps = max(1, round(plan.tokens / per_step))
        self.step, self.tokens, self.smooth = 0, 0, math.nan
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.layers = tuple(dict.fromkeys((*head.feature_layers, FINAL)))

    @torch.no_grad()
    def texts(self, step: int) -> Texts:
        return read_texts(self.head, self.lm, *self.batches[step], self.cache)

    def prepare(self) -> None:
        """Before the first step: the scale of the states, and what starts as a copy of the target's."""
        texts = self.texts(0)
        self.head.feature_scale = float(texts.states[texts.mask].double().square().mean().sqrt())
        start_from_target(self.head)

    def rate(self, progress: float) -> float:
        """Linear warm-up, then linear decay to a tenth."""
        return self.plan.lr * min(1.0, progress / self.plan.warmup, 1.0 - 0.9 * progress)

    def run(self, report: Callable[[Report], None], every: int = 20, save_s: float = 60.0) -> None:
        """To the end. On an interrupt the last checkpoint stands; the same command goes on from it."""
        began, first, saved = time.monotonic(), self.tokens, time.monotonic()
        self.head.train()
        while self.step < self.steps:
            texts = self.texts(self.step)
            rng = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + self.step)
            loss: Tensor = LOSSES[self.plan.kind](self.head, texts, rng)
            if not bool(torch.isfinite(loss)):
                raise ForetokenError(f"The loss is {float(loss.detach())} at step {self.step}: lower --lr.")
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_value_(self.head.parameters(), self.plan.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate((self.step + 1) / self.steps)
            self.optimizer.step()
            value = float(loss.detach())
            self.smooth = value if math.isnan(self.smooth) else 0.95 * self.smooth + 0.05 * value
            self.step += 1
            self.tokens += int(texts.mask.sum())
            speed = (self.tokens - first) / (time.monotonic() - began)
            if self.step % every == 0 or self.step == self.steps:
                left = (self.steps - self.step) * (self.tokens / self.step) / speed
                report(Report(self.step, self.steps, self.tokens, self.smooth, speed, left))
            if time.monotonic() - saved > save_s or self.step == self.steps:
                self.save()
                saved = time.monotonic()

    def save(self) -> None:
        state = {
            "plan": asdict(self.plan),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "feature_scale": self.head.feature_scale,
            "step": self.step,
            "tokens": self.tokens,
            "smooth": self.smooth,
        }
        write(self.folder / CHECKPOINT, lambda path: torch.save(state, path))

    def resume(self) -> bool:
        """Whether there was a checkpoint to go on from. Raises ForetokenError for one of another plan."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return False
        try:
            state: dict[str, Any] = torch.load(path, map_location=self.lm.device, weights_only=True)
        except Exception as error:
            raise ForetokenError(
                f"{path} cannot be read ({type(error).__name__}): remove it to start again."
            ) from error
        if state["plan"] != asdict(self.plan):
            changed = [key for key, value in asdict(self.plan).items() if state["plan"].get(key) != value]
            raise ForetokenError(
                f"{path} was made with another {', '.join(changed)}: use those options again, or another --out."
            )
        self.head.load_state_dict(state["head"])
        self.head.feature_scale = state["feature_scale"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.smooth = state["step"], state["tokens"], state["smooth"]
        return True


@torch.no_grad()
def read_texts(head: Head, lm: CausalLM, ids: Tensor, mask: Tensor, cache: StateCache | None = None) -> Texts:
    """The target's states on whole texts, padded on the right, by one plain forward or from the cache."""
    ids, mask = ids.to(lm.device), mask.to(lm.device)
    layers = (*head.feature_layers, FINAL)
    states = lm.states(ids, layers) if cache is None else cache(ids, mask, layers)
    final = states[..., -lm.hidden_size :]
    return Texts(ids, mask, states[..., : -lm.hidden_size].float(), final.float())


@torch.no_grad()
def start_from_target(head: Head) -> None:
    """LM heads of a head's own start as the target's, as published."""
    weight = getattr(head.target.unembedding, "weight", None)
    if weight is None:
        return
    for linear in head.own_lm_heads():
        if linear.weight.shape == weight.shape:
            linear.weight.copy_(weight * head.feature_scale * head.target.logit_scale)
