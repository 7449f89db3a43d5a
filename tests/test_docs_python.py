"""The Python of the pages runs: whole pages on tiny models, and clients against a server."""

import random
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from calling import MARKED, MARKS, tokenizer_of
from foretoken.serve import requests
from serving import NAME, save_pair, save_target, served, toy_engine
from snippets import PAGES, ROOT, blocks

WHOLE = ("README.md", "docs/quickstart.md", "docs/trees-and-rules.md")
SERVING, CONTRIBUTING, EXTENDING = "docs/serving.md", "CONTRIBUTING.md", "docs/extending.md"
OF_A_CLIENT = 4  # the first blocks of the server's page; one of an ASGI app and one that needs Ray follow
PLACE = "http://127.0.0.1:8000"


def of_server(code: str, url: str) -> str:
    """A client's code for a server at `url` in place of the one that the pages name."""
    assert PLACE in code
    assert "smollm2-135m-instruct" in code
    return code.replace(PLACE, url).replace("smollm2-135m-instruct", NAME)


def test_no_page_with_python_is_left_out() -> None:
    there = {str(page.relative_to(ROOT)) for page in PAGES if blocks(page, "python")}
    assert there == {*WHOLE, SERVING, CONTRIBUTING, EXTENDING}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models in the places of those that the pages name."""
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save_pair(tmp_path / "models")
    save_target(tmp_path / "models" / "smollm2-135m-instruct")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.usefixtures("desk")
def test_a_page_runs(name: str) -> None:
    code = "\n".join(block for block in blocks(ROOT / name, "python") if PLACE not in block)
    assert "foretoken." in code
    exec(compile(code, name, "exec"), {})


def test_the_client_of_the_readme_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page names no seed, and with some the toy model ends its answer before the first letter."""
    monkeypatch.setattr("foretoken.serve.requests.secrets.randbelow", lambda most: 0)
    (code,) = (block for block in blocks(ROOT / "README.md", "python") if PLACE in block)
    with served(toy_engine(tmp_path, context=1024, tokenizer=tokenizer_of(MARKED, MARKS))) as server:
        exec(compile(of_server(code, server.url), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.long
def test_a_client_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a model whose template has tools, as the last of the blocks needs it. With these seeds of the texts the
    call is whole."""
    monkeypatch.setattr(requests.secrets, "randbelow", random.Random(0).randrange)
    code = "\n".join(blocks(ROOT / SERVING, "python")[:OF_A_CLIENT])
    assert code.count(PLACE) == 2
    engine = toy_engine(tmp_path, context=1024, tokenizer=tokenizer_of(MARKED, MARKS))
    assert 'model="qwen"' in code
    with served(engine) as server:
        code = of_server(code, server.url).replace('model="qwen"', f'model="{NAME}"')
        exec(compile(code, SERVING, "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1].startswith('weather {"city"')


@pytest.mark.usefixtures("desk")
def test_an_app_of_ones_own_is_made() -> None:
    app, cluster = blocks(ROOT / SERVING, "python")[OF_A_CLIENT:]
    assert "from ray import serve" in cluster  # Ray is a large package: tests/test_cluster_serve.py starts it
    names: dict = {}
    exec(compile(app, SERVING, "exec"), names)
    with TestClient(names["app"]) as client:
        answer = client.post("/v1/completions", json={"prompt": "def main():", "max_tokens": 4})
    assert answer.json()["usage"]["completion_tokens"] > 0
