"""What the decoding loop needs of a target and of a drafter; it sees nothing else of either.

Both hand out *sessions*: the state of one batch, row i of which belongs to sequence i of the lists they are called
with. Rows are joined at the end; when row i leaves, the last row takes its place.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from foretoken.core.laws import Law
from foretoken.core.sequence import Sequence
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.core.walk import NodeScores

Path = tuple[int, ...]  # tree nodes from the root down


@dataclass(frozen=True)
class Saved:
    """A copy of what a session keeps of a row's committed ids from `start` to `end`; parts: as the session made it."""

    start: int
    end: int
    parts: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@runtime_checkable
class TargetSession(Protocol):
    def join(self) -> None: ...

    def leave(self, row: int) -> None: ...

    def score(self, sequences: Seq[Sequence], trees: Seq[TokenTree]) -> Seq[NodeScores]:
        """The scores of every tree's nodes, by one forward; catches up with the committed ids by itself.

        The forward may run as late as the first use of the scores, which must come before `keep`.
        """
        ...

    def keep(self, paths: Seq[Path]) -> None:
        """Make each row's accepted path permanent and forget the rest of its tree."""
        ...


@runtime_checkable
class FeatureSession(TargetSession, Protocol):
    """A target's session that kept the hidden states of its forwards."""

    def features(self, sequences: Seq[Sequence]) -> list[Float[Tensor, "_ f"]]:
        """Those of every committed id but the last, after prefilling what is missing; none costs a forward again."""
        ...


@runtime_checkable
class DraftSession(Protocol):
    def join(self) -> None: ...

    def leave(self, row: int) -> None: ...

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        """One tree per sequence, rooted at its last committed id."""
        ...

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Called after every step, once the sequences hold the new tokens, with the accepted nodes of its trees."""
        ...


@runtime_checkable
class PrefixSession(Protocol):
    """A session that can read the beginning of a row's text in pieces, and hand it to another session of its kind."""

    def read(self, row: int, ids: Seq[int]) -> None:
        """Read what the row has not read of these ids, with which its text begins; its last id is not among them."""
        ...

    def save(self, row: int, start: int, end: int) -> Saved | None:
        """A copy of what is kept of the row's ids [start, end); None where it has not read so far."""
        ...

    def restore(self, row: int, saved: Saved) -> None:
        """Take over what another row kept, of the same ids up to `saved.end`; this row has read `saved.start` ids."""
        ...


@runtime_checkable
class LearningSession(DraftSession, Protocol):
    """A drafter's session that drafts from the target's hidden states."""

    def learn(self, features: list[Float[Tensor, "_ f"]]) -> None:
        """Called before every `propose` with the states, per row, of all committed ids but the last, as views."""
        ...


@runtime_checkable
class GuestSession(DraftSession, Protocol):
    """A drafter's session that works in the slot cache of the target's."""

    def share(self, target: TargetSession) -> None:
        """Called once, before any row joins, with the session whose rows will join and leave before this one's."""
        ...


@runtime_checkable
class Target(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def open(self, batch: int, slots: int) -> TargetSession:
        """A session for up to `batch` sequences of up to `slots` tokens, tree nodes included."""
        ...


@runtime_checkable
class FeatureTarget(Target, Protocol):
    def open_with_features(self, batch: int, slots: int, layers: tuple[int, ...]) -> FeatureSession:
        """As `open`; its session keeps the hidden states of `layers`, side by side."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Shared and immutable; what belongs to one batch lives in its session."""

    @property
    def name(self) -> str: ...

    @property
    def laws(self) -> tuple[Law, ...]:
        """The laws of the siblings it proposes, each with its largest number of draws."""
        ...

    @property
    def max_nodes(self) -> int:
        """The largest number of tree nodes it proposes, root included."""
        ...

    def open(self, batch: int, slots: int) -> DraftSession: ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the target; its sessions are LearningSessions."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Whose states: l for those that enter layer l, -1 for those that the LM head reads."""
        ...
