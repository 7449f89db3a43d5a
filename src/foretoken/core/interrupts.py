"""A context in which Ctrl-C sets a flag, so that work can end at a good moment."""

import signal
import threading
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
