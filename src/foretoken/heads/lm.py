"""A draft head in the place of a drafter's language model, and a warning if its drafts are of no use.

A head of another target, or one misread, loads and drafts noise.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from foretoken.core.interfaces import Path
from foretoken.core.tree import TokenTree
from foretoken.heads.eagle import Eagle
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.head import Head
from foretoken.heads.kernel import EagleKernel, eagle_kernel
from foretoken.heads.rows import HeadRows
from foretoken.heads.serial import Serial
from foretoken.models.panels import PACKED, pack_linears
from foretoken.models.static import COMPILED_GRAPHS, GRAPHS, StaticForward

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


def ready(head: Head, name: str) -> "HeadLM":
    """Return a head as a drafter's model, its weights packed where that is faster.

    head: the head, which is changed: it can no longer be trained or saved.
    name: its name, for messages.
    """
    if isinstance(head, Eagle3):
        head.order_vocabulary()
    if head.target.device.type == "cpu" and head.target.dtype in PACKED:
        pack_linears(head)
    if isinstance(head, Serial) and head.target.execution in (GRAPHS, COMPILED_GRAPHS):
        forward = head.forward_of(f"Head {name}")
        forward.compiling = True
        return HeadLM(head, name, forward)
    return HeadLM(head, name, eagle_kernel(head) if isinstance(head, Eagle | Eagle3) else None)


@dataclass(frozen=True)
class HeadLM:
    """A draft head with the attributes and methods that a drafter uses of a language model.

    head: the head.
    name: its name, for messages.
    backend: what runs its forwards, as in `Head.open`; None: plain torch.
    usefulness: the counts of its drafts so far.
    """

    head: Head
    name: str
    backend: EagleKernel | StaticForward | None = None
    usefulness: Usefulness = field(default_factory=Usefulness, compare=False)

    @property
    def vocab_size(self) -> int:
        return self.head.target.vocab_size

    @property
    def device(self) -> torch.device:
        return self.head.target.device

    def open(self, batch: int, slots: int) -> HeadRows:
        """Return the rows of up to `batch` sequences of up to `slots` tokens each, tree nodes included."""
        return self.head.open(batch, slots, self.backend)
