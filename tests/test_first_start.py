"""What a first start need not compile, and what two processes that share the compiling must agree on."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numba import types

import foretoken
from engines import demo_engine
from foretoken.gguf.reader import open_gguf
from foretoken.kernel import addresses, compile, model
from foretoken.kernel.chain import draft_chain
from foretoken.kernel.compile import compiled
from foretoken.models import panels
from foretoken.models.llama_kernel import KernelRows

STAMPS = """
import inspect
from foretoken.kernel import chain, layer, model
from foretoken.kernel.compile import _stamp
for loop in (chain.draft_chain, layer.look, layer.layers_of, model.score):
    print(_stamp(inspect.unwrap(loop)))
"""


def test_processes_agree_on_what_a_loop_was_compiled_from():
    """One process finds what another one kept; names of functions come in another order in each of them."""
    found = set[str]()
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", STAMPS], env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True,
            text=True,
        )  # fmt: skip
        found.add(done.stdout)
    assert len(found) == 1
    assert len(set(found.pop().split())) == 4


@pytest.mark.long
def test_another_process_compiles_all_linked_loops_which_are_all_there_are(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    code = compile.COMPILING.format(", ".join(compile.LINKED))
    command, pipe = [sys.executable, "-P", "-c"], subprocess.PIPE
    with subprocess.Popen([*command, code], env=environment | {compile.AT_ONCE: "1"}, stdin=pipe) as process:
        assert process.wait() == 0
    every = [f"foretoken.kernel.{path.stem}" for path in Path(compile.__file__).parent.glob("*.py")]
    code = f"import {', '.join(every)}; print(foretoken.kernel.compile._missing)"
    assert subprocess.run([*command, code], env=environment, check=True, capture_output=True).stdout == b"{}\n"


@compiled
def added(x, more):
    return x + more


def test_a_loop_is_compiled_once_for_constants_and_variables():
    code = added._inner_code
    for more in (types.literal(1), types.literal(2), types.int64):
        code.get_call_template((types.int64, more), {})
        code.get_call_template((types.int64,), {"more": more})
    assert code.signatures == [(types.int64, types.int64)]


def test_scoring_does_without_loops_that_truncate():
    truncating = "foretoken.kernel.softmax.truncate"
    assert truncating not in model.score._reached
    assert truncating in draft_chain._reached


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_decoding_does_without_the_loop_that_drafts(temperature: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KernelRows, "draft_chain", lambda *_: pytest.fail("a chain was drafted"))
    result = demo_engine().generate("def read(", max_new_tokens=4, temperature=temperature, seed=0)
    assert len(result.token_ids) == 4


@compiled
def sum_of(x, m, n):
    """The sum of a float32 array [m, n] that is known by its address, and of its bits in the first column."""
    total, rows = 0.0, addresses.floats(x, (m, n))
    bits = addresses.bits_of(rows[:, :1])  # pyright: ignore[reportCallIssue]
    for i in range(m):
        total += np.float64(bits[i, 0])
        for j in range(n):
            total += rows[i, j]
    return total


def test_arrays_by_their_addresses():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert sum_of(x.ctypes.data, 2, 3) == x.sum() + x.view(np.uint32)[:, 0].sum()


def written(path, **lists) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, values in lists.items():
        writer.add_array(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_lists_of_the_metadata(tmp_path):
    lists = {"texts": ["a", "", "träumt", "日本"], "numbers": [3, -1, 2], "shares": [0.5, 0.25], "flags": [True, False]}
    written(tmp_path / "lists.gguf", **lists)
    ours, theirs = open_gguf(tmp_path / "lists.gguf"), gguf.GGUFReader(tmp_path / "lists.gguf")
    for key, values in lists.items():
        field = theirs.get_field(key)
        assert field is not None
        assert ours.metadata(key) == field.contents() == values


@pytest.mark.parametrize("key", ["texts", "numbers"])
def test_a_list_beyond_the_file_is_refused(tmp_path, key: str):
    path = tmp_path / "lists.gguf"
    written(path, **{key: ["abc"] * 4 if key == "texts" else [1, 2, 3, 4]})
    content = path.read_bytes()
    at = content.index(key.encode()) + len(key) + 8  # behind the types of the list and of its entries
    path.write_bytes(content[:at] + (1 << 40).to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(foretoken.ForetokenError, match=r"Cannot read .*lists\.gguf as a GGUF file"):
        open_gguf(path)


def test_the_product_is_not_tried_for_models_without_such_layers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(panels, "_works", lambda: pytest.fail("it was tried"))
    panels.pack_linears(torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.LayerNorm(4)))
    with pytest.raises(pytest.fail.Exception, match="it was tried"):
        panels.pack_linears(torch.nn.Sequential(torch.nn.Linear(4, 3)))
