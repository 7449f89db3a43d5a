"""A real headless browser, driven over its debugging pipe: no package is needed for it."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class Page:
    """One page. What its scripts complain of is in `complaints`."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of = os.fdopen(to, "wb"), os.fdopen(of, "rb")
        self._number = 0
        self._held = b""
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    _session: str | None = None

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """What a script gives; a promise is waited for."""
        told = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return when the page finds the condition true; it looks at every frame, for at most a minute."""
        self.value(
            "new Promise((good, bad) => { const end = Date.now() + 60000; (function look() {"
            f"if ({condition}) good(); else if (Date.now() > end) bad(new Error('waited in vain'));"
            "else setTimeout(look, 10); })(); })"
        )

    def close(self) -> None:
        self._session = None
        self._call("Browser.close")
        self._to.close()
        self._of.close()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            told = self._read()
            if told.get("id") == self._number:
                assert "error" not in told, told["error"]
                return told["result"]
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(told["params"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            more = os.read(self._of.fileno(), 1 << 16)
            assert more, "the browser ended"
            self._held += more
        message, self._held = self._held.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a fresh browser. folder: for its profile."""
    assert CHROMIUM is not None
    (commands, to), (of, news) = os.pipe(), os.pipe()

    def places() -> None:  # the browser reads commands from 3 and writes to 4
        held = os.dup(news)
        os.dup2(commands, 3)
        os.dup2(held, 4)

    line = [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    running = subprocess.Popen(
        line, preexec_fn=places, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(commands)
    os.close(news)
    try:
        page = Page(to, of)
        yield page
        page.close()
        running.wait(60)
    finally:
        running.kill()
        running.wait(60)
