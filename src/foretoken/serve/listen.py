"""The socket of a server, bound before a model is loaded, so that a port that is taken is reported at once."""

import socket

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
        made.bind((host, port))
    except (OSError, TypeError) as error:  # the latter for a name that no network has
        made.close()
        raise _refusal(host, port, error) from error
    return made


def listen(made: socket.socket) -> None:
    """Begin to listen.

    made: a bound socket.
    Raises ForetokenError where another server, which was bound to its port too, listens already.
    """
    host, port = made.getsockname()[:2]
    try:
        made.listen()
    except OSError as error:
        raise _refusal(host, port, error) from error


def address(listening: socket.socket) -> str:
    """Return the URL at which a browser reaches the socket `listening`."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refusal(host: str, port: int, error: Exception) -> ForetokenError:
    """Return what is said where the system refuses an address; host, port: the address. error: why it does."""
    why = getattr(error, "strerror", None) or error
    return ForetokenError(f"Cannot listen on {host} port {port}: {why}. Choose another --host or --port.")
