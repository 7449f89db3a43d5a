"""Draws docs/step.svg and docs/tree.svg: a step of the loop, and a token tree with its accepted path.

Both show steps that the small models of this repository take, recorded by `foretoken.Trace`; nothing is made up.
`python scripts/step_pictures.py` writes them anew.
"""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import foretoken
from foretoken.trace.record import TracedStep

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODELS = DOCS.parent / "models"
PROMPT = "def main():\n    parser = argparse.ArgumentParser("
STYLE = """<style>
text { font: 13px ui-monospace, monospace; fill: #20242c }
.note, .title { font-family: system-ui, sans-serif }
.note { font-size: 12px; fill: #59616f }
.title { font-weight: bold }
.ground { fill: #ffffff }
rect.node, rect.box { fill: #f1f3f6; stroke: #9aa3b2 }
rect.accepted { fill: #d3f0d8; stroke: #2e8540 }
rect.own { fill: #d6e6fb; stroke: #2563a8 }
rect.root { fill: #ffffff; stroke: #59616f }
path { fill: none; stroke: #9aa3b2; stroke-width: 1.5 }
path.accepted { stroke: #2e8540; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e3e6eb }
.note { fill: #a9b1bf }
.ground { fill: #1e2129 }
rect.node, rect.box { fill: #2a2f3a; stroke: #6b7484 }
rect.accepted { fill: #1f4a2a; stroke: #5fbf77 }
rect.own { fill: #1d3a5c; stroke: #6aa7e8 }
rect.root { fill: #1e2129; stroke: #a9b1bf }
}
</style>
"""
WIDE, HIGH, ACROSS, DOWN = 108, 38, 142, 52  # of a node, and from one to the next


def steps_of(tree: str, seed: int) -> tuple[foretoken.Engine, list[TracedStep], list[int]]:
    """The engine, the steps of one short text, and the ids of the text."""
    engine = foretoken.load(MODELS / "target", drafter=MODELS / "drafter", tree=tree)
    trace = foretoken.Trace(engine)
    engine.generate(PROMPT, max_new_tokens=48, temperature=0.8, seed=seed, observer=trace)
    return engine, trace.texts[0].steps, trace.texts[0].sequence.ids


def chosen(steps: Sequence[TracedStep], fits: Callable[[TracedStep], bool]) -> TracedStep:
    """The first step that shows what the picture is about."""
    return next(step for step in steps if fits(step))


def shown(engine: foretoken.Engine, token: int) -> str:
    """A token as text, its blanks visible, short enough for a node."""
    assert engine.tokenizer is not None
    text = str(engine.tokenizer.decode([token])).replace("\n", "\u21b5").replace(" ", "\u00b7")
    return text if len(text) <= 11 else f"{text[:10]}\u2026"


def node(x: float, y: float, kind: str, lines: Sequence[str]) -> str:
    """A box with its token, and its probabilities below."""
    top = y + (16 if len(lines) > 1 else 24)
    words = "".join(
        f'<text class="{"note" if i else "token"}" x="{x + WIDE / 2}" y="{top + 15 * i}" text-anchor="middle">'
        f"{escape(line)}</text>"
        for i, line in enumerate(lines)
    )
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="6"/>{words}\n'


