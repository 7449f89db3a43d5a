"""Turn prompts and conversations into token ids, and ids into text while they come in."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from foretoken.core.messages import Message, as_templates_read, check_messages, check_text
from foretoken.models.folder import no_template, refused_by_template

CONTEXT = 8  # prompt ids that are decoded with the first output, since decoders treat the start of a text specially
REPLACEMENT = "\ufffd"  # what decoders write for an incomplete character
LONGEST = 3  # the most such signs for one
BROKEN = 64  # tokens after which what is no whole character, or has no text, is taken as it is
ANSWER = "foretoken-answer"  # stands for an answer, to find what a template writes behind one


def encode(tokenizer: Tokenizer, text: str, which: str = "The prompt", special: bool = True) -> list[int]:
    """Return the ids of a prompt.

    tokenizer: the target's.
    text: the prompt.
    which: names the prompt in errors.
    special: whether the tokenizer adds its special tokens, such as the one that begins a text, if it has any.
    """
    check_text(text, which)
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    which: str = "The conversation",
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Return the ids of a conversation in the form of the chat template, up to where the model's answer begins.

    The template writes all special tokens itself, begin-of-text as well.

    tokenizer: the target's, which has the template.
    messages: {"role": ..., "content": ...} each, and what else the template reads; tool calls in OpenAI's form.
    which: names the conversation in errors.
    tools: functions that the answer may call, in OpenAI's form.

    Raises ForetokenError where there is no template, the messages are malformed, or the template refuses them.
    """
    check_messages(messages, which)
    if not tokenizer.chat_template:
        raise no_template(which, "this model")
    try:
        template = tokenizer.get_chat_template(tools=None if tools is None else list(tools))  # of several the one used
        written = _written(tokenizer, [as_templates_read(message, template) for message in messages], tools, True)
    except Exception as error:  # templates are programs that come with a model: they may raise anything
        raise refused_by_template(which, error) from error
    return encode(tokenizer, written, f"{which}, as the chat template writes it,", special=False)


def _written(tokenizer: Tokenizer, messages: Sequence[Any], tools: Sequence[Any] | None, prompt: bool) -> str:
    """Return the text that the chat template makes of a conversation; raises whatever the template raises.

    tokenizer, messages, tools, prompt: as in `rendered`.
    """
    offered: dict[str, Any] = {"tools": None if tools is None else list(tools), "add_generation_prompt": prompt}
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **offered))


def rendered(
    tokenizer: Tokenizer, messages: Sequence[Any], tools: Sequence[Any] | None = None, prompt: bool = False
) -> str | None:
    """Return the text that a chat template makes of a conversation; None where it fails or there is no template.

    tokenizer: the one with the template.
    messages, tools: as in `chat_prompt`.
    prompt: whether the text goes on to where an answer begins.
    """
    try:
        return _written(tokenizer, messages, tools, prompt)
    except Exception:  # templates fail in any way, and one that fails on such a conversation may work on others
        return None


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that the template of `tokenizer` writes right after an answer, if any."""
    written = rendered(tokenizer, [{"role": "user", "content": "0"}, {"role": "assistant", "content": ANSWER}])
    if written is None or ANSWER not in written:
        return None
    after = written.rpartition(ANSWER)[2].lstrip()
    specials = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special and t.content}
    following = [content for content in specials if after.startswith(content)]
    return specials[max(following, key=len)] if following else None


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether the tokenizers a and b map the same tokens to the same ids; their models may have more logits."""
    return a is b or a.get_vocab() == b.get_vocab()


class TextStream:
    """A decoder of one output that returns its text as soon as it is certain.

    An incomplete character is held back, and so is text that may be the beginning of a stop string. The whole text is
    the same however the ids are cut into pieces, but for the number of signs that stand for broken bytes.

    stopped: whether a stop string was found; it and everything behind it is left out.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = (), prompt_ids: Sequence[int] = ()) -> None:
        """Start with no output.

        tokenizer: the target's.
        stops: strings that end the text.
        prompt_ids: ids before the output; the last CONTEXT of them are used, or more to begin with a character and to
            have any text.
        """
        self.tokenizer = tokenizer
        self.stops = tuple(stop for stop in stops if stop)
        self.stopped = False
        count = CONTEXT
        while count < len(prompt_ids) and not self._decode(prompt_ids[-count:]):
            count *= 2
        for longer in (*range(count, count + LONGEST + 1), count):
            self._ids = list(prompt_ids[-longer:])
            if not self._decode(self._ids).startswith(REPLACEMENT):
                break
        self._start = 0  # index of the first id that is decoded again with new ones
        self._num_prompt = self._settled = len(self._ids)  # _settled: number of ids whose text was returned or is held
        self._given = self._decode(self._ids)  # what the ids from _start on spell, as far as it is certain
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids of the output and return the text that has become certain."""
        if self.stopped:
            return ""
        self._ids.extend(ids)
        now = self._decode(self._ids[self._start :])
        if len(ids) > 1 and not (now.startswith(self._given) and REPLACEMENT not in now[len(self._given) :]):
            del self._ids[-len(ids) :]  # parts of characters: what is certain of them is found out id by id
            return "".join([self.push([token]) for token in ids])
        signs = len(now) - len(now.rstrip(REPLACEMENT))
        if len(self._ids) - self._settled >= BROKEN or (not signs and now != self._given):
            return self._settle(now)
        text = _after(self._given, now[: len(now) - min(signs, LONGEST)]) or ""
        self._given += text
        return self._release(self._held + text)

    def finish(self) -> str:
        """End the output and return the text that was held back."""
        if self.stopped:
            return ""
        text = self._settle(self._decode(self._ids[self._start :])) + self._held
        self._held = ""
        return text

    def _settle(self, now: str) -> str:
        """Take all ids as certain, and return what `_release` lets out of their text.

        now: what the ids from _start on spell.
        """
        text, new = _after(self._given, now), self._ids[self._settled :]
        if text is None:  # decoders may read the parts of a character otherwise with what follows: read that alone
            text = self._decode([*new, *new])[len(self._decode(new)) :]
        if now == self._given:  # no text, and a decoder that treats a text's start specially might begin behind it
            del self._ids[self._settled :]
        elif self._settled > self._num_prompt or not self._given.endswith(REPLACEMENT):
            self._start = self._settled  # else the prompt ends inside a character
        self._settled = len(self._ids)
        self._given = self._decode(self._ids[self._start :])
        return self._release(self._held + text)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _release(self, text: str) -> str:
        """Return `text` up to a stop string; without one, all but an end that may be the beginning of a stop string.

        Such an end is held back in _held.
        """
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


def _after(before: str, now: str) -> str | None:
    """Return what a text has more than its beginning; None where it does not begin so.

    before: the beginning as it was decoded by itself: signs at its end may stand for parts of a character.
    now: the text, where these parts may have become a character.
    """
    while before.endswith(REPLACEMENT) and not now.startswith(before):
        before = before[:-1]
    return now[len(before) :] if now.startswith(before) else None
