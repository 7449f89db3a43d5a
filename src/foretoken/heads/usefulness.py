"""Whether a head's drafts are of any use: one of another target, or of a layout misread, loads and drafts noise."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from foretoken.core.interfaces import Path
from foretoken.core.tree import TokenTree

ENOUGH = 50  # drafts after which it is judged
LEAST = 0.05  # share of drafts with an accepted token below which it is useless; one of 0.2 falls there in 1 of 800


class UselessHeadWarning(UserWarning):
    """Next to nothing that a head drafts is accepted."""


@dataclass
class Usefulness:
    """What became of a head's drafts, over all texts since it was loaded.

    drafts: trees with anything besides the root. accepted: those of them of which a token was accepted. warned:
    whether a warning was given.
    """

    drafts: int = 0
    accepted: int = 0
    warned: bool = False

    def count(self, trees: Iterable[TokenTree], paths: Iterable[Path], head: str, target: str) -> None:
        """The trees of one step, with their accepted paths; warns once. head, target: their names."""
        for tree, path in zip(trees, paths, strict=True):
            self.drafts += tree.num_drafted > 0
            self.accepted += len(path) > 1
        if self.warned or self.drafts < ENOUGH or self.accepted >= LEAST * self.drafts:
            return
        self.warned = True
        warnings.warn(
            f"Draft head {head} drafts nothing useful: wrong target or layout? Of {self.drafts} drafts {self.accepted} "
            f"had a token accepted. Texts are right and slower. Check that it was trained for {target}, and that its "
            "config.json is the one that came with its weights; else decode without it.",
            UselessHeadWarning,
            stacklevel=3,
        )
