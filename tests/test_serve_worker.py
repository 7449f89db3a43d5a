"""The thread that owns the model: every job has the text that it would have alone, whoever joins, leaves or fails."""

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

import foretoken
from foretoken.core.errors import GrammarError
from foretoken.decode import Decoder, DraftFailedWarning
from foretoken.draft.store import Store
from foretoken.serve import batch
from foretoken.serve.batch import Batch, Ticket
from foretoken.serve.errors import ApiError
from foretoken.serve.owner import Owner
from foretoken.serve.worker import Worker
from listening import PATIENCE, Listener, Raises, alone, asked, finish, job, load
from listening import folders as folders  # fixtures
from listening import work as work
from raising import raising
from serving import wait_until
from thinning import one_in

pytestmark = pytest.mark.usefixtures("unchecked")
PROMPTS = ["def f(x):", "import os\n", "a", "class A:\n    def __init__(self", "é", "return x"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[int]], bool]], list[int]]:
    """Makes a step fail for lack of memory where it is told so of the sizes of all steps so far; these sizes."""

    def short(lacks: Callable[[list[int]], bool]) -> list[int]:
        step, sizes = Decoder.step, []

        def limited(decoder: Decoder) -> list:
            sizes.append(len(decoder.sequences))
            if lacks(sizes):
                raise MemoryError
            return step(decoder)

        monkeypatch.setattr(Decoder, "step", limited)
        return sizes

    return short


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("drafter", "options"),
    [(None, {}), ("drafter", {"tree": "chain:3"}), ("drafter", {"tree": "kary:2x2"}), ("ngram", {"tree": "chain:4"})],
)
def test_texts_are_those_of_the_engine_alone(folders, work, drafter, options, temperature):
    """Eight jobs of different lengths through three rows; some are cancelled on the way."""
    engine = load(folders, drafter, **options)
    worker = work(engine, max_batch=3)
    jobs = [(PROMPTS[i % 6], i, 6 + 2 * i, temperature) for i in range(8)]
    tickets, listeners = [], []
    for i, one in enumerate(jobs):
        gone = i % 4 == 2
        listeners.append(
            Listener(lambda me, i=i, gone=gone: worker.cancel(tickets[i]) if gone and len(me.news) == 2 else None)
        )
        tickets.append(worker.submit(job(engine, *one), listeners[i]))
    worker.start()
    for i, listener in enumerate(listeners):
        if i % 4 == 2:
            continue
        want = alone(engine, *jobs[i])
        assert listener.wait() == want.token_ids
        assert "".join(step.text for step in listener.steps) == want.text
        assert listener.steps[-1].finish_reason == want.finish_reason
        assert all(len(step.origins) == len(step.token_ids) for step in listener.steps)
        assert sum(step.num_drafted for step in listener.steps) == want.stats.num_drafted
    worker.stop()
    assert [len(listener.news) for listener in listeners[2::4]] == [2, 2]
    assert (worker.running, worker.waiting, worker.cache_use, worker.error) == (0, 0, 0.0, None)


@pytest.mark.filterwarnings("ignore::foretoken.decode.DraftFailedWarning")
@pytest.mark.parametrize("tree", ["chain:3", "kary:2x2"])
@pytest.mark.parametrize(
    ("error", "says", "status"),
    [
        (RuntimeError("secret"), "The model failed at this request (RuntimeError).", 500),
        (MemoryError(), "The memory did not suffice", 500),
        (foretoken.ForetokenError("That is not it."), "That is not it.", 500),
        (GrammarError("It has no text."), "It has no text.", 400),
    ],
)
def test_a_job_that_fails_fails_alone(folders, work, tree, error, says, status):
    """The others go on with their own texts, and with their drafter."""
    engine = load(folders, tree=tree)
    worker = work(engine, max_batch=4)
    good = [asked(worker, job(engine, PROMPTS[i], i, 20)) for i in range(3)]
    bad = asked(worker, job(engine, "abc", 9, 40, sampling={"processors": (Raises(error, 12),)}))
    finish(worker, *good, bad)
    for i, listener in enumerate(good):
        want = alone(engine, PROMPTS[i], i, 20)
        assert listener.wait() == want.token_ids
        assert sum(step.num_drafted for step in listener.steps) == want.stats.num_drafted
    assert bad.news[-1].message.startswith(says)
    assert bad.news[-1].status == status
    settings = {"max_new_tokens": 40, "temperature": 0.8, "seed": 9, "processors": (Raises(error, 12),)}
    chunks, want = engine.stream("abc", **settings), []
    with pytest.raises(type(error)):
        want.extend(token for chunk in chunks for token in chunk.token_ids)
    assert bad.ids == want
    assert bad.ids
    assert worker.alive


