"""Tool calls in a model's text: how chat templates write them, and how they are read back while the text grows."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from json import JSONDecodeError, JSONDecoder
from uuid import uuid4


@dataclass(frozen=True)
class CallForm:
    """How a chat template writes a call: before {"name": NAME, key: ARGUMENTS} after.

    before, after: the marks around a call; both are empty where a call has no marks and is the whole answer.
    key: the name of the field that holds the arguments.
    names: the functions whose calls are read without their marks too, where the whole answer is such calls.
    alone: whether an answer is either calls or text, never both.
    """

    before: str
    after: str
    key: str
    names: frozenset[str] = frozenset()
    alone: bool = False

    def write(self, name: str, arguments: str) -> str:
        """Return a call as text. name: that of the function. arguments: a JSON object as text."""
        return f'{self.before}{BEGIN}{name}", "{self.key}": {arguments}}}{self.after}'

    def head(self, name: str) -> tuple[str, ...]:
        """Return the JSON tokens of a call up to its arguments. name: that of the function."""
        return "{", '"name"', ":", f'"{name}"', ",", f'"{self.key}"', ":"

    def reader(self) -> "CallReader":
        """Return a new reader, for one answer."""
        if self.names:
            return UnmarkedCalls(self)
        return MarkedCalls() if self.before else WholeCall()


HERMES = CallForm("<tool_call>\n", "\n</tool_call>", "arguments")  # Hermes, Qwen and many others
LLAMA = CallForm("", "", "parameters")  # Llama 3.1
MARK, END = HERMES.before.rstrip(), HERMES.after.lstrip()
BEGIN = '{"name": "'  # with which a call is written between its marks; a model may put SPACE before each JSON token
SPACE = r"[ \t\n\r]*"  # white space in JSON
PIECES = [piece for token in re.findall(r'"\w*"?|[{:]', BEGIN) for piece in (SPACE, *map(re.escape, token))]
BEGINS = "".join(PIECES)  # regular expression of what a call begins with
SPACES = re.compile(SPACE)
# A text that begins with BEGINS, or with as much of it as there is text.
MAY_BEGIN = re.compile(reduce(lambda rest, piece: f"(?:{piece}{rest})?", reversed(PIECES), "(?s:.*)"))
HEAD = re.compile(BEGINS + r"""([^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)""")
TAIL = re.compile(r"\s*\}\s*")
FENCE, LANGUAGE = "```", "json"  # what a model may put calls without marks between, and after the first FENCE
UNFINISHED = re.compile(r"[\w.+\\-]*")  # the tail of a JSON text in which a number, a word or an escape is not complete
# A call with its marks: up to the first closing mark that is not inside a JSON string, with no second opening mark in
# between, so that the time for a text with many opening marks grows with its length alone.
BLOCK = re.compile(r'<tool_call>((?:[^"<]++|"(?:[^"\\]++|\\.)*+"|<(?!/?tool_call>))*+)</tool_call>', re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A call of a function.

    index: its place among the calls of the answer, from 0.
    name: the name of the function.
    arguments: a JSON object as text, as the model wrote it.
    id: a name for the call, which the client sends back with the result.
    """

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


Reading = Callable[[str, bool], tuple[str, list[Call]]]  # the method `read` of a reader


class MarkedCalls:
    """Parts the text of an answer, while it grows, into text and calls between marks.

    Each comes out as soon as it is certain; how the text is cut into pieces changes nothing. White space before a call,
    and at the end of a text with calls, is left out. What begins like a call, but is none, is text.
    """

    def __init__(self) -> None:
        self._held = ""  # text that may become a call, or white space before one
        self._num_calls = 0

    def read(self, text: str, last: bool) -> tuple[str, list[Call]]:
        """Return (text, calls) that have become certain and were not returned before.

        text: what the answer has grown by.
        last: whether the answer ends with it.
        """
        said, calls, held = "", [], self._held + text
        while (begin := held.find(MARK)) >= 0:
            block = BLOCK.match(held, begin)
            if block is None and not last:
                break
            call = None if block is None else call_of(block[1], self._num_calls)
            end = begin + len(MARK) if block is None else block.end()
            said += held[:end] if call is None else held[:begin].rstrip()
            if call is not None:
                calls.append(call)
                self._num_calls += 1
            held = held[end:]
        certain = held if last else held[: begin if begin >= 0 else _without_beginning(held)]
        if self._num_calls or not last:
            certain = certain.rstrip()
        self._held = held[len(certain) :]
        return said + certain, calls


class WholeCall:
    """Reads an answer that is either one call without marks, or text, while it grows."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def read(self, text: str, last: bool) -> tuple[str, list[Call]]:
        held = self._held + text
        self._is_text = self._is_text or not MAY_BEGIN.fullmatch(held)
        if not self._is_text and not last:
            self._held = held
            return "", []
        self._held = ""
        call = None if self._is_text else call_of(held, 0)
        return (held, []) if call is None else ("", [call])


class UnmarkedCalls:
    """Reads an answer that is calls without marks, fenced or not, or what `MarkedCalls` reads, while it grows.

    It is held back as long as all of it may be calls without marks.

    form: how a call is written, and the functions that may be called.
    """

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._text = ""
        self._found: list[Call] = []
        self._at = 0  # how far the text is read
        self._fenced = False  # whether what comes there is inside a fence
        self._cut = False  # whether the text ended where more of a call, or another, may follow
        self._read_on: Reading | None = None  # reads the answer once it cannot be calls without marks

    def read(self, text: str, last: bool) -> tuple[str, list[Call]]:
        """Return (text, calls) that have become certain, as `MarkedCalls.read` does."""
        if self._read_on is not None:
            return self._read_on(text, last)
        self._text += text
        self._cut = False
        while self._step():
            pass
        if self._cut and not last:
            return "", []
        if self._found and not self._fenced and SPACES.fullmatch(self._text, self._at):
            return "", self._found
        is_text = self._form.alone and not self._text.startswith(MARK[0])
        self._read_on = (lambda text, last: (text, [])) if is_text else MarkedCalls().read
        return self._read_on(self._text, last)

    def _step(self) -> bool:
        """Return whether a call, or the end of a fence, comes next, and go past it if so."""
        begin = self._at
        if self._fenced and self._take(FENCE):
            self._fenced = False
            return True
        opened = not self._fenced and self._take(FENCE)
        if opened:
            self._take(LANGUAGE)
        if not self._call():
            self._at = begin
            return False
        self._fenced |= opened
        return True

    def _call(self) -> bool:
        """Return whether a call comes next, and add it to those found if so."""
        begin = self._at
        for name in self._form.names:
            if all(map(self._take, (*self._form.head(name), "{"))):
                arguments = self._arguments()
                if arguments is not None and self._take("}"):
                    self._found.append(Call(len(self._found), name, arguments))
                    return True
            self._at = begin
        return False

    def _arguments(self) -> str | None:
        """Return the JSON object whose first character was taken last, None where it is none."""
        begin = self._at - 1
        try:
            _, self._at = DECODER.raw_decode(self._text, begin)
        except JSONDecodeError as error:
            unended = error.msg.startswith("Unterminated")
            self._cut |= unended or UNFINISHED.fullmatch(self._text, error.pos) is not None
            return None
        except (ValueError, RecursionError):
            return None
        return self._text[begin : self._at]

    def _take(self, token: str) -> bool:
        """Return whether a token comes next, after white space, and go past it if so."""
        at = SPACES.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
        if self._text.startswith(token, at):
            self._at = at + len(token)
            return True
        self._cut |= token.startswith(self._text[at : at + len(token)]) and at + len(token) > len(self._text)
        return False


CallReader = MarkedCalls | WholeCall | UnmarkedCalls


def call_of(text: str, index: int) -> Call | None:
    """Return the call that a JSON text is; None where it is none. index: its place among the answer's calls, from 0."""
    head = HEAD.match(text)
    if head is None:
        return None
    try:
        _, end = DECODER.raw_decode(text, head.end())
    except (ValueError, RecursionError):
        return None
    if not TAIL.fullmatch(text, end):
        return None
    return Call(index, head[1], text[head.end() : end])


def _without_beginning(text: str) -> int:
    """Return the length of a text without its longest tail that may be the beginning of a mark."""
    return len(text) - next((n for n in range(len(MARK) - 1, 0, -1) if text.endswith(MARK[:n])), 0)


def _refuse(constant: str) -> None:
    """Refuse NaN and the infinities, which Python's decoder would take."""
    raise ValueError(f"{constant} is no JSON.")


DECODER = JSONDecoder(parse_constant=_refuse)
