"""Training texts are read from text files and JSON lines, and become rows of token ids that form batches."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from foretoken.core.errors import ForetokenError
from foretoken.models.text import Tokenizer, encode

SHORTEST = 16  # smallest number of tokens of a row; shorter ones teach next to nothing


@dataclass(frozen=True)
class Record:
    """One training text: strings, or token ids.

    prompt: the beginning of the text, which is given and not learnt.
    text: the rest, which is learnt.
    file: the file where it stands, for messages.
    ids: token ids of the whole text instead of strings, else empty. Where a model has sampled a text, its tokenizer may
        encode the decoded string as other ids.
    given: with `ids`, how many of the first of them are not learnt.
    """

    prompt: str
    text: str
    file: str = field(default="the data", compare=False)
    ids: tuple[int, ...] = ()
    given: int = 0


@dataclass(frozen=True)
class Row:
    """A text, or a piece of one, as it is trained on.

    ids: token ids [t].
    skipped: how many of the first ids are not learnt; fewer than t.
    """

    ids: np.ndarray
    skipped: int


def records(files: Sequence[str]) -> Iterator[Record]:
    """Yield the training texts of files.

    A file is one text. In a .jsonl file each line is one, an object of one of these forms: {"text"}, {"prompt",
    "text"}, {"conversations": [{"role", "content"}]}, or {"ids", "given"}, which has the token ids of a whole text and
    the number of the first ones that are not learnt. The last assistant turn of a conversation is learnt; all turns
    before it are the prompt, and turns after it are left out. Blank files and lines are left out.

    files: paths of the files.

    Raises ForetokenError where a file or a line cannot be read, or there is no text at all.
    """
    empty = True
    for name in files:
        path = Path(name)
        try:
            content = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ForetokenError(
                f"Cannot read data file {name}: {getattr(error, 'strerror', None) or error}."
            ) from error
        by_line = path.suffix == ".jsonl"
        pieces = content.split("\n") if by_line else [content]  # JSON strings may hold what `splitlines` splits at
        for number, piece in enumerate(pieces, start=1):
            if piece.strip():
                empty = False
                yield _record(piece, name, f"{name}, line {number}") if by_line else Record("", piece, name)
    if empty:
        raise ForetokenError(f"There is no text at all in {', '.join(files)}: name files that hold some.")


def _record(line: str, file: str, place: str) -> Record:
    turns, last, strings, of_ids = [], 0, {}, None
    try:
        value = json.loads(line)
        if "ids" in value:
            of_ids = value["ids"], value.get("given", 0)
        elif "conversations" in value:
            turns = [(turn["role"], turn["content"]) for turn in value["conversations"]]
            last = max(i for i, (role, _) in enumerate(turns) if role == "assistant")
            strings = {f"role of turn {i}": role for i, (role, _) in enumerate(turns, start=1)}
            strings |= {f"content of turn {i}": content for i, (_, content) in enumerate(turns, start=1)}
        else:
            strings = {"prompt": value.get("prompt", ""), "text": value["text"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForetokenError(
            f'{place} is no training text: write {{"text": ...}} or {{"conversations": [{{"role", "content"}}, ...]}}, '
            "with an assistant turn."
        ) from error
    if of_ids is not None:
        return _record_of_ids(*of_ids, file, place)
    for what, string in strings.items():
        _check(string, what, place)
    if not turns:
        return Record(strings["prompt"], strings["text"], file)
    said = [f"{role}: {content}\n" for role, content in turns[:last]]
    return Record("".join(said) + "assistant: ", turns[last][1], file)


def _record_of_ids(ids: Any, given: Any, file: str, place: str) -> Record:
    if not isinstance(ids, list) or not all(type(x) is int and x >= 0 for x in ids):
        raise ForetokenError(f"{place} has ids that are no list of whole numbers from 0 on: mend or remove the line.")
    if type(given) is not int or not 0 <= given <= len(ids):
        raise ForetokenError(f"{place} has given {given}: it must be a number of its {len(ids)} ids.")
    return Record("", "", file, tuple(ids), given)


def _check(string: object, what: str, place: str) -> None:
    if not isinstance(string, str):
        raise ForetokenError(f"{place} must hold strings, but its {what} is {json.dumps(string):.40}: write it as one.")
    try:
        string.encode()
    except UnicodeEncodeError as error:
        raise ForetokenError(
            f"{place} holds half a character, \\u{ord(string[error.start]):x}, in its {what}: mend or remove it."
        ) from error


def rows(texts: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[Row]:
    """Return the rows of texts: each text by itself, cut into pieces of up to `length` ids.

    Pieces shorter than SHORTEST, and pieces with nothing to learn, are left out.

    texts: the texts.
    tokenizer: encodes the texts that are strings. Its end-of-text id, if it has one, is appended to these, but not to
        texts that are ids.
    length: largest number of ids of a row.

    Raises ForetokenError where no row is left.
    """
    end = tokenizer.eos_token_id
    out = []
    for text in texts:
        given, ids = text.given, list(text.ids)
        if not ids:
            given = len(encode(tokenizer, text.prompt)) if text.prompt else 0
            ids = encode(tokenizer, text.prompt + text.text) + ([end] if isinstance(end, int) else [])
        for start in range(0, len(ids), length):
            piece = np.array(ids[start : start + length], dtype=np.int64)
            skipped = max(0, min(given - start, len(piece)))
            if len(piece) >= SHORTEST and skipped < len(piece):
                out.append(Row(piece, skipped))
    if not out:
        files = ", ".join(dict.fromkeys(text.file for text in texts))
        raise ForetokenError(
            f"There is no text of {SHORTEST} tokens or more among the {len(texts)} from {files}: give longer ones."
        )
    return out


def commonest(data: Sequence[Row], num_tokens: int, vocab_size: int) -> torch.Tensor:
    """Return the most frequent tokens of what is learnt, which a trimmed draft vocabulary keeps, as ids [num_tokens].

    The ids are in ascending order; of equally frequent ones the lowest are taken.

    data: the rows that are trained on.
    num_tokens: size of the draft vocabulary.
    vocab_size: number of tokens of the target.

    Raises ForetokenError unless `num_tokens` is from 1 to vocab_size - 1.
    Source: Zhao et al. 2025, FR-Spec (arXiv:2502.14856).
    """
    if not 0 < num_tokens < vocab_size:
        raise ForetokenError(f"The draft vocabulary is {num_tokens}: it must be 1 to {vocab_size - 1} tokens.")
    counts = np.zeros(vocab_size, np.int64)
    for row in data:
        counts += np.bincount(row.ids[row.skipped :], minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:num_tokens]))


def digest(texts: Sequence[Record]) -> str:
    """Return the SHA-256 of all texts, in order, as hexadecimal digits."""
    sha = hashlib.sha256()
    for text in texts:
        for part in (text.prompt, text.text, *((repr((text.ids, text.given)),) if text.ids else ())):
            sha.update(f"{len(part)}:".encode())
            sha.update(part.encode())
    return sha.hexdigest()


class Batches:
    """The batch of each step: `batches[step]`, for any step from 0 on.

    It depends on the seed and on the number of the step alone, so that a resumed run has the batches of an unbroken
    one.

    batch: number of rows of a batch, at most that of all rows.
    per_epoch: number of batches after which all rows are shuffled anew. Rows that fill no batch are left out that time.
    """

    def __init__(self, data: Sequence[Row], batch: int, seed: int) -> None:
        """Take the rows `data`; batch: number of rows per step; seed: that of the order of the rows."""
        self.data, self.batch, self.seed = data, min(batch, len(data)), seed
        self.per_epoch = len(data) // self.batch

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ids, which of them are learnt) of the batch of a `step`, each [b, t], padded on the right."""
        epoch, place = divmod(step, self.per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data))
        chosen = [self.data[i] for i in order[place * self.batch : (place + 1) * self.batch]]
        ids = [torch.from_numpy(row.ids) for row in chosen]
        learnt = [torch.arange(len(row.ids)) >= row.skipped for row in chosen]
        return pad_sequence(ids, batch_first=True), pad_sequence(learnt, batch_first=True)
