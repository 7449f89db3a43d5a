"""Who may ask: keys, and pages of other sites."""

import pytest

import serving
from foretoken.core.errors import ForetokenError
from foretoken.serve.guards import from_other_site
from foretoken.serve.settings import KEYS, Settings
from limited import engine as engine  # fixtures
from limited import error
from limited import server as server
from limited import small as small
from serving import COMPLETION


def test_the_keys(small, monkeypatch):
    def asked(path, key=None, scheme="Bearer"):
        headers = {} if key is None else {"Authorization": f"{scheme} {key}".encode()}
        return small.client.get(path, headers=headers)

    for path in ("/", "/health", "/ready", "/metrics", "/version"):
        assert asked(path).status_code == 200
    for path in ("/v1/models", "/openapi.json", "/nothing"):
        told = error(asked(path), 401)
        assert (told["type"], told["code"]) == ("authentication_error", "invalid_api_key")
    for key in ("first", "zweit\u00e9"):
        assert asked("/v1/models", key).status_code == 200
    for key in ("firs", "first1", "x", "First"):
        error(asked("/v1/models", key), 401)
    error(asked("/v1/models", "first", "Basic"), 401)
    monkeypatch.setenv(KEYS, " one, two,")
    assert Settings().keys == ("one", "two")
    assert Settings(api_key=["three"]).keys == ("three",)
    with pytest.raises(ForetokenError, match="key is empty"):
        Settings(api_key=[""])
    for none in ("", " , ", ","):  # whoever sets it means that keys are asked for
        monkeypatch.setenv(KEYS, none)
        with pytest.raises(ForetokenError, match="is set and holds no key"):
            Settings()
        assert Settings(api_key=["three"]).keys == ("three",)


OWN = ["localhost", "LocalHost:3000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000"]
OTHERS = ["evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "10.0.0.1:8000", "[::2]", "[", ""]


def test_other_sites_may_not_ask_a_server_of_this_machine_that_has_no_key(server, small):
    """Neither by a name that is turned into its address (DNS rebinding), nor from a page of theirs."""
    for host in OWN:
        assert server.client.get("/", headers={"Host": host}).status_code == 200
        origin = {"Origin": f"http://{host}"}
        assert server.post(COMPLETION, {"prompt": "x", "max_tokens": 1}, headers=origin).status_code == 200
    for host in OTHERS:
        for path in ("/", "/metrics", "/v1/models"):
            assert "Host" in error(server.client.get(path, headers={"Host": host}), 403)["message"]
        for origin in (f"https://{host}", host, "null"):
            told = error(server.post(COMPLETION, {"prompt": "x"}, headers={"Origin": origin}), 403)
            assert "Origin" in told["message"]
        keyed = {"Authorization": "Bearer first", "Host": host, "Origin": f"https://{host}"}
        assert small.client.get("/v1/models", headers=keyed).status_code == 200


def test_what_is_not_bound_to_this_machine_alone_has_any_name(engine):
    with serving.served(engine, host="0.0.0.0") as running:
        assert running.client.get("/v1/models", headers={"Host": "a.example", "Origin": "null"}).status_code == 200


def test_the_name_that_the_server_is_bound_to_is_its_own():
    def refused(address, host):
        return from_other_site("mine", (), {"type": "http", "server": address, "headers": [(b"host", host)]})

    assert refused(("127.0.0.1", 80), b"mine:80") is None
    assert refused(("127.0.0.1", 80), b"other:80").status == 403
    for elsewhere in (("192.168.0.1", 80), ("/run/socket", None), None):
        assert refused(elsewhere, b"other:80") is None


def test_an_origin_that_is_allowed(engine):
    allowed = {"Origin": "https://app.example"}
    asking = {**allowed, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with serving.served(engine, allow_origin=["https://app.example"]) as running:
        for answer in (
            running.post(COMPLETION, {"prompt": "x", "max_tokens": 1}, headers=allowed),
            running.client.options(COMPLETION, headers=asking),
        ):
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
        error(running.post(COMPLETION, {"prompt": "x"}, headers={"Origin": "https://app.example:1"}), 403)
        error(running.client.get("/", headers={**allowed, "Host": "app.example"}), 403)
    for bad in ("*", "app.example", "https://app.example/", "null"):
        with pytest.raises(ForetokenError, match="allow_origin has"):
            Settings(allow_origin=[bad])
