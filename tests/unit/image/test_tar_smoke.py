"""The scanner and the EROFS writer, joined in memory, on the smallest layers."""

from __future__ import annotations

import io
import tarfile

from snapshotter.image.erofs_writer import write_erofs
from snapshotter.image.tar import TarScanner
from snapshotter.image.tree import Kind


def test_a_file_is_found_with_its_bytes_in_the_view() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("etc/hostname")
        info.size = 6
        tar.addfile(info, io.BytesIO(b"ember\n"))
    plain = buffer.getvalue()
    scanner = TarScanner()
    scanner.feed(memoryview(plain))
    tree = scanner.finish()
    etc = tree.root.children[b"etc"]
    file = etc.children[b"hostname"]
    assert etc.implied
    assert file.kind is Kind.FILE
    (segment,) = file.segments
    assert plain[segment.view_offset : segment.view_offset + segment.length] == b"ember\n"
    assert tree.view_bytes == len(plain)
    image = write_erofs(tree, device_bytes=len(plain), device_tag=b"sha256:test")
    assert len(image) % 512 == 0
