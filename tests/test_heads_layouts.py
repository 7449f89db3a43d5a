"""The layouts that draft heads are published in: each gives the scores of the same weights in their authors' names."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.core.errors import ForetokenError
from foretoken.heads.checkpoint import head_kind, load_head, save_head
from foretoken.heads.head import PublishedHead
from foretoken.heads.lm import ready
from foretoken.models.causal_lm import CausalLM
from foretoken.models.parts import TargetParts, parts
from foretoken.models.rotary import Rotary
from test_heads import check_tree, lm, plain, target, wide
from test_heads_files import FILES, Config, Weights, checkpoint, loaded

__all__ = ["lm", "target", "wide"]
pytestmark = pytest.mark.filterwarnings("ignore::foretoken.heads.checkpoint.UnknownTargetWarning")

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "factor": 2.0, "long_factor": [1.0] * 4, "short_factor": [1.0] * 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def check_alike(one: PublishedHead, other: PublishedHead) -> None:
    """Both give the same scores, to the bit."""
    torch.manual_seed(4)
    ids = [4, 8, 15, 16, 23]
    features = torch.randn(len(ids) - 1, one.target.hidden * len(one.feature_layers))
    assert one.feature_layers == other.feature_layers
    for drafted in ([], [7], [7, 3]):
        assert torch.equal(plain(one, features, ids, drafted), plain(other, features, ids, drafted))


def renamed(weights: Weights, *pairs: tuple[str, str]) -> Weights:
    """With the beginnings of keys changed."""
    out: Weights = {}
    for key, value in weights.items():
        new = next((to + key.removeprefix(start) for start, to in pairs if key.startswith(start)), key)
        out[new] = value
    return out


def embedding(target: TargetParts) -> Tensor:
    return target.embedding.get_parameter("weight").detach().clone()


def transformer(target: TargetParts) -> Config:
    """A Llama layer of the target's sizes and positions, as transformers writes it."""
    return {
        "model_type": "llama", "hidden_size": target.hidden, "num_attention_heads": target.shape.heads,
        "num_key_value_heads": target.shape.kv_heads, "head_dim": target.shape.head_dim,
        "rms_norm_eps": target.shape.eps,
        "rope_theta": 10000.0, "rope_scaling": None, "num_hidden_layers": 1, "vocab_size": target.vocab_size,
    }  # fmt: skip


def eagle3_of_its_authors(w: Weights, t: TargetParts) -> tuple[Weights, Config]:
    return w, {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(w["d2t"]), **transformer(t)}


def eagle3_of_specforge(w: Weights, t: TargetParts) -> tuple[Weights, Config]:
    """With a copy of the target's embedding, and the layers counted whose states come out."""
    layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, t.layers // 2 - 1, t.layers - 4]}
    return w | {"embed_tokens.weight": embedding(t)}, {**transformer(t), "eagle_config": layers}


def eagle3_of_speculators(w: Weights, t: TargetParts) -> tuple[Weights, Config]:
    """With copies of the target's norm and LM head, with which training compared; only the inner part is a Llama's."""
    copies = {"verifier_norm.weight": torch.ones(t.hidden), "verifier_lm_head.weight": embedding(t)}
    w = renamed(w, ("midlayer.", "layers.0.")) | copies | {"embed_tokens.weight": embedding(t)}
    return w, {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": len(w["d2t"]),
        "norm_before_residual": False, "embed_requires_grad": False, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, t.layers // 2, t.layers - 3],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b"}},
        "transformer_layer_config": transformer(t),
    }  # fmt: skip


def eagle3_without_mask(w: Weights, t: TargetParts) -> tuple[Weights, Config]:
    """Only d2t tells the draft vocabulary, in 32 bits."""
    return {k: v for k, v in w.items() if k != "t2d"} | {"d2t": w["d2t"].to(torch.int32)}, transformer(t)


