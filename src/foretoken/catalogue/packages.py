"""Download wheels from the package index that the user's pip is set up for; nothing in them is installed or run."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from foretoken.catalogue.known import Package
from foretoken.core.errors import ForetokenError

LOOK_S = 0.2  # seconds between two looks at how far a download is
# Parts of pip's messages where it cannot reach an index.
UNREACHED = ("Retrying (", "ConnectionError", "ConnectTimeout", "ReadTimeout", "ProxyError", "SSLError", "HTTP error")


def download(package: Package, path: Path, folder: Path, progress: Callable[[int], None]) -> None:
    """Download the wheel of a `package` to the file `path`, unless it is there already.

    pip does it, with its configured index, proxy and certificates; it refuses a wheel with another hash.

    folder: where a folder is made for pip's unfinished files, and removed again.
    progress: called with the bytes of this wheel so far.

    Raises ForetokenError, one sentence, where the wheel cannot be downloaded.
    """
    if path.exists() and sha256(path) == package.sha256:
        progress(package.bytes)
        return
    scratch = Path(mkdtemp(prefix="pip-", dir=folder))
    try:
        requirements, log, done = scratch / "requirements.txt", scratch / "log.txt", scratch / "done"
        requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        with log.open("wb") as output:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
            command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
            command += [f"--requirement={requirements}", f"--dest={done}"]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment(scratch)
            )
            try:
                while process.poll() is None:
                    progress(min(package.bytes, _unfinished(scratch)))
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(LOOK_S)
            finally:
                process.kill()
                process.wait()
        if process.returncode != 0:
            raise ForetokenError(_reason(package, log.read_text(errors="replace")))
        wheel = next(done.iterdir())
        if sha256(wheel) != package.sha256:
            raise ForetokenError(_changed(package))
        wheel.replace(path)
        progress(package.bytes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sha256(path: Path) -> str:
    """Return the SHA-256 hash of the file at `path` in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _environment(scratch: Path) -> dict[str, str]:
    """Return pip's environment variables: its temporary files go to `scratch`, on the disk whose space was checked."""
    temporary = {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
    return {"PIP_RESUME_RETRIES": "5"} | dict(os.environ) | temporary  # after a broken connection; older pips ignore it


def _unfinished(scratch: Path) -> int:
    """Return how many bytes of a wheel pip has written; of two files, as pip copies it, the larger one counts."""
    sizes = [0]
    for folder, _, names in os.walk(scratch):  # which passes over folders that pip removes meanwhile
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):
                    sizes.append(os.path.getsize(os.path.join(folder, name)))
    return max(sizes)


def _changed(package: Package) -> str:
    return (
        f"Package {package} is not the one that was checked (its hash is another): nothing of it was used; look for a "
        "newer version of foretoken."
    )


def _reason(package: Package, log: str) -> str:
    """Return the reason of a failure in one sentence, by pip's messages `log`."""
    if "No module named pip" in log:
        return f"{sys.executable} has no pip, which fetches packages: install it (python -m ensurepip) and call again."
    if "DO NOT MATCH THE HASHES" in log:
        return _changed(package)
    if "No space left" in log or "Errno 28" in log:
        return f"The disk became full as package {package} was downloaded: free some space and call again."
    if any(sign in log for sign in UNREACHED):
        return (
            f"No package index could be reached for package {package}: check the network and pip's settings "
            "(pip config list), and call again."
        )
    if "No matching distribution" in log:
        return (
            f"The package index that pip is set up for has no package {package}: set another one (pip config set "
            "global.index-url URL), and call again."
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    return f"pip cannot download package {package}: {errors[0] if errors else log.strip() or 'it does not say why'}"
