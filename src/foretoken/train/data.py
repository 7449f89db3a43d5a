"""Training texts are read from text files and JSON lines, and become rows of token ids that form batches."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from foretoken.core.errors import ForetokenError
from foretoken.core.files import read_text
from foretoken.core.messages import Message, check_messages, check_text
from foretoken.models.text import TextStream, Tokenizer, chat_prompt, encode, turn_end

SHORTEST = 16  # smallest number of tokens of a row; shorter ones teach next to nothing


@dataclass(frozen=True)
class Record:
    """One training text.

    prompt: its beginning, which is given and not learnt: a string, the messages of a conversation, or token ids.
    text: the rest, which is learnt.
    ids: the token ids of the rest as a model has sampled it, since its tokenizer may encode the decoded string as other
        ids; None: the text is encoded.
    file: the file where it stands, for messages.
    line: the number of its line there; None: it is the whole file.
    """

    prompt: str | list[Message] | tuple[int, ...]
    text: str
    ids: tuple[int, ...] | None = None
    file: str = field(default="the data", compare=False)
    line: int | None = field(default=None, compare=False)

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return self.file if self.line is None else f"{self.file}, line {self.line}"


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
    "text"}, {"messages", "text"}, {"conversations": [{"role", "content"}]}, or {"ids", "given"}, which has the token
    ids of a whole text and the number of the first ones that are not learnt. The last assistant turn of `conversations`
    is learnt; all turns before it are given, and turns after it are left out. "token_ids" beside "text", as `generate
    --json` writes them, are learnt in its place. Blank files and lines are left out.

    files: paths of the files.

    Raises ForetokenError where a file or a line cannot be read, or there is no text at all.
    """
    empty = True
    for name in files:
        content, by_line = read_text(name, "data file", "utf-8-sig"), Path(name).suffix == ".jsonl"
        pieces = content.split("\n") if by_line else [content]  # JSON strings may hold what `splitlines` splits at
        for number, piece in enumerate(pieces, start=1):
            if piece.strip():
                empty = False
                yield _record(piece, name, number) if by_line else Record("", piece, file=name)
    if empty:
        raise ForetokenError(f"There is no text at all in {', '.join(files)}: name files that hold some.")


def _record(written: str, file: str, line: int) -> Record:
    place = f"{file}, line {line}"
    try:
        value = json.loads(written)
        turns, of_ids = value.get("conversations"), "ids" in value
        if of_ids:
            prompt = text = ""
        elif turns is None:
            prompt, text = value.get("messages", value.get("prompt", "")), value["text"]
        else:
            last = max(i for i, turn in enumerate(turns) if turn["role"] == "assistant")
            prompt, text = turns[:last], turns[last]["content"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForetokenError(
            f'{place} is no training text: write {{"text": ...}} or {{"conversations": [{{"role", "content"}}, ...]}}, '
            "with an assistant turn."
        ) from error
    if of_ids:
        ids, given = _ids(value["ids"], "ids", place), value.get("given", 0)
        if type(given) is not int or not 0 <= given <= len(ids):
            raise ForetokenError(
                f"{place} has given {given}: it must be a whole number up to {len(ids)}, the number of ids."
            )
        return Record(ids[:given], "", ids[given:], file, line)
    if prompt == []:
        prompt = ""
    if isinstance(prompt, list):
        check_messages(prompt, f"The conversation in {place}")
    else:
        _check(prompt, "prompt", place)
    _check(text, "text", place)
    sampled = _ids(value["token_ids"], "token_ids", place) if "token_ids" in value else None
    return Record(prompt, text, sampled, file, line)


def _ids(ids: Any, what: str, place: str) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(x) is int and 0 <= x < 2**31 for x in ids):
        raise ForetokenError(
            f"{place} has {what} that are no list of whole numbers from 0 on, below 2**31: mend or remove it."
        )
    return tuple(ids)


def _check(string: object, what: str, place: str) -> None:
    if not isinstance(string, str):
        raise ForetokenError(f"{place} must hold strings, but its {what} is {json.dumps(string):.40}: write it as one.")
    check_text(string, f"The {what} in {place}")


def rows(texts: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[Row]:
    """Return the rows of texts: each text by itself, cut into pieces of up to `length` ids.

    Pieces shorter than SHORTEST, and pieces with nothing to learn, are left out.

    texts: the texts.
    tokenizer: encodes what is a string. To a text that ends in a string the id is appended that ends it: the end of the
        turn in its chat template for an answer to a conversation, else its end of text, if it has one.
    length: largest number of ids of a row.

    Raises ForetokenError where no row is left.
    """
    out, turn = [], turn_end(tokenizer) if tokenizer.chat_template else None
    for text in texts:
        ids, given = _encoded(text, tokenizer, turn)
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


def _encoded(record: Record, tokenizer: Tokenizer, turn: int | None) -> tuple[list[int], int]:
    """Return the ids of a text, and how many of the first ones are given.

    record, tokenizer: the text, and what encodes it.
    turn: the id that ends an answer to a conversation; None: the end of text does.

    Raises ForetokenError for a conversation that the chat template refuses, and for ids of another tokenizer.
    """
    prompt, text = record.prompt, record.text
    if isinstance(prompt, list):
        if tokenizer.chat_template:
            prompt = tuple(chat_prompt(tokenizer, prompt, f"The conversation in {record.place}"))
        else:
            prompt = "".join(f"{turn['role']}: {turn.get('content') or ''}\n" for turn in prompt) + "assistant: "
    if record.ids is not None:
        first = encode(tokenizer, prompt) if isinstance(prompt, str) else [*prompt]
        if text:
            stream = TextStream(tokenizer, (), first)
            spelled = stream.push([*record.ids]) + stream.finish()
            # A stop string may have ended the text. Some tokenizers drop a space where there is no prompt before it.
            if not spelled.lstrip().startswith(text.lstrip()):
                raise ForetokenError(
                    f"{record.place} has token_ids that are not those of its text for this target's tokenizer: leave "
                    "token_ids out, or give texts that this target has written."
                )
        return [*first, *record.ids], len(first)
    end_id = turn if turn is not None and isinstance(record.prompt, list) else tokenizer.eos_token_id
    end = [end_id] if isinstance(end_id, int) else []
    if not isinstance(prompt, str):
        return [*prompt, *tokenizer(text, add_special_tokens=False)["input_ids"], *end], len(prompt)
    ids, alone = encode(tokenizer, prompt + text), encode(tokenizer, prompt) if prompt else []
    # The end of the prompt and the beginning of the text may be one token, which is learnt.
    given = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, ids, strict=False)))
    return ids + end, given


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
        prompt, of_ids = text.prompt, ()
        if text.ids is not None:
            first = prompt if isinstance(prompt, tuple) else ()
            of_ids = (repr((first + text.ids, len(first))),)
        shown = prompt if isinstance(prompt, str) else "" if isinstance(prompt, tuple) else json.dumps(prompt)
        for part in (shown, text.text, *of_ids):
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
