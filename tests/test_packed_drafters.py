"""Drafter models whose weights are packed, by default and by name."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import foretoken
import gguf_zoo
import models_zoo
from engines import check_greedy, ids_of
from foretoken import build
from foretoken.core.errors import ForetokenError
from foretoken.heads.checkpoint import save_head
from foretoken.heads.head import new_head
from foretoken.models import quantised
from foretoken.models.load import load_model, load_tokenizer
from foretoken.models.packed import _bytes_read
from foretoken.models.panels import PackedLinear
from foretoken.models.parts import parts
from foretoken.models.quantised import UnpackableError, pack_quantised
from gguf_zoo import save_wide

CPU = torch.device("cpu")
TYPES = gguf.GGMLQuantizationType
PROMPTS = ["the cat sat on", "the rat", "on the mat, the"]


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its tokenizer."""
    folder = tmp_path_factory.mktemp("wide")
    gguf_zoo.wide().save_pretrained(folder)
    load_tokenizer(save_wide(folder / "model.gguf")).save_pretrained(folder)
    (folder / "model.gguf").unlink()
    return folder


def check_text(engine: foretoken.Engine, target: Path) -> None:
    """Assert that greedy texts are those of the target that is loaded from its folder alone."""
    alone = foretoken.load(target).generate(PROMPTS, max_new_tokens=12, temperature=0.0)
    assert ids_of(check_greedy(engine, PROMPTS, 12)) == ids_of(alone)


def test_a_drafter_alone_is_quantised(tmp_path: Path) -> None:
    """The target stays as it is, and the text is its own."""
    for name in ("target", "drafter"):
        gguf_zoo.wide().save_pretrained(tmp_path / name)
        load_tokenizer(save_wide(tmp_path / "model.gguf")).save_pretrained(tmp_path / name)
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    engine = foretoken.load(target, drafter=drafter, quantise_drafter="q4_1")
    packs = [{x.kind for x in lm.model.modules() if isinstance(x, PackedLinear)}
             for lm in (engine.target.lm, engine.source.model)]  # fmt: skip
    assert packs == [set(), {"q4_1", "q8_0"}]  # the LM head is packed in q8_0, whatever the kind
    assert [lm.backend.head.screen != 0 for lm in (engine.target.lm, engine.source.model)] == [False, True]
    check_text(engine, target)
    read, of_target = (_bytes_read(lm.weights) for lm in (engine.source.model, engine.target.lm))
    assert 5 / 16 < read / of_target < 6 / 16  # the target's weights fill 16 bits


