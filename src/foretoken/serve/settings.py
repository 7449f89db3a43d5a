"""How the server is reached and what it lets in: read without torch and without FastAPI."""

import os
import re
from dataclasses import dataclass, field

from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_choice, check_counts
from foretoken.core.messages import check_text

DAY = 86_400  # seconds
LOGS = ("text", "json")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
KEYS = "FORETOKEN_API_KEY"  # environment variable: keys, separated by commas


@dataclass(frozen=True)
class Settings:
    """host: Address to listen on; 0.0.0.0 is every address of this machine.
    port: Port to listen on; 0 takes a free one.
    api_key: Key that clients must send as a bearer token; may be repeated. Default: the keys in FORETOKEN_API_KEY,
    separated by commas; where there are none, nobody is asked for one.
    allow_origin: Site whose pages may use the server from a browser, as https://app.example; may be repeated.
    name: Name of the model as clients see it. Default: the last part of the target's name.
    max_batch: Most texts that are decoded side by side.
    max_queue: Most texts that wait; a request above it gets 429.
    context: Most tokens of one text, its prompt included. Default: the model's own.
    max_body: Largest body of a request, in bytes.
    timeout: Seconds after which a request is ended.
    drain: Seconds that running requests have to end in, once the server is asked to stop.
    log: How requests are logged on stderr, without their texts: text, or json for one JSON object a line.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: list[str] | None = field(default=None, repr=False)
    allow_origin: list[str] | None = None
    name: str | None = None
    max_batch: int = 8
    max_queue: int = 64
    context: int | None = None
    max_body: int = 4_000_000
    timeout: float = 600.0
    drain: float = 30.0
    log: str = "text"

    def __post_init__(self) -> None:
        check_counts(max_batch=self.max_batch, context=self.context, max_body=self.max_body)
        if not 0 <= self.port <= 65535:
            raise ForetokenError(f"port is {self.port}: it must be in 0..65535.")
        if self.max_queue < 0:
            raise ForetokenError(f"max_queue is {self.max_queue}: it must be 0 or more.")
        if not self.timeout > 0:
            raise ForetokenError(f"timeout is {self.timeout}: it must be above 0 seconds.")
        if not 0 <= self.drain <= DAY:
            raise ForetokenError(f"drain is {self.drain}: it must be 0 to {DAY} seconds, a day.")
        if not self.host:
            raise ForetokenError("host is empty: name an address of this machine, or 0.0.0.0 for all of them.")
        check_choice("log", self.log, LOGS)
        check_text(self.name or "", "name")
        for origin in self.allow_origin or ():
            if not ORIGIN.fullmatch(origin):
                raise ForetokenError(f"allow_origin has {origin}: give a site as https://app.example, without a path.")
        if not all(self.keys):
            raise ForetokenError("An api key is empty: give one character or more, or leave it out.")
        if self.api_key is None and KEYS in os.environ and not self.keys:
            raise ForetokenError(f"{KEYS} is set and holds no key: give keys separated by commas, or unset it.")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are accepted; none where nobody is asked for one. Options come before the environment."""
        if self.api_key is not None:
            return tuple(self.api_key)
        return tuple(key.strip() for key in os.environ.get(KEYS, "").split(",") if key.strip())
