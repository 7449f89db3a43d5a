"""`--show-drafts`: the text in colours that show where each token comes from."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style

if TYPE_CHECKING:
    from foretoken.engine import Chunk, Engine, Prompt

STYLES = {
    "accepted": Style(color="green"),
    "corrected": Style(color="red", bold=True),
    "bonus": Style(color="blue", bold=True),
    "plain": Style(),
}
MEANINGS = {
    "accepted": "drafted and accepted",
    "corrected": "the target's own, after a rejected draft",
    "bonus": "the target's own, after all drafts were accepted",
    "plain": "nothing was drafted",
}


def legend() -> str:
    """Return one line for stderr that explains the colours, or says why there are none."""
    if _colours(sys.stdout) is None:
        return "tokens are not tinted: stdout takes no colours (FORCE_COLOR=1 forces them, NO_COLOR turns them off)."
    colours = _colours(sys.stderr)
    parts = (f"{_tinted(origin, origin, colours)} ({meaning})" for origin, meaning in MEANINGS.items())
    return f"tokens are {', '.join(parts)}."


class Tints:
    """Turns the chunks of one text into tinted text.

    A character that takes several tokens has the tint of the last of them.
    """

    def __init__(self, engine: "Engine", prompt: "Prompt", stops: Sequence[str] | None) -> None:
        """Begin a text.

        engine, prompt: the engine, with a tokenizer, and what the text continues or answers.
        stops: strings that end the text before them.
        """
        from foretoken.models.text import TextStream

        assert engine.tokenizer is not None
        self._colours = _colours(sys.stdout)
        self._stream = TextStream(engine.tokenizer, tuple(stops or ()), engine.encode(prompt))

    def push(self, chunk: "Chunk") -> str:
        """Return what the chunk adds to the text, in colours for the terminal."""
        pieces = [
            (self._stream.push([token]), origin) for token, origin in zip(chunk.token_ids, chunk.origins, strict=True)
        ]
        if chunk.finished:
            pieces.append((self._stream.finish(), chunk.origins[-1]))
        return "".join(_tinted(text, origin, self._colours) for text, origin in pieces)


def _colours(stream: Any) -> ColorSystem | None:
    """Return the colours that the stream's terminal has; None for a file or pipe, or where the user wants none."""
    console = Console(file=stream)
    return None if console.no_color or console.color_system is None else COLOR_SYSTEMS[console.color_system]


def _tinted(text: str, origin: str, colours: ColorSystem | None) -> str:
    """Return a text in the colour of its origin, line by line, so that no line's end is inside a colour."""
    return "\n".join(STYLES[origin].render(line, color_system=colours) if line else "" for line in text.split("\n"))
