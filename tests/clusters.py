"""Ray on this machine, for the tests that need it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STORE = 200_000_000  # bytes that Ray's object store may take


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of its own, with room for two engines."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[cluster]'")
    tests = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent / "src"), *sys.path]))
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=STORE,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        yield
        ray.shutdown()
