"""A page for the browser that shows what every step of a decoding drafted, accepted and corrected."""

from foretoken.trace.record import Trace

__all__ = ["Trace"]
