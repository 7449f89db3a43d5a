"""Constrained generation: text that a grammar accepts, by the law of the target restricted to it at every token.

The parser is llguidance's. A constraint is a pure function of the ids before a token, so that it may be asked at every
node of a token tree in any order: it keeps one parser of one text, which goes back to where two prefixes part and reads
on from there. Neighbouring nodes of a tree therefore cost one token each.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError, GrammarError
from foretoken.core.messages import check_text
from foretoken.core.shapes import Float
from foretoken.models.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# JSON is written as json.dumps writes it: a model cannot lose itself in white space. A schema may say otherwise under
# "x-guidance", as {"whitespace_flexible": true}.
JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Grammar:
    """What a text must be; made by one of the functions below, which refuse what is no grammar.

    source: the grammar in llguidance's own form.
    """

    source: str

    @staticmethod
    def json_object() -> "Grammar":
        """The texts that are a JSON object."""
        return Grammar.json_schema({"type": "object"})

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | str) -> "Grammar":
        """The JSON texts of a schema.

        schema: a JSON schema as a dict, or as JSON text. Keywords that cannot be enforced are refused.
        """
        matcher = _llguidance().LLMatcher
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            check_text(text, "The JSON schema")
            source = matcher.grammar_from_json_schema(text, defaults=JSON_FORM)
        except (TypeError, ValueError, RecursionError) as error:
            raise ForetokenError(f"The JSON schema is no JSON object: {_line(error)}.") from error
        failed, messages = matcher.validate_grammar_with_warnings(source)
        if failed or messages:
            raise ForetokenError(f"The JSON schema cannot be enforced: {_line(messages[0])}.")
        return Grammar(source)

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """The texts that a regular expression matches as a whole.

        pattern: in the syntax of Rust's regex crate, without look-around and back-references.
        """
        return _checked("The regular expression", pattern, _llguidance().LLMatcher.grammar_from_regex)

    @staticmethod
    def lark(grammar: str, parts: Mapping[str, "Grammar"] | None = None) -> "Grammar":
        """The texts of a context-free grammar.

        grammar: in the Lark syntax as llguidance reads it; its rule `start` is the whole text.
        parts: grammars of JSON or a regular expression to which it may refer, as @name.
        """
        named = [{**json.loads(part.source)["grammars"][0], "name": name} for name, part in (parts or {}).items()]
        joined = json.dumps({"grammars": [{"lark_grammar": grammar}, *named]}) if named else grammar
        return _checked("The Lark grammar", joined, _llguidance().LLMatcher.grammar_from_lark)

    def constraint(self, tokenizer: Tokenizer | None, ends: frozenset[int], num_prompt: int) -> "GrammarConstraint":
        """The processor that holds one text to the grammar.

        tokenizer: of the target. ends: ids that end the text; they are allowed where the grammar can end, and nothing
        else is where it must. num_prompt: ids of the prompt, after which the grammar's text begins.
        Raises ForetokenError where there is no tokenizer that can be read, or no id that ends a text.
        """
        if tokenizer is None:
            raise ForetokenError("A grammar needs a tokenizer: pass tokenizer= to foretoken.load.")
        if not ends:
            raise ForetokenError("A grammar needs an end-of-text token, and this model names none.")
        parser = compiled(tokenizer, self).deep_copy()
        silent = np.array(sorted(set(tokens_of(tokenizer).eos_tokens) - ends), np.int64)
        return GrammarConstraint(parser, silent, np.array(sorted(ends), np.int64), num_prompt)


@dataclass(eq=False)
class GrammarConstraint:
    """One text held to a grammar; see core.sampling.Constraint.

    parser: its state after `read`. silent: end-of-text ids of the tokenizer that do not end this text.
    ends: ids that do. num_prompt: ids before the grammar's text.
    """

    parser: "LLMatcher"
    silent: np.ndarray
    ends: np.ndarray
    num_prompt: int
    read: list[int] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)  # a drafter may work while the target does

    def __call__(self, ids: Tensor, scores: Float[Tensor, "1 v"]) -> Tensor:
        allowed = torch.from_numpy(self._mask(ids[0, self.num_prompt :].tolist(), scores.shape[1]))
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def allows(self, ids: Sequence[int], token: int) -> bool:
        with self.lock:
            inside = self._go_to(ids[self.num_prompt :])
            if token in self.ends:
                return not inside or self.parser.is_accepting()
            return inside and token not in self.silent and self.parser.validate_tokens([token]) == 1

    def _mask(self, text: list[int], width: int) -> np.ndarray:
        """Which of `width` tokens may come after the ids of a text; after one outside the grammar the ends alone."""
        mask, ends = np.zeros(width, bool), self.ends[self.ends < width]
        with self.lock:
            inside = self._go_to(text)
            if inside:
                bits = np.unpackbits(np.frombuffer(_allowed(self.parser), np.uint8), bitorder="little")
                mask[: len(bits)] = bits[:width]
            mask[self.silent[self.silent < width]] = False
            mask[ends] = not inside or self.parser.is_accepting()
        return mask

    def _go_to(self, text: Sequence[int]) -> bool:
        """Bring the parser to where it has read these ids; False where they are no beginning of the grammar's texts."""
        same = min(len(self.read), len(text))
        if self.read[:same] != list(text[:same]):  # compared at once: nearly every text goes on from the last one
            same = next(i for i, (a, b) in enumerate(zip(self.read, text, strict=False)) if a != b)
        if same < len(self.read):
            self.parser.rollback(len(self.read) - same)
            del self.read[same:]
        rest = list(text[same:])
        if any(token in self.ends for token in rest):
            return False
        known = self.parser.try_consume_tokens(rest)
        self.read += rest[:known]
        _check(self.parser)
        return known == len(rest)


