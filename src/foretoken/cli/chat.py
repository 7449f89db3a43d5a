"""`foretoken chat`: a conversation in the terminal."""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.command import command
from foretoken.cli.options import EngineOptions, TextOptions
from foretoken.cli.prompts import ONE, system_message
from foretoken.cli.tints import Tints, legend
from foretoken.core.errors import ContextError, ForetokenError
from foretoken.core.files import check_file, write
from foretoken.core.interrupts import is_to_end
from foretoken.core.messages import Message, check_messages, check_text

if TYPE_CHECKING:
    from foretoken.engine import Engine
    from foretoken.stats import Stats

HELLO = {"role": "user", "content": "Hello"}
HELP = """\
/stats        speed and acceptance of the last answer, and of the whole conversation
/save FILE    write the messages as JSON
/load FILE    go on from messages that were saved
/system TEXT  set the system message from here on; without TEXT there is none
/reset        forget the conversation, the system message excepted
/exit         leave; so does Ctrl-D
Ctrl-C ends an answer, and what was printed stays. A line that begins with a space is no command."""


@dataclass(frozen=True)
class AnswerOptions(TextOptions):
    """The options of any text, with defaults that suit an answer."""

    temperature: float = 0.7
    max_new_tokens: int = 1024


@command
def chat(model: str | None = None, /, *, engine: EngineOptions, text: AnswerOptions) -> None:
    """Talk with an instruction-tuned model; answers stream to stdout as their tokens are accepted.

    Lines come from the terminal, or from a pipe, one message each. /help lists what can be done besides.
    Answer i of a conversation uses seed + i.

    model: Model folder (Hugging Face), GGUF file, hub id, or a name that `foretoken fetch` lists: the same as --target.
    """
    engine = engine.of(model)
    messages = system_message(text.system)
    text.check()
    engine.check_chat({ONE: [*messages, HELLO]})
    loaded = engine.load(text.seed, 1)
    conversation = Conversation(loaded, text.arguments(), text.show_drafts, messages)
    loaded.encode([*messages, HELLO])  # has it a template?
    _say(f"{loaded.target.name}; /help tells what can be done, /exit or Ctrl-D leaves.")
    if text.show_drafts:
        _say(legend())
    while conversation.turn():
        pass


