"""Files of draft heads: the published layouts are read and written, damaged and unfitting ones refused."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from foretoken.core.errors import ForetokenError
from foretoken.heads import HEADS
from foretoken.heads.checkpoint import UnknownTargetWarning, head_kind, load_head, load_to_train, save_head
from foretoken.heads.head import PublishedHead, new_head
from foretoken.models.causal_lm import CausalLM
from foretoken.models.parts import TargetParts, parts
from test_heads import lm, plain, target
from thinning import one_in

__all__ = ["lm", "target"]
Weights = dict[str, Tensor]
Config = dict[str, Any]


def published(target: TargetParts) -> dict[str, dict[str, tuple[int, ...]]]:
    """Key names and shapes as the authors publish them, at this target's sizes."""
    d, v, inner = target.hidden, target.vocab_size, target.shape.intermediate
    q, kv = target.shape.heads * target.shape.head_dim, target.shape.kv_heads * target.shape.head_dim

    def layer(prefix: str, width: int, *norms: str) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.self_attn.q_proj.weight": (q, width),
            f"{prefix}.self_attn.k_proj.weight": (kv, width),
            f"{prefix}.self_attn.v_proj.weight": (kv, width),
            f"{prefix}.self_attn.o_proj.weight": (d, q),
            f"{prefix}.mlp.gate_proj.weight": (inner, d),
            f"{prefix}.mlp.up_proj.weight": (inner, d),
            f"{prefix}.mlp.down_proj.weight": (d, inner),
            **{f"{prefix}.{norm}.weight": (d,) for norm in norms},
        }

    before, after = "input_layernorm", "post_attention_layernorm"
    eagle = {"fc.weight": (d, 2 * d), "fc.bias": (d,), "embed_tokens.weight": (v, d), **layer("layers.0", d, after)}
    gumiho = {**eagle, **layer("layers.1", d, before, after)}
    for j in range(5):
        for b in range(6):
            gumiho |= {f"mlp.{j}.{b}.linear.weight": (d, 2 * d if b == 0 else d), f"mlp.{j}.{b}.linear.bias": (d,)}
    small = v // 2
    eagle3 = {
        "fc.weight": (d, 3 * d), "norm.weight": (d,), "lm_head.weight": (small, d), "d2t": (small,), "t2d": (v,),
        **layer("midlayer", 2 * d, before, after, "hidden_norm"),
    }  # fmt: skip
    medusa: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        medusa |= {f"{i}.0.linear.weight": (d, d), f"{i}.0.linear.bias": (d,), f"{i}.1.weight": (v, d)}
    hydra = layer("prefix_embeding_layer.layers.0", d, before, after)
    hydra |= {"prefix_embeding_layer.embed_tokens.weight": (v, d), "prefix_embeding_layer.norm.weight": (d,)}
    for i in range(3):
        for part in ("linear", "res_connection"):
            hydra |= {f"hydra_mlp.{i}.1.{part}.weight": (d, (i + 2) * d), f"hydra_mlp.{i}.1.{part}.bias": (d,)}
        hydra |= {f"hydra_lm_head.{i}.1.weight": (v, d), f"hydra_lm_head.{i}.1.bias": (v,)}
    dflash = {"fc.weight": (d, 2 * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for i in range(2):
        dflash |= layer(f"layers.{i}", d, before, after)
        dflash |= {f"layers.{i}.self_attn.{norm}_norm.weight": (target.shape.head_dim,) for norm in "qk"}
    return {
        "eagle": eagle, "gumiho": gumiho, "eagle3": eagle3, "medusa": medusa, "hydra": hydra, "dflash": dflash,
        "jetflow": dflash,
    }  # fmt: skip


OF_BLOCKS = {"block_size": 4, "num_target_layers": 6, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 5]}}
CAUSAL = {"mask_token_id": 5, "target_layer_ids": [1, 5], "causal_head": True}
CONFIGS = {"dflash": OF_BLOCKS, "jetflow": OF_BLOCKS | {"dflash_config": CAUSAL}}  # what tensors do not say
FILES = {"medusa": "medusa_lm_head.pt", "hydra": "hydra_lm_head.pt"}


