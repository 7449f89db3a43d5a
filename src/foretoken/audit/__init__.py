"""The audit: exact enumeration of every rule and of whole decodings, then tests on the given models."""

from collections.abc import Callable

from foretoken.audit import bits, decoding, models
from foretoken.audit import enumerate as exact
from foretoken.audit.report import APPROXIMATE, FAILED, OK, WEAK, AuditReport, Check, Section, verdict
from foretoken.audit.wrong import EachAlone, PeekingDrafter
from foretoken.core.laws import IID
from foretoken.core.limits import check_audited
from foretoken.core.verifier import Approximate, Verifier
from foretoken.decode import DraftFailedWarning
from foretoken.engine import Engine
from foretoken.verify import VERIFIERS


def run(
    engine: Engine | None, *, temperature: float, samples: int, seed: int, progress: Callable[[str], None]
) -> AuditReport:
    """Audit every rule exactly, and an engine on its own models.

    engine: what is audited; None for the rules alone.
    temperature: of the sampled text.
    samples: the number of texts that are sampled for the test of their distribution.
    seed: of everything random.
    progress: shows what is done now.

    Raises ForetokenError for a temperature or a number of samples that cannot be audited.
    """
    rules = list(VERIFIERS.values())
    if engine is not None:
        check_audited(temperature, samples)
        if engine.verifier not in rules:
            rules.append(engine.verifier)
    sections = [one_node(rules, seed, progress), whole_decodings(rules, seed, progress)]
    if engine is None:
        return AuditReport({}, tuple(sections))
    try:
        progress("tree scores")
        sections.append(models.tree_scores(engine, seed))
        progress("bit for bit")
        sections.append(bits.bit_exact(engine.target.lm, models.prompts(engine, seed), seed))
        progress("greedy text")
        sections.append(models.greedy(engine, seed))
        sections.append(models.sampled(engine, temperature, samples, seed, progress))
    except DraftFailedWarning as error:
        sections.append(Section("Drafter", "It must not fail.", (Check("drafter", FAILED, str(error)),)))
    subject = {
        "target": engine.target.name,
        "drafter": engine.drafter.name,
        "verifier": engine.verifier.name,
        "tree": engine.tree,
        "dtype": str(engine.target.lm.dtype).removeprefix("torch."),
        "device": str(engine.target.lm.device),
        "seed": seed,
    }
    return AuditReport(subject, tuple(sections))


def one_node(rules: list[Verifier], seed: int, progress: Callable[[str], None]) -> Section:
    """Check every rule at one node by exact enumeration, and that a wrong rule is caught.

    rules: what is checked.
    seed: of the random distributions.
    progress: shows which rule is enumerated.
    """
    pairs = exact.all_pairs(seed)
    checks = []
    for rule in rules:
        progress(f"enumerating {rule.name} at one node")
        lossless = exact.laws_of(rule)
        measured = [exact.measure(rule, law, pairs) for law in lossless]
        worst = max(m.worst for m in measured)
        laws = exact.laws_text(lossless)
        detail = f"worst {worst:.1e}; laws {laws}"
        outcome = verdict(all(m.exact for m in measured))
        if isinstance(rule, Approximate):
            outcome = APPROXIMATE if outcome == OK else outcome
            detail = f"NOT lossless: worst {worst:.1e}, at most {rule.tolerance:g} by design; laws {laws}"
        checks.append(Check(rule.name, outcome, detail, {"worst": worst}))
    wrong = exact.measure(EachAlone(), IID(2), exact.all_pairs(seed, most=3))
    checks.append(
        Check("known-wrong rule", verdict(not wrong.exact), f"caught, off by {wrong.worst:.2f}", {"worst": wrong.worst})
    )
    method = (
        f"Sum over all draws of P(draws) * row = p, for {len(pairs)} pairs p, q with up to 5 tokens (zeros, one-hots,\n"
        f"p = q, disjoint supports): largest deviation of a probability, at most {exact.TOLERANCE:g}."
    )
    return Section("Rules, enumerated exactly", method, tuple(checks))


def whole_decodings(rules: list[Verifier], seed: int, progress: Callable[[str], None]) -> Section:
    """Check whole decodings with every rule by exact enumeration, and that a wrong rule and drafter are caught.

    rules, seed, progress: as in `one_node`; approximate rules are left out.
    """
    checks = []
    for rule in rules:
        if isinstance(rule, Approximate):
            continue
        progress(f"enumerating whole decodings with {rule.name}")
        measured = [decoding.measure(rule, family, shape, seed) for family, shape in decoding.cases(rule)]
        worst = max(m.worst for m in measured)
        trees = ", ".join(sorted({m.tree.partition(":")[0] for m in measured}))
        detail = f"worst {worst:.1e}; {len(measured)} pairs of a law and a tree ({trees})"
        outcome = verdict(worst <= exact.TOLERANCE)
        untested = sorted({m.tree for m in measured if m.accepted == 0})
        if untested:
            outcome = WEAK if outcome == OK else outcome
            detail += f"; no draft token was ever accepted with {', '.join(untested)}"
        checks.append(Check(rule.name, outcome, detail, {"worst": worst, "num_pairs": len(measured)}))
    wrong = {
        "known-wrong rule": decoding.measure(EachAlone(), IID, decoding.SHAPES[1], seed),
        "peeking drafter": decoding.measure(VERIFIERS["rrs"], IID, decoding.SHAPES[0], seed, around=PeekingDrafter),
    }
    checks += [
        Check(name, verdict(not found.exact), f"caught, off by {found.worst:.2g}", {"worst": found.worst})
        for name, found in wrong.items()
    ]
    method = (
        "Every outcome of every draw through the real drafter, trees, walk and decoder, on table models: the law\n"
        f"of the next 3 tokens against the target's own, at most {exact.TOLERANCE:g} apart."
    )
    return Section("Whole decodings, enumerated exactly", method, tuple(checks))
