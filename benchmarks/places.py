"""What the arena compares on: pairs of models, answers of the target, and the trees drafted at places of an answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.build import load, plain
from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import LearningSession
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence as Running
from foretoken.core.shapes import Float
from foretoken.core.tree import TokenTree
from foretoken.decode import Decoder
from foretoken.engine import Engine
from foretoken.models.identity import device_name, fingerprint
from foretoken.models.packed import num_weights

CHAT = str(Path(__file__).resolve().parents[1] / "models" / "chat-prompts.jsonl")
DRAFTS = 1 << 32  # added to the seed for drafts, which must not be drawn by what the answers were drawn by


@dataclass(frozen=True)
class Pair:
    """Models as `--target` and `--drafter` name them, None for the demo pair's.

    workload: the file of prompts; None: held-out excerpts.
    """

    name: str
    target: str | None
    drafter: str | None
    workload: str | None = CHAT
    vocab: str | None = None

    def load(self, device: str | None, dtype: str | None) -> Engine:
        target, drafter = options.resolve_models(self.target, self.drafter)
        engine = load(target, drafter=drafter, vocab=self.vocab, device=device, dtype=dtype)
        options.spare_threads(num_weights(engine.target.lm.weights))
        return engine


SMALL = "smollm2-135m-instruct"
PAIRS = {
    pair.name: pair
    for pair in (
        Pair("smollm2", SMALL, "self:q4_0"),
        Pair("smollm2-self", SMALL, "self"),
        Pair("smollm2-ngram", SMALL, "ngram"),
        Pair("qwen", "qwen2.5-coder-1.5b-instruct", SMALL, vocab="tli"),
        Pair("toy", None, None, None),
    )
}


def pair_named(name: str) -> Pair:
    """One of PAIRS, or that of TARGET,DRAFTER. Raises ForetokenError for anything else."""
    target, comma, drafter = name.partition(",")
    if name not in PAIRS and not (comma and target and drafter):
        raise ForetokenError(f"There is no pair {name}: choose one of {', '.join(PAIRS)}, or write TARGET,DRAFTER.")
    return PAIRS.get(name) or Pair(name, target, drafter)


def identity(engine: Engine) -> dict[str, Any]:
    """Without which figures of two runs cannot be put together."""
    lm = engine.target.lm
    dtype = str(lm.dtype).removeprefix("torch.")
    return {"weights": [fingerprint(lm), engine.fingerprint], "device": device_name(lm.device), "dtype": dtype}


@dataclass(frozen=True)
class Text:
    """An answer of the target to a prompt, in ids, and the places of it at which a step is looked at.

    places: rising numbers of tokens of the answer that are known there.
    """

    prompt: list[int]
    answer: list[int]
    places: list[int]


def answered(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int, count: int, temperature: float, seed: int
) -> list[Text]:
    """Let the target answer each prompt, to its end of text or `num_tokens` tokens; at `count` places, evenly apart, or
    before every token of a shorter answer, a step is looked at."""
    found = plain(engine).generate(list(prompts), max_new_tokens=num_tokens, temperature=temperature, seed=seed)
    lengths = [len(result.token_ids) for result in found]
    places = [sorted({i * length // count for i in range(count)}) for length in lengths]
    return [Text(ids, each.token_ids, at) for ids, each, at in zip(prompts, found, places, strict=True)]


@torch.inference_mode()
def drafted_along(
    engine: Engine, texts: Sequence[Text], temperature: float, seed: int
) -> Iterator[tuple[int, TokenTree, Float[Tensor, "n v"]]]:
    """Draft, at each place of each text, the tree that the engine's drafter draws there; texts go side by side.

    Yields the text's number, the tree, and the target's p after each of its n nodes, float64. A policy with an account
    of earlier trees sees those at the places before; nothing is accepted of any. Text i draws by seed + i.
    """
    room = max(len(text.answer) for text in texts) + engine.drafter.max_nodes + 1
    slots = room + max(len(text.prompt) for text in texts)
    decoder = Decoder(engine.target, engine.drafter, engine.verifier, len(texts), slots)
    sampling, of = Sampling(temperature=temperature), dict[Running, tuple[int, Text]]()
    for number, text in enumerate(texts):
        sequence = Running(list(text.prompt), sampling, seeded(DRAFTS + seed + number), room)
        of[sequence] = number, text
        decoder.join(sequence)
    for turn in range(max(len(text.places) for text in texts)):
        for sequence in list(decoder.sequences):
            _, text = of[sequence]
            if turn == len(text.places):
                decoder.leave(sequence)
            else:
                sequence.ids += text.answer[sequence.num_new : text.places[turn]]
        running = list(decoder.sequences)
        if isinstance(decoder.drafter, LearningSession):
            decoder.drafter.learn(decoder.target.features(running))
        trees = decoder.drafter.propose(running)
        for sequence, tree, scores in zip(running, trees, decoder.target.score(running, trees), strict=True):
            yield of[sequence][0], tree, scores.p(range(len(tree))).double()
            sequence.ids.append(of[sequence][1].answer[sequence.num_new])
        decoder.target.keep([(0,)] * len(running))
        decoder.drafter.observe(running, trees, [(0,)] * len(running))
