"""Models that keep recurrent states: their rows equal plain forwards, whatever is accepted, and forwards are few."""

import copy
import random
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import foretoken
from foretoken.core.errors import ForetokenError
from foretoken.models.causal_lm import CausalLM
from foretoken.models.recurrent import RecurrentRows, RecurrentSlots
from foretoken.models.rows import Rows
from models_zoo import RECURRENT, TOLERANCE, assert_close, check_random_steps, plain, text, tiny
from thinning import one_in


@pytest.mark.parametrize("family", one_in(3, RECURRENT))
def test_trees_equal_plain_forwards(family: str) -> None:
    check_random_steps(tiny(family), seed=1, steps=6)
    check_random_steps(tiny(family, "eager"), seed=3, steps=8, batch=4)


def _rounded(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with weights in bfloat16, and one with the same weights that computes in float32."""
    model = tiny(family)
    torch.nn.Module.to(model, torch.bfloat16)
    return model, torch.nn.Module.to(copy.deepcopy(model), torch.float32)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_trees_equal_plain_forwards_in_bfloat16(family: str) -> None:
    """Nemotron-H gives its logits in float32. Rounding moves one of qwen3_5 by .07 where a processor has only AVX2."""
    model, exact = _rounded(family)
    check_random_steps(model, seed=2, steps=4, dtype=torch.bfloat16, exact=exact)


def _never_unread(rows: RecurrentRows, paths: list[list[int]]) -> None:
    """Take the states behind whatever was read last for those behind the accepted path: a wrong rule."""
    for row, path in enumerate(paths):
        rows._readings[row].path = list(path)
    keep(rows, paths)


keep = RecurrentRows.keep


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "bamba"])
def test_states_that_read_rejected_tokens_are_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentRows, "keep", _never_unread)
    with pytest.raises(AssertionError, match="not close"):
        check_random_steps(tiny(family), seed=1, steps=6)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_they_are_seen_in_bfloat16_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, exact = _rounded(family)
    monkeypatch.setattr(RecurrentRows, "keep", _never_unread)
    with pytest.raises(AssertionError, match="not close"):
        check_random_steps(model, seed=2, steps=4, dtype=torch.bfloat16, exact=exact)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The numbers of rows and of tokens of each forward."""
    found: list[tuple[int, int]] = []
    call = RecurrentSlots.__call__

    def counting(slots: RecurrentSlots, ids: list[list[int]], *others: Any) -> torch.Tensor:
        found.append((len(ids), len(ids[0])))
        return call(slots, ids, *others)

    monkeypatch.setattr(RecurrentSlots, "__call__", counting)
    return found


def _opened(widths: list[tuple[int, int]], batch: int = 1, length: int = 6) -> Rows:
    rows = CausalLM(tiny("qwen3_5")).open(batch, 60)
    for r in range(batch):
        rows.extend(rows.join(), list(range(10 * r, 10 * r + length)))
    widths.clear()
    return rows


def test_forwards_of_chains_and_trees(widths: list[tuple[int, int]]) -> None:
    """A chain takes one forward, a tree one per leaf, and rejected tokens are made up for by the next forward."""
    rows = _opened(widths)
    rows.score([[1, 2, 3]], [[-1, 0, 1]])
    rows.keep([[0, 1, 2]])
    assert widths == [(1, 3)]
    rows.score([[1, 2, 3]], [[-1, 0, 1]])
    rows.keep([[0, 1]])
    rows.score([[4, 5]], [[-1, 0]])  # reads the two accepted tokens again
    assert widths[1:] == [(1, 3), (1, 4)]
    rows.keep([[0, 1]])
    rows.score([[1, 2, 3, 4, 5]], [[-1, 0, 0, 1, 2]])
    assert widths[3:] == [(1, 3), (1, 3)]
    rows.keep([[0, 1, 3]])  # the first leaf was read last, so nothing is read again
    rows.score([[1]], [[-1]])
    assert widths[5:] == [(1, 1)]


def test_a_tree_that_grows_by_levels(widths: list[tuple[int, int]]) -> None:
    """Each level reads its own tokens alone, where it follows the path that was read before."""
    rows = _opened(widths)
    for level in range(4):
        rows.score([[level]], [[level - 1]])
    rows.keep([[0, 1, 2, 3]])
    rows.score([[7]], [[-1]])
    assert widths == [(1, 1)] * 5


def test_unread_tokens_do_not_pile_up(widths: list[tuple[int, int]]) -> None:
    """Where every step accepts a part of its chain, accepted tokens are read again by forwards of their own."""
    rows = _opened(widths)
    for _ in range(8):
        rows.score([[1, 2, 3, 4]], [[-1, 0, 1, 2]])
        rows.keep([[0, 1, 2]])
    assert max(n for _, n in widths) == 4 + 3
    assert [n for _, n in widths] == [4, 7, 6] * 4


def test_plain_steps_of_a_batch_take_one_forward(widths: list[tuple[int, int]]) -> None:
    rows = _opened(widths, batch=3)
    rows.score([[1], [2], [3]], [[-1]] * 3)
    rows.keep([[0]] * 3)
    rows.score([[1, 4], [2, 5], [3, 6]], [[-1, 0]] * 3)
    assert widths == [(3, 1), (3, 2)]
    rows.keep([[0, 1], [0], []])
    rows.score([[1], [2], [3]], [[-1]] * 3)
    assert sorted(widths[2:]) == [(1, 1), (1, 1), (1, 2)]


def test_a_failed_forward_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("falcon_h1"), list(range(9))
    rows = CausalLM(model).open(1, 40)
    rows.extend(rows.join(), ids)
    rows.score([[1, 2]], [[-1, 0]])
    follow = RecurrentRows._follow

    def failing(rows: RecurrentRows, part: slice, chains: list[Any], head: bool) -> torch.Tensor:
        logits = follow(rows, part, chains, head)
        if chains[0].ids[-1] == 3:
            raise MemoryError
        return logits

    monkeypatch.setattr(RecurrentRows, "_follow", failing)
    with pytest.raises(MemoryError):
        rows.score([[3, 4]], [[1, 1]])  # the forward of 4 comes first, and succeeds
    (logits,) = rows.score([[5, 6]], [[1, 2]])
    assert_close(logits[1], plain(model, [*ids, 1, 2, 5, 6]), torch.float32)


def test_what_is_saved_of_a_prompt() -> None:
    """The last piece of what was read has the states; pieces without count once one with states follows them."""
    model, ids = tiny("falcon_h1"), text(random.Random(1), 20)
    lm = CausalLM(model)
    rows = lm.open(2, 40, (1,))
    rows.extend(rows.join(), ids[:12])
    pieces = [rows.save(0, start, start + 4) for start in (0, 4, 8)]
    other = lm.open(2, 40, (1,))
    for taken in (2, 3):
        row = other.join()
        for piece in pieces[:taken]:
            assert piece is not None
            other.restore(row, piece)
        assert other.lengths[row] == (12 if taken == 3 else 0)
        other.extend(row, ids[other.lengths[row] : 16])
    scores = other.score([ids[16:]] * 2, [[-1, 0, 1, 2]] * 2)
    for of_row in scores:
        assert_close(of_row[3], plain(model, ids), torch.float32)
    other.keep([[0], [0]])
    assert other.save(0, 0, 16) is None
    torch.testing.assert_close(other.features(0), other.features(1), rtol=0, atol=TOLERANCE[torch.float32])


def test_what_was_read_again_cannot_be_cut() -> None:
    rows = CausalLM(tiny("lfm2")).open(1, 40)
    rows.extend(rows.join(), [1, 2, 3, 4])
    rows.score([[5, 6, 7]], [[-1, 0, 1]])
    rows.keep([[0, 1]])
    rows.cut(0, 5)
    (logits,) = rows.score([[9]], [[-1]])
    assert_close(logits[0], plain(tiny("lfm2"), [1, 2, 3, 4, 5, 9]), torch.float32)
    rows.keep([[]])
    with pytest.raises(ForetokenError, match="cannot go back to token 2"):
        rows.cut(0, 2)


@pytest.mark.parametrize(
    ("family", "way"),
    one_in(
        5,
        product(
            ["qwen3_5", "lfm3", "falcon_h1", "granite_mamba"],
            [("ngram", "chain:4"), ("model", "chain:3"), ("model", "kary:2x2")],
        ),
    ),
)
def test_greedy_text_is_that_of_transformers(family: str, way: tuple[str, str]) -> None:
    drafter, tree = way
    model = tiny(family)
    model.generation_config.eos_token_id = None
    drafting: Any = drafter
    if drafter == "model":  # like its target, but not quite
        drafting = tiny(family)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in drafting.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    prompts = [[3, 1, 4, 1, 5] * 2, [9, 2, 6]]
    engine = foretoken.load(model, drafter=drafting, tree=tree, max_batch=2)
    accepted = 0
    for prompt, result in zip(prompts, engine.generate(prompts, max_new_tokens=20, temperature=0.0), strict=True):
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert result.token_ids == ids[0, len(prompt) :].tolist()
        accepted += result.stats.num_accepted
    assert accepted or drafter == "ngram"


def test_fresh_rows_have_read_nothing() -> None:
    """A row that leaves takes its states along."""
    model = tiny("lfm2")
    rows = CausalLM(model).open(2, 30)
    rows.extend(rows.join(), [1, 2, 3])
    rows.extend(rows.join(), [4, 5])
    rows.leave(0)
    rows.join()
    assert rows.lengths == [2, 0]
    scores = rows.score([[6], [7]], [[-1], [-1]])
    assert_close(scores[0][0], plain(model, [4, 5, 6]), torch.float32)
    assert_close(scores[1][0], plain(model, [7]), torch.float32)


def _ignore(monkeypatch: pytest.MonkeyPatch, kind: str, index: int, layers: list[int], several: bool) -> None:
    """Let a model read as if some of its states were zeros, in forwards of several tokens or else in those of one."""

    def changed(name: str) -> None:
        right = getattr(RecurrentSlots, name)

        def wrong(slots: RecurrentSlots, *args: Any, state_idx: int = 0, **kwargs: Any) -> torch.Tensor | None:
            found = right(slots, *args, state_idx=state_idx, **kwargs)
            layer = args[-1]
            if found is None or layer not in layers or state_idx != index or (slots.new > 1) != several:
                return found
            if name == "update_conv_state":
                found = found.clone()
                found[..., : -slots.new] = 0
                return found
            return torch.zeros_like(found)

        monkeypatch.setattr(RecurrentSlots, name, wrong)

    if kind == "recurrent":
        changed("get_recurrent_state")
    else:
        changed("update_conv_state" if several else "get_conv_state")


@pytest.mark.parametrize(
    ("family", "kind", "several"),
    one_in(5, product(["qwen3_5", "falcon_h1", "kimi_linear"], ["conv", "recurrent"], [True, False])),
)
def test_a_model_that_ignores_a_state_is_found(
    family: str, kind: str, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 one that ignores them in all layers, in float32 also one that does so in one layer."""
    model = tiny(family)
    _ignore(monkeypatch, kind, 0, [2], several)
    with pytest.raises(ForetokenError, match=r"otherwise than (token by token|transformers' own forward)"):
        CausalLM(model)
    monkeypatch.undo()
    CausalLM(model)
    torch.nn.Module.to(model, torch.bfloat16)
    CausalLM(model)
    _ignore(monkeypatch, kind, 0, [0, 1, 2], several)
    number = "several tokens" if several else "one token"
    with pytest.raises(ForetokenError, match=f"reads {number} behind a text without its {kind} states"):
        CausalLM(model)
