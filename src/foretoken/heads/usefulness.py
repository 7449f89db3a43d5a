"""A warning if a head's drafts are of no use: a head of another target, or one misread, loads and drafts noise."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from foretoken.core.interfaces import Path
from foretoken.core.tree import TokenTree

ENOUGH = 50  # drafts after which a head is judged
# A head is useless if a smaller share of its drafts has an accepted token. Where each draft has one with probability
# 0.2, this happens by chance in 1 of 800 cases.
LEAST = 0.05


class UselessHeadWarning(UserWarning):
    """A warning that next to nothing of what a head drafts is accepted."""


@dataclass
class Usefulness:
    """Counts of a head's drafts, over all texts since it was loaded.

    drafts: number of trees with at least one draft token.
    accepted: number of trees of which at least one draft token was accepted.
    warned: whether the warning was given.
    """

    drafts: int = 0
    accepted: int = 0
    warned: bool = False

    def count(self, trees: Iterable[TokenTree], paths: Iterable[Path], head: str, target: str) -> None:
        """Count the trees of one step, and warn, at most once, if next to nothing of all drafts was accepted.

        trees: one token tree per sequence.
        paths: per tree its accepted nodes, the root first.
        head, target: names of the head and of its target, for the warning.
        """
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
