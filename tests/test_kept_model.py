"""A model in a folder of safetensors starts without transformers' modelling code once it was loaded before."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import foretoken
import gguf_zoo
import tiny
from foretoken.catalogue.kept import model_files
from foretoken.models import load as loading
from foretoken.models import quantised
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint
from foretoken.models.load import load_model, load_tokenizer
from foretoken.models.panels import pack
from foretoken.models.skeleton import Settings, Skeleton
from gguf_zoo import save_folder, save_wide
from models_zoo import change_config
from raising import raising
from test_skeleton import IDS, logits
from thinning import one_in

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


pytestmark = pytest.mark.usefixtures("home")


def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_pretrained", raising(AssertionError("transformers makes the model again")))


def made_by_transformers(source: str) -> CausalLM:
    return CausalLM(pack_as_loaded(loading._pretrained(source, "auto", False)), source)


def pack_as_loaded(model: Any) -> Any:
    pack(model.eval(), loading.computes_in(model))
    return model


CASES = [
    *(("llama", dtype, tied) for dtype in (torch.bfloat16, torch.float16, torch.float32) for tied in (True, False)),
    *((name, torch.bfloat16, True) for name in ("qwen2", "qwen3", "phi3", "smollm3", "granite", "seed_oss")),
]


@pytest.mark.parametrize(("architecture", "dtype", "tied"), one_in(3, CASES))
def test_the_next_start_is_the_model_that_transformers_makes(
    tmp_path: Path, architecture: str, dtype: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_folder(tmp_path / "model", architecture, dtype, tied=tied)
    whole = made_by_transformers(source)
    first = load_model(source, CPU)
    with monkeypatch.context() as patched:
        unreadable(patched)
        second = load_model(source, CPU)
    for lm in (first, second):
        assert isinstance(lm.weights, Skeleton)
        assert lm.execution == whole.execution == "kernel"
        assert lm.dtype == whole.dtype == (torch.float32 if dtype == torch.float16 else dtype)
        assert fingerprint(lm) == fingerprint(whole)
        assert torch.equal(logits(lm), logits(whole))
        assert lm.name == lm.weights.config.name_or_path == source
        assert lm.model.config.to_dict() | {"dtype": None} == whole.model.config.to_dict() | {"dtype": None}
        assert str(lm.weights.generation_config) == str(whole.model.generation_config)
        with torch.inference_mode():
            assert torch.equal(lm.model(IDS).logits, whole.model(IDS).logits)


def test_a_changed_checkpoint_is_made_anew(tmp_path: Path) -> None:
    source = save_folder(tmp_path / "model")
    load_model(source, CPU)
    save_folder(tmp_path / "model", tied=False)
    assert torch.equal(logits(load_model(source, CPU)), logits(made_by_transformers(source)))
    change_config(tmp_path / "model", rms_norm_eps=0.3)
    changed = load_model(source, CPU)
    assert torch.equal(logits(changed), logits(made_by_transformers(source)))
    assert changed.weights.config.rms_norm_eps == 0.3


def shards(folder: Path) -> None:
    PreTrainedModel.save_pretrained(gguf_zoo.wide(), folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def rotary_as_once(folder: Path) -> None:
    save_folder(folder)
    weights = load_file(folder / WEIGHTS)
    save_file(
        weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}, folder / WEIGHTS, {"format": "pt"}
    )


def another_head(folder: Path) -> None:
    """The configuration says that it is the embedding; transformers takes what is there."""
    save_folder(folder)
    weights = load_file(folder / WEIGHTS)
    head = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights | {"lm_head.weight": head}, folder / WEIGHTS, {"format": "pt"})


def another_dtype(folder: Path) -> None:
    save_folder(folder)
    change_config(folder, dtype="float32")


def another_attention(folder: Path) -> None:
    save_folder(folder)
    change_config(folder, attn_implementation="eager")


def one_that_the_kernel_does_not_run(folder: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("write", "skeleton"),
    [
        (shards, True),
        (rotary_as_once, False),
        (another_head, True),
        (another_dtype, False),
        (another_attention, False),
        (one_that_the_kernel_does_not_run, False),
    ],
)
def test_only_what_the_files_hold_by_name_is_read_from_them(tmp_path: Path, write: Any, skeleton: bool) -> None:
    """Else transformers makes the model at each start."""
    write(tmp_path / "model")
    source = str(tmp_path / "model")
    whole = made_by_transformers(source)
    for _ in range(2):
        lm = load_model(source, CPU)
        assert isinstance(lm.weights, Skeleton) == skeleton
        assert lm.execution == whole.execution
        assert lm.model.config._attn_implementation == whole.model.config._attn_implementation
        assert torch.equal(logits(lm), logits(whole))


def dangling(folder: Path) -> None:
    (folder / ".#config.json").symlink_to(folder / "gone")
    (folder / "notes.json").symlink_to(folder / "gone")


@pytest.mark.parametrize(
    "stray",
    [
        dangling,
        lambda folder: (folder / "._model.safetensors").write_bytes(b"\0\5\x16\7"),
        lambda folder: (folder / "head.safetensors").write_bytes(b"half"),
        lambda folder: (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
        lambda folder: (folder / "logs.json").mkdir(),
        lambda folder: (folder / "secret.json").touch(mode=0),
    ],
)
def test_files_that_transformers_does_not_read_are_in_nobodys_way(
    tmp_path: Path, stray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read any file, so that the system's answer is given here."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).stat().st_mode & 0o400 != 0)
    source = save_folder(tmp_path / "model")
    before = model_files(tmp_path / "model")
    stray(tmp_path / "model")
    found = {path.name for path in model_files(tmp_path / "model")} - {path.name for path in before}
    assert found <= {"head.safetensors", "consolidated.safetensors"}
    for _ in range(2):
        assert isinstance(load_model(source, CPU).weights, Skeleton)


def test_a_link_is_followed_by_its_own_name(tmp_path: Path) -> None:
    """Two files may have one name where they are kept, as in stores that name them by their content."""
    source = save_folder(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        place = tmp_path / name.removesuffix(".json")
        place.mkdir()
        (tmp_path / "model" / name).rename(place / "data")
        (tmp_path / "model" / name).symlink_to(place / "data")
    load_model(source, CPU)
    change_config(tmp_path / "config", "data", rms_norm_eps=0.3)
    assert load_model(source, CPU).weights.config.rms_norm_eps == 0.3


def test_a_fingerprint_does_not_depend_on_how_a_configuration_is_written(tmp_path: Path) -> None:
    source = save_folder(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    scaled = config.pop("rope_parameters")
    theta, names = scaled.pop("rope_theta"), {str(i): f"class {i}" for i in range(12)}
    config = {"rope_theta": theta, "id2label": names, "rope_scaling": dict(reversed(scaled.items())), **config}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    whole = made_by_transformers(source)
    for _ in range(2):
        lm = load_model(source, CPU)
        assert isinstance(lm.weights, Skeleton)
        assert fingerprint(lm) == fingerprint(whole)


@pytest.mark.parametrize("how", [{"dtype": torch.float32}, {"compile": "off"}, {"trust_remote_code": True}])
def test_transformers_makes_what_is_not_kept(tmp_path: Path, home: Path, how: dict[str, Any]) -> None:
    lm = load_model(save_folder(tmp_path / "model"), CPU, **how)
    assert not isinstance(lm.weights, Skeleton)
    assert not (home / "skeletons").exists()


def test_the_target_drafts_by_its_skeleton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts what it drafts where transformers makes both, and the target's embedding is in memory once."""
    source = save_folder(tmp_path / "model")
    whole = loading.load_own(made_by_transformers(source), source, "q4_k")
    target = load_model(source, CPU)
    unreadable(monkeypatch)
    own = loading.load_own(target, source, "q4_k")
    assert isinstance(own.weights, Skeleton)
    assert own.weights.get_input_embeddings() is target.weights.get_input_embeddings()
    assert own.dtype == torch.float32
    assert fingerprint(own) == fingerprint(whole)
    assert torch.equal(logits(own), logits(whole))
    assert torch.equal(logits(target), logits(load_model(source, CPU)))  # it is as it was


