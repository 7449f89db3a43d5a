"""Thomas and Pal 2025, Figures 1 to 4: optimal acceptance by number of drafts n, q cut to its likeliest tokens."""

from benchmarks.pairs import truncate
from benchmarks.papers.global_resolution_times import TARGET_TEMPERATURES, by_temperature
from benchmarks.papers.run import Run
from foretoken.core.laws import IID, Hub
from foretoken.verify.acceptance import acceptance, alpha_star

DRAWS = (1, 2, 3, 4, 5, 6, 8, 10, 16)
TOPS = (10, 100, 1000)
# The stored text of the paper has no figure. Inferred citations (Llama-3 70B/8B, Gemma-2 27B/2B), from Table 2 and the
# times of Tables 1 and 3: under 10 ms the linear program solves (10, 2) alone; max-flow also (10, 3).
INFERRED = {(10, 2): (0.8253, 0.7903), (10, 3): (0.8394, 0.8069)}


def figure1(run: Run) -> None:
    """Figures 1 to 3: both models at temperature 1; i.i.d. drafts, and the greedy construction (our hub law)."""
    p, q = run.scored().rows(1.0)
    tops = (*TOPS, p.shape[1])
    columns = ["law", "top tokens of q", *(f"n={n}" for n in DRAWS)]
    table = run.report.table("Figures 1-3: optimal acceptance against n, temperature 1", columns)
    for pair, name in enumerate(("paper, Llama-3", "paper, Gemma-2")):
        table.add(f"iid ({name})", "10", *(INFERRED[10, n][pair] if (10, n) in INFERRED else None for n in DRAWS))
    best: dict[str, list[float]] = {}
    for family in ("iid", "hub"):
        for top in tops:
            run.progress(f"{family}, top {top}")
            rows = truncate(p, q, top)
            means = [
                float((alpha_star(IID(n), *rows) if family == "iid" else acceptance("hub", Hub(n), *rows)).mean())
                for n in DRAWS
            ]
            table.add(family, str(top), *means)
            best[family] = means
    wins = [str(n) for n, iid, hub in zip(DRAWS, best["iid"], best["hub"], strict=True) if iid > hub]
    table.notes += [
        "Paper rows: the figure is a picture; these points follow from Table 2 with the times of Tables 1 and 3.",
        f"i.i.d. drafts beat the greedy ones here (all tokens) at n = {', '.join(wins) or 'none'}; the paper, "
        "appendix O: worse at small n, better above.",
    ]


def temperature(run: Run) -> None:
    """Figures 4 and 5: the target's temperature falls, the drafter's stays 1."""
    scored = run.scored()
    columns = ["target T", "top tokens of q", *(f"n={n}" for n in DRAWS)]
    table = run.report.table("Figure 4: optimal acceptance by the target's temperature, drafter at 1", columns)
    for t in TARGET_TEMPERATURES:
        p, q = scored.rows(t, draft_temperature=1.0)
        for top in (*TOPS, p.shape[1]):
            run.progress(f"target temperature {t:g}, top {top}")
            rows = truncate(p, q, top)
            table.add(f"{t:g}", str(top), *(float(alpha_star(IID(n), *rows).mean()) for n in DRAWS))
    coldest = [row[2:] for row in table.rows if row[0] == f"{min(TARGET_TEMPERATURES):g}"]
    gain = max(float(full or 0) - float(ten or 0) for ten, full in zip(coldest[0], coldest[-1], strict=True))
    table.notes.append(
        f"Paper: at low temperature top-10 drafts lose hardly anything. Here the whole vocabulary gains at most "
        f"{gain:.3f} over top-10 at target T = {min(TARGET_TEMPERATURES):g}."
    )
    by_temperature(run)