def _allowed(parser: "LLMatcher") -> bytes:
    """A bit for each token that may come next. Raises what the parser failed with: it never gets over it."""
    bits = parser.compute_bitmask()
    _check(parser)
    return bits


def _check(parser: "LLMatcher") -> None:
    """Raise GrammarError where the parser has failed, by the first word of its message: the rest tells the text."""
    if parser.is_error():
        word = parser.get_error().split(maxsplit=1)[0]
        raise GrammarError(f"The grammar is too much for its parser, or has no text ({word}): simplify it.")


@lru_cache(maxsize=4)
def tokens_of(tokenizer: Tokenizer) -> "LLTokenizer":
    """The tokenizer as the parser knows it; takes up to a second for a large vocabulary.

    Raises ForetokenError for one that the parser cannot read.
    """
    _llguidance()
    from llguidance import hf

    try:
        return hf.from_tokenizer(tokenizer)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # the parser raises whatever its own reader does
        raise ForetokenError(f"Grammars cannot read the tokenizer of this model: {_line(error)}.") from error


@lru_cache(maxsize=4)
def marks_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens that are text, and that a grammar accepts by their id alone, written <[id]>: the text of each -> its id.

    Vocabularies have them for marks such as those around a tool call. Raises ForetokenError as `tokens_of` does.
    """
    known = tokens_of(tokenizer)
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in added if not token.special and known.is_special_token(i)}


@lru_cache(maxsize=64)
def compiled(tokenizer: Tokenizer, grammar: Grammar) -> "LLMatcher":
    """The parser at the beginning of a text. Raises ForetokenError for a grammar that is too large, or has no text."""
    parser = _llguidance().LLMatcher(tokens_of(tokenizer), grammar.source, log_level=0)
    if parser.is_error():
        raise ForetokenError(f"The grammar cannot be compiled: {_line(parser.get_error())}.")
    _allowed(parser.deep_copy())
    return parser


def _checked(what: str, text: Any, make: Any) -> Grammar:
    if not isinstance(text, str):
        raise ForetokenError(f"{what} is a {type(text).__name__}: give a text.")
    check_text(text, what)
    source = make(text)
    failed, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(source)
    if failed:
        raise ForetokenError(f"{what} is not understood: {_line(messages[0])}.")
    return Grammar(source)


def _llguidance() -> Any:
    """The module of the parser. Raises ForetokenError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ForetokenError("Grammars need llguidance: pip install -e '.[grammar]'.") from error
    return llguidance


def _line(error: object) -> str:
    """The message of an error on one line."""
    lines = [line.strip() for line in str(error).splitlines() if "|" not in line and set(line.strip()) - {"^"}]
    return " ".join(lines).rstrip(".") or type(error).__name__