def under_model(w: Weights, t: TargetParts) -> tuple[Weights, Config]:
    own = ("lm_head.", "d2t", "t2d", "mlp.", "fc.")
    return {k if k.startswith(own) else f"model.{k}": v for k, v in w.items()}, transformer(t)


def with_frequencies(w: Weights, t: TargetParts) -> tuple[Weights, Config]:
    layer = "prefix_embeding_layer.layers.0" if any("prefix" in k for k in w) else "layers.0"
    return w | {f"{layer}.self_attn.rotary_emb.inv_freq": t.rotary.inv_freq}, {}


def medusa_of_vllm(w: Weights, t: TargetParts) -> tuple[Weights, Config]:
    out: Weights = {}
    for i in range(3):
        out[f"blocks.{i}.layers.0.weight"] = w[f"{i}.0.linear.weight"]
        out[f"blocks.{i}.layers.0.bias"] = w[f"{i}.0.linear.bias"]
        out[f"lm_heads.{i}.weight"] = w[f"{i}.1.weight"]
    return out, {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "medusa_fc_bias": True}


def medusa_with_model(w: Weights, t: TargetParts) -> tuple[Weights, Config]:
    return {f"medusa_head.{key}": value for key, value in w.items()}, {"medusa_num_heads": 5}


LAYOUTS: list[tuple[str, Callable[[Weights, TargetParts], tuple[Weights, Config]]]] = [
    ("eagle3", eagle3_of_its_authors),
    ("eagle3", eagle3_of_specforge),
    ("eagle3", eagle3_of_speculators),
    ("eagle3", eagle3_without_mask),
    ("eagle3", under_model),
    ("eagle", under_model),
    ("eagle", with_frequencies),
    ("gumiho", under_model),
    ("gumiho", with_frequencies),
    ("medusa", medusa_of_vllm),
    ("medusa", medusa_with_model),
    ("hydra", with_frequencies),
]


@pytest.mark.parametrize(("kind", "written"), LAYOUTS)
def test_layouts(
    kind: str, written: Callable[[Weights, TargetParts], tuple[Weights, Config]], target: TargetParts, tmp_path: Path
) -> None:
    weights = checkpoint(kind, target)
    file = FILES.get(kind, "model.safetensors").replace(".pt", ".safetensors")
    ours = loaded(tmp_path / "ours", weights, {}, target, file)
    theirs = loaded(tmp_path / "theirs", *written(weights, target), target, file)
    assert head_kind(tmp_path / "theirs") == theirs.kind == kind
    check_alike(ours, theirs)
    assert not hasattr(theirs, "embed_tokens") or theirs.embed_tokens is None  # a copy of the target's is not kept


def test_medusa_heads_of_one_lm_head_and_no_bias(target: TargetParts, tmp_path: Path) -> None:
    weights = checkpoint("medusa", target)
    theirs: Weights = {"lm_heads.0.weight": weights["0.1.weight"]}
    for i in range(3):
        theirs[f"blocks.{i}.layers.0.weight"] = weights[f"{i}.0.linear.weight"]
        weights[f"{i}.0.linear.bias"] = torch.zeros(target.hidden)
        weights[f"{i}.1.weight"] = weights["0.1.weight"].clone()
    check_alike(
        loaded(tmp_path / "ours", weights, {}, target, "medusa_lm_head.safetensors"),
        loaded(tmp_path / "theirs", theirs, {"original_lm_head": True}, target),
    )


def eagle31(target: TargetParts) -> Weights:
    """A head of EAGLE-3.1: every layer's states are normed before fc."""
    weights = checkpoint("eagle3", target)
    return weights | {f"fc_norm.{i}.weight": 1 + 0.3 * torch.randn(target.hidden) for i in range(3)}


