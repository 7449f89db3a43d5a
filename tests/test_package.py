"""The wheel has what an installation needs, and nothing that only a checkout needs."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel(tmp_path: Path) -> None:
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*wheel, "--wheel-dir", tmp_path, ROOT], check=True, capture_output=True, text=True)
    (built,) = tmp_path.iterdir()
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
    for name in ("__init__.py", "py.typed", "serve/page.html", "catalogue/known.toml", "demo/target/model.safetensors"):
        assert f"foretoken/{name}" in names
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"foretoken"}
