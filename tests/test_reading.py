"""A drafter reads a prompt where what is left of the text saves more than that takes, on machines of known costs."""

import numpy as np
import pytest

from foretoken.draft.controller import Experience
from foretoken.draft.reading import LENGTH, PRICE, Reading
from machines import EXTRA, MACHINES, controller, depth_of, rates

ACCEPTANCE, MACHINE = 0.7, MACHINES["quick drafter"]
RATE = max(rates(ACCEPTANCE, MACHINE))  # tokens per plain step


def text(known: Experience, prompt: int, tokens: int, limit: int, price: float, rng: np.random.Generator) -> float:
    """Return the plain steps that a text takes, its prompt's reading by the drafter included, that by the target not.

    prompt: the number of ids that the drafter must read before it drafts.
    tokens, limit: the text's length, and the most that it may have.
    price: plain steps that reading an id takes.
    """
    deciding, unread, emitted, total = controller(known), prompt, 1, 0.0
    while emitted < tokens:
        ahead = limit - emitted
        chosen = deciding.choose(True, [ahead - 1], unread, known.reading.left(emitted, ahead)) if ahead > 1 else []
        depth = min(depth_of(chosen), tokens - emitted - 1)
        accepted = int(np.cumprod(rng.random(depth) < ACCEPTANCE).sum())
        read = unread if chosen else 0
        seconds = MACHINE[depth] + price * read
        if chosen:
            deciding.learn_acceptance([depth], [accepted], [None])
        deciding.learn_cost(depth, accepted + 1.0, seconds, read)
        emitted, total = emitted + accepted + 1, total + seconds
        unread = 0 if chosen else unread + (1 if unread else 0)
    deciding.leave(0)
    known.reading.lengths.append(float(tokens))
    return total


def times(prompt: int, tokens: int, limit: int, price: float = PRICE, num_texts: int = 12) -> list[float]:
    """Plain steps that each of some texts takes, one after the other, as a share of plain decoding: mean of 20 runs."""
    found = np.zeros(num_texts)
    for seed in range(20):
        rng, known = np.random.default_rng(seed), Experience(EXTRA)
        found += [text(known, prompt, tokens, limit, price, rng) / (tokens - 1) for _ in range(num_texts)]
    return (found / 20).tolist()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("price", [PRICE / 3, PRICE, 2 * PRICE])
def test_a_long_prompt_with_a_short_answer_costs_nothing(price):
    """Where the limit says that the answer is short, no text is slower than plain decoding."""
    assert max(times(4000, 40, 40, price)) <= 1.02


@pytest.mark.usefixtures("unchecked")
def test_answers_that_are_shorter_than_their_limit_are_found_out():
    found = times(4000, 40, 1000)
    assert max(found) <= 1.02, "4,000 ids take 120 plain steps, more than a text of 128 tokens could save"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("prompt", "tokens"), [(100, 128), (1000, 600), (4000, 1000)])
def test_a_prompt_that_is_worth_it_is_read(prompt, tokens):
    """Once lengths are known, texts take what reading and drafting take, and a tenth more at most."""
    best = (PRICE * prompt + tokens / RATE) / tokens
    assert best < 0.9
    found = times(prompt, tokens, 2 * tokens)
    assert np.mean(found[4:]) <= 1.1 * best
    assert max(found) <= 1.05 * best + 2 * PRICE * prompt / tokens, "the first text waits until its length shows it"


@pytest.mark.usefixtures("unchecked")
def test_after_long_prompts_that_were_not_read_short_ones_are_drafted_at_once():
    after, fresh = 0.0, 0.0
    for seed in range(20):
        rng, known = np.random.default_rng(seed), Experience(EXTRA)
        for _ in range(8):
            text(known, 8000, 40, 1000, PRICE, rng)
        after += text(known, 50, 200, 200, PRICE, rng)
        fresh += text(Experience(EXTRA), 50, 200, 200, PRICE, rng)
    assert after <= 1.03 * fresh


def test_what_reading_takes_is_learnt():
    reading = Reading()
    assert reading.cost(1000) == pytest.approx(30.0)
    for _ in range(20):
        reading.learn(500, 5.0)
    assert reading.cost(1000) == pytest.approx(10.0, rel=0.05)
    reading.learn(500, -3.0)
    assert 0 < reading.cost(1000) < 10


def test_a_text_is_taken_to_be_as_long_as_the_latest_ones_or_as_it_is_by_now():
    reading = Reading()
    assert reading.left(0, 1000) == LENGTH
    assert reading.left(0, 50) == 50
    assert reading.left(300, 1000) == 300
    for _ in range(8):
        reading.lengths.append(20.0)
    assert reading.left(0, 1000) == 20
