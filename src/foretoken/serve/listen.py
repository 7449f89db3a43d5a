"""The socket of a server, bound before a model is loaded, so that a port that is taken is reported at once."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from foretoken.core.errors import ForetokenError


def bound(host: str, port: int) -> socket.socket:
    """Return a socket with this address, which does not listen yet.

    host: the address, IPv4 or IPv6, or a name.
    port: the port; 0 takes a free one.
    Raises ForetokenError where the address is taken or cannot be used.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with _refusing(host, port):
            made.bind((host, port))
    except ForetokenError:
        made.close()
        raise
    return made


def listen(made: socket.socket) -> None:
    """Begin to listen.

    made: a bound socket.
    Raises ForetokenError where another server, which was bound to its port too, listens already.
    """
    host, port = made.getsockname()[:2]
    with _refusing(host, port):
        made.listen()


def address(listening: socket.socket) -> str:
    """Return the URL at which a browser reaches the socket `listening`."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _refusing(host: str, port: int) -> Iterator[None]:
    """Turn errors of the system, or a TypeError for a name that no network has, into a ForetokenError.

    host, port: the address, for the error's sentence.
    """
    try:
        yield
    except (OSError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ForetokenError(f"Cannot listen on {host} port {port}: {why}. Choose another --host or --port.") from error
