"""Prompts in pieces and the prefix cache: they change when a text comes, never what it is."""

import random
import threading
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import foretoken
import models_zoo
import tiny
import tokenizers_zoo as zoo
from foretoken.core.interfaces import PrefixSession
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.decode import Decoder, DraftFailedWarning
from foretoken.draft.lm import LMDraftSession
from foretoken.heads.checkpoint import save_head
from foretoken.heads.head import new_head
from foretoken.models.causal_lm import CausalLM
from foretoken.models.kernel_layers import KernelSlots
from foretoken.models.parts import parts
from foretoken.models.recurrent import RecurrentRows
from foretoken.models.static import StaticForward
from foretoken.serve.prefix import BLOCK, Prefill, PrefixCache
from foretoken.serve.requests import Intake
from foretoken.serve.schema import CompletionRequest
from listening import Listener, alone, asked, finish, job, load, saved
from listening import work as work  # fixture
from thinning import one_in
from watching import calls_of

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root, target = tmp_path_factory.mktemp("models"), tiny.llama(0, hidden=64, context=1024)
    torch.manual_seed(0)
    save_head(new_head("eagle", parts(CausalLM(target))), root / "eagle")
    return saved(target, root) | {"eagle": str(root / "eagle")}


def ids(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, 257), k=length)


DRAFTERS = ("drafter", "eagle", "ngram", "self")
CASES = [(None, {}), *((name, {"tree": "chain:3"}) for name in DRAFTERS)]


@pytest.mark.parametrize(("drafter", "options"), CASES)
def test_long_prompts_beside_running_texts_change_no_text(folders, work, drafter, options):
    """Prompts below, at and above the edges of blocks; half of them begin alike, and some come twice."""
    engine = load(folders, drafter, **options)
    worker = work(engine, max_batch=3)
    common = ids(0, 300)
    prompts = [ids(1, 20), [*common, *ids(2, 21)], ids(3, 64), ids(4, 65), common[:128], ids(5, 129)]
    prompts += [common, [*common, *ids(2, 21)], ids(5, 129)]
    listeners = [asked(worker, job(engine, prompt, i, 12)) for i, prompt in enumerate(prompts)]
    finish(worker, *listeners)
    for i, (prompt, listener) in enumerate(zip(prompts, listeners, strict=True)):
        want = alone(engine, prompt, i, 12)
        assert listener.wait() == want.token_ids, i
        assert sum(step.num_drafted for step in listener.steps) == want.stats.num_drafted
    assert [listener.steps[-1].num_cached for listener in listeners] == [0, 0, 0, 0, 64, 0, 256, 320, 128]


@pytest.mark.parametrize("drafter", [None, "drafter", "ngram"])
def test_prompts_of_a_model_that_keeps_recurrent_states(tmp_path, work, drafter, monkeypatch):
    """Blocks count up to the last one that has states: where a prompt, or a piece of it, was read to."""
    model = models_zoo.tiny("qwen3_5", vocab_size=257, max_position_embeddings=1024, random_weights=True)
    folders = {"target": tiny.save(model, tmp_path)}
    folders["drafter"] = folders["target"]
    engine = load(folders, drafter, **({"tree": "chain:3"} if drafter else {}))
    reads = calls_of(monkeypatch, RecurrentRows, "_commit")
    worker = work(engine)
    prompts = [ids(1, 200), ids(1, 200), [*ids(1, 192), *ids(2, 80)], [*ids(1, 130), *ids(3, 9)], ids(4, 20)]
    listeners = [asked(worker, job(engine, prompt, i, 12)) for i, prompt in enumerate(prompts)]
    finish(worker, *listeners)
    assert sum(len(given[2]) for given in reads) <= (1 + (drafter == "drafter")) * (199 + 7 + 79 + 138 + 19)
    for i, (prompt, listener) in enumerate(zip(prompts, listeners, strict=True)):
        want = alone(engine, prompt, i, 12)
        assert listener.wait() == want.token_ids, i
        assert drafter != "drafter" or want.stats.num_accepted > 4


def test_running_texts_get_steps_between_the_pieces_of_a_prompt(folders, work, monkeypatch):
    """A prompt of 900 ids is read in pieces of at most a step's time; no two without a step between them."""
    engine = load(folders, None)
    worker = work(engine)
    sizes: list[int] = []  # of each piece; 0 for a step
    step, read = Decoder.step, Prefill.read

    def piece(self, step_s):
        before, done = BLOCK * len(self.chain), read(self, step_s)
        sizes.append(BLOCK * len(self.chain) - before)
        return done

    monkeypatch.setattr(Decoder, "step", lambda self: sizes.append(0) or step(self))
    monkeypatch.setattr(Prefill, "read", piece)
    finish(worker, asked(worker, job(engine, ids(0, 10), 1, 200)), asked(worker, job(engine, ids(1, 900), 2, 4)))
    assert next(filter(None, sizes)) == BLOCK  # as long as a piece takes is not known yet
    assert sum(sizes) == 896
    assert all(one == 0 or other == 0 for one, other in pairwise(sizes))


