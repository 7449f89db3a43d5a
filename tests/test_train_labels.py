"""Soft labels across vocabularies (scripts/distil.py), against their definition written out."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import tokenizers_zoo as zoo

SPEC = importlib.util.spec_from_file_location("distil", Path(__file__).resolve().parents[1] / "scripts" / "distil.py")
assert SPEC is not None
assert SPEC.loader is not None
distil = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(distil)

MERGES = [("Ġ", "t"), ("h", "e"), ("l", "l"), ("ll", "o"), ("o", "Ġ")]


@pytest.fixture(scope="module")
def labels():
    own, tok = (zoo.byte_level(merges).backend_tokenizer for merges in (zoo.MERGES, MERGES))
    tok.pre_tokenizer = zoo.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return distil.CrossLabels(own, tok)


def written(labels, ids):
    names = distil.by_id(labels.own), distil.by_id(labels.tok)
    read = np.array(labels.read(ids))
    return [names[0][i] for i in ids], [names[1][i] for i in read], *labels.places(np.array(ids), read)


def test_where_the_drafters_tokens_stand(labels):
    ids = labels.own.encode("the hello the").ids
    target, drafter, token, inside = written(labels, ids)
    assert target == ["t", "he", "Ġ", "hello", "Ġthe"]
    assert drafter == ["t", "he", "Ġ", "he", "llo", "Ġt", "he"]
    assert token.tolist() == [0, 1, 2, 3, 3, 4, 4]
    assert inside.tolist() == [0, 0, 0, 0, 1, 0, 1]


def test_one_that_reaches_over_an_end_has_no_place(labels):
    target, drafter, token, inside = written(labels, labels.own.encode("o he").ids)
    assert (target, drafter) == (["o", "Ġ", "he"], ["oĠ", "he"])
    assert (token.tolist(), inside.tolist()) == ([0, 2], [distil.UNKNOWN, 0])
    assert labels.read([*labels.own.encode("a").ids, distil.by_id(labels.own).index("Ã")]) == labels.tok.encode("a").ids


def test_laws_are_sums_over_the_tokens_that_go_on_so(labels):
    spelled = distil.spellings(labels.own, labels.tok)
    hello, the = (distil.by_id(labels.own).index(name) for name in ("hello", "Ġthe"))
    tokens, inside = torch.tensor([hello, hello, the, the]), torch.tensor([0, 1, 1, 0])
    logits = 3 * torch.randn(4, len(spelled), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = labels.laws(logits, tokens, inside, 300)
    for law, p, t, j in zip(got, logits.softmax(-1), tokens.tolist(), inside.tolist(), strict=True):
        want = torch.zeros(300, dtype=torch.float64)
        for other, ids in enumerate(spelled):
            if len(ids) > j and ids[:j] == spelled[t][:j]:
                want[ids[j]] += p[other]
        assert torch.allclose(law, want / want.sum(), rtol=0, atol=1e-12)
        assert law[spelled[t][j]] > 0
