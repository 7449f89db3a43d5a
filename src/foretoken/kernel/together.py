"""Threads that wait for each other inside one compiled call: starting them anew for every step takes ten times as long.

A *gate* is GATE whole numbers in memory, zeros at first: how many parts have come, and how often one has waited. Parts
that wait for each other must run at the same time, a thread each, or the first would wait for ever. Nothing promises
that: another program may hold a core, and a process may be limited to one thread. So they `meet` first.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import os
import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from foretoken.kernel.compile import fused

GATE = 32  # whole numbers of a gate, whose two counters lie in lines of memory of their own
PASSED = 8 * 16  # bytes from the first counter to the second
SHUT = -1  # the first counter's value where a part was late
# Looks at a counter before a part does something else, from 10 to 50 nanoseconds each with its pause: a tenth of a
# millisecond and more, in which a thread that sleeps wakes up.
PATIENCE = 5000
PER_LOOK = 100_000  # multiplications that one more look is worth: some 3% of the time that a forward takes
TOGETHER, ALONE, LATE = range(3)
POSIX, SCHED_YIELD = os.name == "posix", types.ExternalFunction("sched_yield", types.int32())
PAUSE = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}.get(platform.machine())


def counter(b: Any, address: Any) -> Any:
    return b.inttoptr(address, address.type.as_pointer())


@intrinsic
def seen(typing: Any, address: Any) -> Any:
    """A counter's value, and with it all that was written before it was counted up."""
    return types.intp(types.intp), lambda context, b, s, args: b.load_atomic(counter(b, args[0]), "acquire", 8)


@intrinsic
def count_up(typing: Any, address: Any) -> Any:
    """Add 1 to a counter."""

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        b.atomic_rmw("add", counter(b, args[0]), args[0].type(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def swapped(typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Put `new` in the place of a counter's value if that is `old`. Returns whether it was."""

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        both = b.cmpxchg(counter(b, args[0]), args[1], args[2], "acq_rel", "acquire")
        return b.extract_value(both, 1)

    return types.boolean(types.intp, types.intp, types.intp), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the processor that this is a loop that waits, where it has an instruction for that."""

    def generate(context: Any, b: Any, s: Any, args: Any) -> Any:
        if PAUSE:
            b.call(b.module.declare_intrinsic(PAUSE, (), ir.FunctionType(ir.VoidType(), [])), [])
        return context.get_dummy_value()

    return types.void(), generate


@fused
def give_way():
    """Let another thread have this core, if one waits for it and the system has POSIX's call for that."""
    if POSIX:
        SCHED_YIELD()


@fused
def meet(gate, parts, work):
    """What one of the parts is to do, each of which calls this once.

    gate: the address of a gate. parts: their number. work: multiplications of all parts, by which they wait longer.

    Returns TOGETHER in all parts where they run at the same time; else ALONE in one, which is to do the work of all,
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
        if looks % PATIENCE == 0:  # the other's thread may be waiting for this core
            give_way()
        pause()
    return LATE


@fused
def wait(gate, parts, times):
    """Wait until all parts, which have met, have called this so many times."""
    count_up(gate + PASSED)
    looks = 0
    while seen(gate + PASSED) < parts * times:
        looks += 1
        if looks % PATIENCE == 0:
            give_way()
        pause()
