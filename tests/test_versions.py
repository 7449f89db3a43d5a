"""Versions of what Foretoken needs: the oldest ones that are allowed, and what transformers calls otherwise since."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import LlamaForCausalLM

import models_zoo
from foretoken.models.causal_lm import CausalLM
from foretoken.models.hf_model import CACHE_NAMES, cache_name
from foretoken.models.modules import Modules
from foretoken.models.static import StaticForward

ROOT = Path(__file__).parent.parent
EXTRAS = "transport", "bench", "serve", "grammar"


def test_the_oldest_versions_are_tried_of_all_that_users_install() -> None:
    """`make test-oldest` has the fast tests run with them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    allowed = {name: Version(low) for name, low in (line.split(">=") for line in needed)}
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    tried = {name: Version(low) for name, low in (line.split("==") for line in lines if "==" in line)}
    assert {name: tried.get(name) for name in allowed} == allowed


class Former(LlamaForCausalLM):
    def forward(self, input_ids, past_key_values=None, position_ids=None, **rest) -> Any:  # pyright: ignore
        return super().forward(input_ids, position_ids=position_ids, **{INNER: past_key_values}, **rest)


class Present(LlamaForCausalLM):
    def forward(self, input_ids, cache=None, position_ids=None, **rest) -> Any:  # pyright: ignore
        return super().forward(input_ids, position_ids=position_ids, **{INNER: cache}, **rest)


class Wrapped(LlamaForCausalLM):
    def forward(self, input_ids, position_ids=None, **rest) -> Any:  # pyright: ignore
        return super().forward(input_ids, position_ids=position_ids, **rest)


INNER = cache_name(LlamaForCausalLM)


@pytest.mark.parametrize("kind", [Former, Present])
def test_code_of_a_models_own_may_give_its_cache_either_name(kind: type[LlamaForCausalLM]) -> None:
    model = models_zoo.tiny("llama")
    own = kind(model.config).eval()
    own.load_state_dict(model.state_dict())
    assert isinstance(CausalLM(own).backend, Modules)
    models_zoo.check_random_steps(own, 1, 6)
    lm = CausalLM(own)
    lm.backend = StaticForward(own, "own", lm._layout.planes, compiled=False)
    rows, ids = lm.open(1, 20), [5, 3, 8, 1]
    rows.extend(rows.join(), ids)  # by the model without its LM head, whose code is transformers' own
    models_zoo.assert_close(rows.score([[7]], [[-1]])[0][0], models_zoo.plain(model, [*ids, 7]), torch.float32)


def test_the_names_are_those_of_the_code() -> None:
    assert (cache_name(Present), cache_name(Former)) == CACHE_NAMES
    assert cache_name(Wrapped) == "past_key_values"  # which every version of transformers understands so far
