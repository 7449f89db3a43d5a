"""How a program ends before its work is done: by Ctrl-C, or by a signal that is taken for one."""

import _thread
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Inside `with`, the first Ctrl-C only sets `asked` to True; the second one raises KeyboardInterrupt as usual.

    Outside of the main thread, where no signals arrive, nothing changes.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        # A process that ignores interrupts, as a shell's background jobs do, goes on to ignore them.
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


SOON = 0.01  # seconds until an interrupt comes again
_received: list[int] = []  # signals that were taken for Ctrl-C


def end_as_by_ctrl_c() -> None:
    """From now on let the first SIGTERM or SIGHUP, which a closed terminal sends, do what Ctrl-C does.

    So what was measured or written so far is kept. A second one ends the process at once. A signal that the process
    ignores, as it does SIGHUP under nohup, or handles otherwise, stays as it is. Where Ctrl-C is ignored, as in the
    background jobs of a script, all stay as they are: what takes care of Ctrl-C while code is compiled, or a step of a
    training is not finished, is not in place then.

    A Ctrl-C that Python would only print, since it came in a destructor or a weak reference's callback, is raised after
    that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _as_ctrl_c)
    sys.unraisablehook = _not_lost(sys.unraisablehook)


def _not_lost(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return `hook`, which Python calls with exceptions that cannot be raised, but for interrupts, which come again."""

    def come_again(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and not sys.is_finalizing():
            # By another thread, since this one may still be where no exception can pass when the hook returns.
            threading.Timer(SOON, _thread.interrupt_main).start()
        else:
            hook(unraisable)

    return come_again


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


def is_to_end() -> bool:
    """Whether a signal came that `end_as_by_ctrl_c` took for Ctrl-C: what Ctrl-C only stops ends the program then."""
    return bool(_received)


def exit_code() -> int:
    """Return the exit code of a program that was interrupted: 128 and the number of the signal, for Ctrl-C 130."""
    return 128 + (_received[0] if _received else signal.SIGINT)