def checkpoint(kind: str, target: TargetParts) -> Weights:
    torch.manual_seed(3)
    weights = {key: 0.2 * torch.randn(shape) for key, shape in published(target)[kind].items()}
    if kind in ("eagle", "gumiho"):
        weights["embed_tokens.weight"] = target.embedding.get_parameter("weight").detach().clone()
    if kind == "eagle3":
        chosen = torch.randperm(target.vocab_size)[: len(weights["d2t"])].sort().values
        weights["d2t"] = chosen - torch.arange(len(chosen))
        weights["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return weights


def loaded(
    folder: Path, weights: Weights, config: Config | str, target: TargetParts, file: str = "model.safetensors"
) -> PublishedHead:
    """The head in a new folder with these weights and this config.json."""
    folder.mkdir()
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / file)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return load_head(folder, target)


@pytest.mark.parametrize("kind", HEADS)
def test_published_layouts(kind: str, target: TargetParts, tmp_path: Path) -> None:
    weights = checkpoint(kind, target)
    torch.save(weights, tmp_path / FILES.get(kind, "pytorch_model.bin"))
    config = {"medusa_num_heads": 99, "architectures": ["LlamaForCausalLM"], **CONFIGS.get(kind, {})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert head_kind(tmp_path) == ("dflash" if kind == "jetflow" else kind)  # the two have the same tensors
    with pytest.warns(UnknownTargetWarning, match="does not tell which target"):
        head = load_head(tmp_path, target)
    assert head.kind == kind

    again = tmp_path / "again"
    save_head(head, again, torch.float32)
    saved = load_file(next(again.glob("*.safetensors")))
    kept = {key: value for key, value in weights.items() if "embed_tokens" not in key}
    assert saved.keys() == kept.keys()
    assert all(torch.equal(saved[key], value) for key, value in kept.items())
    other = load_head(again, target)
    ids = [4, 8, 15, 16, 23]
    features = torch.randn(len(ids) - 1, target.hidden * len(head.feature_layers))
    assert torch.equal(plain(head, features, ids, [7]), plain(other, features, ids, [7]))


UNFIT_BLOCKS: list[tuple[Config, str]] = [
    ({"dflash_config": {}}, "names no mask_token_id"),
    ({"dflash_config": {"mask_token_id": 100_000}}, "names no mask_token_id"),
    ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id must be a token's number, not -1"),
    ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [6]}}, r"reads the target's layers \[6\]"),
    ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1]}}, "states that are read 64"),
    *(({"block_size": size}, "block_size must be a whole number from 2 to 256") for size in (1, 257, 100_000)),
    ({"block_size": 0}, "block_size must be a whole number above 0"),
    ({"layer_types": ["sliding_attention"] * 2}, "sliding windows, which are not supported"),
    ({"output_multiplier": 0.5}, "output_multiplier 0.5 in its config.json, which is not supported"),
]
UNFIT: list[tuple[Config | str, str]] = [
    *((content, r"config.json is no JSON object: remove it") for content in ("[]", "null", "7", '"x"')),
    *(
        ({"eagle_aux_hidden_state_layer_ids": layers}, r"reads the target's layers \(.*\), and .* has 6")
        for layers in ([1, 2, 6], [-2, 2, 3])
    ),
    ({"num_attention_heads": 1000}, "attention heads of width 0, which does not divide its 32"),
    ({"fc_norm": True}, "lacks fc_norm.0.weight"),
    ({"norm_before_fc": True}, "lacks input_norm.weight"),
]


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        *(("dflash", OF_BLOCKS | change, message) for change, message in UNFIT_BLOCKS),
        *(("eagle3", config, message) for config, message in UNFIT),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    kind: str, config: Config | str, message: str, target: TargetParts, tmp_path: Path
) -> None:
    with pytest.raises(ForetokenError, match=message):
        loaded(tmp_path / "head", checkpoint(kind, target), config, target)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("eagle", {"layers.0.mlp.up_proj.weight": None}, "lacks layers.0.mlp.up_proj.weight"),
        ("eagle", {"layers.0.mlp.gate_proj.weight": None}, "lacks layers.0.mlp.gate_proj.weight"),
        ("gumiho", {"mlp.2.3.linear.bias": None}, "lacks mlp.2.3.linear.bias"),
        ("gumiho", {"extra": (2,)}, "the unexpected extra"),
        ("hydra", {"hydra_mlp.1.1.linear.bias": None}, "lacks hydra_mlp.1.1.linear.bias"),
        ("medusa", {"1.1.weight": (300, 32)}, r"1.1.weight has shape \(300, 32\)"),
        ("medusa", {f"{i}.1.weight": (300, 32) for i in range(3)}, "target with vocabulary 300"),
        ("eagle", {"fc.weight": (32, 80)}, "target with hidden size 40, and .* has 32"),
        ("eagle3", {"t2d": (99,)}, "target with vocabulary 99"),
        ("eagle3", {"d2t": (60,)}, "has a d2t that is no list of whole numbers"),
        ("eagle3", {"d2t": (0,)}, "has a d2t that is no list of whole numbers"),
        ("eagle3", {"t2d": ()}, r"t2d has shape \(\) instead of 1 dimensions: take another"),
        *(
            (kind, {key: (8,)}, f"holds a .*{what}.*, which is not supported: take one")
            for kind, key, what in (
                ("eagle3", "mask_hidden", "P-EAGLE"),
                ("dflash", "layers.0.attention_conv.base_kernel", "DFlash 2"),
                ("eagle3", "midlayer.self_attn.q_norm.weight", "norms of queries"),
                ("medusa", "token_map", "a list of the tokens"),
            )
        ),
        ("medusa", {"9999.0.linear.weight": (32, 32)}, "9999.0.linear.weight, though it has 10 weights in all"),
    ],
)
def test_wrong_checkpoints_are_refused(
    kind: str, change: dict[str, tuple[int, ...] | None], message: str, target: TargetParts, tmp_path: Path
) -> None:
    weights = checkpoint(kind, target)
    for key, shape in change.items():
        if shape is None:
            del weights[key]
        else:
            weights[key] = torch.zeros(shape)
    torch.save(weights, tmp_path / FILES.get(kind, "pytorch_model.bin"))
    with pytest.raises(ForetokenError, match=message):
        load_head(tmp_path, target)


