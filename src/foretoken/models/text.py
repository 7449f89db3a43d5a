"""Text at both ends: prompts to ids, and ids to text as it grows."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from foretoken.core.messages import Message, as_templates_read, check_messages, check_text
from foretoken.models.folder import no_template, refused_by_template

CONTEXT = 8  # prompt ids decoded along with the first output, since decoders treat the start of a text specially
REPLACEMENT = "\ufffd"  # what decoders write for an incomplete character
ANSWER = "foretoken-answer"  # stands for an answer where a template is asked what it writes after one


def encode(tokenizer: Tokenizer, text: str, which: str = "The prompt") -> list[int]:
    """Ids of a prompt, with the tokenizer's own begin-of-text token if it adds one. which: names it in messages."""
    check_text(text, which)
    return list(tokenizer(text)["input_ids"])


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    which: str = "The conversation",
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Ids of a conversation as the tokenizer's chat template writes it, up to where the model's answer begins.

    messages: {"role": ..., "content": ...} each, and what else the template reads; tool calls in OpenAI's form.
    tools: functions that the answer may call, in OpenAI's form.
    The template writes all special tokens itself, begin-of-text as well.
    Raises ForetokenError where there is no template, the messages are malformed, or the template refuses them.
    """
    check_messages(messages, which)
    if not tokenizer.chat_template:
        raise no_template(which, "this model")
    try:
        ids: Any = tokenizer.apply_chat_template(
            [as_templates_read(message, str(tokenizer.chat_template)) for message in messages],
            tools=None if tools is None else list(tools),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except Exception as error:  # templates are programs that come with a model: they fail as they like
        raise refused_by_template(which, error) from error
    return [int(token) for token in ids]


def rendered(
    tokenizer: Tokenizer, messages: Sequence[Any], tools: Sequence[Any] | None = None, prompt: bool = False
) -> str | None:
    """What the chat template writes for a probe; None where it fails, or there is none.

    prompt: whether it goes on to where an answer begins.
    """
    offered = None if tools is None else list(tools)
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tools=offered, add_generation_prompt=prompt, tokenize=False)
        )
    except Exception:  # templates fail as they like: one that fails on a probe tells nothing
        return None


def turn_end(tokenizer: Tokenizer) -> int | None:
    """The special token that the chat template writes right after an answer, if there is one."""
    written = rendered(tokenizer, [{"role": "user", "content": "0"}, {"role": "assistant", "content": ANSWER}])
    if written is None or ANSWER not in written:
        return None
    after = written.rpartition(ANSWER)[2].lstrip()
    specials = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special and t.content}
    following = [content for content in specials if after.startswith(content)]
    return specials[max(following, key=len)] if following else None


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
