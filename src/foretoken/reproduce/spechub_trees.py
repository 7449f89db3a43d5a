"""Paper 000, Tables 5 to 7: tokens a step of RRS, RRSw and SpecHub on binary, ternary and binary Sequoia trees."""

from dataclasses import dataclass, field, replace

from foretoken.compare.child_acceptance import child_acceptance, continued
from foretoken.compare.tree_report import Sample, samples
from foretoken.compare.tree_runs import Cell, Course, run
from foretoken.core.policy import TreePolicy
from foretoken.draft.heads import HeadDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.engine import Engine
from foretoken.names import verifier_named
from foretoken.reproduce.run import Run
from foretoken.trees.sequoia import sequoia
from foretoken.trees.static import kary

RULES = ("rrs", "rrsw", "spechub")
# Citations: temperature -> tree -> tokens a step of RRS, RRSw, SpecHub. JF68m and JF160m drafting for Llama2-7B on CNN.
Cited = dict[float, dict[str, tuple[float | None, ...]]]
TABLE_5: Cited = {
    0.6: {
        "2^2": (1.5540, 1.5997, 1.6157),
        "2^3": (1.8482, 1.9685, 1.9863),
        "2^4": (2.0510, 2.1694, 2.2456),
        "2^5": (2.1385, 2.3149, 2.4031),
        "biSeq4": (1.7938, 1.8304, 1.8498),
        "biSeq8": (2.0361, 2.1540, 2.1542),
        "biSeq16": (2.1354, 2.2667, 2.2839),
        "biSeq32": (2.2452, 2.4198, 2.4353),
    },
    1.0: {
        "2^2": (1.5432, 1.5521, 1.5997),
        "2^3": (1.8384, 1.8790, 1.9832),
        "2^4": (1.9762, 2.0441, 2.2106),
        "2^5": (2.0694, 2.1383, 2.3104),
        "biSeq4": (1.7401, 1.7469, 1.8057),
        "biSeq8": (1.9522, 2.0063, 2.0667),
        "biSeq16": (2.0529, 2.1662, 2.2843),
        "biSeq32": (2.1197, 2.1604, 2.3445),
    },
}
TABLE_6: Cited = {
    0.6: {
        "2^2": (1.6340, 1.6677, 1.6861),
        "2^3": (2.0164, 2.1428, 2.1758),
        "2^4": (2.2829, 2.3695, 2.4841),
        "2^5": (2.3783, 2.6045, 2.7238),
        "3^2": (1.6626, 1.7349, None),
        "3^3": (2.1132, 2.2796, None),
        "3^4": (2.3976, 2.6819, None),
    },
    1.0: {
        "2^2": (1.6085, 1.6332, 1.6748),
        "2^3": (1.9599, 2.0539, 2.1362),
        "2^4": (2.2036, 2.2860, 2.4204),
        "2^5": (2.3153, 2.4181, 2.6624),
        "3^2": (1.6630, 1.6899, None),
        "3^3": (2.1050, 2.1659, None),
        "3^4": (2.3822, 2.4740, None),
    },
}
TABLE_7: Cited = {  # EAGLE
    0.6: {
        "2^2": (1.8211, 1.8687, 1.8825),
        "2^3": (2.4325, 2.5585, 2.5939),
        "2^4": (2.9125, 3.0899, 3.1192),
        "2^5": (3.2501, 3.4838, 3.5380),
    },
    1.0: {
        "2^2": (1.8054, 1.8327, 1.8655),
        "2^3": (2.3961, 2.4737, 2.4850),
        "2^4": (2.8425, 2.9019, 3.0281),
        "2^5": (3.1451, 3.2548, 3.3318),
    },
}
FIRST, SECOND = 0.4418, 0.1021  # citations: Tables 2 and 3, JF68m, T = 1, RRS
PROMPTS, TOKENS = (31, 32), (1, 4)  # whole, and with --quick


@dataclass
class Efficiencies:
    """Tokens a step of one pair, each case measured when it is asked for first."""

    artefact: Run
    engine: Engine
    course: Course
    done: dict[tuple[str, float, str, str], tuple[int, Sample]] = field(default_factory=dict)
    vectors: dict[tuple[str, float], list[float]] = field(default_factory=dict)

    def of(self, drafter: LMDrafter, temperature: float, tree: str, rule: str) -> tuple[int, Sample]:
        """(drafted nodes of the shape, tokens a step)."""
        key = (drafter.name, temperature, tree, rule)
        if key not in self.done:
            self.artefact.progress(f"{drafter.name}, temperature {temperature:g}, {tree}: {rule}")
            verifier = verifier_named(rule)
            policy = self._shape(tree, rule, temperature)
            made = replace(drafter, policy=policy, law=verifier.laws[0])
            nodes = policy.max_nodes - 1
            (sample,) = samples([run(Cell(temperature, nodes, rule, made, verifier), self.course)]).values()
            self.done[key] = nodes, sample
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
    _table(found, "Table 5: a small language model", "JF68m", TABLE_5, lm)
    artefact.report.tables[-1].notes.append(
        "2^d has 2^d - 1 nodes with the root. biSeqN counts the root too: three drafted nodes, two of the root and one "
        f"below the first, give RRS 1 + {FIRST} + {SECOND} + {FIRST}^2 = {1 + FIRST + SECOND + FIRST**2:.4f} by Tables "
        f"2 and 3, and Table 5 has {TABLE_5[1.0]['biSeq4'][0]} for biSeq4."
    )
    _table(found, "Table 6: with ternary trees, the same drafter of ours", "JF160m", TABLE_6, lm)
    if head is not None:
        _table(found, "Table 7: an EAGLE head", "EAGLE", TABLE_7, HeadDrafter(head, lm.policy, lm.law, lm.vocab_size))


def _table(found: Efficiencies, title: str, who: str, cited: Cited, drafter: LMDrafter) -> None:
    columns = ["T", "tree", "drafted", *(f"{rule}, {whose}" for rule in RULES for whose in (who, "ours"))]
    table = found.artefact.report.table(f"{title}; tokens a step", columns, 2)
    as_printed = []
    for temperature, trees in cited.items():
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
