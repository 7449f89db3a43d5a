"""Write training text for the drafters of a chat model: prompts of its own making, and its own answers to them.

A chat model that is given the beginning of a user's turn goes on to write such a turn (Xu et al. 2024, Magpie,
arXiv:2406.08464). Openers steer it to chat, code, summaries, lists and arithmetic. It then answers each prompt at
temperature 0, 0.7 or 1. The hidden states that a draft head reads come out of the same forwards and are kept in
--cache, where `foretoken train --cache` finds them, so that training runs no forward of the target.

    python scripts/write_answers.py --target FOLDER --out answers.jsonl --cache states --tokens 1000000
"""

import argparse
import json
import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import foretoken
from foretoken.core.interfaces import Path as TreePath
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree, root_only
from foretoken.models.features import FINAL
from foretoken.models.load import load_frozen
from foretoken.train.states import StateCache

BATCH = 32
OPENERS = {
    "chat": (45, ["", "", "", "", "What", "How", "Why", "Can you", "I am", "I want to", "Please", "Explain", "Describe",
                  "Give me", "Tell me about", "What is the difference between", "Compare", "Is it", "Suggest",
                  "Imagine you are", "Write a short story about", "Write a poem about", "Write an email to", "Help me",
                  "Compose", "Draft a", "As an expert in", "What would happen if", "Pretend", "Which", "Discuss",
                  "Provide advice on", "Create a travel itinerary for"]),
    "code": (25, ["Write a Python function that", "Write a Python function to", "Implement", "How do I",
                  "Complete the following Python function:\n\n```python\ndef ", "Complete this code:\n\ndef ",
                  "Write a program in", "Fix the bug in this Python code:\n", "Explain this Python code:\n```python\n",
                  "Write a SQL query", "Write a Python class", "Write a function in JavaScript",
                  "from typing import List\n\n\ndef ", "def ", "Here is a Python function:\n\ndef ",
                  "Write a bash script that", "Write unit tests for", "Given a list of integers,", "Given a string",
                  "What is the output of the following code?\n"]),
    "summary": (10, ["Summarize the following text:\n", "Summarize the following article in three sentences:\n\n",
                     "Provide a concise summary of the text below.\n\n", "Extract the key points from this passage:\n",
                     "What is the main idea of the following paragraph?\n\n", "Rewrite the following sentence",
                     "Rewrite this paragraph in simpler words:\n",
                     "Read the passage and answer the question.\n\nPassage:", "Translate the following"]),
    "list": (10, ["List five", "List", "Give me ten", "Name three", "What are some", "Provide a list of",
                  "Make a step-by-step", "Outline", "Create a table"]),
    "maths": (10, ["Calculate", "Solve", "If a", "A farmer has", "What is the sum of", "John has", "Find the",
                   "How many", "A train travels"]),
}  # fmt: skip
TEMPERATURES = ((0.0, 0.3), (0.7, 0.4), (1.0, 0.3))  # temperature, share of the answers
PROMPT_TOKENS, ANSWER_TOKENS = 160, 400
MARK = "Foretoken's place for a user's turn"


@dataclass(frozen=True)
class Recorder:
    """A drafter that drafts nothing and keeps the hidden states of every text that ends; its own session."""

    feature_layers: tuple[int, ...]
    cache: StateCache
    seen: list[Tensor]
    name: str = "recorder"
    laws: tuple[()] = ()
    max_nodes: int = 1

    def open(self, batch: int, slots: int) -> "Recorder":
        return self

    def join(self) -> None: ...

    def leave(self, row: int) -> None: ...

    def learn(self, features: list[Tensor]) -> None:
        self.seen[:] = features

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        return [root_only(seq.ids[-1]) for seq in sequences]

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[TreePath]) -> None:
        for seq, view in zip(sequences, self.seen, strict=True):
            if seq.finished:  # the state of the last root came out of this step and stands behind the view
                whole = view.as_strided((len(seq.ids) - 1, view.shape[1]), view.stride(), view.storage_offset())
                states = torch.cat((whole, torch.zeros_like(whole[:1])))  # no token follows the last one
                self.cache.put(torch.tensor(seq.ids), self.feature_layers, states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or short name of a chat model")
    parser.add_argument("--out", required=True, type=Path, help="JSON lines; a run goes on behind what is there")
    parser.add_argument("--cache", required=True, type=Path, help="folder for the states, see foretoken train --cache")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of answers, in all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine = foretoken.load(args.target, dtype="bfloat16", max_batch=BATCH)
    frozen = load_frozen(args.target, torch.device("cpu"), torch.bfloat16)
    layers = (2, frozen.num_layers // 2, frozen.num_layers - 3, FINAL)
    recording = replace(engine, drafter=Recorder(layers, StateCache(args.cache, frozen), []))
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    def prompt_of(text: str) -> str:
        turn = [{"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))

    begun = prompt_of(MARK).partition(MARK)[0]
    begun_ids = tokenizer(begun)["input_ids"]  # what follows them is the target's own text, the user's turn included
    written = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    tokens = sum(len(row["ids"]) - row["asked"] for row in written)
    rng, start, before = random.Random(f"{args.seed} {len(written)}"), time.monotonic(), tokens
    with args.out.open("a") as file:
        while tokens < args.tokens:
            chosen = rng.choices(list(OPENERS), [share for share, _ in OPENERS.values()], k=4 * BATCH)
            openers = [rng.choice(OPENERS[kind][1]) for kind in chosen]
            seed = rng.randrange(2**31)
            ends = engine.generate(
                [begun + opener for opener in openers],
                max_new_tokens=PROMPT_TOKENS, temperature=1.0, top_p=0.98, seed=seed,
            )  # fmt: skip
            prompts = [opener + end.text for opener, end in zip(openers, ends, strict=True) if end.text.strip()]
            rng.shuffle(prompts)
            first = 0
            for temperature, share in TEMPERATURES:
                part = prompts[first : first + round(share * len(prompts))]
                first += len(part)
                given: list[list[int]] = [tokenizer(prompt_of(prompt))["input_ids"] for prompt in part]
                answers = recording.generate(
                    given, max_new_tokens=ANSWER_TOKENS, temperature=temperature, seed=seed + 1
                )
                for prompt, ids, answer in zip(part, given, answers, strict=True):
                    row = {"prompt": prompt, "answer": answer.text, "temperature": temperature,
                           "ids": [*ids, *answer.token_ids], "given": len(begun_ids), "asked": len(ids)}  # fmt: skip
                    file.write(json.dumps(row) + "\n")
                    tokens += len(answer.token_ids)
                file.flush()
            rate = (tokens - before) / (time.monotonic() - start)
            print(f"{tokens:,} tokens of answers, {rate:.0f} a second", flush=True)


if __name__ == "__main__":
    main()
