"""EAGLE and Gumiho: decoder layers on (embedding, state); Gumiho drafts its later levels with MLPs side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.heads.checkpoint import Checkpoint
from foretoken.heads.layer import Attend, DecoderLayer, LayerShape, layer_shape
from foretoken.heads.serial import SerialLayers, SerialRows
from foretoken.models.parts import TargetParts

if TYPE_CHECKING:
    from foretoken.heads.head import Backend


class Eagle(SerialLayers):
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
        head.take_own(checkpoint)
        return head, checkpoint.weights

    @classmethod
    def _more(cls, checkpoint: Checkpoint) -> dict[str, int]:
        """Further sizes that the head is made with."""
        return {}

    def joined(self, embedded: Float[Tensor, "*n d"], states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the layers read of tokens: the linear layer on their embeddings and the states before them."""
        return self.fc(torch.cat((embedded.to(states.dtype), states), -1))

    def step(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attends: list[Attend]) -> Tensor:
        x = self.joined(embedded, states)
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
    """Two layers draft the first two tokens, then MLPs side by side the next ones, each from both of these tokens.

    Of the tokens y, z at depths 1 and 2 below root x_{i+1}, drawn from the states o_i and o_{i+1} that stand for
    h_{i+1} and h_{i+2}, the MLPs read joined(y, o_i) and joined(z, o_{i+1}). MLP j gives the state of position
    i + 3 + j, from which the token at depth 3 + j is drawn, whatever stands at the depths between. Li et al. 2025,
    Gumiho, equations 7 to 10; blocks as in its Table 5 and its released code.
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
    def read(cls, checkpoint: Checkpoint) -> tuple["Eagle", dict[str, Tensor]]:
        if "foretoken_head" in checkpoint.config and checkpoint.config.get("mlp_input") != "fc":
            raise ForetokenError(
                f"{checkpoint.path} was trained by an earlier foretoken, whose MLPs do not read the drafted tokens as "
                "Gumiho's do, so that it would draft badly: train it again with foretoken train gumiho."
            )
        return super().read(checkpoint)

    def config(self) -> dict[str, Any]:
        return super().config() | {"mlp_input": "fc"}

    @classmethod
    def _more(cls, checkpoint: Checkpoint) -> dict[str, int]:
        return {"num_mlps": checkpoint.count(r"mlp\.(\d+)\."), "num_blocks": checkpoint.count(r"mlp\.0\.(\d+)\.")}

    def cut(self, levels: int) -> None:
        """Keep only the MLPs of the first `levels` levels. Raises ForetokenError where it has fewer."""
        most = self.SERIAL + len(self.mlp)
        if not self.SERIAL <= levels <= most:
            raise ForetokenError(f"Gumiho's head drafts {self.SERIAL} to {most} levels, not {levels}.")
        self.mlp, self.depth = self.mlp[: levels - self.SERIAL], levels

    def parallel(self, both: Float[Tensor, "*n w"]) -> Float[Tensor, "*n m d"]:
        """The states of all MLPs. both: `joined` of the first two drafted tokens, side by side."""
        return torch.stack([mlp(both) for mlp in self.mlp], -2)

    def open(self, batch: int, slots: int, backend: "Backend | None") -> "GumihoRows":
        return GumihoRows(self, batch, slots, backend)


class GumihoRows(SerialRows):
    """The first two levels by the serial part, all others at once by the MLPs below each depth-2 node."""

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
        owners = [[row.above(node)[Gumiho.SERIAL] for node in nodes] for row, nodes in zip(self.rows, new, strict=True)]
        self._run_parallel({(row, owner) for row, of_row in enumerate(owners) for owner in of_row})
        out = []
        for row, of_row, its_levels in zip(self.rows, owners, levels, strict=True):
            scores = [row.parallel[p][level - Gumiho.SERIAL] for p, level in zip(of_row, its_levels, strict=True)]
            out.append(torch.stack(scores) if scores else self._none())
            row.states += row.states[:1] * len(of_row)  # never read: their children are parallel too
        return out

    @torch.inference_mode()
    def parallel_scores(self, places: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        """Scores of all parallel levels below each (row, depth-2 node)."""
        self._run_parallel(set(places))
        return torch.stack([self.rows[row].parallel[node] for row, node in places])

    def _run_parallel(self, places: set[tuple[int, int]]) -> None:
        """All MLPs and their LM head, for every (row, depth-2 node) not known yet, in one call each."""
        new = sorted((row, node) for row, node in places if node not in self.rows[row].parallel)
        if not new:
            return
        paths = [(self.rows[row], self.rows[row].above(node)) for row, node in new]
        tokens = torch.tensor([[row.tokens[node] for node in path[1:]] for row, path in paths])
        embedded = self.head.embed(tokens.to(self.target.device))
        states = torch.stack([torch.stack([row.states[node] for node in path[:-1]]) for row, path in paths])
        if self.kernel is None:
            parallel = self.head.parallel(self.head.joined(embedded, states).flatten(-2))
        else:
            parallel = self.kernel.parallel(embedded, states)
        for (row, path), scores in zip(paths, self.head.logits(parallel), strict=True):
            row.parallel[path[-1]] = scores
