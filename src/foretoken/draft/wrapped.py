"""Base classes of a drafter around another one, and of its session: each call is passed on to the inner one."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

from foretoken.core.interfaces import Drafter, DraftSession, FeatureDrafter, GuestSession, LearningSession, Path
from foretoken.core.laws import Law
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree

D = TypeVar("D", bound=Drafter, covariant=True)
S = TypeVar("S", bound=DraftSession)


@dataclass(frozen=True)
class WrappedDrafter(Generic[D]):
    """A drafter around `inner`; a subclass adds `open`."""

    inner: D

    def __post_init__(self) -> None:
        # Then this is one too: `isinstance` looks whether there is the attribute, which others must not have.
        if isinstance(self.inner, FeatureDrafter):
            object.__setattr__(self, "feature_layers", self.inner.feature_layers)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def laws(self) -> tuple[Law, ...]:
        return self.inner.laws

    @property
    def max_nodes(self) -> int:
        return self.inner.max_nodes


class WrappedSession(Generic[S]):
    """A session around another one. It offers `share` and `learn` where the inner one does."""

    def __init__(self, inner: S) -> None:
        """inner: the session that calls are passed on to."""
        self.inner = inner
        if isinstance(inner, GuestSession):
            self.share = inner.share
        if isinstance(inner, LearningSession):
            self.learn = inner.learn

    def join(self) -> None:
        self.inner.join()

    def leave(self, row: int) -> None:
        self.inner.leave(row)

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        return self.inner.propose(sequences)

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None:
        self.inner.observe(sequences, trees, paths)
