"""The page at /: its text, and what it does in a real browser where there is one."""

import json
import re

import httpx
import pytest

import browser
from serving import engine as engine  # fixtures
from serving import server as server

needs_browser = pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium")


def test_the_page_is_whole_and_asks_no_other_host(server):
    html = server.client.get("/").text
    assert not re.search(r"__[A-Z]+__", html)
    assert not re.search(r"\b(src|href)\s*=|url\(|@import", html)
    assert set(re.findall(r"https?://[^\s\"']+", html)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'; connect-src 'self'" in html
    assert set(re.findall(r"\.innerHTML|document\.write|eval\(", html)) == set()


def test_a_stream_tells_its_steps_only_when_asked(server):
    asked = {"prompt": "abc", "max_tokens": 12, "seed": 3, "stream": True}

    def chunks(**more):
        with server.client.stream("POST", "/v1/completions", json={**asked, **more}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    plain, told = chunks(), chunks(stream_options={"include_steps": True})
    assert not [chunk for chunk in plain if "step" in chunk]
    text = "".join(chunk["choices"][0]["text"] for chunk in plain)
    steps = [chunk["step"] for chunk in told if "step" in chunk]
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == text
    assert sum(len(step["tokens"]) for step in steps) == 12
    assert {token["origin"] for step in steps for token in step["tokens"]} >= {"accepted", "corrected"}
    trees = [step for step in steps if step["num_drafted"]]
    assert trees
    for step in trees:
        tree = step["tree"]
        assert len(tree["tokens"]) == len(tree["labels"]) == len(tree["parents"]) == step["num_drafted"] + 1
        accepted = [token["id"] for token in step["tokens"] if token["origin"] == "accepted"]
        assert [tree["tokens"][node] for node in tree["path"][1:]][: len(accepted)] == accepted


@needs_browser
def test_the_page_in_a_browser(server, tmp_path):
    with browser.browser(tmp_path) as page:
        page.open(server.url)
        page.wait_for("document.getElementById('model')?.textContent.startsWith('toy')")
        page.value("""
            document.getElementById('seed').value = '3';
            document.getElementById('tokens').value = '24';
            document.getElementById('temperature').value = '0';
            document.getElementById('beside').checked = true;
            document.getElementById('prompt').value = 'hi';
            document.getElementById('form').requestSubmit();
        """)
        page.wait_for("document.querySelectorAll('.text').length === 2 && !document.getElementById('send').disabled")
        assert page.value("document.getElementById('error').textContent") == ""
        drafted, plain = page.value("[...document.querySelectorAll('.text')].map((each) => each.textContent)")
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 24}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert drafted == plain == answer
        classes = "[...document.querySelectorAll('.text')].map((x) => [...x.children].map((y) => y.className))"
        kinds = page.value(classes)
        assert "accepted" in kinds[0]
        assert set(kinds[1]) == {"plain"}
        assert "tokens per step" in page.value("document.querySelector('.figures').textContent")
        page.value("document.querySelector('.text .accepted').click()")
        nodes = page.value("[...document.querySelectorAll('.tree svg g')].map((each) => each.getAttribute('class'))")
        assert nodes[0] == "plain"
        assert "accepted" in nodes
        assert page.value("document.querySelectorAll('.text .now').length") >= 2
        page.value("document.getElementById('reset').click()")
        assert page.value("document.querySelectorAll('.text').length") == 0
        assert page.complaints == []
