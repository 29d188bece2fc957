"""`make demo`: one real image, started in four ways over one slow link, in one table.

Everything is real but private: registry, containerd, link and daemon live in a bed of their own
and are gone afterwards; only the built image stays in the cache folder for the next time.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.bed.bed import Bed
from bench.bed.debian import science_image
from bench.bed.ember import Ember
from bench.bed.gobin import CACHE
from bench.bed.image import Image
from bench.bed.link import Shape
from bench.bed.process import BedError
from bench.progress import Progress
from bench.trial import Row, Starter, measure, table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=200.0, help="of the link, in Mbit/s [200]")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the link, each way [0]")
    parser.add_argument("--rounds", type=int, default=1, help="medians of so many rounds [1]")
    parser.add_argument("--containerd", type=int, choices=(1, 2), default=1, help="major version")
    parser.add_argument("--compression", choices=("gzip", "zstd", "plain"), default="gzip")
    parser.add_argument("--only-overlayfs", action="store_true", help="leave Ember out")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def run_demo(options: argparse.Namespace, console: Console) -> None:
    say = Progress(console)
    with say.step("the image (built once, kept for the next time)"):
        image = science_image(CACHE / "bed", options.compression, say)
    shape = Shape(options.rate, options.delay_ms)
    with Bed(shape) as bed:
        say(f"registry on a link of {shape}; pushing {image.size / 1e6:.0f} MB past the link")
        image.push(bed.registry)
        ember: Ember | None = None
        if not options.only_overlayfs:
            ember = bed.ember(options.containerd)
        containerd = bed.containerd(
            options.containerd,
            ember_socket=ember.socket if ember else None,
            ember_root=ember.root if ember else None,
        )
        if ember:
            say("starting Ember")
            ember.start()
        rows = measure(Starter(bed, containerd, ember, image), options.rounds, say)
    show(rows, image, shape, options, console)


def show(
    rows: list[Row], image: Image, shape: Shape, options: argparse.Namespace, console: Console
) -> None:
    heading, *cells = table(rows, image)
    title = (
        f"{image.size / 1e6:.0f} MB {options.compression}, {image.plain_size / 1e6:.0f} MB plain, "
        f"{len(image.layers)} layers; {shape}; containerd {options.containerd}.x"
    )
    shown = Table(title=title, title_justify="left")
    for column in heading:
        shown.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in cells:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    if options.json:
        documents = [row.document(rows[0], image) for row in rows]
        options.json.write_text(json.dumps({"title": title, "rows": documents}, indent=2) + "\n")


def ended(number: int, _frame: object) -> None:
    """A signal ends the demo the way an error does: with everything cleaned up."""
    raise SystemExit(128 + number)


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGHUP, ended)
    console = Console(stderr=True)
    try:
        run_demo(options, console)
    except (BedError, OSError) as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
