"""Texts and conversations as they come in, checked without torch or a tokenizer: bad ones are refused at once."""

from collections.abc import Mapping, Sequence

from foretoken.core.errors import ForetokenError

Message = Mapping[str, str]  # {"role": "user", "content": "..."}
SHAPE = '{"role": "user", "content": "..."}'


def check_text(text: str, which: str) -> None:
    """Refuse a text that is no Unicode: Python keeps bytes that are not UTF-8, and half characters, as surrogates.

    which: names the text in the message, as "The prompt".
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ForetokenError(
            f"{which} is not valid Unicode: character {error.start + 1} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}, which stands for a byte that is not UTF-8 or for half a character; "
            "remove it, or convert the text to UTF-8."
        ) from None


def check_messages(messages: object, which: str = "The conversation") -> None:
    """Refuse what is no list of messages, each with a text as role and a text as content."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes, bytearray)):
        raise ForetokenError(f"{which} is a {type(messages).__name__}: give a list of messages, {SHAPE} each.")
    if not messages:
        raise ForetokenError(f"{which} is empty: give at least one message, {SHAPE}.")
    for number, message in enumerate(messages, start=1):
        name = f"Message {number} of {which[0].lower()}{which[1:]}"
        if not isinstance(message, Mapping):
            raise ForetokenError(f"{name} is a {type(message).__name__}: write {SHAPE}.")
        for key in ("role", "content"):
            if key not in message:
                raise ForetokenError(f"{name} has no {key}: write {SHAPE}.")
            if not isinstance(message[key], str):
                raise ForetokenError(f"The {key} of {name[0].lower()}{name[1:]} is no text: write {SHAPE}.")
            check_text(message[key], f"The {key} of {name[0].lower()}{name[1:]}")


def is_conversation(prompt: object) -> bool:
    """Whether it is meant as a list of messages: what begins with one, be it well made or not."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
