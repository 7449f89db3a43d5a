"""The verification rules by name. A new rule is one file and one line here; the enumeration test picks it up."""

from typing import TYPE_CHECKING

from foretoken.core.lazy import Lazy

if TYPE_CHECKING:
    from foretoken.core.verifier import Verifier

VERIFIERS: "Lazy[Verifier]" = Lazy(
    {
        "exact-match": "verify.match:ExactMatch",
        "standard": "verify.rejection:Standard",
        "rrs": "verify.rejection:RRS",
        "rrsw": "verify.rejection:RRSw",
        "kseq": "verify.kseq:KSeq",
        "hub": "verify.hub:HubRule",
        "spechub": "verify.hub:SpecHub",
        "block": "verify.block:Block",
        "string-rejection": "verify.strings:StringRejection",
        "randomised": "verify.randomised:Randomised",
        "transport": "verify.exact_transport:Transport",
        "transport-grouped": "verify.exact_transport:TransportGrouped",
        "block-transport": "verify.block:block_transport",
        "block-rrsw": "verify.block:block_rrsw",
        "ot-lp": "verify.published.solvers:LinearProgram",
        "ot-maxflow": "verify.published.solvers:MaxFlow",
        "ot-maxflow-optimised": "verify.published.solvers:OptimisedMaxFlow",
        "canonical": "verify.published.solvers:Canonical",
        "global-resolution": "verify.published.global_resolution:GlobalResolution",
        "global-resolution-thinned": "verify.published.global_resolution:ThinnedGlobalResolution",
    },
    make=lambda rule: rule(),
)
