"""The numbers on which the kernel and its callers agree; without numba, so that they can be read at once."""

from math import pi

LANES = 16  # floats of a vector; two registers with AVX2, one with AVX-512, four with NEON
COLUMNS = 64  # of a panel
WHOLE, HALVED, DOTTED = 0, 1, 2  # forms: what a word of a panel is and what it is multiplied with, see tile.py
QUANTISED = 3  # the first of the forms of quantised weights: see quantised.py
ALL = (0, 1.0, 0.0)  # top_k, top_p and min_p that keep every token
# What a gate is multiplied by is its sigmoid, or that of a (1.5957691 + 0.0713548 a^2) for GELU as tanh has it:
# a sigmoid(2 z) = a (1 + tanh z) / 2 with z = sqrt(2 / pi) (a + 0.044715 a^3).
SILU, GELU = (1.0, 0.0), (2 * (2 / pi) ** 0.5, 2 * (2 / pi) ** 0.5 * 0.044715)
NONE = -1  # stands in a row of draws where the law had nothing left to draw
