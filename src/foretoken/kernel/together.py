"""Threads that wait for each other inside one compiled call: starting them anew for every step takes ten times as long.

The work of a call is done in parts, a thread for each. A *gate* is GATE whole numbers in memory, zeros at first, of
which two are counters: of the parts that have come, and of the waits that parts have begun. Parts that wait for each
other must run at the same time, or the first would wait for ever. Nothing promises that: another program may hold a
core, and a process may be limited to one thread. So parts `meet` first.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import os
import platform
from typing import Any

from llvmlite import ir
from numba import types

from foretoken.kernel.addresses import written
from foretoken.kernel.compile import fused

GATE = 32  # whole numbers of a gate, whose two counters lie in lines of memory of their own
PASSED = 8 * 16  # bytes from the first counter to the second
SHUT = -1  # the first counter's value where a part was late
# How often a part looks at a counter before it does something else. A look takes 10 to 50 nanoseconds with its pause,
# so all take some tenth of a millisecond, in which a thread that sleeps wakes up.
PATIENCE = 5000
PER_LOOK = 100_000  # multiplications per additional look: these looks take some 3% of the time of a forward
TOGETHER, ALONE, LATE = range(3)
POSIX, SCHED_YIELD = os.name == "posix", types.ExternalFunction("sched_yield", types.int32())
PAUSE = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}.get(platform.machine())


def counter(b: Any, address: Any) -> Any:
    """Return a pointer to the counter at an address, an LLVM value; b: the builder of the LLVM instructions."""
    return b.inttoptr(address, address.type.as_pointer())


@written(types.intp, out=types.intp)
def seen(b: Any, address: Any) -> Any:
    """Return a counter's value; what other threads wrote before they counted it up can be read from then on.

    b: the builder of the LLVM instructions.
    address: the counter's address.
    """
    return b.load_atomic(counter(b, address), "acquire", 8)


@written(types.intp)
def count_up(b: Any, address: Any) -> None:
    """Add 1 to a counter, as one operation.

    b: the builder of the LLVM instructions.
    address: the counter's address.
    """
    b.atomic_rmw("add", counter(b, address), address.type(1), "acq_rel")


@written(types.intp, types.intp, types.intp, out=types.boolean)
def swapped(b: Any, address: Any, old: Any, new: Any) -> Any:
    """Put `new` in the place of a counter's value if that is `old`, as one operation; return whether it was.

    b: the builder of the LLVM instructions.
    address: the counter's address.
    old, new: whole numbers.
    """
    return b.extract_value(b.cmpxchg(counter(b, address), old, new, "acq_rel", "acquire"), 1)


@written()
def pause(b: Any) -> None:
    """Let the processor rest in a loop that waits, if it has an instruction for that; b: the builder."""
    if PAUSE:
        b.call(b.module.declare_intrinsic(PAUSE, (), ir.FunctionType(ir.VoidType(), [])), [])


@fused
def give_way():
    """Let another thread have this core, if one waits for it and the system has POSIX's call for that."""
    if POSIX:
        SCHED_YIELD()


@fused
def meet(gate, parts, work):
    """Wait for the other parts, and return what this part is to do. Each part calls this once.

    gate: address of a gate.
    parts: number of parts.
    work: multiplications of all parts together; the larger it is, the longer a part waits.

    Returns TOGETHER in all parts if they run at the same time. Otherwise ALONE in one, which is to do the work of all,
    and LATE in the others.
    """
    known = seen(gate)
    while known != SHUT and not swapped(gate, known, known + 1):
        known = seen(gate)
    looks, most = 0, PATIENCE + work // PER_LOOK
    while known != SHUT:
        known = seen(gate)
        if known == parts:
            return TOGETHER
        if looks >= most and known != SHUT and swapped(gate, known, SHUT):
            return ALONE
        looks += 1
        if looks % PATIENCE == 0:  # another part may be waiting for this core
            give_way()
        pause()
    return LATE


@fused
def wait(gate, parts, times):
    """Wait until each of the parts, which have met, has called this so many times.

    gate: address of their gate.
    parts: number of parts.
    times: number of calls by each part, this one included.
    """
    count_up(gate + PASSED)
    looks = 0
    while seen(gate + PASSED) < parts * times:
        looks += 1
        if looks % PATIENCE == 0:
            give_way()
        pause()
