"""Decoding step by step, so that single steps can be counted and timed."""

from collections.abc import Sequence

from foretoken.core.interfaces import Drafter
from foretoken.core.sequence import Sequence as Running
from foretoken.core.verifier import Verifier
from foretoken.decode import Decoder
from foretoken.models.target import LMTarget, LMTargetSession


def opened(target: LMTarget, drafter: Drafter, verifier: Verifier, sequences: Sequence[Running], slots: int) -> Decoder:
    """A decoder whose target has read the prompts of all sequences, so that steps alone are left to be timed."""
    decoder = Decoder(target, drafter, verifier, len(sequences), slots)
    for sequence in sequences:
        decoder.join(sequence)
    assert isinstance(decoder.target, LMTargetSession)
    decoder.target.catch_up(decoder.sequences)
    return decoder
