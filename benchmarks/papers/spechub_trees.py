"""Sun et al. 2024, SpecHub, Tables 5 to 7: tokens per step of RRS, RRSw and SpecHub on three kinds of trees.

Its figures stand in spechub_trees.csv: JF68m, JF160m and EAGLE drafting for Llama2-7B on CNN. Our small model is a
better drafter for its target than JF68m and JF160m are for theirs, and the best trees of a good drafter are chains, on
which the three rules are one. So its distribution is flattened until a draft is accepted as often as in the paper.
"""

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.papers.run import Run
from benchmarks.papers.shaped import Flattened, ShapedDrafter, flattened_to
from benchmarks.papers.steps import Course, Sample, run
from foretoken.core.policy import TreePolicy
from foretoken.draft.heads import HeadDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.measure.child_acceptance import child_acceptance, continued
from foretoken.measure.teacher_forcing import ScoredText
from foretoken.names import verifier_named
from foretoken.trees.sequoia import sequoia
from foretoken.trees.static import kary

RULES = ("rrs", "rrsw", "spechub")
# temperature -> tree -> tokens per step of RULES
Cited = dict[float, dict[str, tuple[float | None, ...]]]
FIRST = {"JF68m": 0.4418, "JF160m": 0.5257}  # citations: Table 3, T = 1: RRSw's first draft, which is RRS's
SECOND = 0.1021  # citation: Table 1, JF68m, T = 1, RRS
WHOLE, QUICK = (31, 32), (1, 4)  # prompts, and tokens of each


