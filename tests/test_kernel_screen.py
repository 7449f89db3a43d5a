"""The LM head that is read in 4 bits, and again in 8 bits where the largest logits are."""

import gguf
import numpy as np
import pytest

from foretoken.kernel.compile import use_threads
from foretoken.kernel.model import Head, scores
from foretoken.kernel.packing import to_panels
from foretoken.kernel.product import times
from foretoken.kernel.quantised import KINDS
from foretoken.kernel.screen import AGAIN, screen_of
from foretoken.kernel.sizes import COLUMNS
from foretoken.models.kernel_layers import NO_FLOATS, NO_IDS

V, K, ROWS = 40 * COLUMNS + 7, 96, 50
Q8, Q4 = KINDS["q8_0"].form, KINDS["q4_0"].form


@pytest.fixture(scope="module")
def matrix() -> tuple[np.ndarray, np.ndarray]:
    """Panels of a matrix in 8 bits, with one block of zeros, and its screen."""
    weights = np.random.default_rng(0).normal(size=(V, K)).astype(np.float32)
    weights[3, :32] = 0
    panels = to_panels("q8_0", gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0))
    return panels, screen_of(panels)


def product(x: np.ndarray, panels: np.ndarray, form: int, threads: int | None = None) -> np.ndarray:
    out = np.empty((len(x), V), np.float32)
    times(x, panels.ctypes.data, form, V, out, threads)
    return out


def screened(x: np.ndarray, panels: np.ndarray, screen: np.ndarray | None, threads: int | None = None) -> np.ndarray:
    address = 0 if screen is None else screen.ctypes.data
    head = Head(NO_FLOATS, np.float32(0), False, np.float32(1), panels.ctypes.data, Q8, address, NO_FLOATS, NO_IDS)
    out = np.empty((len(x), V), np.float32)
    scores(x, head, out, threads)
    return out


def rows(number: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(number, K)).astype(np.float32)


def test_a_weight_keeps_its_nearest_sixteenth(matrix: tuple[np.ndarray, np.ndarray]) -> None:
    """Rows of the identity give the weights; a code of 8 bits moves by at most 8, at the upper end by 15."""
    eight, four = (product(np.eye(K, dtype=np.float32), m, form).T for m, form in zip(matrix, (Q8, Q4), strict=True))
    step = np.abs(eight.reshape(V, -1, 32)).max(-1, keepdims=True) / 127
    moved = np.abs(four - eight).reshape(V, -1, 32)
    upper = eight.reshape(V, -1, 32) > 119.5 * step
    assert (moved <= np.where(upper, 15, 8) * step * 1.001).all()
    assert (moved > 6 * step).any(), "something is lost"
    assert (four[3, :32] == 0).all()


def test_the_largest_logits_are_those_of_eight_bits(matrix: tuple[np.ndarray, np.ndarray]) -> None:
    x = rows(ROWS, 1)
    eight, four, both = product(x, matrix[0], Q8), product(x, matrix[1], Q4), screened(x, *matrix)
    again = np.zeros((ROWS, V), bool)
    for i in range(ROWS):
        padded = np.full(-(-V // COLUMNS) * COLUMNS, -np.inf, np.float32)
        padded[:V] = four[i]
        for panel in np.argsort(-padded.reshape(-1, COLUMNS).max(1), kind="stable")[:AGAIN]:
            again[i, panel * COLUMNS : (panel + 1) * COLUMNS] = True
    np.testing.assert_array_equal(both, np.where(again, eight, four))
    assert (both.argmax(1) == eight.argmax(1)).all()
    assert (four.argmax(1) != eight.argmax(1)).any(), "4 bits alone would do"
    np.testing.assert_array_equal(screened(x, matrix[0], None), eight)


@pytest.mark.parametrize("threads", [False, True])
def test_a_row_does_not_depend_on_others_or_on_threads(matrix: tuple[np.ndarray, np.ndarray], threads: bool) -> None:
    x = rows(7, 2)
    alone = np.concatenate([screened(row[None], *matrix) for row in x])
    np.testing.assert_array_equal(screened(x, *matrix, use_threads(2) if threads else None), alone)


def test_what_is_no_number_stays_to_be_seen(matrix: tuple[np.ndarray, np.ndarray]) -> None:
    """One column that is no number, whether its panel is computed again or not."""
    panels, screen = (m.copy() for m in matrix)
    for form, m in ((Q8, panels), (Q4, screen)):
        m[:2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)  # the scale of the first block of column 0
        assert np.isnan(product(rows(1, 3), m, form)[0, 0])
    logits = screened(rows(5, 3), panels, screen)
    assert np.isnan(logits[:, 0]).all()
    assert np.isfinite(logits[:, 1:]).all()
