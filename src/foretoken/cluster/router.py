"""The choice of a request's replica: that of its session while it has room, else the one with the fewest requests."""

from hashlib import sha256
from random import sample

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    RequestRouter,
    RunningReplica,
)


class Sticky(RequestRouter):
    """Sends requests of one session to the same replica, whose prefix cache holds what they begin with.

    The replica of a session is the one for which the digest of both names is largest. So every proxy finds the same
    one, and a replica that comes or goes changes the replica of its own sessions only.
    """

    def initialize_state(self, busy: int) -> None:
        """Set up the router.

        busy: number of requests under way at which a replica is full: requests of its sessions then go to any.
        """
        self.busy = busy

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas that Ray tries, in groups; of a group it takes the one with the fewest requests.

        candidate_replicas: the replicas that run.
        pending_request: the request that needs a replica; None where Ray asks for no particular one.
        """
        mixed = sample(candidate_replicas, len(candidate_replicas))  # of equally busy ones, Ray takes the first
        if pending_request is None:
            return [mixed]
        pending_request.routing_context.should_backoff = True  # Ray waits between rounds
        session = pending_request.metadata.session_id
        if not session or not mixed:
            return [mixed]
        own = max(mixed, key=lambda each: sha256(f"{session} {each.replica_id.unique_id}".encode()).digest())
        full = (self.replica_queue_len_cache.get(own.replica_id) or 0) >= self.busy
        return [mixed] if full else [[own], mixed]
