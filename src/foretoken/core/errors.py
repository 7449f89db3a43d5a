"""Errors that a user can mend, whose one sentence the command line prints before it exits with code 2.

DraftError is another matter: decoding goes on after it.
"""


class ForetokenError(ValueError):
    """Bad input. The message is one sentence: it names the input and says what to do."""


class NotFiniteError(ForetokenError):
    """A model gave logits (or a processor made scores) from which no distribution follows."""


class GrammarError(ForetokenError):
    """A grammar that its parser cannot follow, which can come out in the middle of a text."""


class DraftError(Exception):
    """A drafter raised while a walk called it, as for a price; its own error is the `__cause__`.

    path: the nodes accepted until then, the root first. They stay accepted; the token after them may be drawn from p.
    """

    def __init__(self, path: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.path = path
