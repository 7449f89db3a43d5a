"""The verification rules by name. A new rule is one file and one line here; the enumeration test picks it up."""

from foretoken.core.verifier import Verifier
from foretoken.verify.block import Block
from foretoken.verify.hub import HubRule, SpecHub
from foretoken.verify.kseq import KSeq
from foretoken.verify.match import ExactMatch
from foretoken.verify.randomised import Randomised
from foretoken.verify.rejection import RRS, RRSw, Standard
from foretoken.verify.strings import StringRejection
from foretoken.verify.transport.canonical import Canonical
from foretoken.verify.transport.exact import Transport
from foretoken.verify.transport.global_resolution import GlobalResolution, ThinnedGlobalResolution
from foretoken.verify.transport.grouped import TransportGrouped
from foretoken.verify.transport.lp import LinearProgram
from foretoken.verify.transport.maxflow import MaxFlow, OptimisedMaxFlow
from foretoken.verify.tree_block import TreeBlock

_RULES: tuple[Verifier, ...] = (
    *(ExactMatch(), Standard(), RRS(), RRSw(), KSeq(), HubRule(), SpecHub(), Block(), StringRejection(), Randomised()),
    *(Transport(), TransportGrouped(), TreeBlock("block-transport", Transport()), TreeBlock("block-rrsw", RRSw())),
    *(LinearProgram(), MaxFlow(), OptimisedMaxFlow(), Canonical(), GlobalResolution(), ThinnedGlobalResolution()),
)
VERIFIERS: dict[str, Verifier] = {rule.name: rule for rule in _RULES}
