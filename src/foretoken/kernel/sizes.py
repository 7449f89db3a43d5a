"""The numbers on which the kernel and its callers agree; without numba, so that they can be read at once."""

from math import pi

LANES = 16  # float32 numbers of a vector: two registers with AVX2, one with AVX-512, four with NEON
COLUMNS = 64  # columns of a panel, which are outputs of a linear layer
# The form of a matrix says what 32 bits of its panels are. WHOLE: a float32 weight. HALVED: two bfloat16 weights, which
# meet float32 rows. DOTTED: two bfloat16 weights, which meet rows that are rounded to bfloat16 (tile.py). QUANTISED is
# the first of the forms of quantised weights (quantised.py).
WHOLE, HALVED, DOTTED = 0, 1, 2
QUANTISED = 3
ALL = (0, 1.0, 0.0)  # top_k, top_p and min_p that keep every token
# The factors c and d of an activation act(a) = a sigmoid(a (c + d a^2)). With those of GELU this is GELU's tanh form:
# a (1 + tanh z) / 2 = a sigmoid(2 z) with z = sqrt(2 / pi) (a + 0.044715 a^3).
SILU, GELU = (1.0, 0.0), (2 * (2 / pi) ** 0.5, 2 * (2 / pi) ** 0.5 * 0.044715)
NONE = -1  # stands in a row of drawn tokens where the law had nothing left to draw
