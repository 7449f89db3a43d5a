"""`foretoken chat`: a conversation in the terminal."""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.groups import EngineOptions, MaxNewTokens, Temperature, TextOptions, grouped
from foretoken.core.errors import ForetokenError
from foretoken.core.messages import Message, check_messages, check_text

if TYPE_CHECKING:
    from foretoken.engine import Chunk, Engine
    from foretoken.stats import Stats

HELP = """\
/stats        speed and acceptance of the last answer, and of the whole conversation
/save FILE    write the messages as JSON
/load FILE    go on from messages that were saved
/system TEXT  set the system message from here on; without TEXT there is none
/reset        forget the conversation, the system message excepted
/exit         leave; so does Ctrl-D
Ctrl-C ends an answer, and what was printed stays. A line that begins with a space is sent as it is."""


@dataclass(frozen=True)
class AnswerOptions(TextOptions):
    """As for any text, with what suits an answer where nothing is named."""

    temperature: Temperature = 0.7
    max_new_tokens: MaxNewTokens = 1024


@grouped
def chat(engine: EngineOptions, text: AnswerOptions) -> None:
    """Talk with an instruction-tuned model; answers stream to stdout as their tokens are accepted.

    Lines come from the terminal, or from a pipe, one message each. /help lists what can be done besides.
    Answer i of a conversation uses seed + i.
    """
    if text.system is not None:
        check_text(text.system, "The system message")
    text.check()
    loaded = engine.load(text.seed, 1)
    arguments = {"max_new_tokens": text.max_new_tokens, **text.arguments()}
    conversation = Conversation(loaded, arguments, text.first_seed(), text.show_drafts, _system_message(text.system))
    loaded.encode([*conversation.messages, {"role": "user", "content": "Hello"}])  # has it a template?
    _tell(f"{loaded.target.name}; /help tells what can be done, /exit or Ctrl-D leaves.")
    if text.show_drafts:
        from foretoken.cli.tints import legend

        _tell(legend())
    while conversation.turn():
        pass


def _system_message(text: str | None) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