@dataclass
class Conversation:
    """The messages so far, and the statistics of the answers.

    arguments: the arguments of `Engine.stream`, with the seed of the first answer.
    show_drafts: whether the answers are tinted by the origin of their tokens.
    messages: the conversation so far, the system message included.
    answers: the statistics of each answer.
    """

    engine: "Engine"
    arguments: dict[str, Any]
    show_drafts: bool
    messages: list[Message]
    answers: "list[Stats]" = field(default_factory=list)

    def turn(self) -> bool:
        """Read a line, and answer it or obey it as a command. Returns False where the conversation is over."""
        try:
            line = _read()
        except KeyboardInterrupt:
            if is_to_end():
                raise
            _say("/exit or Ctrl-D leaves.")
            return True
        if line is None or line.rstrip() in ("/exit", "/quit"):
            return False
        try:
            if line.startswith("/"):
                name, _, rest = line.strip().partition(" ")
                self.command(name, rest.strip())
            elif line.strip():
                self.answer(line.strip())
        except ForetokenError as error:
            _say(str(error))
        return True

    def answer(self, said: str) -> None:
        """Write the model's answer to the message `said` as its tokens are accepted; Ctrl-C keeps what was written."""
        check_text(said, "The message")
        messages: list[Message] = [*self.messages, {"role": "user", "content": said}]
        self._check_room(messages)
        text, last = "", None
        tints = Tints(self.engine, messages, self.arguments["stop"]) if self.show_drafts else None
        arguments = {**self.arguments, "seed": (self.arguments["seed"] + len(self.answers)) % 2**32}
        try:
            for last in self.engine.stream(messages, **arguments):
                text += last.text
                print(tints.push(last) if tints else last.text, end="", flush=True)
            print(flush=True)
        except KeyboardInterrupt:
            if is_to_end():
                raise
            print(flush=True)
            _say("the answer was ended; the conversation goes on" + (" without this message." if not text else "."))
        if last is None:
            return
        self.answers.append(last.stats)
        if text:
            self.messages = [*messages, {"role": "assistant", "content": text}]
        if last.finish_reason == "length" and last.stats.num_tokens >= self.arguments["max_new_tokens"]:
            _say(f"the answer ended after {last.stats.num_tokens} tokens: --max-new-tokens allows more.")
        elif last.finish_reason == "length":
            _say("the answer ended where the model's context is full: begin anew with /reset.")

    def _check_room(self, messages: list[Message]) -> None:
        """Raise ForetokenError where the messages leave no room for an answer in the model's context."""
        try:
            self.engine.encode(messages, "The conversation")
        except ContextError as error:
            raise ForetokenError(
                f"The conversation has {error.num_tokens} tokens with this message, and the context of "
                f"{self.engine.target.name} is {self.engine.target.lm.context}: begin anew with /reset, or say less."
            ) from None

    def command(self, name: str, rest: str) -> None:
        """Obey a command, as HELP lists them; name, rest: its name, slash included, and what follows it.

        Raises ForetokenError for an unknown command, or a file that cannot be read or written.
        """
        if name in ("/save", "/load") and not rest:
            raise ForetokenError(f"{name} needs the name of a file: {name} FILE.")
        system = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        match name:
            case "/help":
                print(HELP, file=sys.stderr)
            case "/stats":
                parts = (("last answer", self.answers[-1:]), ("conversation", self.answers))
                lines = [_stats_line(part, answers) for part, answers in parts if answers]
                print("\n".join(lines) or "There is no answer yet.", file=sys.stderr)
            case "/save" if not self.messages:
                raise ForetokenError("There is no message yet that could be saved.")
            case "/save":
                file, text = Path(rest), json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
                check_file(file)
                write(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
                _say(f"written to {file}; messages: {len(self.messages)}.")
            case "/load":
                self.messages = _loaded(rest)
                _say(f"read from {rest}; messages: {len(self.messages)}.")
            case "/system":
                self.messages = [*system_message(rest), *self.messages[len(system) :]]
                _say("the system message is set." if rest else "there is no system message.")
            case "/reset":
                self.messages = system
                _say("the conversation begins anew.")
            case _:
                raise ForetokenError(
                    f"There is no command {name}: /help lists them; with a space before it, it is a message."
                )


def _stats_line(name: str, answers: "list[Stats]") -> str:
    """Return a line of statistics over some answers.

    Rates come from sums, so that a long answer counts for more; the time to the first token is a mean.
    """

    figures = "num_tokens", "num_target_forwards", "num_accepted", "num_drafted", "wall_s", "ttft_s"
    tokens, steps, accepted, drafted, seconds, first = (sum(getattr(x, figure) for x in answers) for figure in figures)
    return (
        f"{name + ':':<14}{tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s, first token "
        f"after {first / len(answers) * 1000:.0f} ms, {tokens / max(steps, 1):.2f} tokens per step, acceptance length "
        f"{accepted / max(steps, 1):.2f} ({accepted} of {drafted} drafted tokens in {steps} steps)"
    )


def _loaded(file: str) -> list[Message]:
    """Return the messages in a file that /save wrote."""
    try:
        messages = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ForetokenError(f"Cannot read the conversation {file}: {why}.") from error
    check_messages(messages, f"The conversation in {file}")
    return list(messages)


def _read() -> str | None:
    """Return the next line of the input; None at its end."""
    if sys.stdin is None:
        return None
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if asks:
        with suppress(ImportError):  # its import gives `input` line editing, where the system has it
            import readline  # noqa: F401
    try:
        return input("> " if asks else "")
    except (EOFError, KeyboardInterrupt) as error:
        if asks:
            print(flush=True)
        if isinstance(error, EOFError):
            return None
        raise
    except UnicodeDecodeError as error:
        raise ForetokenError(f"The message is not UTF-8: {error.reason} at byte {error.start + 1}.") from None


def _say(line: str) -> None:
    print(f"foretoken: {line}", file=sys.stderr, flush=True)
