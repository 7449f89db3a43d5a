"""The prefix cache: what the models computed for earlier texts, in blocks, for later texts that begin alike.

A block is a copy of the keys and values (and the hidden states, where the drafter reads them) of the BLOCK ids that
follow those of its parent. Where memory is short, the least recently used block goes first, and a child always goes
before its parent. Prompts are read into it piece by piece, between the steps of the texts in work, so that these texts
do not wait for long.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foretoken.core.interfaces import PrefixSession, Saved
from foretoken.core.sequence import Sequence
from foretoken.decode import Decoder

log = logging.getLogger(__name__)
BLOCK = 64  # ids: the kernel's panels are as long
MOST = 512  # the most ids of a piece of a prompt
STEPS = 1.0  # a piece is to take as long as so many steps of the texts in work


@dataclass(eq=False)
class Block:
    """A block, which is a node in a tree of beginnings of texts.

    ids: its ids.
    parent: the block before it; None at the beginning of a text.
    target, draft: what the sessions of target and drafter keep of its ids; draft is None where the drafter has not
        read them, or keeps nothing.
    children: the blocks after it, by their ids.
    """

    ids: tuple[int, ...]
    parent: "Block | None"
    target: Saved
    draft: Saved | None
    children: dict[tuple[int, ...], "Block"] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Its size, in bytes."""
        return self.target.num_bytes + (0 if self.draft is None else self.draft.num_bytes)


class PrefixCache:
    """The blocks of earlier texts.

    most_bytes: the most bytes that they may take together.
    num_bytes: the bytes that they take now.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._first: dict[tuple[int, ...], Block] = {}  # blocks at the beginning of a text, by their ids
        self._order: OrderedDict[Block, None] = OrderedDict()  # least recently used first

    def match(self, ids: Seq[int]) -> list[Block]:
        """Return the blocks of the longest beginning of a text that is in the cache; they count as used now.

        ids: the ids of the text.
        """
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
        """Copy the blocks of a row that the cache lacks; the least recently used ones go where memory is short.

        decoder: the decoder whose sessions have read the row.
        row: the index of the row.
        ids: the ids of the row's text; those after the last whole block are not kept.
        chain: the blocks at the beginning of the text, as `match` returns them; the others are appended to it.
        """
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
            if block is None:  # else another text has added it since `match`
                target = decoder.target.save(row, start, end)
                if target is None:
                    break
                block = Block(key, parent, target, None if drafter is None else drafter.save(row, start, end))
                if parent is None or parent in self._order:  # else it was dropped: nothing would find this block
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
        """Forget all blocks; needed where sessions are opened that keep other things of a text."""
        self.num_bytes = 0
        self._first.clear()
        self._order.clear()

    def _after(self, block: Block | None) -> dict[tuple[int, ...], Block]:
        """Return the children of a block, by their ids; None stands for the beginning of a text."""
        return self._first if block is None else block.children

    def _use(self, chain: list[Block]) -> None:
        """Count blocks as used now."""
        for block in reversed(chain):  # a parent after its child, so that the child is dropped first
            self._order.move_to_end(block)


def restore(decoder: Decoder, row: int, chain: list[Block]) -> None:
    """Give a new row what the cache holds of the beginning of its text.

    decoder: the decoder that has the row.
    row: the index of the row, which has read nothing.
    chain: the blocks at the beginning of the row's text, in order.
    """
    assert isinstance(decoder.target, PrefixSession)
    for block in chain:
        decoder.target.restore(row, block.target)
    if isinstance(decoder.drafter, PrefixSession):
        for block in chain:
            if block.draft is None:
                break
            decoder.drafter.restore(row, block.draft)


class Prefill:
    """Reads one prompt at a time, in a decoder of one row, and keeps what it read in the prefix cache.

    open_one: returns a new decoder of one row.
    cache: the prefix cache.
    chain: the blocks of the prompt that are read, in order.
    """

    def __init__(self, open_one: Callable[[], Decoder], cache: PrefixCache) -> None:
        self._open_one, self._cache = open_one, cache
        self._decoder: Decoder | None = None  # its row holds the prompt that is being read
        self._token_s = 0.0  # seconds that one id took in the last piece
        self.chain: list[Block] = []

    @property
    def busy(self) -> bool:
        """Whether a prompt is being read."""
        return self._decoder is not None and bool(self._decoder.sequences)

    def begin(self, sequence: Sequence, chain: list[Block]) -> None:
        """Begin to read a prompt.

        sequence: the text that has this prompt.
        chain: the blocks at the beginning of the prompt that the prefix cache held.
        """
        if self._decoder is None or self._decoder.gave_up:
            self._decoder = self._open_one()
        self.chain = chain
        self._decoder.join(sequence)
        restore(self._decoder, 0, chain)

    def read(self, step_s: float | None) -> bool:
        """Read the next piece, in whole blocks. Returns whether less than a block is left.

        step_s: seconds that a step of the texts in work takes, by which the piece is sized; None where no text
            is being decoded.
        """
        decoder = self._decoder
        assert decoder is not None
        (sequence,) = decoder.sequences
        start, last = BLOCK * len(self.chain), len(sequence.ids) - 1
        size = MOST
        if step_s is not None:
            size = int(STEPS * step_s / self._token_s) // BLOCK * BLOCK if self._token_s else BLOCK
            size = min(max(size, BLOCK), MOST)
        read = sequence.ids[: min(start + size, last // BLOCK * BLOCK)]
        began = time.perf_counter()
        assert isinstance(decoder.target, PrefixSession)
        decoder.target.read(0, sequence, len(read))
        if isinstance(decoder.drafter, PrefixSession) and sequence.depth_limit:
            try:
                decoder.drafter.read(0, sequence, len(read))
            except Exception:  # this costs speed only: the text's steps will show whether the drafter is broken
                log.exception("The drafter failed at a prompt.")
        self._cache.keep(decoder, 0, read, self.chain)
        self._token_s = (time.perf_counter() - began) / (len(read) - start)
        return last - len(read) < BLOCK

    def end(self) -> list[Block]:
        """Forget the prompt. Returns its blocks."""
        assert self._decoder is not None
        Decoder.leave(self._decoder, self._decoder.sequences[0])  # its blocks are kept already
        chain, self.chain = self.chain, []
        return chain

    def reset(self) -> None:
        """Forget the prompt and its decoder, after something failed."""
        self._decoder, self.chain = None, []
