"""SLRS: psi is exact, sums to one and is what is sampled; the text's law is the target's own."""

import warnings
from dataclasses import dataclass
from itertools import product

import pytest
import torch

import foretoken
import tiny
import tiny_tables as tables
import tokenizers_zoo as zoo
from foretoken.audit.branching import outcomes
from foretoken.audit.table import TableLM, random_table
from foretoken.core.errors import ForetokenError
from foretoken.core.laws import Opaque
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import PricedSiblings, chain, path_to
from foretoken.core.walk import draw
from foretoken.decode import Decoder, DraftFailedWarning
from foretoken.models.causal_lm import CausalLM
from foretoken.models.target import LMTarget
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.vocab import slrs
from foretoken.vocab.price import Price
from foretoken.vocab.segmentation import NONE, OPEN, SingleTokens
from foretoken.vocab.slrs import SLRSDrafter, SLRSSession
from foretoken.vocab.translation import FIRM
from raising import raising
from rates import summed
from thinning import one_in

RULE = VERIFIERS["string-rejection"]
# "ab" is no token, so that a draft that has "a" stays open at "ab".
LONG = zoo.letters([zoo.EOS, "a", "b", "aba"])
PAIRS = {
    "apart": (tables.DRAFTER, tables.TARGET),
    "contained": (tables.CONTAINED, tables.TARGET),
    "wider": (tables.WIDER_LETTERS, tables.CONTAINED),
    "disjoint": (tables.APART, tables.TARGET),
    "long": (tables.DRAFTER, LONG),
    "containing": (LONG, tables.CONTAINED),
}


def drafting(pair, depth=1, limit=64, seed=0, **settings):
    lm, small = tables.lms(*PAIRS[pair], seed)
    translation = tables.translation(*PAIRS[pair])
    return lm, SLRSDrafter(small, translation, static.chain(depth), vocab_size=lm.vocab_size, limit=limit, **settings)


CASES = [
    *(((pair, 2), {}) for pair in ("apart", "contained", "disjoint", "containing")),
    (("wider", 1), {}),
    *(((pair, 1, 2), {}) for pair in ("apart", "long")),  # a limit that cuts
    *(((pair, 2), {"lookahead": most}) for pair in ("apart", "containing") for most in (1, 2)),
    *(((pair, 2), {"drafts": SingleTokens}) for pair in ("apart", "wider", "disjoint")),  # vocab union
]
SAMPLING = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 2}]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("case", "settings", "rule", "sampling"),
    [
        *((*case, RULE, {}) for case in CASES),
        *((("apart", 2), {}, RULE, sampling) for sampling in SAMPLING),
        (("apart", 2), {}, VERIFIERS["exact-match"], {}),
    ],
)
def test_decoding_with_two_tokenizers_is_the_targets_own(case, settings, rule, sampling):
    assert tables.deviates(*drafting(*case, **settings), rule, **sampling) < 1e-10


@pytest.mark.usefixtures("unchecked")
def test_a_psi_of_one_segmentation_alone_would_be_seen(monkeypatch):
    """The shortest spelling's probability, as if it were the token's."""
    whole = Price._sum

    def shortest(price, plan):
        last = next(i for i, stops in enumerate(plan.stops) if len(stops))
        return whole(
            price, type(plan)(plan.tokens, plan.parents, tuple(s[: i == last] for i, s in enumerate(plan.stops)))
        )

    monkeypatch.setattr(Price, "_sum", shortest)
    assert tables.deviates(*drafting("apart", 1), RULE) > 1e-3


