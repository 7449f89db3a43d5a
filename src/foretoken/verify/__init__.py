"""The verification rules by name. A new rule is one file and one line here; the enumeration test picks it up."""

from typing import TYPE_CHECKING

from foretoken.core.lazy import Lazy

if TYPE_CHECKING:
    from foretoken.core.verifier import Verifier

# name -> (module and attribute of the rule, its description in the tables of docs/)
RULES = {
    "exact-match": (
        "verify.match:ExactMatch",
        "takes the target's own token, and descends where a child carries it; the best for `opaque` children; no cost",
    ),
    "standard": ("verify.rejection:Standard", "one draw: accepts sum min(p, q), the optimum; O(V)"),
    "rrs": ("verify.rejection:RRS", "recursive rejection sampling, draw after draw; O(kV)"),
    "rrsw": ("verify.rejection:RRSw", "recursive rejection sampling where q loses each rejected draw; O(kV)"),
    "kseq": ("verify.kseq:KSeq", "tests k draws alike: at least 1 - 1/e of the optimum; O(V) per Newton step"),
    "hub": ("verify.hub:HubRule", "the optimum of the hub law, for any k; O(V)"),
    "spechub": ("verify.hub:SpecHub", "the optimum of the hub law for k = 2, as published; O(V)"),
    "block": ("verify.block:Block", "chains, one draw per node: jointly over a path, the optimum; O(V) per node"),
    "string-rejection": (
        "verify.strings:StringRejection",
        "drafters that price their own draws: `--vocab slrs` and `union`; O(V)",
    ),
    "randomised": (
        "verify.randomised:Randomised",
        "at most one draw, made with a probability: `--draft-probability` on chains; O(V)",
    ),
    "pairwise": ("verify.pairwise:Pairwise", "two draws without replacement, near the optimum; O(V)"),
    "transport": (
        "verify.exact_transport:Transport",
        "the optimum for any number of draws, fixed or random; O(V log V)",
    ),
    "transport-grouped": ("verify.exact_transport:TransportGrouped", "within a proven gap of the optimum; O(V)"),
    "block-transport": ("verify.block:block_transport", "`transport`, jointly over all paths of a tree"),
    "block-pairwise": ("verify.block:block_pairwise", "`pairwise`, jointly over all paths of a tree"),
    "traversal": ("verify.block:traversal", "`rrsw` jointly over all paths of a tree, from leaf to root"),
    "gbv": ("verify.multipath:GreedyMultipath", "chooses one of K i.i.d. paths by p/q, then `block` on it"),
    "ot-lp": (
        "verify.published.solvers:LinearProgram",
        "the optimum by a linear program; few tokens (top-k), up to 300,000 draw sets",
    ),
    "ot-maxflow": (
        "verify.published.solvers:MaxFlow",
        "the optimum by one maximal flow; few tokens (top-k), up to 300,000 draw sets",
    ),
    "ot-maxflow-optimised": (
        "verify.published.solvers:OptimisedMaxFlow",
        "the optimum by two smaller flows; few tokens (top-k), up to 300,000 draw sets",
    ),
    "canonical": (
        "verify.published.solvers:Canonical",
        "the optimum by canonical decomposition; few tokens (top-k), up to 300,000 draw sets",
    ),
    "global-resolution": (
        "verify.published.global_resolution:GlobalResolution",
        "APPROXIMATE, as published: no engine takes it; milliseconds, or gives up",
    ),
    "global-resolution-thinned": (
        "verify.published.global_resolution:ThinnedGlobalResolution",
        "near the optimum, exactly lossless; few tokens (top-k); milliseconds",
    ),
}
VERIFIERS: "Lazy[Verifier]" = Lazy({name: home for name, (home, _) in RULES.items()}, make=lambda rule: rule())
