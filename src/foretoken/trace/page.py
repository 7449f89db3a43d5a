"""The page of a trace: page.html, with the record in it as JSON, which the page's own script draws."""

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from foretoken.core.sampling import Sampling
from foretoken.models.text import TextStream, Tokenizer
from foretoken.version import __version__

if TYPE_CHECKING:
    from foretoken.engine import Engine
    from foretoken.trace.record import Trace, TracedStep, TracedText

Label = Callable[[int], str]  # the text that stands for a token id
PLACE = "__TRACE__"  # in page.html, where the record goes
PARTS = {"__STYLE__": "tinted.css", "__LEGEND__": "legend.html", "__TREES__": "tree.js"}  # of every page with trees
MOST_OF_PROMPT = 4000  # characters of a prompt that are shown, its last ones
SPACE_SIGN = "\u2581"  # stands for a space in some tokenizers, which do not decode it at the beginning of a text


def page(trace: "Trace") -> str:
    """Return the whole HTML file that shows `trace`."""
    template = composed((files("foretoken.trace") / "page.html").read_text(encoding="utf-8"))
    return template.replace(PLACE, escaped(json.dumps(record(trace), separators=(",", ":"))), 1)


def composed(template: str) -> str:
    """Return a page with the parts that all pages share; template: its HTML, with their places marked as in PARTS."""
    for place, name in PARTS.items():
        template = template.replace(f"{place}\n", (files("foretoken.trace") / name).read_text(encoding="utf-8"), 1)
    return template


def escaped(text: str) -> str:
    """Return JSON that can stand in a script element, since nothing in it ends the element or begins a comment.

    text: the JSON.
    """
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def record(trace: "Trace") -> dict[str, Any]:
    """Return what the page shows of `trace`, as plain values.

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


def labels_of(tokenizer: Tokenizer | None) -> Label:
    """Return the function that gives the text of one token id, as a node shows it.

    tokenizer: the target's; None where there is none, and ids are shown as numbers.
    """

    @cache
    def label(token: int) -> str:
        if tokenizer is None or token >= len(tokenizer):  # a padded head has ids without a token
            return str(token)
        text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        piece = str(tokenizer.convert_ids_to_tokens(token))
        return f" {text}" if piece.startswith(SPACE_SIGN) and not text.startswith(" ") else text

    return label


def _text(text: "TracedText", engine: "Engine", label: Label) -> dict[str, Any]:
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
        "shown": [_step(step, label) for step in text.steps],
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


def _step(step: "TracedStep", label: Label) -> dict[str, Any]:
    nodes = zip(step.tree.tokens, step.tree.parents, step.p, step.q, strict=True)
    return {
        "n": [[label(token), token, parent, _rounded(p), _rounded(q)] for token, parent, p, q in nodes],
        "a": list(step.path[1:]),
        "e": [label(step.token), step.token, _rounded(step.p_token), step.origin],
    }


def _rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.3g}")
