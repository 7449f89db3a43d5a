"""What holds for every model in the kernel, whatever layers it has: the same bits and greedy texts in every way."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import foretoken
from foretoken.kernel.compile import use_threads
from foretoken.kernel.threads import Run, ThreadChoice
from foretoken.models.causal_lm import CausalLM
from tiny import tokenizer

TEXT = [1 + 7 * i % 99 for i in range(64)]
TEXTS = [[17, 4, 90], [25, 3, 77, 12, 8, 41], [5] * 30, [1, 2]]
LOADED: list[dict[str, Any]] = [{}, {"dtype": "float32"}, {"quantise": "q8_0"}]  # options of foretoken.load


def scores(lm: CausalLM, *pieces: int) -> torch.Tensor:
    """The logits after each token of TEXT, which is read in pieces of these many tokens."""
    rows, found, at = lm.open(1, len(TEXT)), list[torch.Tensor](), 0
    rows.join()
    for n in pieces:
        (logits,) = rows.score([TEXT[at : at + n]], [list(range(-1, n - 1))])
        rows.keep([range(n)])
        found.append(logits.clone())
        at += n
    assert at == len(TEXT)
    return torch.cat(found)


def check_bits(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has the same logits alone and among others, in any number of threads."""
    want = scores(lm, *[1] * 64)
    use_threads(2)
    for threads in (None, 2, 3):
        monkeypatch.setattr(ThreadChoice, "forward", lambda *_, threads=threads: nullcontext(Run(threads, 1)))
        monkeypatch.setattr("foretoken.kernel.model.SPREAD", 1)
        for pieces in ([64], [1, 5, 9, 49], [9] * 7 + [1]):
            assert torch.equal(scores(lm, *pieces), want), (threads, pieces)


def check_greedy_texts(folder: Path, options: dict[str, Any]) -> None:
    """Greedy texts of the model in `folder` are those of plain decoding; options: of foretoken.load."""
    settings: dict[str, Any] = {"tokenizer": tokenizer(), "max_batch": len(TEXTS), **options}
    how = {"max_new_tokens": 20, "temperature": 0.0}
    plain = foretoken.load(folder, drafter="none", **settings)
    assert plain.target.lm.execution == "kernel"
    want = [result.token_ids for result in plain.generate(TEXTS, **how)]
    assert [plain.generate(text, **how).token_ids for text in TEXTS] == want
    for drafter, tree in (("ngram", "chain:4"), ("self", "chain:4"), ("self", "kary:2x3"), ("self", "dynamic:8")):
        engine = foretoken.load(folder, drafter=drafter, tree=tree, **settings)
        assert [result.token_ids for result in engine.generate(TEXTS, **how)] == want, (drafter, tree)
