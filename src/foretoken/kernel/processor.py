"""What the processor can do: the abilities by which compiled loops choose their instructions."""

import ctypes
import sys

from numba.core.registry import cpu_target

# The processor that numba compiles for: its name, and its abilities as LLVM lists them (+avx2, ..).
_, NAME, _features = cpu_target.target_context.codegen().magic_tuple()  # pyright: ignore[reportAttributeAccessIssue]
FEATURES = _features.split(",")
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # numbers of the Linux kernel for x86-64


def _permitted() -> bool:
    """Whether Linux lets this process use the registers of the matrix unit; asking once is enough for all threads."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


WIDE = "+avx512f" in FEATURES  # 32 registers of 16 floats
# Whether there is a unit that multiplies 16 rows with 16 columns of bfloat16 numbers in one instruction (AMX).
MATRIX = "+amx-bf16" in FEATURES and WIDE and "+avx512bf16" in FEATURES and _permitted()
# Whether the instruction for pairs of bfloat16 numbers (vdpbf16ps) is used; elsewhere they are widened. Intel's
# processors have it too, but make more products per second in float32: the entry of 2026-11-26 on an Intel processor
# in docs/LOG.md. The matrix unit takes rows in the same form and multiplies words in groups of 16; the instruction does
# the words that are left over.
DOTS = "+avx512bf16" in FEATURES and (MATRIX or NAME.startswith("znver"))
