"""What the processor can do that compiled loops make use of."""

import ctypes
import sys

from numba.core.registry import cpu_target

# What numba compiles for, by its settings.
_, NAME, _features = cpu_target.target_context.codegen().magic_tuple()  # pyright: ignore[reportAttributeAccessIssue]
FEATURES = _features.split(",")
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # numbers of the Linux kernel for x86-64


def _permitted() -> bool:
    """Whether Linux lets this process use the registers of the matrix unit: it grants that once and for all threads."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


WIDE = "+avx512f" in FEATURES  # 32 registers of 16 floats
# Whether there is a unit that multiplies 16 rows with 16 columns of bfloat16 numbers in one instruction (AMX).
MATRIX = "+amx-bf16" in FEATURES and WIDE and "+avx512bf16" in FEATURES and _permitted()
# Whether the instruction for pairs of bfloat16 numbers (vdpbf16ps) is used; elsewhere they are widened. Intel's
# processors have it too, but make more products per second in float32: the entry of 2026-11-26 on an Intel processor
# in docs/LOG.md. Beside the matrix unit, which takes rows in the same form, it does what makes no whole group.
DOTS = "+avx512bf16" in FEATURES and (MATRIX or NAME.startswith("znver"))
