"""Of several ways to draft the fastest one drafts; which one it is never changes what comes out."""

import math
from collections import defaultdict

import numpy as np
import pytest

import foretoken
from foretoken.audit.branching import outcomes
from foretoken.audit.decoding import Decoding, deviation, own_law, table_pair
from foretoken.core.laws import IID, Opaque
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.decode import Decoder
from foretoken.draft import fastest
from foretoken.draft.auto import AutoDrafter
from foretoken.draft.controller import Costs, Experience
from foretoken.draft.fastest import BLOCK, Choice, FastestDrafter
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.vocab.slem import SLEMDrafter
from test_slem import load
from test_slem import pair as pair  # a fixture

EXTRA = (0.0, 0.4, 0.8)


class Ticking:
    """A clock that shows one second more at every look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def two_ways(clock) -> tuple[object, FastestDrafter]:
    """(target, a way whose draft tokens have a q and one whose have none)."""
    target, priced = table_pair(static.chain(2), IID, 2, seed=3)
    _, opaque = table_pair(static.chain(2), Opaque, 2, seed=3)
    known = lambda: Experience(EXTRA, 5.0, 5.0, {1: Costs(EXTRA, 1.0)})  # noqa: E731
    return target, FastestDrafter(
        tuple(AutoDrafter(way, known(), clock) for way in (priced, opaque)), {False: Choice(2, left=1)}
    )


@pytest.mark.usefixtures("unchecked")
def test_whole_decodings_have_the_targets_law(monkeypatch):
    """Enumerated, with blocks of one step and rates that depend on what was accepted, so that the ways change."""
    monkeypatch.setattr(fastest, "BLOCK", 1)
    rule, law, chosen = VERIFIERS["block"], defaultdict(float), set()

    def run(rng):
        target, drafter = two_ways(Ticking())
        decoder = Decoder(target, drafter, rule, 1, 64)
        decoder._guard = lambda call, *args: call(*args)  # a drafter that fails fails here
        sequence = Sequence([0, 1], Sampling(), rng, 5)
        decoder.join(sequence)
        ways = []
        while decoder.sequences:
            decoder.step()
            ways.append(drafter.choices[False].current)
        return tuple(sequence.ids[2:]), tuple(ways)

    for (ids, ways), probability in outcomes(run):
        law[ids] += probability
        chosen.add(ways)
    assert math.fsum(law.values()) == pytest.approx(1, abs=1e-12)
    target, drafter = two_ways(Ticking())
    own = own_law(Decoding(target, drafter.drafters[0].inner, rule, num_tokens=5))
    assert deviation(dict(law), own) <= 1e-12
    assert any(0 in ways and 1 in ways for ways in chosen), "one way drafted everything"
    assert len({ways[-1] for ways in chosen if len(ways) > 2}) > 1, "what was accepted never changed the way"


def speed_of(choice: Choice, rates: list[float], steps: int, rng) -> float:
    """Tokens per second over so many steps, in each of which way i emits 2.5 tokens on average."""
    tokens = seconds = 0.0
    for _ in range(steps):
        way = choice.next()
        emitted = int(rng.integers(1, 5))
        took = 2.5 / rates[way] * math.exp(0.1 * rng.standard_normal())
        if choice.measured:
            choice.learn(emitted, took)
        tokens, seconds = tokens + emitted, seconds + took
    return tokens / seconds


@pytest.mark.parametrize("rates", [[1.0, 0.7], [0.7, 1.0], [1.0, 0.97], [0.5, 1.0], [0.8, 0.9, 1.0]])
def test_the_speed_is_nearly_that_of_the_fastest_way(rates):
    """At least 0.95 of it over 1,600 steps, some thirty answers, the first tries included."""
    choice = Choice(len(rates))
    assert speed_of(choice, rates, 1600, np.random.default_rng(0)) >= 0.95 * max(rates)


def test_a_way_that_becomes_the_fastest_is_found():
    choice, rng = Choice(2), np.random.default_rng(1)
    speed_of(choice, [1.0, 0.7], 800, rng)
    assert choice.best == 0
    speed_of(choice, [1.0, 1.5], 40 * BLOCK, rng)
    assert choice.best == 1


def test_greedy_text_is_the_plain_text_and_all_ways_draft(pair):
    drafting = load(pair, vocab="auto", method="auto", tree=None)
    assert isinstance(drafting.drafter, FastestDrafter)
    assert {type(way.inner) for way in drafting.drafter.drafters} >= {SLEMDrafter}
    assert drafting.verifier.name == "block"
    prompts = ["the hello", "  two\n\n lines", "the the the"]
    settings = {"max_new_tokens": 40, "temperature": 0.0}
    texts = [result.token_ids for result in drafting.generate(prompts, **settings)]
    assert texts == [
        result.token_ids for result in load(pair, vocab="tli", tree="chain:1").generate(prompts, **settings)
    ]
    assert all(speed.seconds > 0 for speed in drafting.drafter.choices[True].speeds), "a way was never tried"
    drafting.generate(prompts, max_new_tokens=20, temperature=1.0, seed=0)
    assert set(drafting.drafter.choices) == {True, False}


def test_what_is_named_is_taken(pair):
    assert not isinstance(load(pair, vocab="slem", method="auto", tree=None).drafter, FastestDrafter)
    assert not isinstance(load(pair, vocab="auto").drafter, FastestDrafter)
    assert not isinstance(load(pair, vocab="auto", method="auto", tree=None, verifier="rrsw").drafter, FastestDrafter)
    assert foretoken.load(pair[0], method="auto", tokenizer=None).drafter.name == "none"
