"""The demo target with its drafters of other vocabularies, on awkward texts: many bytes a character, runs of spaces,
line breaks, tokens that split a character. (`foretoken audit --vocab slrs --drafter models/drafter-bytes` and the like
test the sampled law at length.)"""

from pathlib import Path

import pytest

import foretoken

MODELS = Path(__file__).resolve().parents[1] / "models"
AWKWARD = [
    "# naïve café 日本語 🙂🙂 \u200d x = ",
    "def f():\n\n\n        \t  \n                 return",
    [0],
]
# The first bytes of a character, as ids: the target itself goes on inside it.
HALF = "x = '日"


@pytest.fixture(scope="module")
def plain():
    return foretoken.load(str(MODELS / "target"), device="cpu")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("vocab", "tree", "drafter"),
    [
        ("slrs", "chain:2", "drafter-1k"),
        ("slrs", "chain:2", "drafter-bytes"),
        ("slem", "chain:4", "drafter-bytes"),
        ("tli", "kary:2x2", "drafter-1k"),
    ],
)
def test_awkward_texts_alone_and_in_a_batch(plain, vocab, tree, drafter):
    engine = foretoken.load(str(MODELS / "target"), drafter=str(MODELS / drafter), vocab=vocab, tree=tree, device="cpu")
    half = plain.tokenizer(HALF)["input_ids"][:-1]
    prompts = [*AWKWARD, half]
    want = [r.token_ids for r in plain.generate(prompts, max_new_tokens=5, temperature=0.0)]
    assert [r.token_ids for r in engine.generate(prompts, max_new_tokens=5, temperature=0.0)] == want
    together = engine.generate(prompts, max_new_tokens=5, temperature=1.0, seed=3)
    alone = [engine.generate(p, max_new_tokens=5, temperature=1.0, seed=3 + i) for i, p in enumerate(prompts)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
