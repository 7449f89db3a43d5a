"""The toy pair in replicas on real Ray, and what they count."""

import time
from collections import defaultdict
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import serving
from foretoken.engine import Engine

KEY = {"Authorization": "Bearer secret"}
PATIENCE = 240  # seconds until a wait is a failure; no more than that is asserted by it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("replicas")
    (made / "pids").mkdir()
    serving.save_pair(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """One engine, whose texts the replicas' must be."""
    return serving.load_pair(folder)


def figures(url: str, name: str) -> dict[str, float]:
    """A figure of every replica."""
    told: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(httpx.get(url + "/metrics", timeout=PATIENCE).text):
        for each in family.samples:
            if each.name == name:
                told[each.labels["replica"]] += each.value
    return dict(told)


def wait_until_two(url: str) -> set[str]:
    """The names of two replicas that answer, once there are two."""
    end = time.monotonic() + PATIENCE
    while len(names := set(figures(url, "vllm:num_requests_running"))) != 2:
        assert time.monotonic() < end, names
        time.sleep(0.2)
    return names