@pytest.mark.parametrize(
    ("named", "kinds"),
    [
        ({}, {"q4_k", "q8_0"}),
        ({"quantise": "q5_0"}, {"q5_0", "q8_0"}),
        ({"quantise_drafter": "none"}, set()),
        ({"quantise_drafter": "none", "quantise": "q5_0"}, set()),
        ({"dtype": "float32"}, set()),
        ({"compile": "off"}, set()),
        ({"trust_remote_code": True}, set()),
    ],
)
def test_a_drafter_model_is_packed_in_4_bits_where_nothing_else_is_named(
    wide_folder: Path, named: dict[str, Any], kinds: set[str]
) -> None:
    engine = foretoken.load(wide_folder, drafter=wide_folder, **named)
    lm = engine.source.model
    assert {x.kind for x in lm.model.modules() if isinstance(x, PackedLinear)} == kinds
    of_target = {x.kind for x in engine.target.lm.model.modules() if isinstance(x, PackedLinear)}
    assert of_target == ({named["quantise"], "q8_0"} if "quantise" in named else set())


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_drafter_that_runs_in_modules_is_packed_only_where_that_is_asked_for(
    wide_folder: Path, tmp_path: Path, family: str
) -> None:
    """A Llama with heads of 8 numbers runs in modules too, as only loading it shows."""
    tokenizer = load_tokenizer(str(wide_folder))
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "head_dim": 8}
    models_zoo.tiny(family, random_weights=True, **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for named, kinds in ({}, set[str]()), ({"quantise_drafter": "q4_1"}, {"q4_1", "q8_0"}):
        engine = foretoken.load(wide_folder, drafter=tmp_path, **named)
        lm = engine.source.model
        assert lm.execution == "panels"
        assert {x.kind for x in lm.model.modules() if isinstance(x, PackedLinear)} == kinds
        check_text(engine, wide_folder)


def test_a_drafter_that_cannot_be_packed_drafts_as_it_is(wide_folder: Path, tmp_path: Path) -> None:
    """Its rows fill no blocks. That is an error only where blocks were named."""
    tokenizer = load_tokenizer(str(wide_folder))
    config = {"vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 2}
    gguf_zoo.model("llama", **config, num_key_value_heads=2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = foretoken.load(wide_folder, drafter=tmp_path)
    assert not engine.source.model.quantised
    check_text(engine, wide_folder)
    with pytest.raises(ForetokenError, match="cannot be quantised to q4_1: its layers have no"):
        foretoken.load(wide_folder, drafter=tmp_path, quantise_drafter="q4_1")


def test_a_model_of_which_nothing_but_the_head_can_be_packed_is_not_packed_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPT-2 that drafts comes here at every start, and a head takes long."""
    monkeypatch.setattr(quantised, "_quantised", lambda *_, **__: pytest.fail("weights are quantised"))
    with pytest.raises(UnpackableError, match="cannot be quantised to q4_k"):
        pack_quantised(models_zoo.tiny("gpt2"), "q4_k")


@pytest.mark.filterwarnings("ignore::foretoken.catalogue.kept.UnkeptWarning")
@pytest.mark.parametrize(("named", "packed"), [({}, False), ({"quantise_drafter": "q4_k"}, True)])
def test_nothing_is_packed_anew_at_every_start_unless_asked_for(
    wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any], packed: bool
) -> None:
    """Where nothing can be kept."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "file" / "home"))
    assert foretoken.load(wide_folder, drafter=wide_folder, **named).source.model.quantised == packed


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder, a GGUF file and a draft head."""
    folder = tmp_path_factory.mktemp("drafters")
    gguf_zoo.wide().save_pretrained(folder / "target")
    load_tokenizer(save_wide(folder / "model.gguf", kind=TYPES.F16)).save_pretrained(folder / "target")
    save_head(new_head("medusa", parts(load_model(str(folder / "target"), CPU))), folder / "head")
    return folder


@pytest.mark.parametrize(
    ("drafter", "why"),
    [
        (None, "nothing is drafted"),
        ("none", "nothing is drafted"),
        ("ngram", "drafter ngram is none"),
        ("suffix+self", "drafter self is none"),
        ("head", "head is a draft head"),
        ("object", "LlamaForCausalLM is a model object"),
        ("model.gguf", "model.gguf is a GGUF file, whose weights stay as they are"),
    ],
)
def test_what_is_no_drafter_model_in_a_folder_is_not_quantised(drafters: Path, drafter: str | None, why: str) -> None:
    """Each is refused by one sentence; a GGUF file would be packed as it is, and nobody would notice."""
    named: Any = str(drafters / drafter) if drafter in ("head", "model.gguf") else drafter
    if drafter == "object":
        named = gguf_zoo.wide()
    with pytest.raises(ForetokenError, match=rf"quantise_drafter q4_1 is for .* folder, and \S*{why}: ") as refused:
        foretoken.load(drafters / "target", drafter=named, quantise_drafter="q4_1")
    assert "\n" not in str(refused.value)


def test_a_wrong_request_to_quantise_a_drafter_is_refused_before_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_zoo.model("llama").save_pretrained(tmp_path)
    load_tokenizer(save_wide(tmp_path / "model.gguf")).save_pretrained(tmp_path)
    monkeypatch.setattr(build, "load_model", lambda *_: pytest.fail("a model is loaded"))
    with pytest.raises(ForetokenError, match="Unknown quantise_drafter q9: choose one of"):
        foretoken.load(tmp_path, drafter=tmp_path, quantise_drafter="q9")
    with pytest.raises(ForetokenError, match="quantised to q4_1 on a CPU alone, and not with compile off"):
        foretoken.load(tmp_path, drafter=tmp_path, quantise_drafter="q4_1", compile="off")
