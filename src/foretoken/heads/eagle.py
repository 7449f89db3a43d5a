"""EAGLE and Gumiho: decoder layers on (embedding, state); Gumiho drafts its later levels with MLPs side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.heads.checkpoint import Checkpoint
from foretoken.heads.layer import Attend, DecoderLayer, LayerShape, layer_shape
from foretoken.heads.serial import Serial, SerialRows
from foretoken.models.parts import TargetParts

if TYPE_CHECKING:
    from foretoken.heads.kernel import EagleKernel


class Eagle(Serial):
    """EAGLE-1/2: one decoder layer without input norm on Linear(embedding, state). Li et al. 2024, EAGLE."""

    kind = "eagle"
    marks = (r"fc\.weight$",)

    def __init__(self, parts: TargetParts, shape: LayerShape, num_layers: int = 1, bias: bool = True) -> None:
        super().__init__(parts, shape, num_layers)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=bias)
        self.layers = nn.ModuleList(DecoderLayer(shape, input_norm=i > 0) for i in range(num_layers))

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "Eagle":
        return cls(parts, layer_shape(parts), layers or 1)

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> tuple["Eagle", dict[str, Tensor]]:
        checkpoint.check("hidden size", checkpoint.size("fc.weight")[1] // 2, checkpoint.parts.hidden)
        shape, layers = checkpoint.layer_shape("layers.0."), checkpoint.count(r"layers\.(\d+)\.")
        head = cls(checkpoint.parts, shape, layers, bias="fc.bias" in checkpoint.weights, **cls._more(checkpoint))
        return head, checkpoint.weights

    @classmethod
    def _more(cls, checkpoint: Checkpoint) -> dict[str, int]:
        """Further sizes that the head is made with."""
        return {}

    def step(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attends: list[Attend]) -> Tensor:
        x = self.fc(torch.cat((embedded.to(states.dtype), states), -1))
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, cos, sin, attend)
        return x


class Block(nn.Module):
    """x + SiLU(Linear x); without the residual where the width changes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        self.residual = width == hidden

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.silu(self.linear(x))
        return x + y if self.residual else y


class Gumiho(Eagle):
    """Two layers draft the first two tokens, then MLPs side by side the next ones, each from (o_i, o_{i+1}).

    With o_i for h_{i+1} and o_{i+1} for h_{i+2}, MLP j gives the state of position i + 3 + j: the token at depth 3 + j
    below root x_{i+1}, whatever stands at the depths between. Li et al. 2025, Gumiho, s. 3.3; blocks as in its Table 5.

    Not yet the paper's equations 8 to 10, whose MLPs read FC(cat(e(y), o)) of both drafted tokens y in place of o.
    """

    kind = "gumiho"
    marks = (r"fc\.weight$", r"mlp\.")
    SERIAL: ClassVar[int] = 2  # levels drafted by the serial part
    least_levels = SERIAL + 1
    parallel_from = SERIAL

    def __init__(
        self, parts: TargetParts, shape: LayerShape, num_layers: int = 2, num_mlps: int = 5, num_blocks: int = 6,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(parts, shape, num_layers, bias)
        d = shape.hidden
        self.mlp = nn.ModuleList(
            nn.Sequential(*(Block(2 * d if i == 0 else d, d) for i in range(num_blocks))) for _ in range(num_mlps)
        )
        self.depth = self.SERIAL + num_mlps

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "Gumiho":
        return cls(parts, layer_shape(parts), layers or 2, 5 if levels is None else levels - cls.SERIAL)

    @classmethod
    def _more(cls, checkpoint: Checkpoint) -> dict[str, int]:
        return {"num_mlps": checkpoint.count(r"mlp\.(\d+)\."), "num_blocks": checkpoint.count(r"mlp\.0\.(\d+)\.")}

    def cut(self, levels: int) -> None:
        """Keep only the MLPs of the first `levels` levels. Raises ForetokenError where it has fewer."""
        most = self.SERIAL + len(self.mlp)
        if not self.SERIAL <= levels <= most:
            raise ForetokenError(f"Gumiho's head drafts {self.SERIAL} to {most} levels, not {levels}.")
        self.mlp, self.depth = self.mlp[: levels - self.SERIAL], levels

    def parallel(self, first: Float[Tensor, "... d"], second: Float[Tensor, "... d"]) -> Float[Tensor, "... m d"]:
        """The states of all MLPs from o_i and o_{i+1}."""
        both = torch.cat((first, second), -1)
        return torch.stack([mlp(both) for mlp in self.mlp], -2)

    def open(self, batch: int, slots: int, kernel: "EagleKernel | None") -> "GumihoRows":
        return GumihoRows(self, batch, slots, kernel)


class GumihoRows(SerialRows):
    """The first two levels by the serial part, all others at once by the MLPs of each depth-1 node."""

    head: Gumiho  # pyright: ignore[reportIncompatibleVariableOverride]

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ v"]]:
        new = [range(first, len(row.tree)) for row, first in zip(self.rows, firsts, strict=True)]
        levels = [[row.level(node) for node in nodes] for row, nodes in zip(self.rows, new, strict=True)]
        if all(level < Gumiho.SERIAL for of_row in levels for level in of_row):
            return super()._score(firsts)
        if any(level < Gumiho.SERIAL for of_row in levels for level in of_row):
            raise ForetokenError("A forward of Gumiho's head takes nodes of its serial or of its parallel levels only.")
        # Parallel levels need no slots: their nodes are in the tree as names only.
        pairs = [[row.above(node)[1] for node in nodes] for row, nodes in zip(self.rows, new, strict=True)]
        self._run_parallel({(row, pair) for row, of_row in enumerate(pairs) for pair in of_row})
        out = []
        for row, of_row, its_levels in zip(self.rows, pairs, levels, strict=True):
            scores = [row.parallel[p][level - Gumiho.SERIAL] for p, level in zip(of_row, its_levels, strict=True)]
            out.append(torch.stack(scores) if scores else self._none())
            row.states += row.states[:1] * len(of_row)  # never read: their children are parallel too
        return out

    @torch.inference_mode()
    def parallel_scores(self, pairs: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        """Scores of all parallel levels below each (row, depth-1 node)."""
        self._run_parallel(set(pairs))
        return torch.stack([self.rows[row].parallel[node] for row, node in pairs])

    def _run_parallel(self, pairs: set[tuple[int, int]]) -> None:
        """All MLPs and their LM head, for every pair not known yet, in one call each."""
        new = sorted((row, node) for row, node in pairs if node not in self.rows[row].parallel)
        if not new:
            return
        of_rows = [(self.rows[row], node) for row, node in new]
        first = torch.stack([row.states[row.tree.parents[node]] for row, node in of_rows])
        second = torch.stack([row.states[node] for row, node in of_rows])
        parallel = self.head.parallel if self.kernel is None else self.kernel.parallel
        logits = self.head.logits(parallel(first, second))
        for (row, node), scores in zip(of_rows, logits, strict=True):
            row.parallel[node] = scores
