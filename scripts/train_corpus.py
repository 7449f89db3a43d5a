"""The text that the small models learn: the sources of the standard library, in tokens of each vocabulary."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from train_plan import SPECS, Run, save

EOT = "<|endoftext|>"
SKIPPED = ("site-packages/", "encodings/", "pydoc_data/", "lib2to3/tests/data/")
# Words take one sign before them; runs of punctuation take the line breaks after them.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# What the merges were learnt on: of each file whether it counts. The 1k vocabulary is one of other text.
MERGED: dict[str, Callable[[str], bool]] = {"target": lambda name: True, "drafter-1k": lambda name: "test" not in name}


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 50 == 0


def corpus(held_out: bool) -> Iterator[tuple[str, str]]:
    """(relative path, text) of the library's sources: the training part or the held-out part."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(f"/{part}" in f"/{name}" for part in SKIPPED) or is_held_out(name) != held_out:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield name, text


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def make_tokenizer(kind: str) -> Tokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind in MERGED:
        tok = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        tok.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore
        size, alphabet = SPECS[kind].vocab, byte_alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=[EOT], show_progress=False, initial_alphabet=alphabet, max_token_length=24
        )
        tok.train_from_iterator((text for name, text in corpus(held_out=False) if MERGED[kind](name)), trainer)
    else:
        tok = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[]))
        tok.pre_tokenizer = byte_level  # pyright: ignore
        tok.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    tok.decoder = decoders.ByteLevel()  # pyright: ignore
    return tok


def get_tokenizer(run: Run, kind: str) -> Tokenizer:
    path = run.work / f"{kind}.json"
    if not path.exists():
        print(f"{kind}: making the tokenizer", flush=True)
        text = make_tokenizer(kind).to_str(pretty=True)
        save(path, lambda file: file.write(text.encode()))
    return Tokenizer.from_file(str(path))


def training_tokens(run: Run, kind: str) -> np.ndarray:
    """The packed training stream, each file followed by the end-of-text token."""
    path = run.work / f"{kind}-train.npy"
    if not path.exists():
        tok = get_tokenizer(run, kind)
        encodings = tok.encode_batch([text for _, text in corpus(held_out=False)], add_special_tokens=False)
        parts = [np.array([*encoding.ids, tok.token_to_id(EOT)], dtype=np.uint16) for encoding in encodings]
        save(path, lambda file: np.save(file, np.concatenate(parts)))
    return np.load(path)


class Stream:
    """Rows of training tokens; the rows of a step depend on the seed and the step alone. `sources` take turns."""

    def __init__(self, sources: list[np.ndarray], seed: int, chunk: int, rows: int) -> None:
        self.sources, self.seed, self.chunk, self.rows = sources, seed, chunk, rows

    def batch(self, step: int, length: int) -> torch.Tensor:
        """Inputs and the token after them, cut to `length`: shape (rows, length + 1)."""
        chunk = max(self.chunk, length)
        count, rows = self.rows * self.chunk // chunk, []
        for index in range(step * count, (step + 1) * count):
            turn, kind = divmod(index, len(self.sources))
            source = self.sources[kind]
            per_epoch = (len(source) - 1) // chunk
            epoch, place = divmod(turn, per_epoch)
            rng = np.random.default_rng([self.seed + 1000 * kind, epoch])
            shift = int(rng.integers(len(source) - per_epoch * chunk))
            start = shift + int(rng.permutation(per_epoch)[place]) * chunk
            rows += [source[at : at + length + 1] for at in range(start, start + chunk, length)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def excerpts(run: Run) -> Path:
    """Prompts of 40 to 300 tokens from held-out files, cut at natural places, each with what follows."""
    path, rng, lines = run.out / "heldout.jsonl", np.random.default_rng(run.seed), []
    if path.exists():
        return path
    tok = get_tokenizer(run, "target")
    for name, text in corpus(held_out=True):
        ends, at = [], 0
        for line in text.splitlines(keepends=True):
            at += len(line)
            opens = line.strip().startswith(("def ", "class ", "for ", "if ", "#")) or line.rstrip().endswith('"""')
            if opens and 400 < at < len(text) - 800:
                ends.append(at)
        for end in sorted(rng.permutation(ends)[: 1 if "test" in name else 2].tolist()):
            start = text.rfind("\n", 0, max(1, end - 3 * int(rng.integers(40, 301)))) + 1
            prompt, rest = tok.encode(text[start:end]).ids, tok.encode(text[end : end + 2000]).ids
            reference = tok.decode(rest[:256])
            whole = tok.encode(text[start:end] + reference).ids
            if 40 <= len(prompt) <= 300 and len(rest) >= 256 and whole[: len(prompt)] == prompt:
                line = {"id": f"{name}:{end}", "file": name, "prompt": text[start:end], "reference": reference}
                lines.append(json.dumps(line) + "\n")
    save(path, lambda file: file.writelines(line.encode() for line in lines))
    return path
