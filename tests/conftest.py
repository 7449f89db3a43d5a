"""Under pytest every function of the package and of the benchmarks checks the types and the shapes it declares: in each
test at its first calls and at some of the others, with --every-call at all of them."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from jaxtyping import config as checks
from jaxtyping import install_import_hook

import checking


def temporary() -> str:
    """Return a new folder that is deleted when this process ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


os.environ["FORETOKEN_HOME"] = temporary()  # what is kept of the models of tests goes with them
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # bars of models that a test saves are no output of a command
jaxtyping.jaxtyped = checking.jaxtyped
install_import_hook(["foretoken", "benchmarks"], "beartype.beartype")
pytest_plugins = ["command", "clusters", "recording"]  # after the hook, since they import both
torch.set_num_threads(1)  # the models of the tests are tiny: waking a second thread costs more than their work


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-call", action="store_true", help="check types and shapes at every call, in twice the time"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("every_call"):
        checking.EVERY = 1
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most tests are of code for CPUs, with the default device
    if hasattr(config, "workerinput"):  # one of several processes
        from compiling import share

        share(Path(config.workerinput["locks"]))


locks = cache(temporary)  # one folder for all processes of pytest-xdist


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """node: a process that pytest-xdist is about to start."""
    node.workerinput["locks"] = locks()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays, so that no collection need go through it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    checking.begin_test()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """For tests that pass wrong types, or make the same calls many thousand times."""
    checks.update("jaxtyping_disable", True)
    yield
    checks.update("jaxtyping_disable", False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what is kept of the models of this test goes, nothing of which is there yet."""
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Commands that earlier tests ran in this process may have set another number."""
    torch.set_num_threads(1)
