"""Trees, the walk over them, and what a sequence commits."""

import inspect
import math
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError, NotFiniteError
from foretoken.core.laws import IID, Opaque
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence, Step
from foretoken.core.tree import Siblings, TokenTree, TreeBuilder, root_only
from foretoken.core.walk import LogitScores, draw, follow, walk
from foretoken.decode import Decoder
from foretoken.verify import VERIFIERS
from raising import raising
from tables import each

UNIFORM = torch.full((5,), 0.2, dtype=torch.float64)


def opaque(*draws: int) -> Siblings:
    return Siblings(draws, None, Opaque(len(draws)))


def example() -> TokenTree:
    """4 -> 1 -> 3;  4 -> 2."""
    builder = TreeBuilder(4)
    assert builder.add(0, opaque(1, 2)) == {0: 1, 1: 2}
    assert builder.add(1, opaque(3)) == {0: 3}
    return builder.build()


def test_the_shape_of_a_tree() -> None:
    tree = example()
    assert (tree.tokens, tree.parents) == ((4, 1, 2, 3), (-1, 0, 0, 1))
    assert tree.depths == (0, 1, 1, 2)
    assert (len(tree), tree.num_drafted) == (4, 3)
    assert [tree.child(0, 1), tree.child(0, 2), tree.child(1, 3)] == [1, 2, 3]
    assert tree.child(0, 3) is None
    assert tree.child(3, 1) is None
    assert [tree.path_to(node) for node in range(4)] == [(0,), (0, 1), (0, 2), (0, 1, 3)]


def test_repeated_draws_share_a_node() -> None:
    builder = TreeBuilder(0)
    siblings = Siblings((3, 1, 3, 3), UNIFORM, IID(4))
    assert builder.add(0, siblings) == {0: 1, 1: 2}
    tree = builder.build()
    assert tree.tokens == (0, 3, 1)
    assert tree.siblings[0] is siblings  # the record keeps all four draws


def test_siblings_hold_their_q() -> None:
    with pytest.raises(ForetokenError, match="need the q"):
        Siblings((1,), None, IID(1))
    with pytest.raises(ForetokenError, match="have no q"):
        Siblings((1,), UNIFORM, Opaque(1))


def one_hot(token: int) -> Tensor:
    return torch.eye(5, dtype=torch.float64)[token]


@pytest.mark.parametrize(
    ("wanted", "path", "token"),
    [((1, 3, 0), (0, 1, 3), 0), ((1, 4), (0, 1), 4), ((2, 2), (0, 2), 2), ((3,), (0,), 3)],
)
def test_the_walk_follows_the_target(wanted: tuple[int, ...], path: tuple[int, ...], token: int) -> None:
    tree = example()
    asked = []

    def p(node: int) -> Tensor:
        asked.append(node)
        return one_hot(wanted[tree.depths[node]])

    assert walk(tree, each(p), VERIFIERS["exact-match"], seeded(0)) == (path, token)
    assert asked == list(path)  # visited nodes only
    assert follow(tree, [(*wanted, 0, 0)[depth] for depth in tree.depths]) == (path, token)


def test_opaque_children_never_reach_the_rule() -> None:
    assert walk(example(), each(lambda node: one_hot(0)), raising(AssertionError), seeded(0)) == ((0,), 0)


def test_draw_uses_one_uniform_of_the_given_generator() -> None:
    one, other = seeded(3), torch.Generator().manual_seed(3)
    u = float(torch.rand(1, generator=other, dtype=torch.float64))
    assert draw(UNIFORM.float(), one) == int(u * 5)
    assert torch.equal(one.generator.get_state(), other.get_state())


def sequence(max_new_tokens: int = 10, eos: frozenset[int] = frozenset()) -> Sequence:
    return Sequence([9, 4], Sampling(), seeded(0), max_new_tokens, eos)


def test_commit() -> None:
    seq = sequence()
    assert seq.commit(example(), (0, 1, 3), 0) == Step((1, 3, 0), num_drafted=3, num_accepted=2)
    assert seq.ids == [9, 4, 1, 3, 0]
    assert (seq.num_prompt, seq.num_new, seq.num_left, seq.finished) == (2, 3, 7, False)


@pytest.mark.parametrize(
    ("limit", "end", "tokens", "accepted"),
    [(10, 1, (1,), 1), (10, 0, (1, 3, 0), 2), (1, 2, (1,), 1), (2, 2, (1, 3), 2), (3, 2, (1, 3, 0), 2)],
)
def test_a_text_ends_inside_the_accepted_path(limit: int, end: int, tokens: tuple[int, ...], accepted: int) -> None:
    """At the end of text, or where it is long enough."""
    seq = sequence(limit, frozenset({end}))
    assert seq.commit(example(), (0, 1, 3), 0) == Step(tokens, 3, accepted)
    assert seq.finished
    assert seq.ids == [9, 4, *tokens]
    assert seq.num_left == limit - len(tokens)


def test_end_of_text_in_the_prompt_does_not_stop() -> None:
    seq = sequence(eos=frozenset({4}))
    seq.commit(example(), (0,), 2)
    assert not seq.finished


def test_uniforms_come_from_the_sequence_alone() -> None:
    one, other = sequence(), sequence()
    torch.manual_seed(1)
    first = one.rng.uniforms(2, 3)
    torch.manual_seed(2)
    assert torch.equal(first, other.rng.uniforms(2, 3))
    assert first.dtype == torch.float64
    assert not torch.equal(first, one.rng.uniforms(2, 3))


def test_processors_see_no_text_that_has_ended() -> None:
    """A tree has nodes after an end-of-text token, which plain decoding never reaches: many processors fail there."""

    def nothing_follows_the_end(ids: Tensor, scores: Tensor) -> Tensor:
        assert 2 not in ids[0, 2:]
        return scores - 100 * (torch.arange(3) == ids[0, -1])

    seq = Sequence([2, 2], Sampling(processors=(nothing_follows_the_end,)), seeded(0), 5, frozenset([2]))
    p = seq.probabilities(torch.zeros(4, 3), [[], [1], [1, 2], [2, 0]])
    assert p.round(decimals=2).tolist()[:2] == [[0.5, 0.5, 0], [0.5, 0, 0.5]]
    assert torch.allclose(p[2:], torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_processor_that_gives_no_numbers_is_blamed(bad: float) -> None:
    seq = Sequence([0], Sampling(processors=(lambda _, scores: scores + bad,)), seeded(0), 5)
    with pytest.raises(NotFiniteError, match=r"a logits processor gave NaN or \+inf, or left no token"):
        LogitScores("M", seq, root_only(0), torch.zeros(1, 3)).p(range(1))


def test_probabilities_of_suffixes() -> None:
    seq = Sequence([0], Sampling(repetition_penalty=2.0), seeded(0), 5)
    p = seq.probabilities(torch.ones(2, 3), [[], [2]])
    assert torch.allclose(p, torch.tensor([[0.5, 1.0, 1.0], [0.5, 1.0, 0.5]]).softmax(-1))


def test_the_loop_in_the_pages_is_the_loop_that_runs() -> None:
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = inspect.getsource(Decoder.step)
    body = textwrap.dedent(source[source.index("        sequences, steps, paths = ") :])
    assert f"```python\n{body}```\n" in page
