"""Sun et al. 2024, SpecHub, Figures 1, 6 and 7: efficiency by nodes and by temperature, acceptance by draft.

The stored text of the paper has no figures: the points that its tables give stand beside ours.
"""

from benchmarks.papers.run import Run
from benchmarks.papers.shaped import flattened_to
from benchmarks.papers.spechub_trees import FIRST, RULES, cited, measured
from foretoken.core.laws import IID, Law, WithoutReplacement
from foretoken.measure.child_acceptance import sampled
from foretoken.verify import VERIFIERS

DEPTHS, QUICK_DEPTHS = (2, 3, 4, 5), 2  # of Figure 1
TEMPERATURES, QUICK_TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0), 1  # of Figure 6
DEPTH, QUICK_DEPTH = 5, 2  # of its tree
NUM_DRAFTS = 10  # of Figure 7
DRAWS, QUICK_DRAWS = 8, 1


def figure1(artefact: Run) -> None:
    """Tokens per step by the nodes of a binary tree, temperature 1."""
    _curve(artefact, "Figure 1: tokens per step on binary trees, T = 1", [
        (1.0, depth) for depth in DEPTHS[: artefact.count(len(DEPTHS), QUICK_DEPTHS)]
    ])  # fmt: skip


def figure6(artefact: Run) -> None:
    """Tokens per step by temperature, on a binary tree of depth 5."""
    depth = artefact.count(DEPTH, QUICK_DEPTH)
    _curve(artefact, f"Figure 6: tokens per step by temperature, binary tree of depth {depth}", [
        (t, depth) for t in TEMPERATURES[: artefact.count(len(TEMPERATURES), QUICK_TEMPERATURES)]
    ])  # fmt: skip


def _curve(artefact: Run, title: str, points: list[tuple[float, int]]) -> None:
    """Fill a table with one row per (temperature, depth)."""
    found, printed = measured(artefact), cited(5)
    drafter = found.drafter(FIRST["JF68m"])
    columns = [
        "T",
        "tree",
        "nodes with the root",
        *(f"{rule}, {whose}" for rule in RULES for whose in ("JF68m", "ours")),
    ]
    table = artefact.report.table(title, columns, 2)
    for temperature, depth in points:
        tree = f"2^{depth}"
        figures = printed.get(temperature, {}).get(tree, (None,) * len(RULES))
        cells: list[str | float | None] = []
        for rule, figure in zip(RULES, figures, strict=True):
            _, sample = found.of(drafter, temperature, tree, rule)
            cells += [figure, f"{sample.efficiency:.2f} ± {sample.error:.2f}"]
        table.add(f"{temperature:g}", tree, str(2**depth - 1), *cells)
    table.notes.append(
        "Paper: JF68m for Llama2-7B on CNN articles, figures of Table 5. Ours: the pair named above, its drafter "
        f"flattened until one draft at T = 1 is accepted with probability {FIRST['JF68m']}, as JF68m's."
    )


def figure7(run: Run) -> None:
    """How often each of ten drafts is accepted, temperature 1."""
    p, q = run.scored().rows(1.0)
    q = flattened_to(p, q, FIRST["JF68m"])(q)
    laws: dict[str, Law] = {"rrs": IID(NUM_DRAFTS), "rrsw": WithoutReplacement(NUM_DRAFTS)}
    shares = {}
    for rule, law in laws.items():
        run.progress(rule)
        shares[rule] = sampled(VERIFIERS[rule], law, p, q, run.count(DRAWS, QUICK_DRAWS), run.seed).mean((0, 1))
    columns = ["draft", *(f"{rule}{what}" for rule in laws for what in ("", ", if none before"))]
    table = run.report.table("Figure 7: P(draft j is accepted), ten drafts, T = 1", columns)
    for j in range(NUM_DRAFTS):
        cells: list[str | float | None] = []
        for share in shares.values():
            cells += [float(share[j]), float(share[j] / (1 - share[:j].sum()))]
        table.add(str(j + 1), *cells)
    table.notes.append(
        "Paper: a picture, from which acceptance falls drastically after the first few drafts. Of independent draws a "
        "token that came before is not counted again. The drafter is flattened as for Figures 1 and 6."
    )
