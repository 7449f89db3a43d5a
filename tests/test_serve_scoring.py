"""Log probabilities of prompts: the model's own, at every length, and no text beside them changes."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken.models.target import LMTargetSession
from foretoken.serve.prefix import BLOCK
from listening import Listener, alone, asked, finish, job, load
from listening import folders as folders  # fixtures
from listening import work as work
from models_zoo import TOLERANCE
from serving import NAME
from serving import client as client  # fixtures
from serving import engine as engine
from serving import server as server
from thinning import one_in
from watching import calls_of

pytestmark = pytest.mark.usefixtures("unchecked")
TEXT = "def f(x):\n    return x + 1\n\n\n" * 8
LENGTHS = (1, 2, BLOCK, BLOCK + 1, BLOCK + 2, 3 * BLOCK + 7)


@pytest.mark.parametrize(("new", "drafter"), one_in(4, product([0, 9], [None, "drafter", "ngram"])))
def test_they_are_transformers_own(folders, work, drafter, new):
    engine = load(folders, drafter)
    model = AutoModelForCausalLM.from_pretrained(folders["target"])
    plain = [job(engine, TEXT[:length], 3, max(new, 1)) for length in LENGTHS]
    scored = [replace(one, top_logprobs=2, scores_prompt=True, max_new_tokens=new) for one in plain]
    worker = work(engine, max_batch=4)
    listeners = [asked(worker, one) for one in [*scored, *plain]]
    finish(worker, *listeners)
    again = [asked(worker, one) for one in scored]  # the prefix cache has the prompts now
    for listener in again:
        listener.wait()
    worker.stop()
    for one, listener, second, without in zip(scored, listeners, again, listeners[len(scored) :], strict=False):
        assert listener.ids == second.ids == (without.ids if new else [])
        assert listener.steps[-1].finish_reason == "length"
        told = listener.steps[0].prompt_logprobs
        assert told == second.steps[0].prompt_logprobs
        assert not any(step.prompt_logprobs for step in [*listener.steps[1:], *without.steps])
        assert [x.token for x in told] == list(one.ids)
        assert (told[0].logprob, told[0].top) == (None, ())
        with torch.inference_mode():
            want = model(torch.tensor([one.ids])).logits[0].double().log_softmax(-1)
        for x, row in zip(told[1:], want, strict=False):
            assert x.logprob == pytest.approx(float(row[x.token]), abs=1e-4)
            assert [token for token, _ in x.top] == row.topk(2).indices.tolist()
            assert [logprob for _, logprob in x.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_what_was_scored_is_not_read_again(folders, work, monkeypatch):
    engine = load(folders, None)
    one = job(engine, TEXT[: 2 * BLOCK + 9], 3, 4)
    read = calls_of(monkeypatch, LMTargetSession, "read")
    worker = work(engine, start=True, max_batch=2)
    asked(worker, replace(one, top_logprobs=0, scores_prompt=True)).wait()
    assert read == []
    asked(worker, job(engine, "x" + TEXT[: 2 * BLOCK], 3, 4)).wait()
    assert read != []


def test_a_prompt_that_fails_fails_alone(folders, work, monkeypatch):
    engine = load(folders, None)
    whole = LMTargetSession.score

    def failing(self: LMTargetSession, sequences: list, trees: list) -> list:
        if len(trees[0]) > 20:
            raise MemoryError
        return whole(self, sequences, trees)

    monkeypatch.setattr(LMTargetSession, "score", failing)
    worker = work(engine, max_batch=2)
    bad = asked(worker, replace(job(engine, TEXT[:200], 3, 4), scores_prompt=True))
    good = asked(worker, replace(job(engine, TEXT[:9], 3, 4), scores_prompt=True))
    finish(worker, good, bad)
    assert bad.news[-1].message.startswith("The memory did not suffice")
    assert good.ids == alone(engine, TEXT[:9], 3, 4).token_ids
    assert worker.alive


def test_a_prompt_that_nobody_waits_for_any_more_is_not_scored_to_its_end(folders, work, monkeypatch):
    engine = load(folders, None)
    whole, sizes, worker = LMTargetSession.score, list[int](), work(engine, max_batch=2)

    def score(self: LMTargetSession, sequences: list, trees: list) -> list:
        if len(trees[0]) > 1:  # a piece of the prompt
            sizes.append(len(trees[0]))
            worker.cancel(tickets[0])
        return whole(self, sequences, trees)

    monkeypatch.setattr(LMTargetSession, "score", score)
    gone, other = Listener(), Listener()
    scored, after = replace(job(engine, TEXT[: 3 * BLOCK], 3, 4), scores_prompt=True), job(engine, TEXT[:9], 3, 12)
    tickets = [worker.submit(scored, gone), worker.submit(after, other)]
    finish(worker, other)
    worker.stop()
    assert gone.news == []
    assert len(sizes) == 1


@pytest.mark.parametrize("new", [0, 1, 6])
def test_a_client_gets_those_of_the_prompt_and_of_the_text(engine, client, new):
    """As lm-eval asks for them: several prompts, as ids; and in a stream the same."""
    ids = [engine.encode(text) for text in ("def f(x):", "é = 'ü'\n", "x" * (BLOCK + 9), "a")]
    asked = {"model": NAME, "prompt": ids, "logprobs": 1, "echo": True, "temperature": 0, "max_tokens": new}
    whole = client.completions.create(**asked)
    assert whole.usage.completion_tokens <= len(ids) * new
    plain = {**asked, "max_tokens": max(new, 1), "logprobs": None, "echo": None}
    texts = [choice.text for choice in client.completions.create(**plain).choices]
    streamed = [{"text": "", "tokens": [], "token_logprobs": []} for _ in ids]
    for chunk in client.completions.create(stream=True, **asked):
        for part in chunk.choices:
            streamed[part.index]["text"] += part.text
            for name in ("tokens", "token_logprobs"):
                streamed[part.index][name] += getattr(part.logprobs, name) if part.logprobs else []
    rows = engine.target.lm.open(1, 2 * BLOCK)
    for choice, prompt, text, parts in zip(whole.choices, ids, texts, streamed, strict=True):
        listed = choice.logprobs
        assert choice.text == parts["text"] == engine.tokenizer.decode(prompt) + (text if new else "")
        assert (listed.tokens, listed.token_logprobs) == (parts["tokens"], parts["token_logprobs"])
        assert len(prompt) + (new > 0) <= len(listed.tokens) == len(listed.text_offset) <= len(prompt) + new
        assert (listed.token_logprobs[0], listed.top_logprobs[0]) == (None, None)
        rows.join()
        (logits,) = rows.score([prompt], [range(-1, len(prompt) - 1)])
        rows.leave(0)
        want = logits.double().log_softmax(-1)
        close = TOLERANCE[logits.dtype]  # a model in torch's modules rounds by what is beside a text
        assert listed.token_logprobs[1 : len(prompt)] == pytest.approx(
            [float(row[token]) for row, token in zip(want, prompt[1:], strict=False)], abs=close
        )
        best = [max(top.values()) for top in listed.top_logprobs[1 : len(prompt)]]
        assert best == pytest.approx(want[: len(prompt) - 1].amax(-1).tolist(), abs=close)
