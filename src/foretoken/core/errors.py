"""Errors that a user can mend, whose one sentence the command line prints before it exits with code 2.

DraftError is another matter: decoding goes on after it.
"""


class ForetokenError(ValueError):
    """Bad input. The message is one sentence: it names the input and says what to do."""


class NotFiniteError(ForetokenError):
    """A model gave logits (or a processor made scores) from which no distribution follows."""


class GrammarError(ForetokenError):
    """A grammar that its parser cannot follow, which can come out in the middle of a text."""


class ContextError(ForetokenError):
    """A prompt that leaves no room for an answer in the model's context.

    num_tokens: the number of its tokens.
    """

    def __init__(self, said: str, num_tokens: int = 0) -> None:
        """Make the error; said: the sentence, see `of`; num_tokens: as in the class's docstring."""
        super().__init__(said)  # alone, so that the error can be sent to another process
        self.num_tokens = num_tokens

    @staticmethod
    def of(which: str, num_tokens: int, model: str, context: int) -> "ContextError":
        """Return the error with its sentence.

        which: what it calls the prompt.
        num_tokens, context: numbers of tokens, of the prompt and of the context.
        model: the model's name.
        """
        said = f"{which} has {num_tokens} tokens, and the context of {model} is {context}: shorten it."
        return ContextError(said, num_tokens)


class DraftError(Exception):
    """A drafter raised while a walk called it, as for a price; its own error is the `__cause__`.

    path: the nodes accepted until then, the root first. They stay accepted; the token after them may be drawn from p.
    """

    def __init__(self, path: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.path = path


def is_shortage(error: Exception) -> bool:
    """Whether `error` says that the memory did not suffice; torch says so on a CPU by a RuntimeError."""
    import torch  # takes a second

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
