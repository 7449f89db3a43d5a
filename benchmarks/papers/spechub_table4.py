"""Sun et al. 2024, SpecHub, Table 4 (appendix E): acceptance on toy distributions, 50 tokens, two drafts."""

from collections.abc import Callable

from torch import Tensor

from benchmarks.pairs import toy_rows
from benchmarks.papers.run import Run
from foretoken.core.laws import IID, Hub, WithoutReplacement
from foretoken.measure.child_acceptance import sampled
from foretoken.verify import VERIFIERS
from foretoken.verify.acceptance import acceptance, alpha_star

V, PAIRS, QUICK_PAIRS, DRAWS = 50, 100, 10, 100
# Citations: (temperature, similarity) -> RRS, RRSw, OTM, OTMw, SpecHub.
TABLE_4 = {
    (0.1, 0.7): (0.6273, 0.7120, 0.6380, 0.7345, 0.7402),
    (0.1, 0.5): (0.3323, 0.4057, 0.3346, 0.4125, 0.4123),
    (0.25, 0.7): (0.7354, 0.7653, 0.7846, 0.8321, 0.8113),
    (0.25, 0.5): (0.4564, 0.4978, 0.4743, 0.5245, 0.4968),
    (0.5, 0.7): (0.8090, 0.8122, 0.9037, 0.9150, 0.8500),
    (0.5, 0.5): (0.6456, 0.6593, 0.7052, 0.7206, 0.6403),
}


def rrsw(p: Tensor, q: Tensor, seed: int) -> Tensor:
    return sampled(VERIFIERS["rrsw"], WithoutReplacement(2), p, q, DRAWS, seed).sum(2).mean(1)


METHODS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "RRS": lambda p, q, _: acceptance("rrs", IID(2), p, q),
    "RRSw": rrsw,
    "OTM": lambda p, q, _: alpha_star(IID(2), p, q),
    "OTMw": lambda p, q, _: acceptance("ot-maxflow", WithoutReplacement(2), p, q),
    "SpecHub": lambda p, q, _: acceptance("spechub", Hub(2), p, q),
}


def spechub_table4(run: Run) -> None:
    num_pairs = run.count(PAIRS, QUICK_PAIRS)
    columns = ["T", "similarity", "method", "paper", "ours, normal logits", "standard error", "ours, uniform logits"]
    table = run.report.table("Table 4: acceptance, 50 tokens, two drafts", columns)
    off = {"normal": [], "uniform": []}
    for (temperature, similarity), printed in TABLE_4.items():
        run.progress(f"temperature {temperature:g}, similarity {similarity:g}")
        rows = {
            name: toy_rows(num_pairs, V, temperature, similarity, run.seed, normal=name == "normal") for name in off
        }
        for (name, method), paper in zip(METHODS.items(), printed, strict=True):
            found = {logits: method(p, q, run.seed) for logits, (p, q) in rows.items()}
            means = {logits: float(values.mean()) for logits, values in found.items()}
            error = float(found["normal"].std()) / num_pairs**0.5
            table.add(f"{temperature:g}", f"{similarity:g}", name, paper, means["normal"], error, means["uniform"])
            for logits, mean in means.items():
                off[logits].append(abs(mean - paper))
    average = {logits: sum(values) / len(values) for logits, values in off.items()}
    table.notes += [
        f"The text says uniform logits in [0, 1). They do not give the table: {average['uniform']:.3f} away from it on "
        f"average, standard normal ones {average['normal']:.3f} (the standard error of a mean is shown).",
        f"{num_pairs} pairs (paper: 100). RRSw: over {DRAWS} sampled draws a pair; OTMw: by max-flow; all others in "
        "closed form.",
    ]
