"""The server in replicas behind Ray Serve:

    from ray import serve
    serve.run(replicas(partial(foretoken.load, "models/target", drafter="models/drafter"), Settings(), most=4))

Every replica is a process with an engine of its own. A request goes to one of them, and any of them would write the
same text for it.
"""

import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from foretoken.cluster import need
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts
from foretoken.serve.listen import address
from foretoken.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client import Metric
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from foretoken.engine import Engine
    from foretoken.serve.owner import Owner

NAME = "foretoken"  # of the deployment, and of the application that `foretoken serve --ray` runs
GONE_S = 60.0  # seconds after which a silent cluster counts as gone; Ray itself waits so long for its head
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # for Ray's own log; each request has a line in ours
log = logging.getLogger(__name__)


def unnamed(app: "ASGIApp") -> "ASGIApp":
    """Return `app` without X-Request-Id in its answers: Ray's proxy adds it to each, with the id of the request."""
    from starlette.datastructures import MutableHeaders

    async def answer(scope: "Scope", receive: "Receive", send: "Send") -> None:
        async def without(message: "Message") -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["X-Request-Id"]
            await send(message)

        await app(scope, receive, without)

    return answer


def replicas(
    load: "Callable[[], Engine]",
    settings: Settings,
    fewest: int = 1,
    most: int | None = None,
    num_cpus: int = 1,
    num_gpus: int = 0,
) -> Any:
    """Return the application that `ray.serve.run` takes.

    The number of replicas follows the requests under way: about `settings.max_batch` for each replica.

    load: returns a new engine; it is called once in every replica.
    settings: the server's options; its limits hold for each replica. Its address is not used: Ray's proxy listens.
    fewest, most: the smallest and the largest number of replicas; most None: always the fewest.
    num_cpus, num_gpus: number of cores and of GPUs that one replica takes.
    Raises ForetokenError where Ray is not installed, and for numbers of replicas that cannot be.
    """
    serve = need("ray.serve")
    most = fewest if most is None else most
    check_counts(fewest=fewest, most=most)
    if most < fewest:
        raise ForetokenError(f"The most replicas are {most}, and the fewest {fewest}: allow as many, or more.")
    from foretoken.cluster.router import Sticky

    settings = replace(settings, api_key=list(settings.keys))  # a replica's environment may have others

    def build() -> "FastAPI":
        """Return the app of one replica, in whose process it is called."""
        from starlette.routing import Route

        from foretoken.serve.owner import Owner
        from foretoken.serve.run import prepared

        owner = Owner()
        app = prepared(owner.submit(load).result(), settings, owner)
        app.add_middleware(unnamed)
        app.router.routes.insert(0, Route("/metrics", _metrics))
        return app

    class Replica:
        """What Ray asks of a replica, beside the app's answers."""

        app: "FastAPI"

        def check_health(self) -> None:
            """Raise RuntimeError where the model's thread has died; Ray then replaces the replica."""
            if self.app.state.service.worker.error is not None:
                raise RuntimeError("The thread that runs the model has died.")

        def figures(self) -> "tuple[str, list[Metric]]":
            """Return the replica's name and its figures for Prometheus."""
            name = serve.get_replica_context().replica_id.unique_id
            return name, list(self.app.state.service.metrics.registry.collect())

    deployment = serve.deployment(
        serve.ingress(build)(Replica),
        name=NAME,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        max_ongoing_requests=2 * (settings.max_batch + settings.max_queue),  # a replica itself refuses the others
        autoscaling_config={
            "min_replicas": fewest,
            "max_replicas": most,
            "target_ongoing_requests": settings.max_batch,
        },
        request_router_config={"request_router_class": Sticky, "request_router_kwargs": {"busy": settings.max_batch}},
        graceful_shutdown_timeout_s=settings.drain,
        max_constructor_retry_count=2,
        logging_config=QUIET,
    )
    return deployment.bind()