@dataclass
class Conversation:
    """The messages so far, and the answers' statistics. arguments: of `Engine.stream`, besides the seed."""

    engine: "Engine"
    arguments: dict[str, Any]
    seed: int
    show_drafts: bool
    messages: list[Message]
    answers: "list[Stats]" = field(default_factory=list)

    def turn(self) -> bool:
        """Read a line and do what it says; whether another may follow."""
        try:
            line = _read()
        except KeyboardInterrupt:
            _tell("/exit or Ctrl-D leaves.")
            return True
        if line is None or line.rstrip() in ("/exit", "/quit"):
            return False
        try:
            if line.startswith("/"):
                self.command(line)
            elif line.strip():
                self.answer(line.strip())
        except ForetokenError as error:
            _tell(str(error))
        return True

    def answer(self, said: str) -> None:
        """Write the model's answer as its tokens are accepted; Ctrl-C ends it, and what was written is remembered."""
        check_text(said, "The message")
        messages: list[Message] = [*self.messages, {"role": "user", "content": said}]
        self._check_room(messages)
        text, last = "", None
        shown = self._tints(messages)
        seed = (self.seed + len(self.answers)) % 2**32
        try:
            for last in self.engine.stream(messages, seed=seed, **self.arguments):
                text += last.text
                _write(shown.push(last) if shown else last.text)
        except KeyboardInterrupt:
            _write("\n")
            _tell("the answer was ended; the conversation goes on.")
        else:
            _write("\n")
        if last is None:
            return
        self.answers.append(last.stats)
        if text:
            self.messages = [*messages, {"role": "assistant", "content": text}]
        if last.finish_reason == "length":
            self._tell_length(last)

    def _check_room(self, messages: list[Message]) -> None:
        from foretoken.models.text import chat_prompt

        tokenizer, context = self.engine.tokenizer, self.engine.target.lm.context
        assert tokenizer is not None
        length = len(chat_prompt(tokenizer, messages))
        if context is not None and length >= context:
            raise ForetokenError(
                f"The conversation has {length} tokens with this message, and the context of "
                f"{self.engine.target.name} is {context}: begin anew with /reset, or say less."
            )

    def _tints(self, messages: list[Message]) -> Any:
        if not self.show_drafts:
            return None
        from foretoken.cli.tints import Tints

        return Tints(self.engine, messages, self.arguments["stop"])

    def _tell_length(self, last: "Chunk") -> None:
        wanted = self.arguments["max_new_tokens"]
        if last.stats.num_tokens >= wanted:
            _tell(f"the answer ended after {wanted} tokens: --max-new-tokens allows more.")
        else:
            _tell("the answer ended where the model's context is full: begin anew with /reset.")

    def command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in ("/save", "/load") and not rest:
            raise ForetokenError(f"{name} needs the name of a file: {name} FILE.")
        if name == "/help":
            print(HELP, file=sys.stderr)
        elif name == "/stats":
            print(self.stats(), file=sys.stderr)
        elif name == "/save":
            self.save(Path(rest))
        elif name == "/load":
            self.messages = _loaded(Path(rest))
            _tell(f"{len(self.messages)} messages read from {rest}.")
        elif name == "/system":
            check_text(rest, "The system message")
            self.messages = [*_system_message(rest), *self._said()]
            _tell("the system message is set." if rest else "there is no system message.")
        elif name == "/reset":
            said = self._said()
            self.messages = self.messages[: len(self.messages) - len(said)]
            _tell("the conversation begins anew.")
        else:
            raise ForetokenError(f"There is no command {name}: /help lists them; a space before it sends it as it is.")

    def _said(self) -> list[Message]:
        """The messages without the system's."""
        return self.messages[1:] if self.messages and self.messages[0]["role"] == "system" else self.messages

    def save(self, file: Path) -> None:
        from foretoken.core.files import check_file, write

        check_file(file)
        text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        write(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        _tell(f"{len(self.messages)} messages written to {file}.")

    def stats(self) -> str:
        if not self.answers:
            return "There is no answer yet."
        parts = [("last answer", self.answers[-1:]), ("conversation", self.answers)]
        return "\n".join(_stats_line(name, answers) for name, answers in parts)


def _stats_line(name: str, answers: "list[Stats]") -> str:
    """Sums over answers, so that a long one counts for more; the time to the first token is a mean."""
    tokens, steps = sum(s.num_tokens for s in answers), sum(s.num_target_forwards for s in answers)
    seconds = sum(s.wall_s for s in answers)
    accepted, drafted = sum(s.num_accepted for s in answers), sum(s.num_drafted for s in answers)
    first = sum(s.ttft_s for s in answers) / len(answers)
    return (
        f"{name + ':':<14}{tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s, first token "
        f"after {first * 1000:.0f} ms, {tokens / max(steps, 1):.2f} tokens per step, acceptance length "
        f"{accepted / max(steps, 1):.2f} ({accepted} of {drafted} drafted tokens in {steps} steps)"
    )


def _loaded(file: Path) -> list[Message]:
    try:
        messages = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ForetokenError(f"Cannot read the conversation {file}: {why}.") from error
    check_messages(messages, f"The conversation in {file}")
    return list(messages)


def _read() -> str | None:
    """The next line; None at the end of the input."""
    if sys.stdin is None:
        return None
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if asks:
        with suppress(ImportError):  # which gives `input` its line editing, where the system has it
            import readline  # noqa: F401
    try:
        return input("> " if asks else "")
    except EOFError:
        if asks:
            _write("\n")
        return None
    except UnicodeDecodeError as error:
        raise ForetokenError(f"The message is not UTF-8: {error.reason} at byte {error.start + 1}.") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(line: str) -> None:
    print(f"foretoken: {line}", file=sys.stderr, flush=True)
