"""Ctrl-C while loops are compiled is never lost, and ends a run as elsewhere."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import cast
from unittest.mock import Mock

import pytest
from numba import config
from numba.core import event

import foretoken
from foretoken.cli.options import tell_of_compiling
from foretoken.core.interrupts import Interrupts
from foretoken.kernel.compile import Loop

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(foretoken.__file__).parents[1])}
CALLED_BY_LLVM = "_raw_object_cache_notify"
# Compiles loops until 20 interrupts at random times came through, the last of which ends the command.
PROGRAM = """
import itertools, os, random, signal, threading
import numba  # which an interrupt would leave half imported
from foretoken.cli.main import run
from foretoken.kernel.compile import Loop

def compile_until_interrupted():
    threading.Timer(rng.uniform(0, 0.2), os.kill, (os.getpid(), signal.SIGINT)).start()
    for factor in number:
        def loop(x):
            return factor * x
        Loop(loop, set(), False)(1)

def command():
    for _ in range(19):
        try:
            compile_until_interrupted()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    compile_until_interrupted()

rng, number = random.Random(0), itertools.count()
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background jobs ignore it
run(command)
"""


def _twice(x):
    return 2 * x


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loop:
    """A loop that is not on disk."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    return Loop(_twice, set(), False)


@pytest.fixture
def interrupting() -> Iterator[Callable[[dict[str, int]], None]]:
    """Takes how many interrupts are sent whenever this thread calls a function, by its name."""

    def interrupt(times: dict[str, int]) -> None:
        def called(frame: FrameType, what: str, argument: object) -> None:
            if what == "call":
                for _ in range(times.get(frame.f_code.co_name, 0)):
                    signal.raise_signal(signal.SIGINT)

        sys.setprofile(called)

    yield interrupt
    sys.setprofile(None)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_where_no_exception_can_pass_is_raised_afterwards(
    loop: Loop, interrupting: Callable[[dict[str, int]], None], times: int, capfd: pytest.CaptureFixture[str]
) -> None:
    tell_of_compiling()  # once per process: here, if no command of another test had it said
    capfd.readouterr()
    interrupting({CALLED_BY_LLVM: times})
    with pytest.raises(KeyboardInterrupt):
        loop(4)
    sys.setprofile(None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capfd.readouterr().err == ""
    assert loop(4) == 8


@pytest.mark.usefixtures("interruptible")
def test_of_two_interrupts_that_set_a_flag_first_the_second_one_is_raised(
    loop: Loop, interrupting: Callable[[dict[str, int]], None]
) -> None:
    interrupting({"compile_extra": 1, CALLED_BY_LLVM: 1})
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        loop(4)
    assert interrupts.asked


@pytest.mark.usefixtures("interruptible")
def test_a_loop_is_compiled_after_an_interrupt_at_any_pass(loop: Loop) -> None:
    class At(event.Listener):
        left = 0

        def on_start(self, event: object) -> None:
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
            self.left -= 1

        def on_end(self, event: object) -> None: ...

    at = At()
    with event.install_listener("numba:run_pass", at):
        for at.left in count(step=3):
            try:
                assert loop(4) == 8
                break
            except KeyboardInterrupt:
                continue
    assert at.left >= 0


@pytest.mark.usefixtures("interruptible")
def test_other_threads_leave_the_handler_alone(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", Mock())
    thread = threading.Thread(target=loop, args=(4,))
    thread.start()
    thread.join()
    assert loop._code.signatures
    assert not cast(Mock, signal.signal).called


def test_interrupts_at_random_times_while_loops_are_compiled_are_all_raised(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], env=ENVIRONMENT | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, 19 * "interrupted\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_interrupts_end_a_first_start(tmp_path: Path, seed: int) -> None:
    """Where there are several, Python may print a later one that it meets in a finalizer, as the command ends."""
    times = 1 + seed % 3
    command = [sys.executable, "-m", "foretoken", "generate", "def f(x):", "--max-new-tokens", "4"]
    environment = ENVIRONMENT | {"NUMBA_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert "compiling" in run.stderr.readline()
        time.sleep(random.Random(seed).uniform(0, 6))
        for _ in range(times):
            run.send_signal(signal.SIGINT)
            time.sleep(0.2)
        err = run.communicate()[1]
    assert run.returncode == 130, err
    assert times > 1 or "Traceback" not in err
