"""Layers of multi-token prediction, in small checkpoints with the published names of their weights.

transformers' own MtpModel, which reads the same files and runs the layer over a cache of its own, says what they draft.
"""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM

import foretoken
import tiny
from foretoken.core.errors import ForetokenError
from foretoken.heads.lm import HeadLM
from foretoken.heads.mtp import own_mtp
from foretoken.heads.rows import HeadRows
from foretoken.models import static
from foretoken.models.causal_lm import CausalLM
from foretoken.models.chains import ChainDraws
from foretoken.models.features import FINAL
from foretoken.models.load import load_model
from thinning import one_in

pytestmark = pytest.mark.filterwarnings("ignore::foretoken.heads.lm.UselessHeadWarning")

WIDTH, VOCAB = 32, 257
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "num_mtp_layers": 1,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 8, "first_k_dense_replace": 1, **EXPERTS},
    "deepseek_v3": {"num_key_value_heads": 4, "first_k_dense_replace": 1, **EXPERTS, **LATENT},
    "mellum": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
# Mellum's layer lies beside the others, GLM's and DeepSeek's behind the last of them.
BESIDE = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc"}
NAMES = {
    "mellum": {**BESIDE, "post_norm": "mtp.norm"},
    "glm4_moe": {key: f"model.layers.2.{key}" for key in BESIDE} | {"post_norm": "model.layers.2.shared_head.norm"},
}
NAMES["deepseek_v3"] = NAMES["glm4_moe"]
PROMPT = [5, 17, 3, 40, 22, 9, 31, 8, 60, 2, 44]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of each family: the last of three layers is the one of multi-token prediction, as it is stored."""
    root = tmp_path_factory.mktemp("mtp")
    return {family: _saved(family, root / family) for family in FAMILIES}


def _saved(family: str, folder: Path) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], "num_hidden_layers": 3})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if family == "mellum":
        behind = "model.layers.2."
        weights = {key.replace(behind, "mtp.layers.0."): value for key, value in weights.items()}
    for part, name in NAMES[family].items():
        weights[f"{name}.weight"] = (
            0.3 * torch.randn(WIDTH, 2 * WIDTH) if part == "eh_proj" else 0.5 + torch.rand(WIDTH)
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    about |= {"num_hidden_layers": 2, "layer_types": (about.get("layer_types") or [])[:2] or None}
    if about.get("mlp_layer_types"):
        about["mlp_layer_types"] = about["mlp_layer_types"][:2]
    (folder / "config.json").write_text(json.dumps(about))
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def small_models_have_the_layer_behind_their_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers knows the layer by its number in the published models: 46 or 92 in GLM's, 61 in DeepSeek's."""
    for model in (Glm4MoeForCausalLM, DeepseekV3ForCausalLM):
        monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\..*"])


def _of_transformers(target: CausalLM, tokens: list[int], levels: int) -> list[Tensor]:
    """Scores of the tokens that follow, level by level, each the likeliest: the same layer on its own states."""
    model = MtpModel.from_pretrained(target.model)
    cache = MtpCache(config=target.model.config.get_mtp_config())
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        whole: Any = target.model(input_ids=ids[:, :-1], output_hidden_states=True)
        states, read, at = whole.hidden_states[-1], ids[:, 1:], torch.arange(1, len(tokens))[None]
        out = []
        for _ in range(levels):
            states = model.forward_layer(0, states, at, cache, input_ids=read)[:, -1:]
            out.append(model._project_to_logits(states[0, -1]))
            read, at = out[-1].argmax().view(1, 1), at[:, -1:] + 1
    return out


def begun(target: CausalLM, rows: HeadRows) -> HeadRows:
    """Rows of one sequence, which have read some of PROMPT."""
    rows.join()
    rows.learn([target.states(torch.tensor([PROMPT[:-1]]), (FINAL,))[0]])
    rows.extend(0, PROMPT[1:6])
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_what_transformers_drafts(family: str, folders: dict[str, str]) -> None:
    """Longer than Mellum's window of 7, so that a layer that saw more would score otherwise."""
    target = load_model(folders[family], torch.device("cpu"), compile="off")
    want = _of_transformers(target, PROMPT, 4)
    rows = begun(target, HeadLM(own_mtp(target), "mtp").open(1, 64))
    (scores,) = rows.score([PROMPT[6:]], [[-1, *range(len(PROMPT) - 7)]])
    for level, expected in enumerate(want):
        torch.testing.assert_close(scores[-1], expected, rtol=1e-4, atol=1e-4)
        if level + 1 < len(want):
            (scores,) = rows.score([[int(expected.argmax())]], [[len(PROMPT) - 7 + level]])


@pytest.mark.parametrize(
    ("family", "shape"),
    one_in(2, product(FAMILIES, [("chain:4", None), ("kary:2x2", "traversal"), ("dynamic:6", None)])),
)
def test_greedy_text_is_the_plain_text(family: str, shape: tuple[str, str | None], folders: dict[str, str]) -> None:
    tree, verifier = shape
    engine = foretoken.load(folders[family], drafter="mtp", tree=tree, verifier=verifier, device="cpu", max_batch=2)
    plain = foretoken.load(folders[family], device="cpu", max_batch=2)
    prompts = [PROMPT, PROMPT[4:]]
    got = engine.generate(prompts, max_new_tokens=24, temperature=0.0)
    want = plain.generate(prompts, max_new_tokens=24, temperature=0.0)
    assert [x.token_ids for x in got] == [x.token_ids for x in want]
    assert sum(x.stats.num_drafted for x in got) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_levels_draft_what_transformers_drafts(
    family: str, folders: dict[str, str], recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU runs them, in padded shapes and one level behind the other."""
    monkeypatch.setattr(static, "LEAST_SLOTS", 8)  # so that the slots grow
    target = load_model(folders[family], torch.device("cpu"), compile="off")
    head = own_mtp(target)
    forward = head.forward_of("mtp")
    forward.on_gpu = forward.compiling = True
    drawn = begun(target, head.open(1, 64, forward)).draft_chain(0, PROMPT[6:], ChainDraws(torch.zeros(6, 1), 0.0))
    assert drawn.tokens == [int(scores.argmax()) for scores in _of_transformers(target, PROMPT, 6)]
    assert forward.compiling  # nothing failed
    assert {nodes for _, _, nodes, _ in forward.ready} == {1, 8}


def test_the_target_stays_as_it_is(folders: dict[str, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["mellum"])
    foretoken.load(model, drafter="mtp", tokenizer=tiny.tokenizer())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_quantised_targets_have_it_too(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where their weights are read from what was kept of them."""
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path))
    for _ in range(2):
        engine = foretoken.load(folders["glm4_moe"], drafter="mtp", quantise="q8_0", tree="chain:3", device="cpu")
        assert engine.generate(PROMPT, max_new_tokens=8, temperature=0.0).stats.num_drafted > 0


def test_a_model_without_the_layer_is_refused() -> None:
    with pytest.raises(ForetokenError, match="names none that transformers reads: choose drafter auto"):
        foretoken.load("models/target", drafter="mtp")


def test_a_checkpoint_that_lacks_its_weights_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["glm4_moe"], tmp_path / "part")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.eh_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ForetokenError, match=r"Cannot load the layer of multi-token prediction of .*eh_proj"):
        foretoken.load(str(folder), drafter="mtp", device="cpu")