@pytest.mark.parametrize(("kind", "shape"), one_in(2, product(HEADS, [(), (5,), (2, 3, 4)])))
def test_weights_of_other_dimensions_are_refused(
    kind: str, shape: tuple[int, ...], target: TargetParts, tmp_path: Path
) -> None:
    """Whichever weight it is, one sentence names it."""
    weights = checkpoint(kind, target)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS.get(kind, {})))
    for key, value in weights.items():
        if key == "prefix_embeding_layer.embed_tokens.weight" or value.ndim == len(shape):
            continue  # is not read; has as many
        torch.save(
            {**weights, key: torch.zeros(shape, dtype=value.dtype)}, tmp_path / FILES.get(kind, "pytorch_model.bin")
        )
        with pytest.raises(ForetokenError, match=f"{re.escape(key)} has shape|has a d2t that is no list"):
            load_head(tmp_path, target)


def test_what_is_no_head_is_refused(target: TargetParts, tmp_path: Path) -> None:
    with pytest.raises(ForetokenError, match="holds no draft head"):
        load_head(tmp_path, target)
    assert head_kind(tmp_path) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"not weights")
    with pytest.raises(ForetokenError, match="Cannot read"):
        load_head(tmp_path, target)
    torch.save({"model.embed_tokens.weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert head_kind(tmp_path) is None
    with pytest.raises(ForetokenError, match="no layout known"):
        load_head(tmp_path, target)
    for arguments, message in ((("x",), "Unknown head"), (("eagle", 1, 2), "any depth"), (("gumiho", 2, 2), "needs")):
        with pytest.raises(ForetokenError, match=message):
            new_head(arguments[0], target, *arguments[1:])
    assert target.shape.width == target.hidden


def test_a_head_of_another_target_is_refused(target: TargetParts, tmp_path: Path) -> None:
    save_head(new_head("eagle", target), tmp_path)
    rounded = replace(target, embedding=copy.deepcopy(target.embedding).to(torch.bfloat16))
    load_head(tmp_path, rounded)  # the same one, as another dtype has it
    weight = torch.randn(target.vocab_size, target.hidden)
    for other in (
        replace(target, embedding=torch.nn.Embedding.from_pretrained(weight)),
        replace(target, layers=target.layers + 1),
    ):
        with pytest.raises(ForetokenError, match=r"trained for another target \(.*\) than .*: name that one"):
            load_head(tmp_path, other)
    config = json.loads((tmp_path / "config.json").read_text())
    for damaged in (7, {}, {**config["target"], "embedding": "x"}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "target": damaged}))
        with pytest.raises(ForetokenError, match="is damaged, its target cannot be"):
            load_head(tmp_path, target)


