"""The record of a decoding, step by step, made by an observer of the loop: `engine.generate(..., observer=trace)`.

It is saved as JSON in page.html, whose own script draws it.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from foretoken.core.errors import NotFiniteError
from foretoken.core.files import check_file, write
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Origin, Sequence, origin_after
from foretoken.core.tree import TokenTree
from foretoken.core.walk import NodeScores
from foretoken.engine import Engine
from foretoken.models.text import TextStream, Tokenizer
from foretoken.trace.page import Label, composed, labels_of
from foretoken.version import __version__

# The most steps, and nodes of them, that are recorded of all texts together: a page of a few megabytes.
MOST_STEPS = 4000
MOST_NODES = 60_000
MOST_OF_PROMPT = 4000  # characters of a prompt that are shown, its last ones


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

        sequence, tree, scores, path, token: as every observer gets them; see `decode.Observer`.
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
        shown = json.dumps(_record(self), separators=(",", ":"))
        for sign in "&<>":  # in a script element; without them, nothing ends the element or begins a comment
            shown = shown.replace(sign, f"\\u{ord(sign):04x}")
        html = composed((files("foretoken.trace") / "page.html").read_text(encoding="utf-8"))
        html = html.replace("__TRACE__", shown, 1)
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


def _record(trace: Trace) -> dict[str, Any]:
    """Return what the page shows of a trace, as plain values.

    Keys that are repeated are short: of a step, "n" are its nodes, [label, id, parent, p, q] each; "a" the accepted
    nodes without the root; "e" the token after them, [label, id, p, origin].
    """
    engine = trace.engine
    label = labels_of(engine.tokenizer)
    return {
        "version": __version__,
        "settings": {
            "target": engine.target.name,
            "drafter": engine.drafter.name,
            "tree": engine.tree,
            "verifier": engine.rule,
        },
        "texts": [_text(text, engine, label) for text in trace.texts],
    }


def _text(text: TracedText, engine: Engine, label: Label) -> dict[str, Any]:
    sequence = text.sequence
    prompt, new = sequence.ids[: sequence.num_prompt], sequence.ids[sequence.num_prompt :]
    if engine.tokenizer is None:
        before = " ".join(map(str, prompt))
    else:
        before = str(engine.tokenizer.decode(prompt, clean_up_tokenization_spaces=False))
    return {
        "prompt": before[-MOST_OF_PROMPT:],
        "cut": len(before) > MOST_OF_PROMPT,
        "sampling": _settings(sequence.sampling),
        "tokens": len(new),
        "steps": text.num_steps,
        "drafted": text.num_drafted,
        "accepted": text.num_accepted,
        "pieces": _pieces(engine.tokenizer, prompt, new),
        "ends": [min(step.length - len(prompt) + len(step.path), len(new)) for step in text.steps],
        "shown": [_shown(step, label) for step in text.steps],
    }


def _settings(sampling: Sampling) -> dict[str, Any]:
    """Return the temperature, and the settings that are not at their defaults."""
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    given = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(Sampling, name)}
    tokens = {"logit_bias": f"of {len(sampling.logit_bias)} tokens"} if sampling.logit_bias else {}
    processors = {"processors": len(sampling.processors)} if sampling.processors else {}
    return {"temperature": sampling.temperature, **given, **tokens, **processors}


def _pieces(tokenizer: Tokenizer | None, prompt: list[int], new: list[int]) -> list[str]:
    """Return the text that each new token adds; a character that takes several tokens belongs to the last of them."""
    if tokenizer is None:
        return [f" {token}" for token in new]
    stream = TextStream(tokenizer, (), prompt)
    pieces = [stream.push([token]) for token in new]
    if pieces:
        pieces[-1] += stream.finish()
    return pieces


def _shown(step: TracedStep, label: Label) -> dict[str, Any]:
    nodes = zip(step.tree.tokens, step.tree.parents, step.p, step.q, strict=True)
    return {
        "n": [[label(token), token, parent, _rounded(p), _rounded(q)] for token, parent, p, q in nodes],
        "a": list(step.path[1:]),
        "e": [label(step.token), step.token, _rounded(step.p_token), step.origin],
    }


def _rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.3g}")
