"""The training loop of one head, with checkpoints from which an interrupted run goes on."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.files import write
from foretoken.core.interrupts import Interrupts
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.head import PublishedHead
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.train.begin import Beginning, start_from_target
from foretoken.train.data import Batches
from foretoken.train.evaluate import Accuracy
from foretoken.train.folder import CHECKPOINT
from foretoken.train.losses import LOSSES, Texts
from foretoken.train.muon import Muon
from foretoken.train.states import StateCache

ADAMW, MUON = "adamw", "muon"
BESIDE_MUON = 0.3  # AdamW's rate for norms, biases and LM heads, as a share of Muon's rate for all other matrices
REGRESSION = 0.2  # share of the steps in which Gumiho's MLPs learn states alone: two of the published ten epochs
RESUMED = ("head", "optimizers", "feature_scale", "feature_sizes", "step", "tokens", "smooth")  # read of a checkpoint
EAGLE3_HEAD = 0.01  # as BESIDE_MUON, for the LM head of EAGLE-3, which starts as the target's and stays near it


@dataclass(frozen=True)
class Plan:
    """All that decides the outcome of a run. A run resumes from a checkpoint only under the same plan.

    kind: kind of the head.
    tokens: number of tokens to train on, prompts included, from which the number of steps follows; 0 until `train` has
        read the data.
    data: digest of the texts.
    target, begin: fingerprints of the target, and of the model or head that the head begins with; None: of none.
    seed: seed of the head's weights, of the order of the texts, and of noise.
    batch: texts per step.
    length: largest number of tokens of a text.
    lr: learning rate; 0 until `train` sets the usual one of the kind.
    warmup: share of the steps over which the rate rises.
    clip: bound of the absolute value of each number of the gradient.
    layers, levels: as in `new_head`.
    optimizer: adamw; or muon for matrices but LM heads, with AdamW for all other weights.
    draft_vocab: number of tokens that the head can draft; None: all.
    roots: share of the positions from which EAGLE-3's levels after the first are drafted, see `eagle3_loss`.

    Defaults are Gumiho's (Li et al. 2025, Table 5).
    """

    kind: str
    tokens: int = 0
    data: str = ""
    target: str = ""
    seed: int = 0
    batch: int = 4
    length: int = 2048
    lr: float = 0.0
    warmup: float = 0.05
    clip: float = 0.5
    layers: int | None = None
    levels: int | None = None
    optimizer: str = ADAMW
    begin: str | None = None
    draft_vocab: int | None = None
    roots: float = 1.0


@dataclass(frozen=True)
class Report:
    """The state of a training run after a step.

    step, steps: number of steps done, and of all steps.
    tokens: number of tokens that were learnt so far, without prompts and padding.
    loss: moving average of the loss.
    tokens_per_s: speed since this process began or resumed the run, in tokens per second.
    left_s: estimate of the time that remains, in seconds.
    accuracy: how well the head drafts on held-out texts; None where it was not measured at this step.
    """

    step: int
    steps: int
    tokens: int
    loss: float
    tokens_per_s: float
    left_s: float
    accuracy: Accuracy | None = None

    def text(self) -> str:
        """Return the report as a line for people."""
        line = f"step {self.step}/{self.steps}  loss {self.loss:.3f}  {self.tokens_per_s:,.0f} tokens/s"
        line += f"  {self.left_s / 60:.1f} min left"
        if self.accuracy is not None:
            shares = " ".join(f"{x:.2f}" for x in self.accuracy.greedy)
            line += f"  held-out accuracy by position {shares}, expected length {self.accuracy.expected_length:.2f}"
        return line

    def json(self) -> dict[str, Any]:
        """Return the report as an object for log.jsonl."""
        out = asdict(self)
        measured = out.pop("accuracy")
        return out if self.accuracy is None else {**out, **measured, "expected_length": self.accuracy.expected_length}


class Trainer:
    """A training run of one head: what it has done so far, and the steps that remain.

    step, steps: number of steps done, and of all steps.
    tokens: number of tokens that were learnt so far.
    smooth: moving average of the loss; NaN before the first step.
    """

    def __init__(
        self, head: PublishedHead, lm: CausalLM, batches: Batches, plan: Plan, folder: Path,
        cache: StateCache | None = None, begin: Beginning | None = None,
    ) -> None:  # fmt: skip
        """Prepare a run at step 0; call `resume` or `prepare` next, then `run`.

        head: the head, which is trained in place.
        lm: the target.
        batches: the training texts; batch i is that of step i.
        plan: the settings, complete.
        folder: existing folder in which checkpoints are written.
        cache: where the target's states are kept; None: they are computed anew at each step.
        begin: the model or head that the head begins with; None: none.
        """
        self.head, self.lm, self.batches, self.plan, self.folder = head, lm, batches, plan, folder
        self.cache, self.begin = cache, begin
        per_row = sum(len(row.ids) for row in batches.data) / len(batches.data)
        self.steps = max(1, round(plan.tokens / (batches.batch * per_row)))
        self.step, self.tokens, self.smooth = 0, 0, math.nan
        self.optimizers = _optimizers(head, plan.optimizer)

    def texts(self, step: int) -> Texts:
        """Return the texts of the step with index `step`, from 0 on, with the target's states."""
        return read_texts(self.head, self.lm, *self.batches[step], self.cache)

    @torch.no_grad()
    def prepare(self) -> None:
        """Set, before the first step, the scale of the states and all weights that do not start as noise.

        The scale is the root mean square of the target's final states in the first batch.
        """
        texts = self.texts(0)
        self.head.feature_scale = float(texts.states[texts.mask].double().square().mean().sqrt())
        start_from_target(self.head)
        if self.begin is not None:
            self.begin.fill(self.head)
        if isinstance(self.head, Eagle3):
            channels = texts.features[texts.mask].double().square().mean(0).sqrt().clamp(min=1e-6).float()
            self.head.normalise(channels)

    def loss(self, texts: Texts, rng: torch.Generator) -> Tensor:
        """Return the loss of a batch, as a scalar.

        Where the target is in bfloat16, so are the products, as published; weights and sums stay in float32.

        texts, rng: as in the losses of train/losses.py.
        """
        half = self.lm.dtype == torch.bfloat16
        further = {
            "eagle3": {"roots": self.plan.roots},
            "gumiho": {"regress_only": self.step < REGRESSION * self.steps},
        }
        with torch.autocast(self.lm.device.type, torch.bfloat16, enabled=half):
            return LOSSES[self.plan.kind](self.head, texts, rng, **further.get(self.plan.kind, {}))

    def rate(self, progress: float) -> float:
        """Return the learning rate: it rises linearly to `lr` in the warm-up, then falls linearly to a tenth of it.

        progress: share of the steps that are done, in (0, 1].
        """
        return self.plan.lr * min(1.0, progress / self.plan.warmup, 1.0 - 0.9 * progress)

    def run(
        self, report: Callable[[Report], None], every: int = 20, also_every: int | None = None, save_s: float = 60.0
    ) -> None:
        """Take all steps that remain.

        On an interrupt (Ctrl-C) the step that has begun is finished and saved, then KeyboardInterrupt is raised; the
        same command goes on from there. A second interrupt stops at once, and the last checkpoint stands.

        report: called with a report after the steps whose number is a multiple of `every` or `also_every`, and at the
            end.
        every, also_every: numbers of steps; also_every None: `every` alone.
        save_s: seconds between checkpoints; the last step writes one in any case.

        Raises ForetokenError where the loss is not finite.
        """
        with Interrupts() as interrupts:
            began, first, saved = time.monotonic(), self.tokens, time.monotonic()
            self.head.train()
            while self.step < self.steps:
                self._take_step()
                last = self.step == self.steps
                if self.step % every == 0 or self.step % (also_every or every) == 0 or last:
                    speed = (self.tokens - first) / (time.monotonic() - began)
                    left = (self.steps - self.step) * (self.tokens / self.step) / speed
                    report(Report(self.step, self.steps, self.tokens, self.smooth, speed, left))
                if interrupts.asked or time.monotonic() - saved > save_s or last:
                    self.save()
                    saved = time.monotonic()
                if interrupts.asked and not last:
                    raise KeyboardInterrupt

    def _take_step(self) -> None:
        texts = self.texts(self.step)
        loss = self.loss(texts, torch.Generator().manual_seed(self.plan.seed * 1_000_003 + self.step))
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ForetokenError(f"The loss is {value} at step {self.step}: lower --lr.")
        self.head.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(self.head.parameters(), self.plan.clip)
        for optimizer, share in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * self.rate((self.step + 1) / self.steps)
            optimizer.step()
        self.smooth = value if math.isnan(self.smooth) else 0.95 * self.smooth + 0.05 * value
        self.step += 1
        self.tokens += int(texts.mask.sum())

    def save(self) -> None:
        """Write the checkpoint, under a temporary name first, so that a crash leaves the one before."""
        state = {
            "plan": asdict(self.plan),
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "feature_scale": self.head.feature_scale,
            "mlp_input": self.head.config().get("mlp_input"),
            "feature_sizes": self.head.feature_sizes if isinstance(self.head, Eagle3) else None,
            "step": self.step,
            "steps": self.steps,
            "tokens": self.tokens,
            "smooth": self.smooth,
        }

        def to(path: Path) -> None:
            with path.open("wb") as file:  # by whose errors it is known why it cannot be written
                torch.save(state, file)

        write(self.folder / CHECKPOINT, to)

    def resume(self) -> bool:
        """Load the folder's checkpoint, and return whether there is one.

        Raises ForetokenError where it cannot be read, or was made under another plan or by an older version.
        """
        path = self.folder / CHECKPOINT
        if not path.exists():
            return False
        try:
            with ZipFile(path) as parts:  # torch does not look at the checksums
                if damaged := parts.testzip():
                    raise BadZipFile(damaged)
            state: dict[str, Any] = torch.load(path, map_location=self.lm.device, weights_only=True)
        except Exception as error:
            raise ForetokenError(
                f"{path} cannot be read ({type(error).__name__}): remove it to start again."
            ) from error
        if not isinstance(state, dict) or "plan" not in state:
            raise ForetokenError(f"{path} is no checkpoint of foretoken train: name another --out.")
        if "steps" not in state:
            raise ForetokenError(
                f"{path} was made by an earlier version, which took another number of steps: remove it to start again."
            )
        lost = [key for key in RESUMED if key not in state]
        if lost:
            raise ForetokenError(f"{path} lacks its {', '.join(lost)}: remove it to start again.")
        if state["plan"] != asdict(self.plan):
            changed = [key for key, value in asdict(self.plan).items() if state["plan"].get(key) != value]
            raise ForetokenError(
                f"{path} was made with another {', '.join(changed)}: use those options again, or another --out."
            )
        other = state.get("mlp_input") != self.head.config().get("mlp_input")
        if other or state["head"].keys() != self.head.state_dict().keys():
            raise ForetokenError(f"{path} is of the head as an earlier version had it: remove it to start again.")
        if isinstance(self.head, Eagle3):
            self.head.feature_sizes = state["feature_sizes"]
        self.head.load_state_dict(state["head"])
        self.head.feature_scale = state["feature_scale"]
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.smooth = state["step"], state["tokens"], state["smooth"]
        return True


