"""What every draft head offers: the rows that draft with it and, where it is published by itself, its layout."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_choice
from foretoken.core.shapes import Int
from foretoken.heads import HEADS
from foretoken.models.features import FINAL
from foretoken.models.kernel_layers import KernelLayers
from foretoken.models.parts import TargetParts
from foretoken.models.static import StaticForward

if TYPE_CHECKING:
    from foretoken.heads.checkpoint import Checkpoint
    from foretoken.heads.rows import HeadRows

Backend = KernelLayers | StaticForward  # what runs a head's layers


class Head(nn.Module, ABC):
    """A draft head of one target.

    kind: its name.
    parallel_from: number of levels that are drafted one after the other. All levels below these are drafted at once,
        without the tokens drafted between. None where every level depends on the tokens above it.
    target: what the head borrows of its target.
    depth: number of levels that it can draft, None for any.
    feature_layers: the target's layers whose hidden states it reads, see models/features.py.
    feature_scale: what the target's states are divided by inside the head, so that noise and losses mean the same for
        any target.
    rotary: the rotary angles of its positions; the target's, where its checkpoint names none of its own.
    window: how many positions a node sees in its layers, its own included; None: all before it.
    """

    kind: ClassVar[str]
    parallel_from: ClassVar[int | None] = None
    depth: int | None = None
    feature_layers: tuple[int, ...] = (FINAL,)
    feature_scale: float = 1.0
    window: int | None = None

    def __init__(self, parts: TargetParts) -> None:
        """Make a head without weights of its own; parts: what it borrows of its target."""
        super().__init__()
        self.target = parts
        self.rotary = parts.rotary

    @property
    def columns(self) -> Int[Tensor, " c"] | None:
        """The target ids of the vocabulary that the head scores [c], None where that is the target's."""
        return None

    @abstractmethod
    def open(self, batch: int, slots: int, backend: Backend | None) -> "HeadRows":
        """Return the rows of a batch, none of which is in use yet.

        batch: the largest number of sequences.
        slots: the largest number of tokens of a sequence, tree nodes included.
        backend: what runs the head's layers: the compiled kernel with the head's weights, or forwards that are recorded
            on a GPU; None: plain torch. Heads that have only plain torch ignore it.
        """


class PublishedHead(Head):
    """A head that is trained for a target and published by itself.

    kind: its name in HEADS.
    marks: regular expressions that tell its published layout: each matches the beginning of some key of a checkpoint.
    file: name of the weights' file in that layout.
    least_levels: smallest number of levels that a new head can have; None where the head drafts to any depth.
    """

    marks: ClassVar[tuple[str, ...]]
    file: ClassVar[str] = "model.safetensors"
    least_levels: ClassVar[int | None] = None

    @classmethod
    @abstractmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "PublishedHead":
        """Return an untrained head of the published sizes.

        parts: what the head borrows of its target.
        layers, levels, tokens: as in `new_head`, which has checked them; None: as published.
        """

    @classmethod
    @abstractmethod
    def read(cls, checkpoint: "Checkpoint") -> "PublishedHead":
        """Return a head with the sizes of a published `checkpoint`, whose weights are not in it yet.

        Raises ForetokenError where their sizes do not fit the target.
        """

    def published_weights(self) -> dict[str, Tensor]:
        """Return all weights as they are published; the modules have the published names."""
        return self.state_dict()

    def config(self) -> dict[str, Any]:
        """Return the entries of config.json that tell what the shapes of the weights do not show."""
        return {}

    def own_lm_heads(self) -> list[nn.Linear]:
        """Return the LM heads of its own over tokens of the target; training starts them as the target's."""
        return []


def new_head(
    kind: str, parts: TargetParts, layers: int | None = None, levels: int | None = None, tokens: Tensor | None = None
) -> PublishedHead:
    """Return an untrained head on the target's device.

    kind: its name in HEADS.
    parts: what the head borrows of its target.
    layers: number of its decoder layers, or of blocks per MLP of Medusa and Hydra; None: as published.
    levels: number of levels that it can draft; None: as published.
    tokens: ids of the target's tokens that the head can draft [m], in ascending order; None: all of them.

    Raises ForetokenError for numbers that such a head cannot have.
    """
    check_sizes(kind, layers, levels, tokens is not None)
    return HEADS[kind].new(parts, layers, levels, tokens).to(device=parts.device)


def check_sizes(kind: str, layers: int | None, levels: int | None, trimmed: bool) -> None:
    """Refuse an unknown head, and numbers that such a head cannot have.

    kind, layers, levels: as in `new_head`.
    trimmed: whether it drafts some of the target's tokens alone.
    """
    check_choice("head", kind, HEADS)
    make = HEADS[kind]
    if make.least_levels is None and levels is not None:
        raise ForetokenError(f"Head {kind} drafts to any depth, so that it takes no number of levels.")
    if kind == "eagle3" and layers is not None:
        raise ForetokenError("Head eagle3 has one layer, so that it takes no number of layers.")
    if kind != "eagle3" and trimmed:
        raise ForetokenError(
            f"Head {kind} drafts all of its target's tokens: only eagle3 can have a trimmed draft vocabulary."
        )
    least = make.least_levels or 1
    if (layers is not None and layers < 1) or (levels is not None and levels < least):
        raise ForetokenError(f"Head {kind} needs at least 1 layer and {least} levels, not {layers} and {levels}.")