PROGRAM = """
import sys
import foretoken
for source in sys.argv[3:]:
    engine = foretoken.load(source, drafter=sys.argv[1], method="auto", quantise=sys.argv[2] or None)
    print(engine.generate("the cat", max_new_tokens=8, temperature=0.0).text)
print(sorted({"transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor"} & set(sys.modules)))
"""


@pytest.mark.parametrize(("drafter", "kind"), one_in(3, [("auto", None), ("ngram", None), ("auto", "q8_0")]))
def test_the_second_start_imports_no_modelling_code(tmp_path: Path, drafter: str, kind: str | None) -> None:
    """Lookups are for GGUF files here, a model that drafts for itself for a folder."""
    if drafter == "ngram":
        sources = [save_wide(tmp_path / f"{name}.gguf", name) for name in ("llama", "gemma3")]
    else:
        sources = [save_folder(tmp_path / "model")]
        tiny.tokenizer().save_pretrained(tmp_path / "model")
    texts = []
    for source in sources:
        engine = foretoken.load(source, drafter=drafter, method="auto", quantise=kind)
        texts.append(engine.generate("the cat", max_new_tokens=8, temperature=0.0).text)
    command = [sys.executable, "-c", PROGRAM, drafter, kind or "", *sources]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "\n".join([*texts, "[]\n"])