async def _metrics(request: "Request") -> "Response":
    """Return the figures of all replicas for Prometheus, each with the label `replica`."""
    from prometheus_client import Metric, generate_latest
    from starlette.responses import Response

    from foretoken.serve.metrics import MEDIA_TYPE

    serve = need("ray.serve")
    here = serve.get_replica_context()
    asked = serve.get_deployment_handle(here.deployment, here.app_name).broadcast("figures")
    answers = await asked.results_async(timeout_s=10, return_exceptions=True)
    merged: dict[str, Metric] = {}
    for name, families in (each for each in answers if not isinstance(each, Exception)):  # one may have died just now
        for family in families:
            kept = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            kept.samples += [each._replace(labels={**each.labels, "replica": name}) for each in family.samples]
    all_of_them: Any = SimpleNamespace(collect=merged.values)
    return Response(generate_latest(all_of_them), media_type=MEDIA_TYPE)


def serve_replicas(application: Any, settings: Settings, listening: socket.socket) -> None:
    """Serve until a signal ends it, on the Ray cluster that this machine belongs to, else on one that is started here.

    application: what `replicas` returned.
    settings: the server's options, of which only the form of the log is used.
    listening: a bound socket with the address where Ray's proxy is to listen; it is closed before.
    Raises ForetokenError where Ray Serve runs on the cluster already, and where the replicas do not start.
    """
    from foretoken.serve.logs import DRAINS, ENDS, LISTENS, log_to_stderr
    from foretoken.serve.owner import Owner

    ray, serve = need("ray"), need("ray.serve")
    log_to_stderr(settings.log)
    ray.init()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C; Ray's own handler would leave no time
    if serve.status().proxies:
        raise ForetokenError(
            "Ray Serve runs on this cluster already: add the model to it from Python, as docs/serving.md shows, or end "
            "it with `serve shutdown`."
        )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    (host, port), where = listening.getsockname()[:2], address(listening)
    listening.close()
    asked, at_once, calls = Event(), Event(), Owner()

    def end(*_: object) -> None:
        (at_once if asked.is_set() else asked).set()
        log.info(ENDS if at_once.is_set() else DRAINS)

    try:
        serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
        try:
            serve.run(application, name=NAME)
        except RuntimeError as error:
            deployments = serve.status().applications[NAME].deployments.values()
            cause = "".join(each.message for each in deployments) or str(error)
            raise ForetokenError(f"The replicas do not start: {cause.split('Error: ')[-1].strip()}") from error
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, end)
        log.info(LISTENS, where, where)
        while not asked.wait(1):
            if not _is_deployed(calls, asked):
                at_once.set()
                log.error("the application is no longer on the Ray cluster, or the cluster is gone")
                sys.exit(1)
        _tried(calls, partial(serve.delete, NAME, _blocking=False), at_once)
        while _is_deployed(calls, at_once) and not at_once.wait(0.1):
            pass
    finally:
        _tried(calls, serve.shutdown, at_once)  # where the cluster goes on without us, Ray ends the replicas itself
        ray.shutdown()


def _tried(calls: "Owner", call: Callable[[], Any], ended: Event) -> Future[Any]:
    """Call Ray, and return the future of the result after a limited wait: where the cluster is gone, it is never done.

    calls: the thread that makes all such calls; one that never returns holds up those after it, which would not either.
    call: the function to call.
    ended: an event. The wait takes GONE_S seconds at most, and a second at most once this is set.
    """
    future, end = calls.submit(call), time.monotonic() + GONE_S
    while not wait([future], 1).done and not ended.is_set() and time.monotonic() < end:
        pass
    return future


def _is_deployed(calls: "Owner", asked: Event) -> bool:
    """Whether the command's application is on the cluster.

    calls: the thread that makes calls to Ray.
    asked: an event that a signal sets. Where it ends the wait for Ray's answer, the application counts as there.
    """
    status = _tried(calls, need("ray.serve").status, asked)
    if not status.done():
        return asked.is_set()
    try:
        return NAME in status.result().applications
    except need("ray.exceptions").RayError:
        return False