def test_a_lasting_shortage_of_memory_makes_the_batch_smaller_until_it_is_empty(folders, work, short):
    """The texts are the engine's, and a few steps fail for all together, not every one."""
    engine, most = load(folders, tree="chain:3"), 2
    sizes = short(lambda sizes: sizes[-1] > most)
    worker = work(engine, max_batch=5)
    jobs = [(PROMPTS[i] * repeated, i, 60) for i, repeated in enumerate((1, 10, 1, 1, 1, 12))]
    wanted = [alone(engine, *one).token_ids for one in jobs]
    sizes.clear()
    for num_failed in (5, 0):
        listeners = [asked(worker, job(engine, *one)) for one in jobs]
        if num_failed:
            worker.start()
        assert [listener.wait() for listener in listeners] == wanted
        # A text that waited and came back: what the cache then holds of it is no part of its prompt.
        assert all(len({step.num_cached for step in listener.steps}) == 1 for listener in listeners)
        assert sum(size > most for size in sizes) <= num_failed, sizes
        most = 5
    assert 5 in sizes


def test_a_grammar_that_fails_in_a_repeated_step_is_no_shortage_of_memory(folders, monkeypatch, short):
    """After two such steps the others would have fewer rows, had no text failed by itself."""
    engine, read = load(folders, tree="chain:3"), batch.read_step
    texts, listeners = Batch(engine, 3, 100, 0), [Listener() for _ in range(3)]
    for i, listener in enumerate(listeners):
        texts.join(Ticket(job(engine, PROMPTS[i], i, 40), listener))
    bad, sizes = next(iter(texts._texts)), short(lambda sizes: sizes[-1] == 3)

    def fails(stream, sequence, made):
        if sequence is bad and len(sizes) > 4:
            raise GrammarError("It has no text.")
        return read(stream, sequence, made)

    monkeypatch.setattr(batch, "read_step", fails)
    for _ in range(3):
        texts.step()
    assert sizes == [3, 1, 1, 1, 3, 1, 1, 1, 2]
    assert [isinstance(listener.news[-1], ApiError) for listener in listeners] == [True, False, False]


@pytest.mark.parametrize("drafter", ["drafter", "suffix"])
def test_after_a_shortage_of_memory_the_batch_grows_again_while_texts_are_in_work(
    folders, work, monkeypatch, short, drafter
):
    engine, ended = load(folders, drafter, tree="chain:3"), []
    monkeypatch.setattr(Store, "add", lambda self, ids: ended.append(len(ids)))
    monkeypatch.setattr(batch, "GOOD_STEPS", 5)
    sizes = short(lambda sizes: sizes[-1] > 1 and len(sizes) < 20)
    worker = work(engine, max_batch=4)
    wanted = [alone(engine, prompt, i, 60).token_ids for i, prompt in enumerate(PROMPTS)]
    sizes.clear()
    ended.clear()
    listeners = [asked(worker, job(engine, prompt, i, 60)) for i, prompt in enumerate(PROMPTS)]
    worker.start()
    assert [listener.wait() for listener in listeners] == wanted
    assert 1 in sizes[:20]
    assert max(sizes[20:]) > 1
    worker.stop()
    whole = sorted(len(engine.encode(prompt)) + len(want) for prompt, want in zip(PROMPTS, wanted, strict=True))
    assert drafter != "suffix" or sorted(ended) == whole, "a text that only moves is no text that ended"