@pytest.mark.parametrize(
    ("norms", "config"),
    [
        (3, {}),
        (3, {"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
        (1, {}),
        (1, {"eagle_config": {"norm_before_fc": True}}),
    ],
)
def test_norms_before_fc(norms: int, config: Config, target: TargetParts, tmp_path: Path) -> None:
    """One for the states of each layer, or one for them all."""
    weights, eps = eagle31(target) if norms == 3 else checkpoint("eagle3", target), target.shape.eps
    names = [f"fc_norm.{i}.weight" for i in range(3)] if norms == 3 else ["input_norm.weight"]
    if norms == 1:
        weights["input_norm.weight"] = 1 + 0.3 * torch.randn(3 * target.hidden)
    head = loaded(tmp_path / "head", weights, config, target)
    assert head.norm_output == head.midlayer.norm_before_residual == ("norm_output" in config)
    features = 3 * torch.randn(5, 3 * target.hidden)
    pairs = zip(features.chunk(norms, -1), names, strict=True)
    each = [weights[name] * x / (x.square().mean(-1, keepdim=True) + eps).sqrt() for x, name in pairs]
    torch.testing.assert_close(head.enter(features), torch.cat(each, -1) @ weights["fc.weight"].T)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_embedding_that_was_trained_is_kept(kind: str, target: TargetParts, tmp_path: Path) -> None:
    weights = checkpoint(kind, target)
    trained = embedding(target) + 0.01 * torch.randn(target.vocab_size, target.hidden)
    plain_one = loaded(tmp_path / "ours", weights, {}, target)
    plain_one.target = replace(target, embedding=torch.nn.Embedding.from_pretrained(trained))
    own = loaded(tmp_path / "own", weights | {"embed_tokens.weight": trained}, {"embed_requires_grad": True}, target)
    check_alike(plain_one, own)
    save_head(own, tmp_path / "again", torch.float32)
    check_alike(own, load_head(tmp_path / "again", target))


def test_a_head_without_lm_head_has_the_targets(target: TargetParts, tmp_path: Path) -> None:
    weights = {key: value for key, value in checkpoint("eagle3", target).items() if key not in ("d2t", "t2d")}
    weights["lm_head.weight"] = target.unembedding.get_parameter("weight").detach().clone()
    without = {key: value for key, value in weights.items() if key != "lm_head.weight"}
    ours = loaded(tmp_path / "ours", weights, {}, target)
    check_alike(ours, loaded(tmp_path / "borrows", without, transformer(target), target))


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_rotary_positions_of_its_own(scaling: Config | None, target: TargetParts, tmp_path: Path) -> None:
    """config.json's, not the target's: heads of long-context targets are often trained without its scaling."""
    given = {"rope_theta": 500.0, "max_position_embeddings": 512}
    config = transformer(target) | given | {"rope_scaling": scaling}
    model = LlamaForCausalLM(LlamaConfig.from_dict(config)).eval()
    weights = checkpoint("eagle3", target)
    ours = loaded(tmp_path / "ours", weights, {}, target)
    ours.rotary = parts(CausalLM(model)).rotary
    assert not torch.allclose(ours.rotary.inv_freq, target.rotary.inv_freq)
    if scaling is None:
        by_hand = 500.0 ** (-torch.arange(0, target.shape.head_dim, 2) / target.shape.head_dim)
        torch.testing.assert_close(ours.rotary.inv_freq, by_hand)
    theirs = loaded(tmp_path / "theirs", weights, config, target)
    check_alike(ours, theirs)
    save_head(theirs, tmp_path / "again", torch.float32)
    check_alike(theirs, load_head(tmp_path / "again", target))


def test_what_transformers_leaves_out_is_llamas_default(target: TargetParts, tmp_path: Path) -> None:
    """speculators writes only what differs from them."""
    head = loaded(
        tmp_path / "head", checkpoint("eagle3", target),
        {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "llama", "head_dim": 8}},
        replace(target, shape=replace(target.shape, eps=0.5), rotary=Rotary(target.rotary.inv_freq * 2)),
    )  # fmt: skip
    assert head.shape.eps == 1e-6
    torch.testing.assert_close(head.rotary.inv_freq, 10000.0 ** (-torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, "config.json cannot be read .*: mend it"),
        ({"rope_scaling": {"rope_type": "turned"}}, "scales its rotary positions by turned, and only default, linear"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"scales its rotary positions by \['yarn'\], and only default"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "does not say how linear scales rotary positions"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "does not say how llama3 scales rotary positions"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "by linear with numbers that do not fit: mend it"),
        ({"rope_scaling": {**LONG, "short_factor": [0.0] * 4}}, "by longrope with numbers that do not fit: mend it"),
        ({"rope_scaling": {**LONG, "short_factor": [1.0] * 3}}, "does not say how longrope scales rotary positions"),
        ({"rope_scaling": "linear"}, 'rope_scaling must be an object, not "linear"'),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings must be a whole number above 0"),
        ({"rms_norm_eps": 1}, "config.json cannot be read .*rms_norm_eps.*: mend it"),
        ({"rope_theta": "x"}, "rope_theta must be a number above 0"),
        ({"head_dim": 12}, "attention heads of width 12, which does not divide its"),
        ({"hidden_act": "gelu"}, "hidden_act gelu in its config.json, and only silu is read: take another head"),
        ({"model_type": "speculators", "head_dim": 4}, "attention heads of width 4, and .* rotates 8"),
    ],
)
def test_positions_that_cannot_be_read(change: Config, message: str, target: TargetParts, tmp_path: Path) -> None:
    with pytest.raises(ForetokenError, match=message) as refused:
        loaded(tmp_path / "head", checkpoint("eagle3", target), transformer(target) | change, target)
    assert "\n" not in str(refused.value)


