"""A tiny image: one static program and some bytes; for tests that are about the bed, not the image.

The program prints `ready`; with the argument `wait` it then sleeps until it is killed, with `stay`
until its standard input ends.
"""

from __future__ import annotations

import random
from pathlib import Path

from bench.bed.image import Image, build
from bench.bed.process import run

PROGRAM = """\
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words)
{
    puts("ready");
    fflush(stdout);
    while (count > 1 && !strcmp(words[1], "wait"))
        pause();
    while (count > 1 && !strcmp(words[1], "stay") && getchar() != EOF)
        ;
    return 0;
}
"""


def compile_program(tree: Path) -> None:
    """Put the program into ``tree``."""
    run(["gcc", "-O2", "-static", "-x", "c", "-o", tree / "program", "-"], stdin=PROGRAM.encode())


def program_tree(folder: Path) -> Path:
    """A folder below ``folder`` with the program alone."""
    tree = folder / "program-alone"
    tree.mkdir(exist_ok=True)
    compile_program(tree)
    return tree


def tiny_image(
    folder: Path, *, bytes_each: int = 256 * 1024, layers: int = 2, compression: str = "gzip"
) -> Image:
    """Build an image of ``layers`` layers below ``folder``: ``data/noiseN``, and a program."""
    trees = [folder / f"tree{number}" for number in range(layers)]
    for number, tree in enumerate(trees):
        (tree / "data").mkdir(parents=True)
        noise = random.Random(number).randbytes(bytes_each)
        (tree / "data" / f"noise{number}").write_bytes(noise)
    compile_program(trees[0])
    return build("bed/tiny", compression, trees, ["/program"], folder / "images", compression)