@pytest.mark.parametrize("most", [2, 0])
def test_memory_that_does_not_suffice_to_decode_anew(folders, work, monkeypatch, short, most):
    """With room for two rows, the texts go on in two; with room for none, each is told."""
    engine = load(folders, tree="chain:3")
    worker, open_rows, sizes = work(engine, max_batch=4), Batch._open, short(lambda sizes: len(sizes) == 1)

    def limited(self, size: int) -> Decoder:
        if sizes and size > most:
            raise MemoryError
        return open_rows(self, size)

    monkeypatch.setattr(Batch, "_open", limited)
    listeners = [asked(worker, job(engine, prompt, i, 20)) for i, prompt in enumerate(PROMPTS[:4])]
    finish(worker, *listeners)
    if most:
        monkeypatch.undo()
        wanted = [alone(engine, prompt, i, 20).token_ids for i, prompt in enumerate(PROMPTS[:4])]
        assert [listener.ids for listener in listeners] == wanted
        assert worker.alive
    else:
        assert all(isinstance(listener.news[-1], ApiError) for listener in listeners)


def test_logits_that_are_not_finite_fail_their_job_alone(folders, work):
    engine = load(folders, tree="chain:3")
    worker = work(engine)
    bias = dict.fromkeys(range(257), float("-inf"))
    bad = asked(worker, job(engine, "abc", 1, 20, sampling={"logit_bias": bias}))
    good = asked(worker, job(engine, "def", 2, 20))
    with pytest.warns(DraftFailedWarning):
        finish(worker, bad, good)
    assert good.wait() == alone(engine, "def", 2, 20).token_ids
    assert "logit bias" in bad.news[-1].message


@pytest.mark.parametrize("others", [0, 2])
def test_a_drafter_that_fails_costs_speed_until_its_texts_have_left(folders, work, monkeypatch, others):
    """Once for one text: that one goes on plainly. For all of several texts: all do, until the batch is empty."""
    engine = load(folders, tree="chain:3")
    worker = work(engine)
    session = type(engine.drafter.open(1, 16))
    propose, broken = session.propose, [True]

    def fails(self, sequences):
        if broken[0] and len(sequences[0].ids) > 5:
            raise RuntimeError("broken")
        return propose(self, sequences)

    monkeypatch.setattr(session, "propose", fails)
    texts = [asked(worker, job(engine, "def", 1, 20, 0.0)) for _ in range(1 + others)]
    with pytest.warns(DraftFailedWarning, match="broken"):
        finish(worker, *texts)
    assert all(text.steps[0].num_drafted > 0 for text in texts)
    assert all(text.steps[-2].num_drafted == 0 for text in texts)
    broken[0] = False
    again = asked(worker, job(engine, "def", 1, 20, 0.0))
    assert [again.wait()] * len(texts) == [text.ids for text in texts]
    assert again.steps[0].num_drafted > 0


def test_the_queue_has_an_end(folders, work):
    engine = load(folders, None)
    worker = work(engine, max_batch=1, max_queue=2)
    listeners = [Listener() for _ in range(3)]
    tickets = [worker.submit(job(engine, "a", i, 5), listener) for i, listener in enumerate(listeners)]
    with pytest.raises(ApiError, match="takes 1 texts side by side and 2 that wait") as full:
        worker.submit(job(engine, "a"), Listener())
    assert full.value.status == 429
    assert (worker.waiting, worker.running, worker.alive) == (3, 0, False)
    worker.cancel(tickets[1])
    last = asked(worker, job(engine, "a", 1, 5))
    worker.start()
    assert len(listeners[0].wait()) == len(listeners[2].wait()) == len(last.wait()) == 5
    assert all(each.steps[0].waited_s > 0 for each in (listeners[2], last))
    assert listeners[1].news == []
    worker.stop()
    with pytest.raises(ApiError, match="shutting down") as draining:
        worker.submit(job(engine, "a"), Listener())
    assert draining.value.status == 503
    assert (worker.alive, worker.error) == (False, None)


