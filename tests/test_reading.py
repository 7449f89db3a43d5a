"""A drafter reads a prompt where what is left of the text saves more than that takes, on machines of known costs."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import pytest

from foretoken.core.interfaces import Path
from foretoken.core.laws import Law, Opaque
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import TokenTree, root_only
from foretoken.draft.auto import AutoDrafter
from foretoken.draft.controller import Experience, expected_extra
from foretoken.draft.reading import FEWEST, LENGTH, PRICE, Lengths, Reading
from machines import EXTRA, MACHINES, controller, depth_of, line, rates
from thinning import one_in

ACCEPTANCE, MACHINE = 0.7, MACHINES["quick drafter"]
RATE = max(rates(ACCEPTANCE, MACHINE))  # tokens per plain step
NOISE = math.exp(0.1**2 / 2)  # what a plain step takes with that of `text`


def text(
    known: Experience, prompt: int, tokens: int, limit: int, price: float, rng: np.random.Generator,
    acceptance: float = ACCEPTANCE, machine: list[float] = MACHINE, stall: float = 0.0,
) -> float:  # fmt: skip
    """Return the plain steps that a text takes, its prompt's reading by the drafter included, that by the target not.

    prompt: the number of ids that the drafter must read before it drafts.
    tokens, limit: the text's length, and the most that it may have.
    price: plain steps that reading an id takes.
    acceptance, machine: of a draft token; as in machines.py.
    stall: plain steps that the prompt's reading takes besides, once.
    """
    deciding, unread, emitted, total = controller(known), prompt, 1, 0.0
    while emitted < tokens:
        ahead = limit - emitted
        left = known.lengths.left(emitted, ahead)
        chosen = deciding.choose(True, [ahead - 1], [max(unread - 2, 0)], [left]) if ahead > 1 else []
        depth = min(depth_of(chosen), tokens - emitted - 1)
        accepted = int(np.cumprod(rng.random(depth) < acceptance).sum())
        read = max(unread - 2, 0) if chosen else 0
        seconds = machine[depth] * rng.lognormal(0, 0.1) + price * read + stall * (read == prompt - 2)
        if chosen:
            deciding.learn_acceptance([depth], [accepted], [None])
        if not deciding.waiting:
            deciding.learn_cost(depth, accepted + 1.0, seconds, read)
        emitted, total = emitted + accepted + 1, total + seconds
        unread = 1 if chosen else unread + 1
    deciding.leave(0)
    known.lengths.latest.append(float(tokens))
    return total


def times(prompt: int, tokens: int, limit: int, price: float = PRICE, num_texts: int = 12) -> list[float]:
    """Plain steps that each of some texts takes, one after the other, as a share of plain decoding: mean of 20 runs."""
    found = np.zeros(num_texts)
    for seed in range(20):
        rng, known = np.random.default_rng(seed), Experience(EXTRA)
        found += [text(known, prompt, tokens, limit, price, rng) / (tokens - 1) / NOISE for _ in range(num_texts)]
    return (found / 20).tolist()


@dataclass(frozen=True)
class Counting:
    """A drafter whose sessions count how often they draft."""

    name: str = "counting"
    laws: tuple[Law, ...] = (Opaque(1),)
    max_nodes: int = 4

    def open(self, batch: int, slots: int) -> "CountingSession":
        return CountingSession()


class CountingSession:
    """Drafts nothing, as often as it is asked."""

    proposed = 0

    def join(self) -> None: ...

    def leave(self, row: int) -> None: ...

    def propose(self, sequences: Seq[Sequence]) -> list[TokenTree]:
        self.proposed += 1
        return [root_only(seq.ids[-1]) for seq in sequences]

    def observe(self, sequences: Seq[Sequence], trees: Seq[TokenTree], paths: Seq[Path]) -> None: ...


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
@pytest.mark.parametrize(("prompt", "tokens"), one_in(3, [(100, 128), (1000, 600), (4000, 1000)]))
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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("prompt", "tokens"), [(700, 60), (1500, 100), (2000, 120), (4000, 120)])
def test_a_better_drafter_than_assumed_is_found_out(prompt, tokens):
    """It reads in a quarter of the time that is assumed, and nearly all is accepted: what is not read teaches nothing,
    but its plain steps earn a credit."""
    machine = line(0.1, 0.05)
    best = (0.008 * prompt + tokens / max(rates(0.92, machine))) / tokens
    known, rng = Experience(EXTRA), np.random.default_rng(1)
    found = [text(known, prompt, tokens, tokens, 0.008, rng, 0.92, machine) / tokens for _ in range(100)]
    assert np.mean(found[30:]) <= 1.15 * best


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("prompt", "tokens", "stall", "at"),
    one_in(5, [(*case, at) for case in [(2000, 300, 105.0), (100, 300, 460.0), (100, 300, 1200.0)] for at in (0, 4)]),
)
def test_one_slow_reading_does_not_end_drafting(prompt, tokens, stall, at):
    """As where code is compiled meanwhile, or another program has the cores."""
    best = (0.035 * prompt + tokens / RATE) / tokens
    known, rng, found = Experience(EXTRA), np.random.default_rng(1), []
    for number in range(60):
        found.append(text(known, prompt, tokens, tokens, 0.035, rng, stall=stall * (number == at)) / tokens)
    assert np.mean(found[at + 20 :]) <= 1.15 * best


def test_a_reading_of_few_ids_teaches_nothing():
    reading = Reading()
    reading.learn(FEWEST - 1, 50.0)
    assert reading == Reading()


@pytest.mark.parametrize("waits", [True, False])
def test_a_session_waits_with_a_long_prompt_and_learns_how_long_texts_are(waits):
    """Through the session: what it reads, and what it leaves."""
    experience = Experience(expected_extra(range(4)))
    session = AutoDrafter(Counting(), experience, clock=lambda: 0.0).open(1, 4096)
    for _ in range(2):
        session.join()
        seq = Sequence([1] * (3000 if waits else 20), Sampling(temperature=0.0), seeded(0), 10)
        for _ in range(9):
            trees = session.propose([seq])
            seq.ids.append(1)
            session.observe([seq], trees, [(0,)])
        session.leave(0)
    assert isinstance(session.inner, CountingSession)
    assert (session.inner.proposed == 0) == waits
    assert list(experience.lengths.latest) == [LENGTH, 8.0, 8.0]


def test_in_a_batch_only_texts_that_are_worth_reading_are_drafted(monkeypatch: pytest.MonkeyPatch):
    """A long prompt whose answer is short waits, and those beside it are drafted as if it were not there."""
    experience, noted, floors = Experience(expected_extra(range(4))), list[tuple[int, ...]](), list[object]()
    session = AutoDrafter(Counting(), experience, clock=lambda: 0.0).open(2, 4096)
    monkeypatch.setattr(session.controller, "learn_acceptance", lambda limits, *_: noted.append(tuple(limits)))
    sequences = [Sequence([1] * length, Sampling(temperature=0.0), seeded(0), 60) for length in (20, 3000)]
    for _ in sequences:
        session.join()
    for _ in range(9):
        trees = session.propose(sequences)
        floors = [seq.floors for seq in sequences]
        for seq in sequences:
            seq.ids.append(1)
        session.observe(sequences, trees, [(0,), (0,)])
    assert isinstance(session.inner, CountingSession)
    assert session.inner.proposed > 4
    assert floors[0]
    assert floors[1] == ()
    assert set(noted) == {(1, 0)}
    assert session._seen[1] == 0 < session._seen[0]
    session.leave(0)
    assert session._seen[0] == 0


def test_all_texts_of_a_batch_wait_for_a_reading():
    """So it must save the more, the more there are: what is worth it for one text may not be for eight."""
    known, left = Experience(EXTRA), 300.0
    alone, crowd = controller(known), controller(known)
    for _ in range(7):
        crowd.join()
    most = max(ids for ids in range(0, 10000, 10) if alone.worth_reading(ids, left))
    assert 1000 < most < 9000
    assert crowd.worth_reading(most // 8, left)
    assert not crowd.worth_reading(most // 8 + 20, left)


@dataclass
class ReadingSession(CountingSession):
    """Counts what it is asked to read, in so many seconds per id."""

    clock: list[float]
    read_up_to: int = 0

    def read(self, row: int, sequence: Sequence, end: int) -> None:
        self.clock[0] += 0.001 * (end - self.read_up_to)
        self.read_up_to = end

    def save(self, row: int, start: int, end: int) -> None: ...

    def restore(self, row: int, saved: object) -> None: ...


@dataclass(frozen=True)
class CountingReader(Counting):
    clock: list[float] = field(default_factory=lambda: [0.0])

    def open(self, batch: int, slots: int) -> ReadingSession:
        return ReadingSession(self.clock)


@pytest.mark.parametrize(("limit", "read"), [(40, False), (2000, True)])
def test_a_server_reads_a_prompt_with_the_drafter_where_its_answer_may_be_long(limit, read):
    """The prompt is read piece by piece, and what that takes is learnt."""
    clock, experience = [0.0], Experience(expected_extra(range(4)))
    experience.lengths.latest.append(1500.0)
    session = AutoDrafter(CountingReader(clock=clock), experience, clock=lambda: clock[0]).open(1, 8192)
    session.join()
    experience.costs_of(1).learn(0, 0.01)
    seq = Sequence([1] * 4000, Sampling(temperature=0.0), seeded(0), limit)
    for end in range(500, 4000, 500):
        session.read(0, seq, end)
    assert isinstance(session.inner, ReadingSession)
    assert session.inner.read_up_to == (3500 if read else 0)
    assert (experience.costs_of(1).reading.cost(1000) > 60) == read  # 100 plain steps, 30 at first


def test_what_reading_takes_is_learnt():
    reading = Reading()
    assert reading.cost(1000) == pytest.approx(30.0)
    for _ in range(20):
        reading.learn(500, 5.0)
    assert reading.cost(1000) == pytest.approx(10.0, rel=0.05)
    reading.learn(500, -3.0)
    assert 0 < reading.cost(1000) < 10


def test_a_text_is_taken_to_be_as_long_as_the_latest_ones_or_as_it_is_by_now():
    lengths = Lengths()
    assert lengths.left(0, 1000) == LENGTH
    assert lengths.left(0, 50) == 50
    assert lengths.left(300, 1000) == 300
    for _ in range(8):
        lengths.latest.append(20.0)
    assert lengths.left(0, 1000) == 20
