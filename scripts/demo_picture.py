"""Draws docs/demo.svg: what `make demo` prints, as a terminal shows it. `python scripts/demo_picture.py` runs it."""

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100  # columns


def main() -> None:
    command = [sys.executable, "-m", "foretoken", "demo"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make demo", "bold"))
    console.print(Text.from_ansi(run.stdout.replace(str(Path.home()), "~")))
    picture = console.export_svg(title="make demo")
    # Its fonts lie on another host; the reader's own monospaced one will do.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    path = Path(__file__).parents[1] / "docs" / "demo.svg"
    path.write_text(picture, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
