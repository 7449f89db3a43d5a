"""Text at both ends: prompts to ids, and ids to text as it grows."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

CONTEXT = 8  # prompt ids decoded along with the first output, since decoders treat the start of a text specially
REPLACEMENT = "\ufffd"  # what decoders write for an incomplete character


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a prompt, with the tokenizer's own begin-of-text token if it adds one."""
    return list(tokenizer(text)["input_ids"])


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether the two map the same tokens to the same ids; the models' heads may be padded differently."""
    return a is b or a.get_vocab() == b.get_vocab()


class TextStream:
    """Ids in, text out as soon as it is certain: an incomplete character waits, and so does what may become a stop.

    `push` returns the new text; after a stop string was seen `stopped` is True and nothing follows. `finish` returns
    what was held back.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = (), prompt_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stop for stop in stops if stop)
        self.stopped = False
        self._ids = list(prompt_ids[-CONTEXT:])
        self._start = 0  # first id of the window that is decoded again; earlier ids are settled
        self._settled = len(self._ids)  # ids whose text was taken
        self._held = ""

    def push(self, ids: tuple[int, ...] | list[int]) -> str:
        if self.stopped:
            return ""
        self._ids.extend(ids)
        before = self._decode(self._start, self._settled).rstrip(REPLACEMENT)  # a prompt may end inside a character
        now = self._decode(self._start, len(self._ids))
        if now.endswith(REPLACEMENT):
            return ""
        self._start, self._settled = self._settled, len(self._ids)
        return self._release(self._held + now[len(before) :])

    def finish(self) -> str:
        if self.stopped:
            return ""
        rest = self._decode(self._start, len(self._ids))[len(self._decode(self._start, self._settled)) :]
        text = self._release(self._held + rest) + self._held
        self._held = ""
        return text

    def _decode(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _release(self, text: str) -> str:
        """`text` up to a stop string, or all of it but a tail that may be the beginning of one."""
        ends = [i for stop in self.stops if (i := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self.stops):
                self._held = text[-n:]
                return text[:-n]
        self._held = ""
        return text