def test_a_conversation_goes_on_where_it_ended(folders, work):
    engine = load(folders, tree="chain:3")
    worker = work(engine, start=True)
    prompt = ids(0, 70)
    turn = [*prompt, *asked(worker, job(engine, prompt, 1, 80)).wait(), *ids(1, 9)]
    second = asked(worker, job(engine, turn, 2, 8))
    assert second.wait() == alone(engine, turn, 2, 8).token_ids
    assert second.steps[0].num_cached == 128  # of 150 ids that were there


@pytest.mark.parametrize("blocks", [0, 3])
def test_the_cache_keeps_within_its_bound(folders, work, blocks):
    """What was not used for longest goes first, from its end; a bound of nothing is no cache."""
    engine = load(folders, None)
    probe = work(engine, start=True)
    asked(probe, job(engine, ids(0, 65), 1, 1)).wait()
    probe.stop()
    size = probe._batch.cache.num_bytes
    worker = work(engine, start=True, cache_bytes=blocks * size)
    cached = []
    for prompt in (ids(0, 140), ids(0, 140), ids(1, 70), ids(0, 70), ids(2, 70), ids(0, 140), ids(1, 70)):
        listener = asked(worker, job(engine, prompt, 1, 2))
        assert listener.wait() == alone(engine, prompt, 1, 2).token_ids
        cached.append(listener.steps[0].num_cached)
        assert worker._batch.cache.num_bytes <= blocks * size
    assert cached == [0] * 7 if blocks == 0 else [0, 128, 0, 64, 0, 64, 0]


def test_a_prompt_that_is_cancelled_or_fails_while_it_is_read_leaves_the_others(folders, work, monkeypatch):
    engine = load(folders, tree="chain:3")
    worker = work(engine, max_batch=3)
    read = PrefixCache.keep
    gone, broken, good = Listener(), Listener(), Listener()
    tickets = [worker.submit(job(engine, ids(i, 400), i, 8), x) for i, x in enumerate((gone, broken, good))]

    def keep(self, decoder, row, text, chain):
        if text[:9] == ids(0, 9):
            worker.cancel(tickets[0])
        if text[:9] == ids(1, 9):
            raise MemoryError
        read(self, decoder, row, text, chain)

    monkeypatch.setattr(PrefixCache, "keep", keep)
    finish(worker, broken, good)
    assert good.wait() == alone(engine, ids(2, 400), 2, 8).token_ids
    assert gone.news == []
    assert broken.news[0].message.startswith("The memory did not suffice")
    assert (worker.running, worker.alive) == (0, True)


def test_a_drafter_that_fails_at_a_prompt_costs_speed_alone(folders, work, monkeypatch):
    engine = load(folders, tree="chain:3")
    session = type(engine.drafter.open(1, 16))
    monkeypatch.setattr(session, "_read", lambda self, row, text: 1 / 0)
    worker = work(engine)
    listener = asked(worker, job(engine, ids(0, 200), 1, 20))
    finish(worker, listener)
    assert listener.ids == alone(engine, ids(0, 200), 1, 20).token_ids


def model_of(kind: str, folders: dict[str, str]) -> CausalLM:
    if kind == "kernel":
        return load(folders, None).target.lm
    lm = CausalLM(tiny.llama(0), traced=kind == "static")
    if kind == "static":
        assert isinstance(lm.backend, StaticForward)
        lm.backend.compiling = False
    return lm


@pytest.mark.parametrize("kind", ["kernel", "modules", "static"])
def test_a_row_that_was_restored_scores_as_the_one_that_was_saved(folders, kind):
    lm = model_of(kind, folders)
    source, target = lm.open(2, 240, (0, 1)), lm.open(2, 240, (0, 1))
    assert isinstance(source.cache, KernelSlots) == (kind == "kernel")
    text = ids(0, 200)
    for row in range(2):
        source.join()
        target.join()
        source.extend(row, text if row else ids(1, 9))
    assert source.save(0, 0, 64) is None
    for start in range(0, 192, 64):
        saved = source.save(1, start, start + 64)
        target.restore(0, saved)
    target.extend(0, text[192:])
    chain = [range(-1, 2)], [5, 6, 7]
    want = source.score([[], chain[1]], [[], chain[0][0]])[1]
    got = target.score([chain[1], []], [chain[0][0], []])[0]
    assert torch.equal(got, want) if kind == "kernel" else torch.allclose(got, want, atol=1e-4)
    assert torch.equal(target.features(0)[:192], source.features(1)[:192])
    saved = source.save(1, 0, 64)
    with pytest.raises(foretoken.ForetokenError, match="restore what follows"):
        target.restore(1, replace(saved, start=1))