def line(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    """A bent line from the right of one box to the left of another."""
    middle = (start[0] + end[0]) / 2
    return (
        f'<path class="{kind}" d="M{start[0]} {start[1]} C{middle} {start[1]} {middle} {end[1]} {end[0]} {end[1]}"/>\n'
    )


def note(x: float, y: float, text: str, kind: str = "note") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>\n'


def svg(width: float, height: float, title: str, content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n<title>{escape(title)}'
        f'</title>\n{STYLE}<rect class="ground" width="{width}" height="{height}" rx="8"/>\n{content}</svg>\n'
    )


def tree_picture(engine: foretoken.Engine, step: TracedStep) -> str:
    """The drafted tree, root at the left; the accepted path is green, the token that the target adds is blue."""
    tree, last = step.tree, step.path[-1]
    parents, own = [*tree.parents, last], len(tree)
    paths = [*(tree.path_to(i) for i in range(own)), (*step.path, own)]
    rows, leaves = [0.0] * len(paths), 0
    for i in sorted(range(len(paths)), key=lambda i: paths[i]):
        if i not in parents:
            rows[i], leaves = float(leaves), leaves + 1
    for i in reversed(range(own)):
        below = [rows[child] for child in range(1, len(paths)) if parents[child] == i]
        if below:
            rows[i] = sum(below) / len(below)
    x = [20 + ACROSS * (len(path) - 1) for path in paths]
    y = [48 + DOWN * row for row in rows]
    lines = boxes = ""
    for i in range(len(paths)):
        kept = i in step.path
        kind = "root" if i == 0 else "own" if i == own else "node accepted" if kept else "node"
        token = step.token if i == own else tree.tokens[i]
        p, q = (step.p_token, None) if i == own else (step.p[i], step.q[i])
        known = [f"{name} {value:.2f}" for name, value in (("p", p), ("q", q)) if value is not None]
        boxes += node(x[i], y[i], kind, [shown(engine, token), "root" if i == 0 else "  ".join(known)])
        if i:
            way = "accepted" if kept or i == own else ""
            lines += line((x[parents[i]] + WIDE, y[parents[i]] + HIGH / 2), (x[i], y[i] + HIGH / 2), way)
    levels = max(len(tree.path_to(i)) for i in range(own)) - 1
    title = f"{tree.num_drafted} draft tokens in {levels} levels: {len(step.path) - 1} accepted, one by the target"
    width, height = max(x) + WIDE + 20, max(y) + DOWN + 30
    legend = note(20, 28, title, "title") + note(20, height - 14, "green: accepted; blue: the target's own token")
    return svg(width, height, title, legend + lines + boxes)


def step_picture(engine: foretoken.Engine, step: TracedStep, ids: Sequence[int]) -> str:
    """Draft, score, verify, commit, for a chain."""
    drafted = [step.tree.tokens[i] for i in range(1, len(step.tree))]
    kept = len(step.path) - 1
    before = list(ids[step.length - 2 : step.length])
    tall = 78
    rows = [
        ("1  draft", "the drafter proposes, one cheap forward per token", before, drafted, None),
        ("2  score", "one forward of the target gives p after every node", before, drafted, step.p[1:]),
        ("3  verify", "the rule decides how many stay", before, drafted, None),
        ("4  commit", "accepted tokens and the target's own join the text", [*before, *drafted[:kept]], [], None),
    ]
    content = ""
    for i, (name, about, text, after, scores) in enumerate(rows):
        y = 46 + tall * i
        content += note(20, y - 8, name, "title") + note(110, y - 8, about)
        x = 20.0
        for j, token in enumerate(text):
            content += node(x, y, "root" if j < 2 else "node accepted", [shown(engine, token)])
            x += WIDE + 6
        for j, token in enumerate(after):
            kind = "node accepted" if i == 2 and j < kept else "node"
            p = scores[j] if scores is not None else None
            content += node(x, y, kind, [shown(engine, token), *([] if p is None else [f"p {p:.2f}"])])
            x += WIDE + 6
        if i == 3:
            content += node(x, y, "own", [shown(engine, step.token), step.origin])
    width = 20 + (WIDE + 6) * (2 + len(drafted) + 1) + 14
    title = f"A step of the loop: {len(drafted)} draft tokens, {kept} accepted, {kept + 1} tokens for one forward"
    return svg(width, 46 + tall * 4 - 8, title, content)


def main() -> None:
    engine, steps, ids = steps_of("chain:4", seed=3)
    step = chosen(steps, lambda step: len(step.path) == 3 and len(step.tree) == 5)
    (DOCS / "step.svg").write_text(step_picture(engine, step, ids), encoding="utf-8")
    engine, steps, _ = steps_of("kary:2x3", seed=1)
    step = chosen(steps, lambda step: len(step.path) == 3 and len(step.tree) >= 11)
    (DOCS / "tree.svg").write_text(tree_picture(engine, step), encoding="utf-8")


if __name__ == "__main__":
    main()
