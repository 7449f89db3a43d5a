"""The models in the repository: what they are, what they weigh, and how well the drafter matches the target."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretoken
from engines import check_greedy
from foretoken.cli import options

FOLDERS = ("target", "drafter", "drafter-1k", "drafter-bytes")


@pytest.fixture(scope="module")
def models() -> Path:
    return options.demo_folder()


def test_they_weigh_at_most_40_mb_their_heads_25_and_each_has_its_card(models):
    sizes = {f: f.stat().st_size for f in models.rglob("*") if f.is_file()}
    heads = sum(size for f, size in sizes.items() if models / "heads" in f.parents)
    assert 0 < heads < 25e6
    assert sum(sizes.values()) - heads < 40e6
    for name in FOLDERS:
        card = (models / name / "README.md").read_text()
        for word in ("license: apache-2.0", "standard library", "Tokens seen", "Held-out loss"):
            assert word in card, (name, word)


def test_tokenizers_give_back_every_text(models):
    text = "def f(x):\n    return 'é😀\t' # \\n  \n\n"
    for name in FOLDERS:
        tokenizer = AutoTokenizer.from_pretrained(models / name)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    vocabularies = {name: set(AutoTokenizer.from_pretrained(models / name).get_vocab()) for name in FOLDERS}
    assert vocabularies["drafter"] == vocabularies["target"]
    assert not vocabularies["drafter-1k"] <= vocabularies["target"]


@pytest.mark.long
@torch.inference_mode()
def test_the_drafter_agrees_with_the_target_on_held_out_text(models):
    """Goals of the training: sum of min(p, q) >= 0.65 at temperature 1, the same likeliest token >= 0.55."""
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    target = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32).eval()
    drafter = AutoModelForCausalLM.from_pretrained(models / "drafter", dtype=torch.float32).eval()
    shared, same = [], []
    for excerpt in options.heldout_prompts()[::4]:
        ids = torch.tensor([tokenizer(excerpt["prompt"] + excerpt["reference"])["input_ids"]])
        p, q = (m(input_ids=ids, use_cache=False).logits[0].softmax(-1) for m in (target, drafter))
        shared.append(torch.minimum(p, q).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).float())
    assert torch.cat(shared).mean() >= 0.65
    assert torch.cat(same).mean() >= 0.55


def test_the_demo_pair_writes_the_targets_own_greedy_text_in_fewer_forwards(models):
    engine = foretoken.load(str(models / "target"), drafter=str(models / "drafter"), device="cpu")
    results = check_greedy(engine, [excerpt["prompt"] for excerpt in options.heldout_prompts()[:2]], 32)
    assert all(r.stats.block_efficiency > 1.5 for r in results)
