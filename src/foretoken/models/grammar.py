"""Constrained generation: the target's distribution restricted, at every token, to what a grammar allows.

The parser is llguidance's. A constraint is a pure function of the ids before a token, so that it may be called for the
nodes of a token tree in any order. It keeps one parser of one text. For the next text the parser goes back to where the
two part and reads on from there, so that neighbouring nodes of a tree cost one token each.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
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

# JSON has the white space of json.dumps and no other, since a model could go on writing white space forever. A schema
# may say otherwise under "x-guidance", as {"whitespace_flexible": true}.
JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Grammar:
    """A set of texts, one of which the output must be. Make it by one of the static methods, which check the grammar.

    source: the grammar in llguidance's own form.
    """

    source: str

    @staticmethod
    def json_object() -> "Grammar":
        """Return the grammar of all JSON objects."""
        return Grammar.json_schema({"type": "object"})

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | str) -> "Grammar":
        """Return the grammar of the JSON texts that fit a schema.

        schema: a JSON schema as a dict, or as JSON text.

        Raises ForetokenError for what is no schema, and for keywords that cannot be enforced.
        """
        matcher = _llguidance().LLMatcher
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            check_text(text, "The JSON schema")
            source = matcher.grammar_from_json_schema(text, defaults=JSON_FORM)
        except (TypeError, ValueError, RecursionError) as error:
            deep = "recursion" in str(error)  # Python's or the parser's
            why = "is nested too deeply: simplify it" if deep else f"is no JSON object: {_line(error)}"
            raise ForetokenError(f"The JSON schema {why}.") from error
        failed, messages = matcher.validate_grammar_with_warnings(source)
        if failed or messages:
            raise ForetokenError(f"The JSON schema cannot be enforced: {_line(messages[0])}.")
        return Grammar(source)

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """Return the grammar of the texts that a regular expression matches as a whole.

        pattern: the expression in the syntax of Rust's regex crate, without look-around and back-references.

        Raises ForetokenError for one that cannot be read.
        """
        return _checked("The regular expression", pattern, _llguidance().LLMatcher.grammar_from_regex)

    @staticmethod
    def lark(grammar: str, parts: Mapping[str, "Grammar"] | None = None) -> "Grammar":
        """Return a context-free grammar.

        grammar: its rules in the Lark syntax that llguidance reads; the rule `start` is the whole text.
        parts: grammars of JSON or a regular expression by name; the rules refer to them as @name.

        Raises ForetokenError for rules that cannot be read.
        """
        named = [{**json.loads(part.source)["grammars"][0], "name": name} for name, part in (parts or {}).items()]
        joined = json.dumps({"grammars": [{"lark_grammar": grammar}, *named]}) if named else grammar
        return _checked("The Lark grammar", joined, _llguidance().LLMatcher.grammar_from_lark)

    def constraint(self, tokenizer: Tokenizer | None, ends: frozenset[int], num_prompt: int) -> "GrammarConstraint":
        """Return the logits processor that holds one text to the grammar.

        tokenizer: the target's.
        ends: ids that end the text. They are allowed where the grammar can end; where it must end, nothing else is.
        num_prompt: number of ids in the prompt, after which the grammar's text begins.

        Raises ForetokenError where there is no tokenizer that the parser can read, or no id that ends a text.
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
    """The constraint that holds one text to a grammar; see core.sampling.Constraint.

    Whoever decodes with it calls `check_grammars` after each step.

    parser: its state is that after the ids in `read`.
    silent: ids that end a text for the tokenizer but not for the caller [_]; they are never allowed.
    ends: ids that end this text [_].
    num_prompt: number of ids before the grammar's text.
    read: ids of the grammar's text that the parser has read.
    failed: why the parser cannot go on, if it failed: then the text may only end, and `check_grammars` raises this.
    lock: held while the parser is in use.
    """

    parser: "LLMatcher"
    silent: np.ndarray
    ends: np.ndarray
    num_prompt: int
    read: list[int] = field(default_factory=list)
    failed: GrammarError | None = None
    lock: Lock = field(default_factory=Lock)  # a drafter may work while the target does

    def __call__(self, ids: Tensor, scores: Float[Tensor, "1 v"]) -> Tensor:
        allowed = torch.from_numpy(self._mask(ids[0, self.num_prompt :].tolist(), scores.shape[1]))
        if self.failed is not None:  # the text ends, also where other processors forbid its ends
            scores = torch.zeros_like(scores)
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def allows(self, ids: Sequence[int], token: int) -> bool:
        with self.lock:
            inside = self._go_to(ids[self.num_prompt :])
            if token in self.ends:
                return not inside or self.parser.is_accepting()
            return inside and token not in self.silent and self.parser.validate_tokens([token]) == 1

    def _mask(self, text: list[int], width: int) -> np.ndarray:
        """Return which of `width` tokens may follow the ids of a text [width]; outside the grammar, only the ends."""
        mask, ends = np.zeros(width, bool), self.ends[self.ends < width]
        with self.lock:
            packed = self._allowed() if self._go_to(text) else None
            if packed is not None:
                bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
                mask[: len(bits)] = bits[:width]
            mask[self.silent[self.silent < width]] = False
            mask[ends] = packed is None or self.parser.is_accepting()
        return mask

    def _allowed(self) -> bytes | None:
        """Return the tokens that may come next as bits, one per token id; None where the parser fails."""
        bits = self.parser.compute_bitmask()
        self.failed = _failure(self.parser)
        return bits if self.failed is None else None

    def _go_to(self, text: Sequence[int]) -> bool:
        """Bring the parser to the state after the ids `text`; False if it fails or no text of the grammar begins so."""
        if self.failed is not None:
            return False
        same = min(len(self.read), len(text))
        if self.read[:same] != list(text[:same]):  # a fast test: nearly every text continues the last one
            same = next(i for i, (a, b) in enumerate(zip(self.read, text, strict=False)) if a != b)
        if same < len(self.read):
            self.parser.rollback(len(self.read) - same)
            del self.read[same:]
        rest = list(text[same:])
        if any(token in self.ends for token in rest):
            return False
        known = self.parser.try_consume_tokens(rest)
        self.read += rest[:known]
        self.failed = _failure(self.parser)
        return known == len(rest) and self.failed is None


