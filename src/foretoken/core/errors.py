"""Errors that a user can mend; the command line prints their one sentence and exits with code 2."""


class ForetokenError(ValueError):
    """Bad input. The message is one sentence: it names the input and says what to do."""


class NotFiniteError(ForetokenError):
    """A model gave logits (or a processor made scores) from which no distribution follows."""


class GrammarError(ForetokenError):
    """A grammar that its parser cannot follow, which can come out in the middle of a text."""


class DraftError(Exception):
    """A drafter raised while a walk asked it something; its own error is the cause.

    path: what was accepted until then. The token after it may be drawn from p: what was accepted stays decided.
    """

    def __init__(self, path: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.path = path