def test_a_context_that_cannot_be_had_is_refused(folders, monkeypatch):
    engine = load(folders)
    most = engine.target.lm.context
    with pytest.raises(foretoken.ForetokenError, match=f"context is {most + 1}, and .* takes {most} tokens"):
        Worker(engine, context=most + 1)
    monkeypatch.setattr(Batch, "_open", raising(MemoryError))
    with pytest.raises(foretoken.ForetokenError, match="memory does not suffice for 1000 texts of 30 tokens"):
        Worker(engine, max_batch=1000, context=30)


def test_a_job_that_does_not_fit_is_refused_and_a_long_one_ends_with_the_context(folders, work):
    engine = load(folders)
    worker = work(engine, start=True, context=20)
    for ids in ((), tuple(range(1, 21))):
        with pytest.raises(foretoken.ForetokenError, match="the context is 20"):
            worker.submit(replace(job(engine, "a"), ids=ids), Listener())
    long = asked(worker, job(engine, [*range(1, 17)], new=100))
    assert len(long.wait()) == 4
    assert long.steps[-1].finish_reason == "length"


def test_stopping_ends_the_jobs_in_work(folders, work):
    engine = load(folders)
    worker = work(engine, start=True, max_batch=1)
    begun, held = threading.Event(), threading.Event()

    def hold(_: Listener) -> None:
        """The first news keep the thread until `stop` was called, so that the text cannot end before."""
        begun.set()
        assert held.wait(PATIENCE)

    running, waiting = Listener(hold), Listener()
    worker.submit(job(engine, "a", new=200), running)
    worker.submit(job(engine, "b"), waiting)
    assert begun.wait(PATIENCE)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    wait_until(lambda: worker._stopping)
    held.set()
    stopping.join(PATIENCE)
    (last,) = waiting.news
    for news in (running.news[-1], last):
        assert isinstance(news, ApiError)
        assert (news.message, news.status) == ("The server is shutting down.", 503)
    assert len(running.ids) < 200
    assert not worker.alive


def test_a_thread_that_dies_is_seen(folders, work, monkeypatch):
    engine = load(folders)
    worker = work(engine)
    monkeypatch.setattr(Batch, "step", lambda self: 1 / 0)
    listener = asked(worker, job(engine, "a"))
    finish(worker, listener)
    (news,) = listener.news
    assert isinstance(news, ApiError)
    assert (news.message, news.status) == ("The thread that runs the model has died: restart the server.", 503)
    assert isinstance(worker.error, ZeroDivisionError)
    assert not worker.alive
    with pytest.raises(ApiError, match="has died") as refused:
        worker.submit(job(engine, "a"), Listener())
    assert refused.value.status == 503


def test_a_thread_that_dies_once_more_while_it_tells_so_is_seen(folders, work, monkeypatch):
    engine = load(folders)
    monkeypatch.setattr(Batch, "fail", raising(SystemExit))
    for at_work in (False, True):
        if at_work:
            monkeypatch.setattr(Batch, "drop_cancelled", raising(SystemExit))
        worker = work(engine, start=True)
        worker.stop()
        assert isinstance(worker.error, SystemExit)
        assert not worker.alive


def test_a_worker_without_an_owner_ends_its_thread(folders, work):
    engine, before = load(folders), set(threading.enumerate())
    worker = work(engine, start=True)
    (thread,) = set(threading.enumerate()) - before
    worker.end()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    worker = Worker(engine)  # never started
    (thread,) = set(threading.enumerate()) - before
    del worker
    thread.join(PATIENCE)
    assert not thread.is_alive()
    owner = Owner()
    work(engine, start=True, owner=owner).stop()
    assert owner.submit(threading.current_thread).result(PATIENCE).is_alive()


def test_one_who_cannot_be_told_is_cancelled(folders, work):
    engine = load(folders)
    worker = work(engine, start=True)
    lost, good = Listener(raising(RuntimeError("the loop is closed"))), Listener()
    worker.submit(job(engine, "a", new=200), lost)
    worker.submit(job(engine, "b", 2), good)
    good.wait()
    worker.stop()
    assert len(lost.news) == 1


