"""The server in replicas behind Ray Serve:

    from ray import serve
    serve.run(replicas(partial(foretoken.load, "models/target", drafter="models/drafter"), Settings(), most=4))

Every replica has an engine of its own. A request goes to one of them and has the text that any of them would write.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts
from foretoken.engine import Engine
from foretoken.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI


def replicas(
    load: Callable[[], Engine], settings: Settings, fewest: int = 1, most: int = 1, num_cpus: float = 1
) -> Any:
    """The application that `ray.serve.run` takes; Ray's own proxy listens, not the address of `settings`.

    load: makes an engine; it is called once in every replica. settings: of the server. fewest, most: replicas, whose
    number follows the requests under way, about `settings.max_batch` for each. num_cpus: cores that one takes.
    Raises ForetokenError where Ray is not installed.
    """
    try:
        from ray import serve  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ForetokenError("Ray is not installed: pip install -e '.[cluster]'.") from error
    check_counts(fewest=fewest, most=most)

    def build() -> "FastAPI":
        from foretoken.serve.app import create_app

        return create_app(load(), settings)

    deployment = serve.deployment(
        serve.ingress(build)(),
        name="foretoken",
        ray_actor_options={"num_cpus": num_cpus},
        max_ongoing_requests=settings.max_batch + settings.max_queue,
        autoscaling_config={
            "min_replicas": fewest,
            "max_replicas": max(fewest, most),
            "target_ongoing_requests": settings.max_batch,
        },
    )
    return deployment.bind()