def cited(table: int) -> Cited:
    """The figures of the paper's table."""
    found: Cited = {}
    with Path(__file__).with_suffix(".csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if int(row["table"]) == table:
                figures = tuple(float(row[rule]) if row[rule] else None for rule in RULES)
                found.setdefault(float(row["temperature"]), {})[row["tree"]] = figures
    return found


@dataclass
class Efficiencies:
    """Tokens per step of one pair."""

    artefact: Run
    engine: Engine
    course: Course
    vectors: dict[tuple[str, float, float], list[float]] = field(default_factory=dict)
    texts: dict[float, ScoredText] = field(default_factory=dict)

    def of(self, drafter: LMDrafter, temperature: float, tree: str, rule: str) -> tuple[int, Sample]:
        """(drafted nodes of the shape, tokens per step)."""
        power = power_of(drafter)
        self.artefact.progress(f"{drafter.name}, temperature {temperature:g}, {tree}: {rule}")
        verifier = verifier_named(rule)
        policy = self._shape(tree, rule, temperature, power)
        made = replace(drafter, policy=policy, law=verifier.laws[0])
        return policy.max_nodes - 1, run(made, verifier, temperature, self.course)

    def drafter(self, accepted: float) -> ShapedDrafter:
        """The pair's drafter, flattened until one draft at temperature 1 is accepted with this probability."""
        lm = self.engine.drafter
        assert isinstance(lm, LMDrafter)
        shape = flattened_to(*self._text(1.0).rows(1.0), accepted)
        return ShapedDrafter(lm.lm, lm.policy, lm.law, lm.vocab_size, shape)

    def _shape(self, tree: str, rule: str, temperature: float, power: float) -> TreePolicy:
        """K^d: k-ary with d levels, the root's own counted. biSeqN: the best binary tree of N nodes with the root."""
        if tree.startswith("biSeq"):
            return sequoia(self._vector(rule, temperature, power), int(tree.removeprefix("biSeq")) - 1)
        k, _, depth = tree.partition("^")
        return kary(int(k), int(depth) - 1)

    def _vector(self, rule: str, temperature: float, power: float) -> list[float]:
        """Acceptance of two children, of the drafter LM."""
        key = (rule, temperature, power)
        if key not in self.vectors:
            verifier, text = verifier_named(rule), self._text(temperature)
            text = ScoredText(text.target, power * text.drafter)
            found = child_acceptance(verifier, verifier.laws[0], 2, text, temperature, self.course.seed)
            self.vectors[key] = list(found.acceptance)
        return self.vectors[key]

    def _text(self, temperature: float) -> ScoredText:
        """Both models along the target's own continuations."""
        if temperature not in self.texts:
            course = self.course
            self.texts[temperature] = continued(
                self.engine, course.prompts, course.num_tokens, temperature, course.seed
            )
        return self.texts[temperature]


def power_of(drafter: LMDrafter) -> float:
    """Return by what the drafter's logits are multiplied."""
    shape = drafter.shape if isinstance(drafter, ShapedDrafter) else None
    return shape.power if isinstance(shape, Flattened) else 1.0


def measured(artefact: Run) -> Efficiencies:
    """What the demo pair or the pair named is measured by."""
    engine, prompts = artefact.pair()
    prompts = prompts[: artefact.count(WHOLE[0], QUICK[0])]
    course = Course(engine.target, prompts, artefact.count(WHOLE[1], QUICK[1]), seed=artefact.seed)
    return Efficiencies(artefact, engine, course)


def spechub_trees(artefact: Run) -> None:
    found = measured(artefact)
    lm, head = found.engine.drafter, artefact.head()
    assert isinstance(lm, LMDrafter)
    small, larger = cited(5), cited(6)
    _table(found, "Table 5: a small language model", "JF68m", small, found.drafter(FIRST["JF68m"]))
    artefact.report.tables[-1].notes.append(
        "2^d has 2^d - 1 nodes with the root. biSeqN counts the root too: three drafted nodes, two of the root and one "
        f"below the first, give RRS 1 + {FIRST['JF68m']} + {SECOND} + {FIRST['JF68m']}^2 = "
        f"{1 + FIRST['JF68m'] + SECOND + FIRST['JF68m'] ** 2:.4f} by Tables 1 and 3, and Table 5 has "
        f"{small[1.0]['biSeq4'][0]} for biSeq4."
    )
    _table(found, "Table 6: a better one, ternary trees too", "JF160m", larger, found.drafter(FIRST["JF160m"]))
    if head is not None:
        of_head = HeadDrafter(head, lm.policy, lm.law, lm.vocab_size)
        _table(found, "Table 7: an EAGLE head", "EAGLE", cited(7), of_head)


def _table(found: Efficiencies, title: str, who: str, theirs: Cited, drafter: LMDrafter) -> None:
    columns = ["T", "tree", "drafted", *(f"{rule}, {whose}" for rule in RULES for whose in (who, "ours"))]
    table = found.artefact.report.table(f"{title}; tokens per step", columns, 2)
    as_printed = []
    for temperature, trees in theirs.items():
        for tree, figures in trees.items():
            asked = {rule: figure for rule, figure in zip(RULES, figures, strict=True) if figure is not None}
            ours = {rule: found.of(drafter, temperature, tree, rule) for rule in asked}
            cells: list[str | float | None] = []
            for rule in RULES:
                shown = f"{ours[rule][1].efficiency:.2f} ± {ours[rule][1].error:.2f}" if rule in ours else None
                cells += [asked.get(rule), shown]
            table.add(f"{temperature:g}", tree, ours[RULES[0]][0], *cells)
            as_printed.append(sorted(ours, key=lambda rule: ours[rule][1].efficiency) == list(ours))
    if isinstance(drafter, ShapedDrafter):
        table.notes.append(
            f"Our drafter's logits are multiplied by {power_of(drafter):.3f}, at which one draft at T = 1 is accepted "
            f"with probability {FIRST[who]}, as {who}'s in Table 3."
        )
    table.notes.append(
        f"Order rrs < rrsw < spechub, as in the paper, in {sum(as_printed)} of {len(as_printed)} rows. The paper's "
        "figures are of Llama2-7B on CNN articles, ours of the pair named above: only the order can be compared."
    )
