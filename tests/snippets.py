"""The blocks of code in the pages for users, and the commands in them, as a shell reads them."""

import re
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmark_page import commands_in

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "models/README.md")),
    *(page for page in sorted(ROOT.glob("docs/*.md")) if page.name != "LOG.md"),
]


@dataclass(frozen=True)
class Command:
    """A command as a page shows it, in one line, without its comment. background: whether `&` ends it there."""

    page: str
    text: str
    background: bool

    @property
    def writes(self) -> list[str]:
        """The files and folders that it is asked to write."""
        return re.findall(r"(?:--out|--plot|--trace|benchmarks expand) (\S+)", self.text)

    @property
    def names(self) -> set[str]:
        """Its words, without quotes: among them are the files that it reads."""
        return {word.strip("'\"") for word in re.split(r"[\s=@,]", self.text)} - set(self.writes)


def blocks(page: Path, *languages: str) -> list[str]:
    """The code of a page's blocks in one of these languages."""
    return [code for language, code in CODE.findall(page.read_text(encoding="utf-8")) if language in languages]


def commands(page: Path) -> list[Command]:
    """Every command of a page's shell blocks, in order."""
    name, texts = str(page.relative_to(ROOT)), commands_in("".join(blocks(page, "sh", "bash")))
    return [Command(name, text.removesuffix("&").strip(), text.endswith("&")) for text in texts]


def shown() -> dict[str, Command]:
    """Every command of the pages by its text, where it stands first."""
    found: dict[str, Command] = {}
    for page in PAGES:
        for command in commands(page):
            found.setdefault(command.text, command)
    return found
