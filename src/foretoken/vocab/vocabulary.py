"""A vocabulary as byte strings: the bytes that each token spells, and the ids that spell given bytes.

Tokens of two tokenizers are compared by their bytes, since what a vocabulary file shows differs from family to family:

| family                       | in the file            | here                    |
|------------------------------|------------------------|-------------------------|
| byte-level BPE               | "Ġthe", "Ã©"           | b" the", b"\\xc3\\xa9"    |
| SentencePiece (BPE, Unigram) | "▁the", "<0xC3>"       | b" the", b"\\xc3"        |
| WordPiece                    | "the", "##ing"         | b" the", b"ing"         |
| ByT5                         | chr(195)               | b"\\xc3"                 |

The bytes of a text are those of its tokens, joined. Where a tokenizer puts a space before the first word, the bytes
have that space too. Special tokens spell nothing.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram

from foretoken.core.errors import ForetokenError
from foretoken.models.text import Tokenizer

SPACE = "▁"  # how SentencePiece writes a space
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
FAMILIES = "byte-level BPE, SentencePiece (BPE or Unigram), WordPiece or ByT5"
# One of these is put before a text, and its ids taken off again, so that the first word gets no space of its own.
ANCHORS = ("", "\n", "\na", "a")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of one tokenizer as bytes.

    name: the tokenizer's name, for messages.
    tokens: tokens[id] is what the token spells; None for special and unknown tokens and for ids without a token.
    special: {content: id} of the special tokens.
    bos, eos: ids of begin-of-text and end-of-text; None where there is none.
    prefix: the ids with which the tokenizer begins every text, such as begin-of-text; may be empty.
    backend: the part of the tokenizer that splits text, which the caller may use too; None for ByT5.
    fallback: ids of tokens such as <0x0A>; where another token spells the same byte, that one is preferred.
    """

    name: str
    tokens: tuple[bytes | None, ...]
    special: dict[str, int]
    bos: int | None
    eos: int | None
    prefix: tuple[int, ...]
    backend: Backend | None = field(repr=False)
    fallback: frozenset[int] = frozenset()

    def __len__(self) -> int:
        """Return the number of tokens, special ones included."""
        return sum(token is not None for token in self.tokens) + len(self.special)

    def within(self, width: int) -> "Vocabulary":
        """Return the vocabulary without the ids from `width` on, for a model whose tokenizer has more tokens than that.

        width: the number of ids that the model can read, or that its logits have.
        """
        tokens = tuple(token if i < width else None for i, token in enumerate(self.tokens))
        special = {name: i for name, i in self.special.items() if i < width}
        bos, eos = (i if i is not None and i < width else None for i in (self.bos, self.eos))
        prefix = tuple(i for i in self.prefix if i < width)
        return replace(self, tokens=tokens, special=special, bos=bos, eos=eos, prefix=prefix)

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """{bytes: id} of all tokens that spell something. Of tokens with equal bytes it is the lowest id, those in
        `fallback` last."""
        ids: dict[bytes, int] = {}
        for last in (False, True):
            for i, token in enumerate(self.tokens):
                if token and (i in self.fallback) is last:
                    ids.setdefault(token, i)
        return ids

    @cached_property
    def longest(self) -> int:
        """The length of the longest token, in bytes."""
        return max(map(len, self.ids), default=0)

    @cached_property
    def _copy(self) -> Backend:
        """A backend that does not truncate or pad, whatever the caller's does."""
        assert self.backend is not None
        copy = Backend.from_str(self.backend.to_str())
        copy.no_truncation()
        copy.no_padding()
        return copy

    def spell(self, ids: Iterable[int]) -> bytes:
        """Return the joined bytes of the tokens `ids`; special tokens and ids past the end add none."""
        tokens, n = self.tokens, len(self.tokens)
        return b"".join(tokens[i] or b"" for i in ids if i < n)

    def encode(self, data: bytes) -> list[int]:
        """Return ids that spell `data` as inside a text: no begin-of-text, no first space, never a special token.

        They are the tokenizer's own choice where that spells the same bytes, else those of `longest_match`, which
        leaves out bytes that no token fits.
        """
        ids: list[int] = []
        for piece in utf8_pieces(data):
            own = self._own(piece) if isinstance(piece, str) else None
            ids += self.longest_match(piece.encode() if isinstance(piece, str) else piece) if own is None else own
        return ids

    def longest_match(self, data: bytes) -> list[int]:
        """Return ids that spell `data`: from the left, each time the longest token that the rest begins with.

        A byte is left out where the rest begins with no token. Source: greedy segmentation, Timor et al. 2025, s. 3.
        """
        ids, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + self.longest), at, -1):
                token = self.ids.get(data[at:end])
                if token is not None:
                    ids.append(token)
                    at = end
                    break
            else:
                at += 1
        return ids

    def _own(self, text: str) -> list[int] | None:
        """Return the tokenizer's own ids for `text`; None where there is no backend, or they spell something else.

        They do where a caller who uses the same tokenizer has added tokens that the text has.
        """
        backend = self.backend
        if backend is None:
            return None
        if backend.truncation or backend.padding or backend.encode_special_tokens:  # set by such a caller
            backend = self._copy
        want = text.encode()
        for anchor in ANCHORS:
            ids = backend.encode(anchor + text, add_special_tokens=False).ids
            start = self._boundary(ids, anchor.encode())
            if start is not None and self.spell(ids[start:]) == want and all(self.tokens[i] for i in ids[start:]):
                return ids[start:]
        return None

    def _boundary(self, ids: Sequence[int], head: bytes) -> int | None:
        """Return how many of the first ids spell `head`, with or without a space before it; None if none do."""
        if not head:
            return 0
        spelled = b""
        for i, token in enumerate(ids, start=1):
            spelled += self.spell([token])
            if spelled in (head, b" " + head):
                return i
        return None