def test_a_block_that_another_text_put_is_taken(folders):
    """Two texts keep the same block, one after the other looked it up: it stands in the cache once, and goes once."""
    engine = load(folders, None)
    decoder = Decoder(engine.target, engine.drafter, engine.verifier, 2, 400)
    sequences = [Sequence(ids(7, 200), Sampling(), seeded(0), 4) for _ in range(2)]
    for sequence in sequences:
        decoder.join(sequence)
    decoder.step()
    cache = PrefixCache(1 << 30)
    chains = [cache.match(sequence.ids) for sequence in sequences]
    for row, (sequence, chain) in enumerate(zip(sequences, chains, strict=True)):
        cache.keep(decoder, row, sequence.ids[:192], chain)
    assert chains[0] == chains[1]
    assert cache.num_bytes == sum(block.num_bytes for block in chains[0])
    cache.most_bytes = 0
    cache.keep(decoder, 0, sequences[0].ids[:192], cache.match(sequences[0].ids))
    assert cache.num_bytes == 0
    assert cache.match(sequences[0].ids) == []


@pytest.mark.parametrize("vocab", one_in(3, ["tli", "slem", "slrs", "auto"]))
def test_drafters_with_another_vocabulary_read_for_themselves(work, vocab):
    """Nothing of theirs is kept; prompts of several blocks and long texts come out as the engine's."""
    method = "auto" if vocab == "auto" else "fixed"
    engine = zoo.load_bytes(vocab=vocab, tree=None if vocab == "auto" else "chain:3", method=method)
    engine = replace(engine, eos_ids=frozenset())
    worker = work(engine, max_batch=2)
    prompts = [[5 + i % 90 for i in range(length)] for length in (20, 150, 150)]
    listeners = [asked(worker, job(engine, prompt, 0, 60, 0.0)) for prompt in prompts]
    finish(worker, *listeners)
    for prompt, listener in zip(prompts, listeners, strict=True):
        assert listener.wait() == alone(engine, prompt, 0, 60, 0.0).token_ids
    assert worker.alive


def test_the_cache_does_not_outlive_its_drafter(folders, work, monkeypatch):
    """A head that fails for every text is left, and with it the hidden states that were kept for it; it comes back."""
    engine = load(folders, "eagle", tree="chain:3")
    worker = work(engine, max_batch=2)
    broken = threading.Event()
    propose = LMDraftSession.propose

    def failing(self, sequences):
        if broken.is_set():
            raise RuntimeError("broken")
        return propose(self, sequences)

    monkeypatch.setattr(LMDraftSession, "propose", failing)
    finish(worker, asked(worker, job(engine, ids(8, 150), 0, 4)))
    broken.set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DraftFailedWarning)
        pair = [asked(worker, job(engine, ids(8, 150), 0, 12, 0.0)) for _ in range(2)]
        texts = [listener.wait() for listener in pair]
    broken.clear()
    last = asked(worker, job(engine, ids(8, 150), 0, 12, 0.0))
    want = alone(engine, ids(8, 150), 0, 12, 0.0).token_ids
    assert [*texts, last.wait()] == [want] * 3


@pytest.mark.parametrize(
    ("drafter", "method", "more", "depth"),
    [
        ("drafter", "auto", {"seed": 1}, 0),
        ("self", "auto", {"seed": 1, "temperature": 0.5}, 0),
        ("drafter", "auto", {"seed": 1, "temperature": 0.0}, None),
        ("drafter", "auto", {"seed": 1, "speculation": 3}, 3),
        ("drafter", "auto", {}, None),
        ("ngram", "auto", {"seed": 1}, None),
        ("drafter", "fixed", {"seed": 1}, None),
        (None, "auto", {"seed": 1}, None),
    ],
)
def test_a_seed_that_is_named_fixes_the_text(folders, drafter, method, more, depth):
    """Where measured times would decide what a seed gives, a request that names one is decoded plainly."""
    intake = Intake(load(folders, drafter, method=method), "m", 512, 8)
    asked = intake.completion(CompletionRequest(model="m", prompt="abc", **more))
    assert [one.depth for one in asked.jobs] == [depth]


def test_sessions_that_cannot_be_copied_are_known(folders):
    for options in ({"tree": "chain:3"}, {"method": "auto"}):
        sessions = [load(folders, name, **options).drafter.open(1, 32) for name in ("drafter", "eagle", "ngram")]
        assert [isinstance(session, PrefixSession) for session in sessions] == [True, False, False]
