"""What every draft head offers: the rows that draft with it and, where it is published by itself, its layout."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.heads import HEADS, check_head
from foretoken.models.features import FINAL
from foretoken.models.parts import TargetParts

if TYPE_CHECKING:
    from foretoken.heads.checkpoint import Checkpoint
    from foretoken.heads.kernel import EagleKernel
    from foretoken.heads.rows import HeadRows
    from foretoken.models.static import StaticForward

    Backend = EagleKernel | StaticForward


class Head(nn.Module, ABC):
    """A draft head of one target.

    kind: its name.
    parallel_from: number of levels that are drafted one after the other, before those that do not depend on the tokens
        between; None where every level depends on them.
    target: what the head borrows of its target.
    depth: number of levels that it can draft, None for any.
    feature_layers: the target's layers whose states it reads, see models/features.py.
    feature_scale: what states are divided by inside the head, so that noise and losses mean the same on any target.
    rotary: the angles of its positions; the target's, where its checkpoint names none of its own.
    """

    kind: ClassVar[str]
    parallel_from: ClassVar[int | None] = None
    depth: int | None = None
    feature_layers: tuple[int, ...] = (FINAL,)
    feature_scale: float = 1.0

    def __init__(self, parts: TargetParts) -> None:
        super().__init__()
        self.target = parts
        self.rotary = parts.rotary

    @abstractmethod
    def open(self, batch: int, slots: int, backend: "Backend | None") -> "HeadRows[Any]":
        """Rows of up to `batch` sequences of `slots` tokens each.

        backend: what runs the head's layers where that is not plain torch: the compiled kernel with the head's weights,
        or forwards that are recorded.
        """


class PublishedHead(Head):
    """A head that is trained for a target and published by itself.

    kind: its name in HEADS.
    marks: patterns of its published layout, each of which some key of a checkpoint begins with.
    file: name of the weights' file in that layout.
    least_levels: smallest number of levels that can be asked for; None where the head drafts to any depth.
    """

    marks: ClassVar[tuple[str, ...]]
    file: ClassVar[str] = "model.safetensors"
    least_levels: ClassVar[int | None] = None

    @classmethod
    @abstractmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "PublishedHead":
        """An untrained head of the published sizes, see `new_head`."""

    @classmethod
    @abstractmethod
    def read(cls, checkpoint: "Checkpoint") -> tuple["PublishedHead", dict[str, Tensor]]:
        """A head with the sizes of a published checkpoint, and the checkpoint's weights by the names of this module.

        Raises ForetokenError where they do not fit the target.
        """

    @staticmethod
    def published_key(key: str) -> str:
        """The published name of the weight that this module calls `key`."""
        return key

    def published_weights(self) -> dict[str, Tensor]:
        """All weights by their published names."""
        return {self.published_key(key): value for key, value in self.state_dict().items()}

    def config(self) -> dict[str, Any]:
        """Entries of config.json that tensors do not show."""
        return {}

    def own_lm_heads(self) -> list[nn.Linear]:
        """LM heads of its own over tokens of the target; they start as the target's."""
        return []


def new_head(
    kind: str, parts: TargetParts, layers: int | None = None, levels: int | None = None, tokens: Tensor | None = None
) -> PublishedHead:
    """An untrained head of this kind.

    layers: number of layers of the Transformer, or of blocks of a Medusa or Hydra MLP. levels: depth drafted.
    tokens: [m], the target's tokens that the head can draft, in ascending order; None: all of them.
    Raises ForetokenError for numbers that such a head cannot have.
    """
    check_head(kind)
    make = HEADS[kind]
    if make.least_levels is None and levels is not None:
        raise ForetokenError(f"Head {kind} drafts to any depth, so that it takes no number of levels.")
    if kind == "eagle3" and layers is not None:
        raise ForetokenError("Head eagle3 has one layer, so that it takes no number of layers.")
    if kind != "eagle3" and tokens is not None:
        raise ForetokenError(f"Head {kind} has its target's LM head: only eagle3 can have a trimmed draft vocabulary.")
    least = make.least_levels or 1
    if (layers is not None and layers < 1) or (levels is not None and levels < least):
        raise ForetokenError(f"Head {kind} needs at least 1 layer and {least} levels, not {layers} and {levels}.")
    return make.new(parts, layers, levels, tokens).to(device=parts.device)
