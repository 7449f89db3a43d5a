"""What every step of a decoding drafted, accepted and corrected, as a page for the browser."""

from foretoken.trace.record import Trace

__all__ = ["Trace"]
