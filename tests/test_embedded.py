"""The engine inside a larger program: arguments of wrong types, copies, forked processes, chunks that are kept."""

import copy
import gc
import os
import pickle
from fractions import Fraction
from typing import Any

import pytest
import torch

import foretoken
import gguf_zoo
from foretoken.core import forked
from foretoken.decode import DraftFailedWarning
from foretoken.models.named import located


@pytest.fixture(scope="module")
def target(demo) -> str:
    return str(demo / "target")


@pytest.fixture(scope="module")
def engine(demo, target) -> foretoken.Engine:
    return foretoken.load(target, drafter=str(demo / "drafter"), device="cpu")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [10**29, Fraction(3, 2)])
def test_numbers_of_any_type_are_taken_as_floats(engine: foretoken.Engine, value: Any) -> None:
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty", "temperature"):
        whole, real = (engine.generate("def", max_new_tokens=6, seed=1, **{name: x}) for x in (value, float(value)))
        assert whole.token_ids == real.token_ids


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (lambda ids, scores: scores[0], r"returned shape \[\d+\]: it must return scores as a tensor \[1, \d+\]"),
        (lambda ids, scores: scores[:, :1], r"returned shape \[1, 1\]"),
        (lambda ids, scores: None, "returned NoneType"),
    ],
)
def test_what_a_processor_returns_is_checked(target: str, processor: Any, says: str) -> None:
    plain = foretoken.load(target, device="cpu")
    with pytest.raises(foretoken.ForetokenError, match=says):
        plain.generate("x", max_new_tokens=3, processors=[processor])


@pytest.mark.usefixtures("unchecked")
def test_where_a_processor_fails_the_drafter_is_not_said_to_be_the_cause(engine: foretoken.Engine) -> None:
    def mine(ids: object, scores: object) -> object:
        raise KeyError("mine")

    with (
        pytest.warns(DraftFailedWarning, match="^The drafter, or a processor or logit bias .* failed"),
        pytest.raises(KeyError, match="mine"),
    ):
        engine.generate("x", max_new_tokens=3, processors=[mine])


def test_chunks_keep_their_counts(engine: foretoken.Engine) -> None:
    chunks = list(engine.stream("def f(x):", max_new_tokens=20, temperature=0.0))
    emitted = [len(chunk.token_ids) for chunk in chunks]
    assert [chunk.stats.num_tokens for chunk in chunks] == [sum(emitted[: i + 1]) for i in range(len(chunks))]
    assert [chunk.stats.num_target_forwards for chunk in chunks] == list(range(1, len(chunks) + 1))


def test_a_copy_outlives_its_original(tmp_path) -> None:
    """Its compiled weights are the same ones: what the kernel reads stands at addresses."""
    gguf_zoo.save_wide(tmp_path / "model.gguf")
    engine = foretoken.load(str(tmp_path / "model.gguf"), drafter="ngram", device="cpu")
    assert engine.target.lm.execution == "kernel"
    expected = engine.generate([1, 2, 3], max_new_tokens=8, temperature=0.0).token_ids
    other = copy.deepcopy(engine)
    assert other.target.lm.backend is engine.target.lm.backend
    del engine
    gc.collect()
    assert other.generate([1, 2, 3], max_new_tokens=8, temperature=0.0).token_ids == expected


@pytest.mark.parametrize("how", [{}, {"compile": "off"}, {"drafter": "suffix"}])
def test_an_engine_can_be_copied_but_not_sent_to_another_process(target: str, how: dict[str, str]) -> None:
    """Its copies learn from each other's texts, as engines with another recipe do."""
    engine = foretoken.load(target, device="cpu", **how)
    with pytest.raises(foretoken.ForetokenError, match=r"^An engine cannot be pickled: call foretoken\.load in the"):
        pickle.dumps(engine)
    expected = engine.generate([1, 2, 3], max_new_tokens=8, temperature=0.0).token_ids
    for other in copy.copy(engine), copy.deepcopy(engine):
        assert other.source.store is engine.source.store
        assert other.generate([1, 2, 3], max_new_tokens=8, temperature=0.0).token_ids == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("threads", "in_child", "refused"), [(2, 2, True), (2, 1, False), (1, 2, False)])
def test_a_forked_process_is_refused_where_it_would_hang(
    target: str, monkeypatch: pytest.MonkeyPatch, threads: int, in_child: int, refused: bool
) -> None:
    """Where models ran in several threads, which a fork lacks, and it would use several itself."""
    monkeypatch.setattr(forked, "_first", None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        foretoken.load(target, device="cpu")
        forked.check_not_forked()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(in_child)
            try:
                forked.check_not_forked()
                os._exit(0)
            except foretoken.ForetokenError:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == refused
    finally:
        torch.set_num_threads(before)


def test_engines_check_for_forks(engine: foretoken.Engine, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_first", os.getpid() + 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for call in (lambda: engine.generate("x", max_new_tokens=2), lambda: foretoken.load(target, device="cpu")):
        with pytest.raises(foretoken.ForetokenError, match="This process was forked from one in which models had run"):
            call()


NO_IDS = ["my models/llama 7b", "owner/x--y", "é/ü", "a/.."]  # no hub takes them


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ngram", "There is no model ngram here: that is the name of a drafter; give the path"),
        ("ngran", "here: did you mean drafter ngram[?] Else give the path"),
        ("smollm2-135m-instruc", "here: did you mean smollm2-135m-instruct[?] Else give"),
        *((name, "cannot be had from the hub|There is no model") for name in NO_IDS),
    ],
)
def test_a_name_that_is_no_model(name: str, says: str) -> None:
    with pytest.raises(foretoken.ForetokenError, match=says):
        located(name)


def test_a_prompt_of_python_completes_the_public_names() -> None:
    assert set(foretoken.__all__) < set(dir(foretoken))