@pytest.mark.parametrize("entry", [{}, {"mlp_input": "states"}])
@pytest.mark.parametrize("load", [load_head, load_to_train])
def test_a_gumiho_head_of_another_function_is_refused(
    entry: dict[str, str], load: Callable[..., PublishedHead], target: TargetParts, tmp_path: Path
) -> None:
    """The MLPs of ours read the serial states alone once, with weights of the same names and sizes."""
    save_head(new_head("gumiho", target), tmp_path)
    load(tmp_path, target)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["mlp_input"]
    (tmp_path / "config.json").write_text(json.dumps(config | entry))
    with pytest.raises(ForetokenError, match=r"MLPs do not read the drafted tokens.*: train it again"):
        load(tmp_path, target)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("eagle3", "Head eagle3 needs"),
        ("dflash", "Heads dflash and jetflow need"),
        ("jetflow", "dflash and jetflow need"),
    ],
)
def test_some_heads_need_layers_to_read(kind: str, said: str) -> None:
    with pytest.raises(ForetokenError, match=f"{said} a target of 4 layers, and LlamaForCausalLM has 3"):
        new_head(kind, parts(CausalLM(tiny.llama(0, layers=3))))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        *(("feature_scale", value, "a number above 0") for value in ("abc", 0, -1.5, None, True, [], 10**400)),
        *(("feature_scale", float(value), "a number above 0") for value in ("nan", "inf")),
        *(("rms_norm_eps", value, "a number above 0") for value in ("q", 0, -1e-5, float("nan"))),
        *(("head_dim", value, "a whole number above 0") for value in ("x", 0, -8, 8.0, True)),
        *(("num_attention_heads", value, "a whole number above 0") for value in ("4", 0, [4])),
        *(("transformer_layer_config", value, "an object") for value in (None, [], "x")),
        *(("eagle_aux_hidden_state_layer_ids", value, "a list of layers") for value in (3, "123", [1, "2", 3])),
        ("norm_output", "false", "true or false"),
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_damaged_configurations_are_refused(
    key: str, value: object, wanted: str, inner: bool, target: TargetParts, tmp_path: Path
) -> None:
    config = {key: value}
    if inner and key != "transformer_layer_config":
        config = {"transformer_layer_config": config}
    with pytest.raises(ForetokenError, match=rf"config.json, {key} must be {wanted}.*, not .*: mend it"):
        loaded(tmp_path / "head", checkpoint("eagle3", target), config, target)


NULLS = ("head_dim", "num_attention_heads", "rms_norm_eps", "eagle_aux_hidden_state_layer_ids", "norm_output")


@pytest.mark.parametrize(("kind", "config"), [("eagle3", dict.fromkeys(NULLS)), ("eagle", {"block_size": 2048})])
def test_entries_that_say_nothing_of_a_head(kind: str, config: Config, target: TargetParts, tmp_path: Path) -> None:
    """null stands for the default, and the size of blocks is read of heads with blocks alone."""
    with pytest.warns(UnknownTargetWarning):
        assert loaded(tmp_path / "head", checkpoint(kind, target), config, target).kind == kind
