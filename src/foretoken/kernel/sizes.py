"""The numbers on which the kernel and its callers agree; without numba, so that they can be read at once."""

LANES = 16  # floats of a vector; two registers with AVX2, one with AVX-512, four with NEON
COLUMNS = 64  # of a panel
WHOLE, HALVED, DOTTED = 0, 1, 2  # forms: what a word of a panel is and what it is multiplied with, see tile.py
QUANTISED = 3  # the first of the forms of quantised weights: see quantised.py
ALL = (0, 1.0, 0.0)  # top_k, top_p and min_p that keep every token
NONE = -1  # stands in a row of draws where the law had nothing left to draw
