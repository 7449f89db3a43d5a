"""A server with narrow limits and one with keys, which the tests of the server's manners ask."""

import pytest

import serving

LONG = {"prompt": "abc", "max_tokens": 16_000, "ignore_eos": True}  # takes far longer than any test waits


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return serving.toy_engine(tmp_path_factory.mktemp("pair"), context=16_384)


@pytest.fixture(scope="module")
def server(engine):
    with serving.served(engine, max_batch=2, max_queue=3, max_body=20_000) as running:
        yield running


@pytest.fixture(scope="module")
def small(engine):
    """Another server, with keys, a short time limit, one row and no queue."""
    with serving.served(engine, api_key=["first", "zweit\u00e9"], timeout=0.4, max_batch=1, max_queue=0) as running:
        yield running


def error(response, status=400):
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    assert "\n" not in body["message"]
    return body
