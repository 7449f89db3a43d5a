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
        "transport": "verify.transport.exact:Transport",
        "transport-grouped": "verify.transport.grouped:TransportGrouped",
        "block-transport": "verify.block:block_transport",
        "block-rrsw": "verify.block:block_rrsw",
        "ot-lp": "verify.transport.lp:LinearProgram",
        "ot-maxflow": "verify.transport.maxflow:MaxFlow",
        "ot-maxflow-optimised": "verify.transport.maxflow:OptimisedMaxFlow",
        "canonical": "verify.transport.canonical:Canonical",
        "global-resolution": "verify.transport.global_resolution:GlobalResolution",
        "global-resolution-thinned": "verify.transport.global_resolution:ThinnedGlobalResolution",
    },
    make=lambda rule: rule(),
)