def test_a_model_type_that_is_no_name_is_none_of_transformers(target: TargetParts, tmp_path: Path) -> None:
    """And so its head has the target's positions."""
    config = transformer(target) | {"model_type": ["llama"], "rope_theta": 500.0}
    head = loaded(tmp_path / "head", checkpoint("eagle3", target), config, target)
    assert head.rotary is target.rotary


def test_two_weights_of_one_name_are_refused(target: TargetParts, tmp_path: Path) -> None:
    """Else one of them would be read, and nobody would know which."""
    weights = checkpoint("eagle", target)
    both = weights | {"model.fc.weight": torch.zeros_like(weights["fc.weight"])}
    with pytest.raises(
        ForetokenError, match=r"has (model.)?fc.weight and (model.)?fc.weight, which are one weight, and"
    ):
        loaded(tmp_path / "head", both, {}, target)
    loaded(tmp_path / "same", weights | {"model.fc.weight": weights["fc.weight"].clone()}, {}, target)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("borrows", [False, True])
def test_drafting_with_all_that_a_head_may_have_of_its_own(
    kernel: bool, borrows: bool, wide: CausalLM, tmp_path: Path
) -> None:
    """Norms before fc, an embedding, positions: trees through the cache equal forwards without one."""
    target = parts(wide)
    weights = eagle31(target) | {"embed_tokens.weight": torch.randn(target.vocab_size, target.hidden)}
    if borrows:
        del weights["lm_head.weight"], weights["d2t"], weights["t2d"]
    config = transformer(target) | {"rope_theta": 500.0, "norm_output": True, "fc_norm": True}
    head = loaded(tmp_path / "head", weights, config, target)
    rng = random.Random(2)
    texts = [[rng.randrange(257) for _ in range(n)] for n in (5, 9)]
    states = [torch.randn(len(ids), 3 * target.hidden) for ids in texts]
    reference = load_head(tmp_path / "head", target)
    rows = ready(head, "head").open(2, 64) if kernel else head.open(2, 64, None)
    assert (rows.kernel is not None) == kernel
    for _ in texts:
        rows.join()
    check_tree(reference, rows, texts, states, rng)