QUANTISED = [  # architecture, kind, width of the MLP, dtype, whether the LM head is tied
    *(("llama", "q4_1", 512, dtype, True) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    ("qwen2", "q4_1", 512, torch.float16, False),
    ("gemma3", "q4_1", 512, torch.bfloat16, True),
    *(("llama", kind, width, torch.bfloat16, True) for kind, width in (("q4_0", 512), ("q4_k", 512), ("q8_0", 80))),
]


@pytest.mark.parametrize(("architecture", "kind", "between", "dtype", "tied"), one_in(2, QUANTISED))
def test_quantised_layers_are_read_without_it(
    tmp_path: Path, architecture: str, kind: str, between: int, dtype: torch.dtype, tied: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A row of 80 weights fills no blocks: its layers stay as they are, and the model computes in float32."""
    made = gguf_zoo.model(architecture, tied=tied, hidden_size=256, intermediate_size=between)
    torch.nn.Module.to(made, dtype).save_pretrained(tmp_path / "model")
    source = str(tmp_path / "model")
    fresh = quantised.pack_quantised(loading._pretrained(source, "auto", False), kind)
    whole = CausalLM(pack_as_loaded(fresh), source)
    first = load_model(source, CPU, quantise=kind)
    unreadable(monkeypatch)
    second = load_model(source, CPU, quantise=kind)
    assert whole.dtype == (torch.float32 if dtype == torch.float16 or between == 80 else dtype)
    for lm in (first, second):
        assert isinstance(lm.weights, Skeleton) == (architecture != "gemma3")
        assert lm.dtype == whole.dtype
        assert (lm.execution, lm.quantised) == ("kernel", True)
        assert fingerprint(lm) == fingerprint(whole)
        assert torch.equal(logits(lm), logits(whole))
        assert lm.weights.config.name_or_path == source
        with torch.inference_mode():
            assert torch.equal(lm.model(IDS).logits, whole.model(IDS).logits)


@pytest.mark.parametrize(
    "named", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizer", None]
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gpt2"])
def test_tokenizers_are_those_of_transformers(tmp_path: Path, named: str | None, model_type: str) -> None:
    """Their class is found without importing that of the configuration; `named`: what the tokenizer's files say."""
    save_folder(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    change_config(tmp_path / "model", "tokenizer_config.json", tokenizer_class=named)
    change_config(tmp_path / "model", model_type=model_type)
    source = str(tmp_path / "model")
    found = loading._config_of_any_class(source)
    assert (found is None) == (named is None)
    assert found is None or (type(found), found.model_type) == (Settings, model_type)
    wanted, got = AutoTokenizer.from_pretrained(source), load_tokenizer(source)
    assert type(got) is type(wanted)
    assert got.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()
    assert got("the cat sat")["input_ids"] == wanted("the cat sat")["input_ids"]
    assert got.special_tokens_map == wanted.special_tokens_map
    assert got.chat_template == wanted.chat_template


def test_a_tokenizer_is_loaded_whatever_layers_the_model_has(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """What transformers demands of the entries of every configuration does not hold for all of its classes."""
    save_folder(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    kinds = ["of another kind"] * config["num_hidden_layers"]
    for entries in ({"layer_types": kinds}, {"layer_types": None, "rope_scaling": {"rope_type": "default"}}):
        change_config(tmp_path / "model", **entries)
        assert load_tokenizer(str(tmp_path / "model"))("the cat sat")["input_ids"]
    assert not recwarn.list