def check_grammars(processors: Iterable[object]) -> None:
    """Raise GrammarError if the parser of a grammar among a text's `processors` failed; called after each step."""
    for processor in processors:
        if isinstance(processor, GrammarConstraint) and processor.failed is not None:
            raise processor.failed


def _failure(parser: "LLMatcher") -> GrammarError | None:
    """Return the error of a parser that has failed, which cannot be used again; None where it has not.

    The error quotes only the first word of the parser's message, since the rest contains the generated text.
    """
    if not parser.is_error():
        return None
    word = parser.get_error().split(maxsplit=1)[0]
    return GrammarError(f"The grammar is too much for its parser, or has no text ({word}): simplify it.")


@lru_cache(maxsize=4)
def tokens_of(tokenizer: Tokenizer) -> "LLTokenizer":
    """Return a `tokenizer` in the parser's form, which takes up to a second for a large vocabulary.

    Raises ForetokenError for one that the parser cannot read.
    """
    _llguidance()
    from llguidance import LLTokenizer

    end: Any = tokenizer.eos_token_id
    try:
        spec = _as_read(tokenizer)
        known = LLTokenizer(json.dumps(spec), eos_token=end)
        texts = {i: [str(tokenizer.decode([i] * n, clean_up_tokenization_spaces=False)) for n in (1, 2)]
                 for i, token in tokenizer.added_tokens_decoder.items() if not token.special}  # fmt: skip
        unlike = {i for i, (one, two) in texts.items() if known.decode_bytes([i]) != two[len(one) :].encode()}
        for token in spec["added_tokens"]:
            token["special"] |= token["id"] in unlike  # which no grammar takes for text
        return LLTokenizer(json.dumps(spec), eos_token=end) if unlike else known
    except Exception as error:  # the parser raises whatever its own reader does
        raise ForetokenError(f"Grammars cannot read the tokenizer of this model: {_line(error)}.") from error


def _as_read(tokenizer: Any) -> dict[str, Any]:
    """Return the JSON of a `tokenizer` as the parser understands it.

    Of decoders the parser knows two kinds, and it takes for granted that no space is put before a text.

    Raises ValueError for a tokenizer that has no JSON.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError("only fast tokenizers are supported")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    spec = json.loads(backend.to_str())
    before, decoder = spec["pre_tokenizer"] or {}, spec["decoder"] or {}
    for part in before.get("pretokenizers", [before]):
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
    for part in decoder.get("decoders", [decoder]):
        if part.get("type") == "Metaspace":
            written = {"type": "Replace", "pattern": {"String": part["replacement"]}, "content": " "}
            spec["decoder"] = {"type": "Sequence", "decoders": [written, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return spec


@lru_cache(maxsize=4)
def marks_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens of a `tokenizer` that are text, but that a grammar accepts by their id alone: text -> id.

    A grammar writes such a token as <[id]>. Vocabularies have them for marks such as those around a tool call.
    """
    known = tokens_of(tokenizer)
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in added if not token.special and known.is_special_token(i)}


@lru_cache(maxsize=64)
def compiled(tokenizer: Tokenizer, grammar: Grammar) -> "LLMatcher":
    """Return a parser of `grammar` over the tokens of `tokenizer`, at the beginning of a text; copy it before use.

    Raises ForetokenError for a grammar that cannot be compiled, is too large, or has no text.
    """
    parser = _llguidance().LLMatcher(tokens_of(tokenizer), grammar.source, log_level=0)
    if parser.is_error():
        raise ForetokenError(f"The grammar cannot be compiled: {_line(parser.get_error())}.")
    first = parser.deep_copy()
    first.compute_bitmask()
    if failed := _failure(first):
        raise failed
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
    """Return the module of the parser. Raises ForetokenError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ForetokenError("Grammars need llguidance: pip install -e '.[grammar]'.") from error
    return llguidance


def _line(error: object) -> str:
    """Return the beginning of an error's message on one line, without lines that quote the source of the grammar."""
    message = str(error).partition("<backtrace>")[0]
    lines = [line.strip() for line in message.splitlines() if "|" not in line and set(line.strip()) - {"^"}]
    return " ".join(lines)[:300].rstrip(".") or type(error).__name__
