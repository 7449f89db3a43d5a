"""SIGTERM and a closed terminal end a command as Ctrl-C does: what was written and measured is kept."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import signal, time
from foretoken.core.interrupts import end_as_by_ctrl_c, exit_code, is_to_end
{}
end_as_by_ctrl_c()
assert not is_to_end()
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    print("kept", is_to_end(), flush=True)
    {}
    raise SystemExit(exit_code())
"""
AGAIN = "time.sleep(10)"


@pytest.mark.parametrize(
    ("before", "meanwhile", "sent", "code", "said"),
    [
        ("", "", [signal.SIGTERM], 143, "kept True\n"),
        ("", "", [signal.SIGHUP], 129, "kept True\n"),
        ("", "", [signal.SIGINT], 130, "kept False\n"),
        # A script's background jobs ignore Ctrl-C, and nohup has a program ignore that its terminal was closed.
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)", "", [signal.SIGINT, signal.SIGTERM], -signal.SIGTERM, ""),
        ("signal.signal(signal.SIGHUP, signal.SIG_IGN)", "", [signal.SIGHUP, signal.SIGTERM], 143, "kept True\n"),
        ("signal.signal(signal.SIGTERM, lambda *_: exit(7))", "", [signal.SIGTERM], 7, ""),
        ("", AGAIN, [signal.SIGTERM, None, signal.SIGTERM], -signal.SIGTERM, "kept True\n"),
    ],
)
def test_signals_that_end_a_program(
    before: str, meanwhile: str, sent: list[signal.Signals | None], code: int, said: str
) -> None:
    """None: the program's next line is waited for."""
    reset = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    reset += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
    command = [sys.executable, "-c", PROGRAM.format(reset + before, meanwhile)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found = ""
        for number in sent:
            if number is None:
                found += process.stdout.readline()
            else:
                process.send_signal(number)
        found += process.stdout.read()
    assert (process.returncode, found) == (code, said)


LOST = """
import signal, sys, time, weakref
from foretoken.core.interrupts import end_as_by_ctrl_c
signal.signal(signal.SIGINT, signal.default_int_handler)
end_as_by_ctrl_c()

class Thing:
    def __del__(self):
        {0}

class Other: ...

thing, other = Thing(), Other()
reference = weakref.ref(other, lambda _: {1})
try:
    del {2}
    for _ in range(500):
        time.sleep(0.01)
    print("lost")
except KeyboardInterrupt:
    print("raised")
"""
RAISE = "signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize("lost", [(RAISE, "None", "thing"), ("pass", RAISE, "other")])
def test_an_interrupt_where_no_exception_can_pass_is_raised_after_that(lost: tuple[str, str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOST.format(*lost)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("raised\n", "")


def test_other_exceptions_that_cannot_be_raised_are_printed_as_before() -> None:
    program = LOST.format("raise ValueError('as before')", "None", "thing").replace("range(500)", "range(2)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, "ValueError: as before" in done.stderr) == ("lost\n", True)


@pytest.mark.long
def test_a_benchmark_that_is_ended_shows_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "foretoken", "bench", "decoding", "--prompts", "1", "--rounds", "50", "--max-new-tokens",
         "16", "--temperature", "0", "--out", out, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = ""
    while "[8/" not in said:
        said += process.stderr.read(1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert json.loads(printed)["interrupted"]
    assert len(out.read_text().splitlines()) >= 7
