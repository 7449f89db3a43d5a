"""Sun et al. 2024, SpecHub, Tables 5 to 7: tokens per step of RRS, RRSw and SpecHub on three kinds of trees.

Its figures stand in spechub_trees.csv: JF68m, JF160m and EAGLE drafting for Llama2-7B on CNN.
"""

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.papers.run import Run
from benchmarks.papers.steps import Course, Sample, run
from foretoken.core.policy import TreePolicy
from foretoken.draft.heads import HeadDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.measure.child_acceptance import child_acceptance, continued
from foretoken.names import verifier_named
from foretoken.trees.sequoia import sequoia
from foretoken.trees.static import kary

RULES = ("rrs", "rrsw", "spechub")
# temperature -> tree -> tokens per step of RULES
Cited = dict[float, dict[str, tuple[float | None, ...]]]
FIRST, SECOND = 0.4418, 0.1021  # citations: Tables 2 and 3, JF68m, T = 1, RRS
PROMPTS, TOKENS = (31, 32), (1, 4)  # whole, and with --quick


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
    """Tokens per step of one pair, each case measured when it is asked for first."""

    artefact: Run
    engine: Engine
    course: Course
    done: dict[tuple[str, float, str, str], tuple[int, Sample]] = field(default_factory=dict)
    vectors: dict[tuple[str, float], list[float]] = field(default_factory=dict)

    def of(self, drafter: LMDrafter, temperature: float, tree: str, rule: str) -> tuple[int, Sample]:
        """(drafted nodes of the shape, tokens per step)."""
        key = (drafter.name, temperature, tree, rule)
        if key not in self.done:
            self.artefact.progress(f"{drafter.name}, temperature {temperature:g}, {tree}: {rule}")
            verifier = verifier_named(rule)
            policy = self._shape(tree, rule, temperature)
            made = replace(drafter, policy=policy, law=verifier.laws[0])
            self.done[key] = policy.max_nodes - 1, run(made, verifier, temperature, self.course)
        return self.done[key]

    def _shape(self, tree: str, rule: str, temperature: float) -> TreePolicy:
        """K^d: k-ary with d levels, the root's own counted. biSeqN: the best binary tree of N nodes with the root."""
        if tree.startswith("biSeq"):
            return sequoia(self._vector(rule, temperature), int(tree.removeprefix("biSeq")) - 1)
        k, _, depth = tree.partition("^")
        return kary(int(k), int(depth) - 1)

    def _vector(self, rule: str, temperature: float) -> list[float]:
        """Acceptance of two children, of the drafter LM."""
        if (rule, temperature) not in self.vectors:
            course, verifier = self.course, verifier_named(rule)
            text = continued(self.engine, course.prompts, course.num_tokens, temperature, course.seed)
            found = child_acceptance(verifier, verifier.laws[0], 2, text, temperature, course.seed)
            self.vectors[rule, temperature] = list(found.acceptance)
        return self.vectors[rule, temperature]


def spechub_trees(artefact: Run) -> None:
    engine, prompts = artefact.pair()
    prompts = prompts[: artefact.count(PROMPTS[0], TOKENS[0])]
    course = Course(engine.target, prompts, artefact.count(PROMPTS[1], TOKENS[1]), seed=artefact.seed)
    found = Efficiencies(artefact, engine, course)
    lm, head = engine.drafter, artefact.head()
    assert isinstance(lm, LMDrafter)
    small = cited(5)
    _table(found, "Table 5: a small language model", "JF68m", small, lm)
    artefact.report.tables[-1].notes.append(
        "2^d has 2^d - 1 nodes with the root. biSeqN counts the root too: three drafted nodes, two of the root and one "
        f"below the first, give RRS 1 + {FIRST} + {SECOND} + {FIRST}^2 = {1 + FIRST + SECOND + FIRST**2:.4f} by Tables "
        f"2 and 3, and Table 5 has {small[1.0]['biSeq4'][0]} for biSeq4."
    )
    _table(found, "Table 6: with ternary trees, the same drafter of ours", "JF160m", cited(6), lm)
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
    table.notes.append(
        f"Order rrs < rrsw < spechub, as in the paper, in {sum(as_printed)} of {len(as_printed)} rows. The paper's "
        "figures are of Llama2-7B on CNN articles, ours of the pair named above: only the order can be compared."
    )
