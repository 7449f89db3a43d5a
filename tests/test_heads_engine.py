"""Draft heads in the engine: the target's own text at temperature 0, whatever the tree and the rule."""

import pytest
import torch

import foretoken
import tiny
from engines import check_batch, check_greedy
from foretoken.heads import HEADS
from foretoken.heads.checkpoint import save_head
from foretoken.heads.head import new_head
from foretoken.models.causal_lm import CausalLM
from foretoken.models.parts import parts
from foretoken.models.target import LMTargetSession
from raising import raising
from thinning import one_in

pytestmark = pytest.mark.filterwarnings("ignore::foretoken.heads.lm.UselessHeadWarning")
PROMPTS = ["def f(x):", "import os\n", "a", "class A:\n    def __init__(self"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The untrained heads guess badly, which is the hard case for losslessness; Medusa's LM heads are the target's."""
    root = tmp_path_factory.mktemp("heads")
    model = tiny.llama(0, hidden=64, layers=6)  # heads of 16: the compiled kernel serves eagle and gumiho
    out = {"target": tiny.save(model, root / "target")}
    target = parts(CausalLM(model))
    for kind in HEADS:
        torch.manual_seed(0)
        head = new_head(kind, target)
        for linear in head.own_lm_heads():
            torch.nn.init.normal_(linear.weight, std=0.3)
        save_head(head, root / kind)
        out[kind] = str(root / kind)
    return out


def load(folders, kind, **options):
    return foretoken.load(folders["target"], drafter=folders[kind], device="cpu", **options)


CASES = [
    *((kind, "kary:2x3", "transport") for kind in HEADS),
    *((kind, "dynamic:14", None) for kind in HEADS),
    *((kind, "chain:9", "rrsw") for kind in ("eagle", "gumiho", "medusa")),  # deeper than these heads go
    *((kind, "product:14", None) for kind in ("gumiho", "medusa", "dflash", "jetflow")),
]


@pytest.mark.parametrize(("kind", "tree", "verifier"), one_in(2, CASES))
def test_greedy_text_is_the_plain_text(folders, kind, tree, verifier):
    results = check_greedy(load(folders, kind, tree=tree, verifier=verifier, max_batch=3), PROMPTS, 12)
    assert all(r.stats.num_drafted > 0 for r in results)


def test_a_target_that_fails_is_not_blamed_on_the_drafter(folders, monkeypatch):
    """Its states are computed before the drafter learns from them: without a drafter the step would fail too."""
    engine = load(folders, "eagle", tree="chain:3")
    monkeypatch.setattr(LMTargetSession, "features", raising(MemoryError("of the target")))
    with pytest.raises(MemoryError, match="of the target"):
        engine.generate("def f(x):", max_new_tokens=12)


SEEDED = [
    ("gumiho", "kary:2x3"),
    ("hydra", "kary:2x3"),
    ("gumiho", "product:14"),
    ("eagle", "chain:4"),
    ("gumiho", "chain:9"),
]


@pytest.mark.parametrize(("kind", "tree"), one_in(3, SEEDED))
def test_the_text_depends_on_the_seed_alone_not_on_the_batch(folders, kind, tree):
    check_batch(load(folders, kind, tree=tree, max_batch=2), PROMPTS[1:], 12)
