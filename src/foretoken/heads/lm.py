"""A draft head in the place of a drafter's language model."""

from dataclasses import dataclass, field

import torch

from foretoken.heads.eagle import Eagle
from foretoken.heads.eagle3 import Eagle3
from foretoken.heads.head import Head
from foretoken.heads.kernel import EagleKernel, eagle_kernel
from foretoken.heads.rows import HeadRows
from foretoken.heads.serial import Serial
from foretoken.heads.usefulness import Usefulness
from foretoken.models.panels import PACKED, pack_linears
from foretoken.models.static import COMPILED_GRAPHS, GRAPHS, StaticForward


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
