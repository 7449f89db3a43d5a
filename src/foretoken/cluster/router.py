"""Which replica a request goes to: that of its session while it has room, else the one with the fewest requests."""

from hashlib import sha256
from random import sample

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    RequestRouter,
    RunningReplica,
)


class Sticky(RequestRouter):
    """Requests with the same session go to the same replica, whose prefix cache holds what they begin with.

    The replica of a session is the one with the largest digest of both names, so that every proxy finds the same one
    and a replica that comes or goes takes only its own sessions along.
    """

    def initialize_state(self, busy: int) -> None:
        """busy: requests under way at which a replica takes no more for a session's sake."""
        self.busy = busy

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas that Ray tries, in groups; of a group it takes the one with the fewest requests."""
        mixed = sample(candidate_replicas, len(candidate_replicas))  # of equals the first is taken
        if pending_request is None:
            return [mixed]
        pending_request.routing_context.should_backoff = True  # between rounds in which no replica took it
        session = pending_request.metadata.session_id
        if not session or not mixed:
            return [mixed]
        own = max(mixed, key=lambda each: sha256(f"{session} {each.replica_id.unique_id}".encode()).digest())
        full = (self.replica_queue_len_cache.get(own.replica_id) or 0) >= self.busy
        return [mixed] if full else [[own], mixed]
