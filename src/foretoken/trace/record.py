"""The record of a decoding, step by step, made by an observer of the loop: `engine.generate(..., observer=trace)`."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from foretoken.core.errors import NotFiniteError
from foretoken.core.files import check_file, write
from foretoken.core.sequence import Origin, Sequence, origin_after
from foretoken.core.tree import TokenTree
from foretoken.core.walk import NodeScores
from foretoken.engine import Engine
from foretoken.trace.page import page

# The most steps, and nodes of them, that are recorded of all texts together: a page of a few megabytes.
MOST_STEPS = 4000
MOST_NODES = 60_000


@dataclass(frozen=True)
class TracedStep:
    """One step, as it was before its tokens were committed.

    length: the number of committed ids before it.
    tree: what was drafted.
    p, q: per node the probability of its token after its parent, of the target and of the drafter; None at the root,
        and where there is none, such as the q of prompt lookup.
    path: the accepted nodes, the root first.
    token: the id after them.
    p_token: the target's probability of that token; None where it cannot be computed.
    origin: of that token, see `Step.origins`.
    """

    length: int
    tree: TokenTree
    p: list[float | None]
    q: list[float | None]
    path: tuple[int, ...]
    token: int
    p_token: float | None
    origin: Origin


@dataclass
class TracedText:
    """One sequence and its recorded steps.

    sequence: the text, with its sampling.
    steps: those that were recorded.
    num_steps, num_drafted, num_accepted: numbers of steps, of draft tokens and of accepted ones, recorded or not.
    """

    sequence: Sequence
    steps: list[TracedStep] = field(default_factory=list)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class Trace:
    """An observer that records the steps of each text, in the order in which they began.

        trace = foretoken.Trace(engine)
        engine.generate("def main():", observer=trace)
        trace.save("trace.html")

    The texts are the same as without it, bit for bit; they take longer, since p is computed for every node. Texts are
    recorded as they were decoded: one that a stop string ended shows the whole of its last step.
    """

    def __init__(self, engine: Engine) -> None:
        """Begin an empty record; engine: what generates the texts, for its names and its tokenizer."""
        self.engine = engine
        self._texts: dict[Sequence, TracedText] = {}
        self._steps, self._nodes = 0, 0

    @property
    def texts(self) -> list[TracedText]:
        """The texts so far, in the order in which they began."""
        return list(self._texts.values())

    def __call__(
        self, sequence: Sequence, tree: TokenTree, scores: NodeScores, path: tuple[int, ...], token: int
    ) -> None:
        """Record one step; the decoding loop calls it before it commits the step's tokens.

        sequence: the text.
        tree: what was drafted.
        scores: the target's, of the tree's nodes.
        path: the accepted nodes, the root first.
        token: the id after them.
        """
        text = self._texts.setdefault(sequence, TracedText(sequence))
        text.num_steps += 1
        text.num_drafted += tree.num_drafted
        text.num_accepted += min(len(path) - 1, len(sequence.emitted(tree, path, token)))
        whole = len(text.steps) == text.num_steps - 1  # no step was left out, since the page shows those from the first
        if whole and self._steps < MOST_STEPS and self._nodes + len(tree) <= MOST_NODES:
            self._steps += 1
            self._nodes += len(tree)
            text.steps.append(_step(sequence, tree, scores, path, token))

    def save(self, file: str | Path) -> None:
        """Write the page to `file`, whole or not at all: HTML that needs no network. Raises ForetokenError."""
        check_file(Path(file))
        html = page(self)
        write(Path(file), lambda temporary: temporary.write_text(html, encoding="utf-8"))


def _step(sequence: Sequence, tree: TokenTree, scores: NodeScores, path: tuple[int, ...], token: int) -> TracedStep:
    p: list[float | None] = [None] * len(tree)
    q: list[float | None] = [None] * len(tree)
    p_token = None
    children: dict[int, list[int]] = {path[-1]: []}
    for node, parent in list(enumerate(tree.parents))[1:]:
        children.setdefault(parent, []).append(node)
    for parent, nodes in children.items():
        siblings = tree.siblings[parent]
        if siblings is not None and siblings.q is not None:
            for node in nodes:
                q[node] = float(siblings.q[tree.tokens[node]])
        with suppress(NotFiniteError):  # the walk did not come to this node, so that decoding goes on
            row = scores.p(range(parent, parent + 1))[0]
            for node in nodes:
                p[node] = float(row[tree.tokens[node]])
            if parent == path[-1]:
                p_token = float(row[token])
    return TracedStep(len(sequence.ids), tree, p, q, path, token, p_token, origin_after(tree, path))