def brute_psi(lm, drafter, ids, edge, most=6):
    """{first target token or None: probability} by writing every draft down, without the bookkeeping; what is still
    open after `most` tokens is missing, unless the drafter's look-ahead ends it. A token that the context had already,
    taken back and written again, is none of the draft's."""
    source, dest = drafter.translation.source, drafter.translation.dest
    tokens = list(source.ids)
    psi, taken = {}, edge.taken

    def settle(string, ended):
        if not ended and any(t.startswith(string) and t != string for t in tokens):
            return False
        best = max((t for t in tokens if string.startswith(t)), key=len, default=None)
        return True if best is None else source.ids[best]

    def write(ids, string, prob, first, drafted):
        table = lm.table[(0, *ids)[-2], ids[-1]]
        mass = sum(float(table[d]) for d in range(len(table)) if not (first and taken) or d in edge.firsts)
        for d in range(len(table)):
            spelled = dest.spell([d])
            if first and taken and d not in edge.firsts:
                continue
            chance = prob * float(table[d]) / mass
            after = string + (spelled[len(taken) :] if first else spelled)
            number = drafted + (not spelled or len(after) > 0)
            ended = not spelled or number == drafter.lookahead
            token = source.eos if d == dest.eos and not string and not first else settle(after, ended)
            if d == dest.eos and first and not taken:
                token = source.eos
            if token is not False:
                token = None if token is True else token
                psi[token] = psi.get(token, 0.0) + chance
            elif len(ids) < most:
                write([*ids, d], after, chance, False, number)

    write(list(ids), b"", 1.0, True, 0)
    return psi


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("lookahead", [None, 1, 2])
@pytest.mark.parametrize(
    ("pair", "prompt", "heals"),
    [*((pair, [1, 2, 1], False) for pair in ("apart", "contained", "wider", "long", "containing")),
     *((pair, prompt, True) for pair, prompt in (("apart", [1, 2]), ("apart", [2, 2]), ("containing", [1, 2, 2])))],
)  # fmt: skip
def test_psi_is_exact_sums_to_one_and_is_what_is_drawn(pair, prompt, heals, lookahead):
    lm, drafter = drafting(pair, 1, lookahead=lookahead)
    found = {}

    def run(rng):
        session = drafter.open(1, 32)
        session.join()
        seq = Sequence(list(prompt), Sampling(), rng, 5, frozenset({0}))
        (tree,) = session.propose([seq])
        record = tree.siblings[0]
        assert isinstance(record, PricedSiblings)
        row = session._rows[0]
        assert bool(row.edge.taken) == heals
        found["psi"] = {t: record.psi(t) for t in range(lm.vocab_size)}
        found["brute"] = brute_psi(drafter.lm, drafter, row.ids, row.edge)
        return record.draws

    drawn = summed((draws[0] if draws else None, prob) for draws, prob in outcomes(run))
    assert sum(drawn.values()) == pytest.approx(1, abs=1e-12)
    assert sum(found["psi"].values()) + drawn.get(None, 0.0) == pytest.approx(1, abs=1e-12)
    for token, psi in found["psi"].items():
        assert psi == pytest.approx(drawn.get(token, 0.0), abs=1e-12)
        assert psi == pytest.approx(found["brute"].get(token, 0.0), abs=1e-12)
    assert any(psi > 0.05 for psi in found["psi"].values())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("prompt", [[1, 2, 1], [1, 2]])
def test_at_temperature_0_the_likeliest_draft_is_written(prompt):
    """Token after token of the drafter the likeliest that may come, also where its last token was taken back."""
    proposed = set()
    for seed in range(8):
        _, drafter = drafting("apart", 1, seed=seed)
        session, table = drafter.open(1, 32), drafter.lm.table
        session.join()
        (tree,) = session.propose([Sequence(list(prompt), Sampling(0.0), seeded(0), 5, frozenset({0}))])
        row, segmentation = session._rows[0], drafter.segmentation
        ids, state, edge = list(row.ids), b"", row.edge
        code = OPEN
        while code <= OPEN:
            weights = table[(0, *ids)[-2], ids[-1]].clone()
            weights[segmentation.closed(edge)] = 0
            ids.append(int(weights.argmax()))
            code = int(segmentation.outcomes(state, edge)[ids[-1]])
            state, edge = (segmentation.states[OPEN - code] if code <= OPEN else b""), FIRM
        assert tree.siblings[0].draws == (() if code == NONE else (code,))
        proposed |= {*tree.siblings[0].draws}
    assert len(proposed) > 1


@pytest.mark.usefixtures("unchecked")
def test_a_target_drafting_for_itself_is_accepted():
    model = tiny.llama(0, vocab=257)
    engine = foretoken.load(
        model, drafter=model, tokenizer=zoo.byte_only(), drafter_tokenizer=zoo.byte_only(), vocab="slrs",
        tree="chain:4", device="cpu",
    )  # fmt: skip
    for temperature in (0.0, 1.0):
        result = engine.generate([3, 1, 4], max_new_tokens=40, temperature=temperature, seed=0)
        assert result.stats.block_efficiency > 4


PROMPTS = ["  two\n\n lines", "é 日本", "<|end|>", [0]]


@pytest.fixture(scope="module")
def target():
    return tiny.llama(0, vocab=len(zoo.byte_level()))