@pytest.mark.parametrize(("temperature", "tree"), one_in(3, product([0.0, 0.8], ["chain:3", "kary:2x2"])))
def test_log_probabilities_are_the_models_own(folders, work, temperature, tree):
    """Of drafted tokens as of others, before penalties and temperature; and asking for them changes no text."""
    engine = load(folders, tree=tree)
    shown = {"top_logprobs": 2, "shows_trees": True, "sampling": {"frequency_penalty": 0.5}}
    telling = [job(engine, prompt, 3, 20, temperature, **shown) for prompt in PROMPTS]
    plain = [replace(one, top_logprobs=None, shows_trees=False) for one in telling]
    worker = work(engine, max_batch=5)
    listeners = [asked(worker, one) for one in telling + plain]
    finish(worker, *listeners)
    single = []
    for one in (telling[0], plain[0]):  # with no job beside it
        single.append(asked(worker, one))
        single[-1].wait()
    assert [x.ids for x in listeners[:6]] == [x.ids for x in listeners[6:]]
    assert single[0].ids == single[1].ids == listeners[0].ids
    assert single[0].steps[3].logprobs == listeners[0].steps[3].logprobs
    for one, listener in zip(telling, listeners, strict=False):
        ids = [*one.ids, *listener.ids]
        rows = engine.target.lm.open(1, len(ids))
        rows.join()
        (logits,) = rows.score([ids[:-1]], [range(-1, len(ids) - 2)])
        want = logits.double().log_softmax(-1)[len(one.ids) - 1 :]
        told = [x for step in listener.steps for x in step.logprobs]
        assert [x.token for x in told] == listener.ids
        for x, row in zip(told, want, strict=True):
            assert x.logprob == pytest.approx(float(row[x.token]), abs=1e-9)
            assert [token for token, _ in x.top] == row.topk(2).indices.tolist()
            assert [logprob for _, logprob in x.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-9)
        for step in listener.steps:
            tokens = step.tree["tokens"]
            assert len(tokens) - 1 == step.num_drafted
            accepted = [tokens[node] for node in step.tree["path"][1:]]
            assert list(step.token_ids[: len(accepted)]) == accepted[: len(step.token_ids)]
    assert any(len(step.logprobs) > 1 for x in listeners[:6] for step in x.steps)
    assert not any(step.logprobs or step.tree for x in listeners[6:] for step in x.steps)


@pytest.mark.parametrize("method", ["fixed", "auto"])
def test_every_job_has_its_own_depth(folders, work, method):
    """0 is plain decoding, and n cuts the trees there; jobs beside each other differ in it."""
    engine = load(folders, tree="chain:4", method=method)
    worker = work(engine, max_batch=4)
    depths = [0, 1, 2, None] * 2
    jobs = [(PROMPTS[i % 6], i, 24, 0.8 if i < 4 else 0.0) for i in range(8)]
    listeners = [asked(worker, job(engine, *one, depth=depth)) for one, depth in zip(jobs, depths, strict=True)]
    finish(worker, *listeners)
    for i, (depth, listener) in enumerate(zip(depths, listeners, strict=True)):
        assert max(step.num_drafted for step in listener.steps) <= (4 if depth is None else depth)
        if method == "fixed" or i >= 4:
            alike = load(folders, "none" if depth == 0 else "drafter", tree=f"chain:{depth or 4}")
            assert listener.ids == alone(alike, *jobs[i]).token_ids


def test_a_cancelled_job_takes_no_place_of_the_queue(folders, work):
    """Even before the step under way has ended, after which its row is free."""
    engine = load(folders, None)
    worker, second = work(engine, max_batch=1, max_queue=0), Listener()

    def replaced(me: Listener) -> None:
        if len(me.news) == 1:
            with pytest.raises(ApiError, match="no room"):
                worker.submit(job(engine, "b", 2, 5), second)
            worker.cancel(ticket)
            worker.submit(job(engine, "b", 2, 5), second)

    first = Listener(replaced)
    ticket = worker.submit(job(engine, "a", 1, 200), first)
    finish(worker, second)
    assert len(second.wait()) == 5
    assert len(first.news) == 1
