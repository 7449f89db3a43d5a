"""Sun et al. 2024, SpecHub, Tables 1 to 3: how often each of two drafts is accepted, by temperature."""

from benchmarks.papers.run import Run
from foretoken.core.laws import IID, Hub, Law, WithoutReplacement
from foretoken.measure.child_acceptance import sampled
from foretoken.verify import VERIFIERS

DRAWS, QUICK_DRAWS = 32, 4
RULES: dict[str, Law] = {"rrs": IID(2), "rrsw": WithoutReplacement(2), "spechub": Hub(2)}
# Citations: temperature -> rule -> (drafter JF68m, drafter JF160m).
SECOND = {
    0.3: {"rrs": (0.0426, 0.0399), "rrsw": (0.1114, 0.1129), "spechub": (0.1184, 0.1221)},
    0.6: {"rrs": (0.074, 0.073), "rrsw": (0.1089, 0.1212), "spechub": (0.1379, 0.1351)},
    1.0: {"rrs": (0.1021, 0.091), "rrsw": (0.114, 0.1176), "spechub": (0.166, 0.166)},
}
FIRST = {
    0.3: {"rrsw": (0.4498, 0.5465), "spechub": (0.4921, 0.5578)},
    0.6: {"rrsw": (0.4821, 0.5587), "spechub": (0.4842, 0.5632)},
    1.0: {"rrsw": (0.4418, 0.5257), "spechub": (0.4248, 0.5130)},
}
BINARY_TREE_RRS = 1.5432  # citation: Table 5, JF68m, CNN, T = 1, tree 2^2


def spechub_drafts(run: Run) -> None:
    scored = run.scored()
    columns = [
        "T",
        "rule",
        *(f"{draft}, {who}" for draft in ("first", "second") for who in ("JF68m", "JF160m", "ours")),
    ]
    table = run.report.table(
        "Tables 1-3: P(a draft is accepted); paper: drafters JF68m and JF160m", [*columns, "second, if not the first"]
    )
    order = []
    for temperature, second in SECOND.items():
        p, q = scored.rows(temperature)
        ours = {}
        for name, law in RULES.items():
            run.progress(f"temperature {temperature:g}: {name}")
            mass = sampled(VERIFIERS[name], law, p, q, run.count(DRAWS, QUICK_DRAWS), run.seed).mean((0, 1)).tolist()
            ours[name] = mass[1]
            table.add(
                f"{temperature:g}",
                name,
                *FIRST[temperature].get(name, (None, None)),
                mass[0],
                *second[name],
                mass[1],
                mass[1] / (1 - mass[0]) if mass[0] < 1 else None,
            )
        order.append(f"T = {temperature:g}: " + " < ".join(sorted(ours, key=lambda name: ours[name])))
    table.notes += [
        "Paper: rrs < rrsw < spechub in the second draft at every temperature. Ours: " + "; ".join(order) + ".",
        "The paper's figures are of Llama2-7B on CNN articles; ours of the pair named above, teacher-forced, rows "
        f"averaged over {run.count(DRAWS, QUICK_DRAWS)} sampled draws a position. Only the order can be compared.",
        "First and second are shares of all positions and add up: Table 5 gives RRS on one root with two children "
        f"(2^2, CNN, T = 1) {BINARY_TREE_RRS} tokens per step, and 1 + {FIRST[1.0]['rrsw'][0]} + "
        f"{SECOND[1.0]['rrs'][0]} = {1 + FIRST[1.0]['rrsw'][0] + SECOND[1.0]['rrs'][0]:.4f}. "
        "The first draft of RRS is that of RRSw.",
        "Table 3 at T = 0.3 and 0.6 is impossible as a mean over the same contexts: SpecHub's first draft has law q, "
        "so it is accepted at most with the sum of min(p, q), which RRSw's attains.",
    ]
