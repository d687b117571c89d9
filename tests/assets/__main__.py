"""`python -m tests.assets [NAME ...]`: fetch and build the assets; `--list` shows them."""

import argparse
import json
import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.assets.build import build, built_path, computed_pins, get_family
from tests.assets.families import FAMILIES, Family, Part
from tests.assets.lock import PACKAGES, AssetError
from tests.assets.store import cache_root, fetch_package, package_path


def _origin(part: Part | None) -> str:
    """Package and member, short enough for a table."""
    if part is None:
        return "none exists"
    package = PACKAGES[part.package]
    return f"{package.project} {package.version}: {'/'.join(part.path.split('/')[-2:])}"


def show(console: Console, families: list[Family]) -> None:
    """One line per family: where its parts come from and whether it is in the cache."""
    table = Table(title=f"Assets in {cache_root()}")
    for heading in ("family", "tokenizer from", "template from", "kwargs", "cached"):
        table.add_column(heading, overflow="fold")
    for family in families:
        cached = "[green]yes" if built_path(family).is_dir() else "[yellow]no"
        kwargs = ", ".join(family.kwargs)
        table.add_row(family.name, _origin(family.tokenizer), _origin(family.template), kwargs, cached)
    console.print(table)


def fetch(console: Console, families: list[Family]) -> None:
    """Download the packages that the missing families need, then build those families."""
    missing = [family for family in families if not built_path(family).is_dir()]
    needed = dict.fromkeys(part.package for family in missing for part in family.parts())
    packages = [key for key in needed if not package_path(key).exists()]
    label = TextColumn("{task.description:<24}")
    with Progress(label, BarColumn(), DownloadColumn(), TimeElapsedColumn(), console=console) as bar:
        total = bar.add_task("download", total=sum(PACKAGES[key].size for key in packages))
        for key in packages:
            bar.update(total, description=PACKAGES[key].project)
            fetch_package(key, lambda arrived: bar.advance(total, arrived))
        bar.update(total, description="download")
    with Progress(label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:
        total = bar.add_task("build", total=len(families), completed=len(families) - len(missing))
        for family in missing:
            bar.update(total, description=family.name)
            build(family)
            bar.advance(total)
        bar.update(total, description="build")
    console.print(f"{len(families)} families in {cache_root()}", highlight=False, soft_wrap=True)


def print_pins(console: Console, families: list[Family]) -> None:
    """Lines for `lock.toml`, computed from the packages."""
    for family in families:
        console.out(f'"{family.name}" = {json.dumps([pin for pin in computed_pins(family) if pin])}')


def main(arguments: list[str]) -> int:
    """Run the command line; returns 1 if an asset is not available."""
    parser = argparse.ArgumentParser(prog="python -m tests.assets", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="families (default: all)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="show the families and whether they are cached")
    action.add_argument("--pins", action="store_true", help="print fresh lines for lock.toml")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        families = [get_family(name) for name in options.names] or list(FAMILIES.values())
        run = show if options.list else print_pins if options.pins else fetch
        run(console, families)
    except AssetError as error:
        console.print(f"[red]{type(error).__name__}:[/] {error}", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
