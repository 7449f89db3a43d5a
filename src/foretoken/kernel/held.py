"""Ctrl-C while numba compiles, which would be lost in places where no exception can pass."""

import functools
import signal
import threading
from types import FrameType


@functools.cache
def hold_interrupts() -> None:
    """From now on hold Ctrl-C while this process compiles a loop or loads one from disk, and raise it afterwards.

    LLVM calls Python functions of llvmlite from C++ code: an exception there is printed and forgotten, along with the
    machine code that the function was given. numba has a lock for all that calls LLVM, which it takes once for a loop
    and again for each step of its compilation. KeyboardInterrupt is raised as soon as the main thread, which alone
    handles signals, gives the lock back.
    """
    from numba.core import event

    class Held(event.Listener):
        """Notes Ctrl-C while the main thread has the lock.

        Any other handler than Python's own stays, since it does not raise. One that gives way to Python's own at the
        first Ctrl-C, as that of `Interrupts` does, may do so in the middle: so the handler is looked at each time.
        """

        def __init__(self) -> None:
            self._times, self._asked = 0, False

        def on_start(self, event: object) -> None:
            if threading.current_thread() is not threading.main_thread():
                return
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._asked = False
                signal.signal(signal.SIGINT, self._note)
            self._times += 1

        def on_end(self, event: object) -> None:
            if threading.current_thread() is not threading.main_thread():
                return
            self._times -= 1
            if (self._times == 0 or self._asked) and signal.getsignal(signal.SIGINT) == self._note:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if self._asked:
                    raise KeyboardInterrupt

        def _note(self, number: int, frame: FrameType | None) -> None:
            self._asked = True

    event.register("numba:compiler_lock", Held())