def _optimizers(head: PublishedHead, name: str) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return the optimizers of a head's weights, each with its share of the learning rate; name: as in `Plan`."""

    def adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.0)

    if name != MUON:
        return [(adam(list(head.parameters())), 1.0)]
    heads = {id(linear.weight) for linear in head.own_lm_heads()}
    matrices, others, near = [], [], []
    for p in head.parameters():
        of_heads = near if isinstance(head, Eagle3) else others
        (of_heads if id(p) in heads else matrices if p.ndim == 2 else others).append(p)
    groups = [(Muon, matrices, 1.0), (adam, others, BESIDE_MUON), (adam, near, EAGLE3_HEAD)]
    return [(make(params), share) for make, params, share in groups if params]


@torch.no_grad()
def read_texts(head: PublishedHead, lm: CausalLM, ids: Tensor, mask: Tensor, cache: StateCache | None = None) -> Texts:
    """Return a batch of texts with the target's states in float32, by one plain forward or from the cache.

    head: the head, for the layers that it reads.
    lm: the target.
    ids: b texts, padded on the right to t tokens [b, t].
    mask: which tokens are learnt [b, t].
    cache: where the states are kept; None: they are computed.
    """
    ids, mask = ids.to(lm.device), mask.to(lm.device)
    layers = (*head.feature_layers, FINAL)
    states = lm.states(ids, layers) if cache is None else cache(ids, mask, layers)
    final = states[..., -lm.hidden_size :]
    return Texts(ids, mask, states[..., : -lm.hidden_size].float(), final.float())
