"""Measures the tables of docs/results/verification.md anew, in place; the text around them is left alone.

    python scripts/verification_results.py              all of them: about half an hour on one core
    python scripts/verification_results.py rules toy    only these

Between `<!-- NAME -->` and `<!-- end NAME -->` stands what the command of that name printed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "verification.md"
COMMANDS = {
    "rules": ["rules", "--positions", "72", "--draws", "1,2,4", "--temperature", "1,0.3"],
    "speed": ["rules", "--speed", "--temperature", "1"],
    "toy": ["rules", "--toy", "--draws", "1,2,3", "--temperature", "1,0.3"],
    **{
        name: ["reproduce", name, "--positions", "72"]
        for name in (
            "spechub-figures",
            "spechub-table4",
            "spechub-tables1-3",
            "global-resolution-table1",
            "global-resolution-table2",
            "global-resolution-figure1",
            "global-resolution-temperature",
        )
    },
}


def section(name: str) -> str:
    command = COMMANDS[name]
    shown = f"python -m benchmarks {' '.join(command)}"
    print(f"--- {shown}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command, "--markdown"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{shown} ended with {done.returncode}: {PAGE.name} keeps its old table.")
    return f"<!-- {name} -->\n```sh\n{shown}\n```\n{done.stdout}<!-- end {name} -->"


def write(name: str) -> None:
    page = PAGE.read_text()
    found = re.compile(f"<!-- {name} -->.*?<!-- end {name} -->", re.DOTALL)
    if not found.search(page):
        sys.exit(f"{PAGE.name} has no place for {name}: write '<!-- {name} --><!-- end {name} -->' where it belongs.")
    fresh = section(name)
    temporary = PAGE.with_name(PAGE.name + ".tmp")
    temporary.write_text(found.sub(lambda _: fresh, page))
    os.replace(temporary, PAGE)


if __name__ == "__main__":
    names = sys.argv[1:] or list(COMMANDS)
    if unknown := [name for name in names if name not in COMMANDS]:
        sys.exit(f"Unknown table {unknown[0]}: choose among {', '.join(COMMANDS)}.")
    for each in names:
        write(each)
