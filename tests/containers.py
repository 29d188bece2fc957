"""Real containers that read their image on demand, and what a node must not be left with.

The image's program reads a file of the image and prints the CRC-32 of what it saw; it is asked by
`ctr task exec`, so each answer needs containerd, its shim and the layers to work together.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.bed.process import run
from ioengine.mounts import mountinfo
from snapshotter.chunks.presence import decode_header, encode_header
from tests.cases.images import ImageCase, as_it_is, gzipped, image
from tests.cases.rows import is_file
from tests.cases.tars import file, layer
from tests.node import Node

EXEC_S = 40.0
PROGRAM = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdint.h>
#include <unistd.h>
int main(int count, char **words)
{
    static unsigned char block[65536];
    uint32_t crc = ~0u;
    ssize_t got;
    if (count < 2) {
        puts("ready");
        fflush(stdout);
        for (;;)
            pause();
    }
    int fd = open(words[1], O_RDONLY);
    if (fd < 0)
        return perror(words[1]), 1;
    while ((got = read(fd, block, sizeof block)) > 0)
        for (ssize_t n = 0; n < got; n++) {
            crc ^= block[n];
            for (int bit = 0; bit < 8; bit++)
                crc = crc >> 1 ^ (0xEDB88320u & -(crc & 1));
        }
    if (got < 0)
        return perror(words[1]), 1;
    printf("%08x\n", ~crc);
    return 0;
}
"""
_serial = itertools.count()


def build_program(folder: Path) -> bytes:
    """The static program, as bytes for a layer."""
    source, binary = folder / "program.c", folder / "program"
    source.write_text(PROGRAM)
    run(["gcc", "-O2", "-static", "-o", binary, source])
    return binary.read_bytes()


def reading_image(program: bytes, name: str, count: int = 3, size: int = 400_000) -> ImageCase:
    """The program and files ``f0``… that don't pack, in a plain and a gzip layer."""
    files = {f"f{n}": random.Random(f"{name} {n}").randbytes(size) for n in range(count)}
    rows = {key: is_file(data) for key, data in files.items()}
    entries = [file(key.encode(), data) for key, data in files.items()]
    own = layer(file(b"program", program, mode=0o755), file(b"name", name.encode()))
    blobs = [as_it_is(own), gzipped(layer(*entries))]
    return image(name, blobs, rows, config={"Cmd": ["/program"]})


def crc_of(name: str, number: int, size: int = 400_000) -> str:
    """What the program must say of file ``number`` of the image ``name``."""
    return f"{zlib.crc32(random.Random(f'{name} {number}').randbytes(size)):08x}"


class Container:
    """A container that runs until it is killed."""

    def __init__(self, at: Node, reference: str) -> None:
        self._at = at
        self.name = f"{at.namespace}-{os.getpid()}-{next(_serial)}"
        words = ["run", "-d", "--null-io", "--snapshotter", "ember", reference, self.name]
        at.containerd.ctr(*words, "/program")

    @property
    def pid(self) -> int:
        """The process; 0 if containerd knows of none."""
        for row in self._at.containerd.ctr("tasks", "ls").splitlines():
            fields = row.split()
            if fields[0] == self.name and fields[2] == "RUNNING":
                return int(fields[1])
        return 0

    def begin(self, path: str) -> subprocess.Popen[str]:
        """Have the program read ``path`` in the container; see ``told``."""
        words = ["tasks", "exec", "--exec-id", f"e{next(_serial)}"]
        words += ["--fifo-dir", str(self._at.containerd.directory / "fifo"), self.name]
        command = self._at.containerd.command(*words, "/program", path)
        return subprocess.Popen(
            ["timeout", "-k", "2", str(EXEC_S), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read(self, path: str) -> str:
        """The checksum of ``path`` as the container sees it, or what went wrong."""
        return told(self.begin(path))

    def remove(self) -> None:
        """Kill and delete it, with its snapshot."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid or 2**22, signal.SIGKILL)
        assert self._at.until(lambda: self.pid == 0)
        self._at.containerd.ctr("tasks", "rm", "-f", self.name)
        self._at.containerd.ctr("containers", "rm", self.name)


def told(process: subprocess.Popen[str]) -> str:
    """The last line that a program begun by ``begin`` said: clients may warn before."""
    said, _ = process.communicate(timeout=EXEC_S + 5)
    return said.strip().rpartition("\n")[2]


@contextlib.contextmanager
def container(at: Node, reference: str) -> Iterator[Container]:
    """A container for the length of a block; its end leaves nothing of it."""
    made = Container(at, reference)
    try:
        yield made
    finally:
        made.remove()


def keepers(at: Node) -> list[int]:
    """The keepers of this node's Ember."""
    socket = str(at.ember.state / "keeper.sock").encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"ember-keeper") and socket in words:
                    found.append(int(entry.name))
    return found


def has_another_keeper(at: Node, before: int) -> bool:
    """Whether a new keeper holds the guard; a dying one may still be named for a moment."""
    keeper: str = at.status()["daemon"]["keeper"]
    return keeper.startswith("pid") and keeper != f"pid {before}"


def layer_mounts(at: Node) -> list[Path]:
    """The EROFS instances that Ember has mounted."""
    below = at.ember.state / "layers"
    return [mount.target for mount in mountinfo() if below in mount.target.parents]


def left_behind(at: Node, *references: str) -> list[str]:
    """Remove the images wholly, then name everything that is still on the node.

    The daemon runs, no container does, and ``references`` are all images that there were.
    """
    found: list[str] = []
    at.containerd.collect_garbage()
    for reference in references:
        if any(reference in image["names"] for image in at.status()["images"]):
            found += removal(at, reference)
    at.until(lambda: not layer_mounts(at) and not emptied(at), 10)
    found += [f"mounted: {target}" for target in layer_mounts(at)]
    found += [f"file: {path}" for path in emptied(at)]
    found += [f"image {image['names']}" for image in at.status()["images"]]
    if not at.until(lambda: at.status()["guard"]["outstanding"] == 0, 10):
        found.append(f"guard: {at.status()['guard']}")
    if len(holders := keepers(at)) != 1:
        found.append(f"keepers: {holders}")
    return found + [f"open: {link}" for link in deleted_files(at.ember.pid)]


def removal(at: Node, reference: str) -> list[str]:
    """Remove an image wholly; what stayed, and why.

    An overlay of somebody else on layers that are called as ours are may be in the way for a while.
    """
    kept: list[str] = []

    def gone() -> bool:
        kept[:] = at.remove(reference).kept
        return not kept

    at.until(gone, 10)
    return kept


def emptied(at: Node) -> list[Path]:
    """What is in the directories that are empty when there are no images."""
    names = ("views", "presence", "index", "metadata", "snapshots", "staging")
    folders = [at.ember.root / name for name in names]
    return [path for folder in folders if folder.is_dir() for path in folder.iterdir()]


def deleted_files(pid: int) -> list[str]:
    """Files that process ``pid`` has open though they are gone (memfds are not files)."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            link = str(entry.readlink())
            if link.endswith(" (deleted)") and not link.startswith("/memfd:"):
                links.append(link)
    return links


def as_after_a_power_loss(root: Path) -> None:
    """Let every presence file of a cache be of another boot, that was not ended in order."""
    for presence in (root / "presence").iterdir():
        raw = bytearray(presence.read_bytes())
        header = decode_header(bytes(raw[:512]))
        raw[:512] = encode_header(replace(header, boot=bytes(16), clean=False))
        presence.write_bytes(raw)
