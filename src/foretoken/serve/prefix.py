"""The prefix cache: what the models made of earlier texts, in blocks, for later texts that begin alike.

A block is a copy of the keys and values (and the hidden states, where the drafter reads them) of BLOCK ids after those
of its parent. The block that was not used for longest goes first, and a child always goes before its parent.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foretoken.core.interfaces import PrefixSession, Saved
from foretoken.decode import Decoder

BLOCK = 64  # ids: the kernel's panels are as long


@dataclass(eq=False)
class Block:
    """Some ids after those of the parent. target, draft: what the sessions made of them; None where the drafter has not
    read them, or keeps nothing. children: by their ids."""

    ids: tuple[int, ...]
    parent: "Block | None"
    target: Saved
    draft: Saved | None
    children: dict[tuple[int, ...], "Block"] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.target.num_bytes + (0 if self.draft is None else self.draft.num_bytes)


class PrefixCache:
    """Blocks of earlier texts, within a bound of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._first: dict[tuple[int, ...], Block] = {}
        self._order: OrderedDict[Block, None] = OrderedDict()  # least recently used first

    def match(self, ids: Seq[int]) -> list[Block]:
        """The blocks of the longest beginning of a text that is here; they count as used now."""
        chain: list[Block] = []
        level = self._first
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            block = level.get(tuple(ids[start : start + BLOCK]))
            if block is None:
                break
            chain.append(block)
            level = block.children
        self._use(chain)
        return chain

    def keep(self, decoder: Decoder, row: int, ids: Seq[int], chain: list[Block]) -> None:
        """Copy the whole blocks of a row that are not here; `chain`, those that are, grows by them."""
        drafter = decoder.drafter if isinstance(decoder.drafter, PrefixSession) else None
        assert isinstance(decoder.target, PrefixSession)
        for i, block in enumerate(chain):
            if block.draft is None and drafter is not None:
                block.draft = drafter.save(row, i * BLOCK, (i + 1) * BLOCK)
                if block.draft is not None and block in self._order:
                    self.num_bytes += block.draft.num_bytes
        for start in range(BLOCK * len(chain), len(ids) - BLOCK + 1, BLOCK):
            end = start + BLOCK
            key, parent = tuple(ids[start:end]), chain[-1] if chain else None
            block = self._after(parent).get(key)
            if block is None:  # else another text put it here since the chain was looked up
                target = decoder.target.save(row, start, end)
                if target is None:
                    break
                block = Block(key, parent, target, None if drafter is None else drafter.save(row, start, end))
                if parent is None or parent in self._order:  # else it was dropped, and nobody would find this one
                    self._after(parent)[key] = block
                    self._order[block] = None
                    self.num_bytes += block.num_bytes
            chain.append(block)
        self._use([block for block in chain if block in self._order])
        while self.num_bytes > self.most_bytes:
            block, _ = self._order.popitem(last=False)
            del self._after(block.parent)[block.ids]
            self.num_bytes -= block.num_bytes

    def clear(self) -> None:
        """Forget all blocks, as where other sessions are opened, which keep something else."""
        self.num_bytes = 0
        self._first.clear()
        self._order.clear()

    def _after(self, block: Block | None) -> dict[tuple[int, ...], Block]:
        return self._first if block is None else block.children

    def _use(self, chain: list[Block]) -> None:
        for block in reversed(chain):  # a parent after its child, so that the child goes first
            self._order.move_to_end(block)


def restore(decoder: Decoder, row: int, chain: list[Block]) -> None:
    """Give a new row of a decoder what the blocks hold of the beginning of its text."""
    assert isinstance(decoder.target, PrefixSession)
    for block in chain:
        decoder.target.restore(row, block.target)
    if isinstance(decoder.drafter, PrefixSession):
        for block in chain:
            if block.draft is None:
                break
            decoder.drafter.restore(row, block.draft)