def load(target, name, **options):
    tokenizer = zoo.DRAFTERS[name]()
    return foretoken.load(
        target,
        drafter=tiny.llama(1, vocab=len(tokenizer)),
        tokenizer=zoo.byte_level(),
        drafter_tokenizer=tokenizer,
        device="cpu",
        **{"vocab": "slrs", "tree": "chain:3", **options},
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("temperature", "name"), one_in(4, product([0.0, 1.0], zoo.DRAFTERS)))
def test_the_drafters_cache_and_scores_are_its_context_at_every_step(target, name, temperature, monkeypatch):
    """Also where a sequence leaves, and where there was too little room at first."""
    monkeypatch.setattr(slrs, "CHAIN", 3)
    engine = load(target, name)
    decoder = Decoder(engine.target, engine.drafter, engine.verifier, 3, 80)
    decoder.drafter = SLRSSession(engine.drafter, 3, 8)
    vocab = engine.drafter.translation.source
    for i, text in enumerate((b" the hello ther", "é 日本".encode(), b"x")):
        rng = seeded(i)
        decoder.join(Sequence(vocab.encode(text), Sampling(temperature), rng, 3 + 3 * i))
    lm = CausalLM(engine.drafter.lm.model)
    checked = 0
    while decoder.sequences:
        trees = decoder.drafter.propose(decoder.sequences)
        for row, tree in zip(decoder.drafter._rows, trees, strict=True):
            for record in tree.siblings:
                if isinstance(record, PricedSiblings):
                    total = sum(map(record.psi, range(0, decoder.drafter.drafter.vocab_size, 17)))
                    assert total < 1 + 1e-9
            for node in range(0, len(row.trie.q), 6):
                ids = [*row.committed, *(row.trie.tokens[at] for at in path_to(row.trie.parents, node))]
                fresh = lm.open(1, 400)
                fresh.join()
                (want,) = fresh.score([ids], [range(-1, len(ids) - 1)])
                got = torch.from_numpy(row.trie.q[node]).float()
                want = want[-1].softmax(-1) if temperature else want[-1]  # scores rank as well
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
                checked += 1
        decoder.drafter.observe(decoder.sequences, trees, [(0,)] * len(trees))  # nothing was accepted
        decoder.step()
    assert checked > 10


def test_what_does_not_fit_is_told(target):
    with pytest.raises(ForetokenError, match=r"slrs.*chain:4"):
        load(target, "bytes", tree="kary:2x2")
    with pytest.raises(ForetokenError, match=r"slrs.*choose string-rejection"):
        load(target, "bytes", verifier="rrsw")


@pytest.mark.usefixtures("unchecked")
def test_a_drafter_that_fails_in_the_middle_of_a_walk_costs_no_text(target, monkeypatch):
    engine = load(target, "bytes")
    monkeypatch.setattr(Price, "__call__", broken)
    with pytest.warns(DraftFailedWarning, match="no more memory") as told:
        results = engine.generate(PROMPTS, max_new_tokens=6, temperature=1.0, seed=0)
    assert [len(result.token_ids) for result in results] == [6] * len(PROMPTS)
    assert len(told) == 1


@pytest.mark.usefixtures("unchecked")
def test_scores_that_are_no_numbers_end_the_drafting_at_temperature_0(target, monkeypatch):
    engine = load(target, "bytes")
    plain = foretoken.load(target, tokenizer=zoo.byte_level(), device="cpu")
    monkeypatch.setattr(SLRSSession, "_q", lambda self, row, logits: torch.full_like(logits, torch.nan).numpy())
    with pytest.warns(DraftFailedWarning, match="gave NaN or infinite logits"):
        result = engine.generate([3, 1, 4], max_new_tokens=5, temperature=0.0)
    assert result.token_ids == plain.generate([3, 1, 4], max_new_tokens=5, temperature=0.0).token_ids
    assert result.stats.num_drafted == 0


@dataclass
class TwoDrafts:
    """Draws two tokens from psi, one after the other; what the second cost cannot be told."""

    psi: torch.Tensor
    name: str = "two"
    laws: tuple = (Opaque(1),)
    max_nodes: int = 3

    def open(self, batch, slots):
        return self

    def join(self): ...

    def leave(self, row): ...

    def observe(self, sequences, trees, paths): ...

    def propose(self, sequences):
        (seq,) = sequences
        drafts = [draw(self.psi, seq.rng) for _ in range(2)]
        psi = [lambda token: float(self.psi[token]), broken]
        return [
            chain(
                [seq.ids[-1], *drafts],
                [*(PricedSiblings((x,), None, Opaque(1), of) for x, of in zip(drafts, psi, strict=True)), None],
            )
        ]


broken = raising(RuntimeError("no more memory"))


def test_what_was_accepted_before_a_drafter_fails_stays():
    """Else the text would be drawn anew just where drafts are accepted."""
    lm, psi = TableLM("t", random_table(3, 1)), torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)

    def step(rng):
        decoder = Decoder(LMTarget(lm), TwoDrafts(psi), RULE, 1, 8)
        decoder.join(Sequence([1, 2], Sampling(), rng, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DraftFailedWarning)
            ((_, step),) = decoder.step()
        return step.tokens

    law = summed(outcomes(step))
    p = lm.table[1, 2]
    for x in range(3):
        assert sum(prob for tokens, prob in law.items() if tokens[0] == x) == pytest.approx(float(p[x]), abs=1e-12)
        for y in range(3):
            both = float(torch.minimum(p, psi)[x] * lm.table[2, x, y])
            assert law.get((x, y), 0.0) == pytest.approx(both, abs=1e-12)
