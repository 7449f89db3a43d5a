"""Prompts are read piece by piece between the steps of the texts in work, so that these texts do not wait for long."""

import logging
import time
from collections.abc import Callable

from foretoken.core.interfaces import PrefixSession
from foretoken.core.sequence import Sequence
from foretoken.decode import Decoder
from foretoken.serve.prefix import BLOCK, Block, PrefixCache, restore

log = logging.getLogger(__name__)
MOST = 512  # the most ids of a piece
STEPS = 1.0  # a piece is to take as long as so many steps of the texts in work


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
