"""The model behind budget trees: what a node gains, what is forecast below it, and the best spending at a price."""

import numpy as np
import pytest

from foretoken.trees.budget import spend
from foretoken.trees.gain import CHOICES, HARDNESS, LOG_PRICES, LOWEST, PRICES, STEP, WIDE, forecast, gain_at, shares


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_the_model_of_gains(joint: bool, temperature: float) -> None:
    """Probabilities, one after the other; more children are worth less each, and a sure drafter's first one all."""
    of = shares(np.array([0.0, 0.3, 0.9, 1.0]), np.full(4, 0.8), np.full(4, 0.5), gain_at(temperature, 0.31, joint))
    first, other = of.share
    assert of.log_share[0] == pytest.approx(np.log(0.5 * first), abs=1e-12)
    assert (first > 0).all()
    assert (other >= 0).all()
    assert (np.diff(first + (CHOICES - 1) * other, axis=1) > -1e-12).all()
    assert first[3, 0] == 1


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_the_forecast(joint: bool, temperature: float) -> None:
    """With one level to go, by hand; a cheaper node is worth more nodes, and more levels are worth no less."""
    gain, levels = gain_at(temperature, 0.31, joint), 8
    worth, size = forecast(gain, levels, (0.2, 0.8)).transpose(1, 0, 2, 3)
    last = np.zeros(worth.shape[1:])
    for certain in (0.2, 0.8):
        first, other = shares(np.full(len(HARDNESS), certain), HARDNESS, np.ones(len(HARDNESS)), gain).share
        value = WIDE * (1 - first[:, :1]) + first + (CHOICES - 1) * other
        last += np.maximum((value[:, None] - PRICES[:, None] * CHOICES).max(2), 0) / 2
    assert np.abs(worth[1] - last).max() <= 1e-12
    assert (np.diff(worth, axis=2) <= 1e-12).all()
    assert (np.diff(worth, axis=0) >= -1e-12).all()
    assert (size[1:, :, 0] > size[1:, :, -1]).all()


def test_spending_is_the_best_at_its_price() -> None:
    """Against all choices of all nodes, valued one by one; the price is the one from `least` on that spends most nearly
    what there is, what is expected below it included."""
    gain = gain_at(1.0, 0.31, joint=True)
    below = forecast(gain, 8, (0.2, 0.8))[6]
    reach, certainty, hardness = np.array([1.0, 0.5, 0.2]), np.array([0.1, 0.6, 0.3]), np.array([1.0, 0.8, 0.5])
    of = shares(certainty, hardness, reach, gain)
    number = np.stack([np.ones_like(CHOICES), CHOICES - 1])

    def read(table: np.ndarray, i: int, kind: int, j: int, price: float) -> float:
        column = (price - np.log(reach[i] * of.share[kind, i, j] + 1e-300) - LOWEST) / STEP
        column = np.clip(column, 0, len(PRICES) - 1.001)
        return float(
            np.interp(of.hardness[kind, i], HARDNESS, [np.interp(column, range(len(row)), row) for row in table])
        )

    def best(price: float) -> tuple[list[np.ndarray], float, float]:
        """(value of each node's choices, nodes of the best ones, and those with what is expected below them)."""
        values, own, total = [], 0.0, 0.0
        for i in range(3):
            value, nodes = reach[i] * WIDE * (1 - of.share[0, i, 0]) - np.exp(price) * CHOICES, CHOICES.copy()
            for j in range(len(CHOICES)):
                for kind in (0, 1):
                    gained = reach[i] * of.share[kind, i, j] * (1 + read(below[0], i, kind, j, price))
                    value[j] += number[kind, j] * gained
                    nodes[j] += number[kind, j] * read(below[1], i, kind, j, price)
            pick = int(value.argmax())
            values.append(value)
            if value[pick] > 0:
                own, total = own + CHOICES[pick], total + nodes[pick]
        return values, own, total

    prices = [best(float(price)) for price in LOG_PRICES]
    for left, least in ((2.0, 0), (9.0, 0), (40.0, 0), (40.0, 80)):
        chosen = np.empty(3, np.int64)
        found = spend(reach, of, below, left, least, chosen)
        values, _, cost = prices[found]
        own = 0.0
        for i in range(3):
            if values[i].max() <= 0:
                assert chosen[i] == -1
            else:
                assert values[i][chosen[i]] == pytest.approx(values[i].max(), abs=1e-9)
                own += CHOICES[chosen[i]]
        assert own <= left
        assert found >= least
        distance = [abs(total - left) for _, own, total in prices[least:] if own <= left]
        assert abs(cost - left) == pytest.approx(min(distance), abs=1e-9)
