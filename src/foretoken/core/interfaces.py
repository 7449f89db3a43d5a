"""The interfaces of a target and of a drafter: the decoding loop uses nothing else of either.

Both hand out *sessions*. A session is the state of one batch. Its row i belongs to sequence i of the lists that its
methods are called with. A new row comes at the end; when row i leaves, the last row takes its place.
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

Path = tuple[int, ...]  # indices of tree nodes from the root, which is node 0, down


@dataclass(frozen=True)
class Saved:
    """A copy of what a session keeps of a row's committed ids [start, end), for example their keys and values.

    parts: the copied tensors, in an order that only sessions of the same kind can read.
    """

    start: int
    end: int
    parts: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all parts, in bytes."""
        return sum(part.nbytes for part in self.parts)


@runtime_checkable
class Session(Protocol):
    """The state of one batch, such as a cache."""

    def join(self) -> None:
        """Add an empty row at the end, for a sequence that joins the batch."""
        ...

    def leave(self, row: int) -> None:
        """Forget the row with index `row`; the last row takes its place."""
        ...


@runtime_checkable
class TargetSession(Session, Protocol):
    """The state of one batch in the target."""

    def score(self, sequences: Seq[Sequence], trees: Seq[TokenTree]) -> Seq[NodeScores]:
        """Return the node scores of each tree, all by one forward.

        Committed ids that a row has not read yet are read first. The forward may run as late as the first use of the
        scores, which must come before `keep`.

        sequences: those of all rows, in order.
        trees: the draft of each sequence; its root is the sequence's last committed id.
        """
        ...

    def keep(self, paths: Seq[Path]) -> None:
        """Make the accepted path of each row permanent and forget the rest of its tree.

        paths: per row the accepted nodes of the tree that was scored last, the root first.
        """
        ...

    def features(self, sequences: Seq[Sequence]) -> list[Float[Tensor, "_ f"]]:
        """Return per row the hidden states of all committed ids but the last [ids - 1, f], as views.

        Ids that a row has not read yet are read first; the states of all others are kept from earlier forwards.

        sequences: those of all rows, in order.

        Raises ForetokenError where the session was opened without layers.
        """
        ...


@runtime_checkable
class DraftSession(Session, Protocol):
    """The state of one batch in the drafter."""

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        """Return one token tree, rooted at the last committed id, for each of `sequences`, those of all rows."""
        ...

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        """Take note of what a step accepted; it is called once the sequences hold the new tokens.

        sequences: those of all rows, in order.
        trees: what `propose` returned at this step.
        paths: per tree its accepted nodes, the root first.
        """
        ...


@runtime_checkable
class PrefixSession(Protocol):
    """A session that can read the beginning of a row's text in pieces, and hand it to another session of its kind."""

    def read(self, row: int, sequence: Sequence, end: int) -> None:
        """Read what the row has not read yet of the beginning of its text. A drafter may leave that for later.

        row: the index of the row, which has no tree.
        sequence: the row's text.
        end: the number of ids that are to be read, fewer than the text has.
        """
        ...

    def save(self, row: int, start: int, end: int) -> Saved | None:
        """Return a copy of what is kept of a row's ids [start, end); None where the row has read fewer than `end` ids.

        row: the index of the row.
        start, end: numbers of ids from the beginning of the text.
        """
        ...

    def restore(self, row: int, saved: Saved) -> None:
        """Take over what another row kept of the same ids, instead of reading them.

        row: the index of the row, which has read exactly `saved.start` ids.
        saved: from `save` of a row whose text has the same ids up to `saved.end`.
        """
        ...


@runtime_checkable
class LearningSession(DraftSession, Protocol):
    """A drafter's session that drafts from the target's hidden states."""

    def learn(self, features: list[Float[Tensor, "_ f"]]) -> None:
        """Take the target's hidden states; it is called before every `propose`.

        features: per row those of all committed ids but the last [ids - 1, f], as views into the target's memory.
        """
        ...


@runtime_checkable
class GuestSession(DraftSession, Protocol):
    """A drafter's session that works in the slot cache of the target's."""

    def share(self, target: TargetSession) -> None:
        """Take up the target's session; it is called once, before any row joins.

        target: the session whose cache is shared. Each of its rows joins and leaves before this session's row does.
        """
        ...


@runtime_checkable
class Target(Protocol):
    """The model whose distribution the text must have. It is immutable: the state of a batch is in its session."""

    @property
    def name(self) -> str:
        """The model's name, for messages."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of columns of its logits."""
        ...

    def open(self, batch: int, slots: int, layers: tuple[int, ...] = ()) -> TargetSession:
        """Open a session.

        batch: the most sequences at a time.
        slots: the most tokens of a sequence, tree nodes included.
        layers: which hidden states are kept, as in `FeatureDrafter.feature_layers`; those of all layers are
            concatenated, in this order, to one vector of f numbers per id.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Whatever proposes draft tokens. It is shared and immutable: the state of a batch is in its session."""

    @property
    def name(self) -> str:
        """The drafter's name, for messages."""
        ...

    @property
    def laws(self) -> tuple[Law, ...]:
        """The laws by which children are drawn in its trees, each with its largest number of draws."""
        ...

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes of a tree, the root included."""
        ...

    def open(self, batch: int, slots: int) -> DraftSession:
        """Open a session for up to `batch` sequences of up to `slots` tokens each, tree nodes included."""
        ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the target; its sessions are LearningSessions."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Which hidden states it reads: l stands for those that enter layer l, -1 for those that the LM head reads."""
        ...
