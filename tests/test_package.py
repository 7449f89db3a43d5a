"""The wheel has what an installation needs, nothing that only a checkout needs, and runs outside of the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What the wheel was installed into is read before the checkout, whose own folder is in the environment.
RUN = """
import sys
from pathlib import Path
import foretoken
assert Path(foretoken.__file__).is_relative_to(sys.argv[1]), foretoken.__file__
from foretoken.cli.main import main
sys.argv = ["foretoken", "generate", "def main():", "--max-new-tokens", "8", "--compile", "off", "--drafter", "none"]
main()
"""


def pip(*arguments: object) -> None:
    line = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--quiet"]
    subprocess.run(line, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.mark.long
def test_it_runs_outside_of_the_checkout(built: Path, tmp_path: Path) -> None:
    place, work = tmp_path / "place", tmp_path / "work"
    work.mkdir()
    pip("install", "--no-index", "--target", place, built)
    ran = subprocess.run(
        [sys.executable, "-c", RUN, place], cwd=work, env={**os.environ, "PYTHONPATH": str(place)},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("def main():")
    assert len(ran.stdout) > len("def main():\n")


@pytest.mark.long
def test_the_wheel(built: Path) -> None:
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
    for name in ("__init__.py", "py.typed", "serve/page.html", "catalogue/known.toml", "demo/target/model.safetensors"):
        assert f"foretoken/{name}" in names
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"foretoken"}