def utf8_pieces(data: bytes) -> Iterator[str | bytes]:
    """Yield `data` in pieces: valid UTF-8 as str, and the bytes between that are none, such as half a character."""
    while data:
        try:
            yield data.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start].decode()
            yield data[error.start : error.end]
            data = data[error.end :]


def vocabulary(tokenizer: Tokenizer, name: str = "") -> Vocabulary:
    """Return the vocabulary of a tokenizer as bytes.

    tokenizer: one of a family in the table above.
    name: its name in messages; by default the name or path it was loaded by, or its class.

    Raises ForetokenError, with that name, for a tokenizer from which the bytes of its tokens cannot be read.
    """
    tok: Any = tokenizer  # whose stubs promise less than it does
    name = name or tok.name_or_path or type(tokenizer).__name__
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None and type(tokenizer).__name__ != "ByT5Tokenizer":
        raise _no_bytes(name, type(tokenizer).__name__)
    special = {str(t): i for i, t in tok.added_tokens_decoder.items() if t.special}
    added = [i for i, t in tok.added_tokens_decoder.items() if not t.special]
    shown = dict(zip(added, tok.convert_ids_to_tokens(added), strict=True))  # which a normaliser may have changed
    for content in tok.all_special_tokens:  # those that are tokens of the model, not added ones
        special.setdefault(content, tok.convert_tokens_to_ids(content))
    spell = _byt5 if backend is None else _speller(backend, name)
    entries: dict[str, int] = tok.get_vocab()
    tokens: list[bytes | None] = [None] * (max(entries.values(), default=-1) + 1)
    silent = set(special.values()) | ({_unknown(backend, entries)} if backend else set())
    for token, i in entries.items():
        if i not in silent:
            tokens[i] = shown[i].encode() if i in shown and backend is None else spell(shown.get(i, token))
    fallback = frozenset(i for token, i in entries.items() if BYTE.fullmatch(token)) if backend else frozenset()
    begins = tok("a")["input_ids"]
    prefix = begins[: next((n for n, i in enumerate(begins) if i not in special.values()), 0)]
    return Vocabulary(
        name, tuple(tokens), special, tok.bos_token_id, tok.eos_token_id, tuple(prefix), backend, fallback
    )


def _unknown(backend: Backend, entries: dict[str, int]) -> int | None:
    """Return the id of the token for what no other token spells; None where there is none."""
    model: Any = backend.model
    if isinstance(model, Unigram):  # which has no attribute for it
        return json.loads(backend.to_str())["model"]["unk_id"]
    return entries.get(model.unk_token or "")


def _speller(backend: Backend, name: str) -> Any:
    """Return the function from a token, as the file shows it, to its bytes, by the tokenizer's kind of decoder."""
    part: Any = backend.decoder
    decoder: dict[str, Any] = {"type": "none"} if part is None else json.loads(part.__getstate__())
    parts: dict[str, dict[str, Any]] = {d["type"]: d for d in decoder.get("decoders", [decoder])}
    spaced = any(d.get("replacement") == SPACE or d.get("pattern") == {"String": SPACE} for d in parts.values())
    if "ByteLevel" in parts:
        return _byte_level
    if "WordPiece" in parts:
        decode: Any = backend.decoder.decode  # which may put no space before some signs
        return lambda token: decode(["a", token])[1:].encode()
    if "Metaspace" in parts or spaced:
        return _sentencepiece
    raise _no_bytes(name, f"its decoder is {' and '.join(parts)}")


def _no_bytes(name: str, why: str) -> ForetokenError:
    return ForetokenError(
        f"Tokenizer {name} does not tell the bytes of its tokens ({why}): use one of the families {FAMILIES}."
    )


def _sentencepiece(token: str) -> bytes:
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


def _byt5(token: str) -> bytes:
    return bytes([ord(token)]) if len(token) == 1 and ord(token) < 256 else token.encode()


def _alphabet() -> dict[str, int]:
    """Return {letter: byte} of byte-level BPE: a printable byte is shown as itself, others as letters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


NO_LETTER = "\uffff"  # stands for characters that are no letters, so that Latin-1 has no byte for them
LETTERS = dict.fromkeys(range(256), NO_LETTER) | {ord(letter): chr(byte) for letter, byte in _alphabet().items()}


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(LETTERS).encode("latin-1")
    except UnicodeEncodeError:  # an added token, written as it reads
        return token.encode()
