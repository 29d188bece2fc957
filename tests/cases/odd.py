"""Odd images of every kind that met an unpacker, each with its right answer.

What a tar itself may hold is in layers.py, stacks.py and refused.py; here is what is odd about the
blobs, their labels, and the documents that name them.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zstandard

from tests.cases.images import (
    ATTESTATION,
    DOCKER,
    DOCKER_GZIP,
    OCI,
    OCI_GZIP,
    OCI_PLAIN,
    OCI_ZSTD,
    Blob,
    ImageCase,
    as_it_is,
    config_of,
    digest,
    entry_of,
    frame,
    gzipped,
    image,
    index_of,
    manifest_of,
    member,
    skippable,
    zstandarded,
)
from tests.cases.rows import is_dir, is_file
from tests.cases.tars import END, directory, file, layer
from tests.treecheck import Rows

DATA = b"".join(b"line %d of something that can be packed\n" % n for n in range(8000))


PLAIN = layer(directory(b"d", 0o750, uid=7), file(b"d/f", DATA), file(b"g", b"short"))


ROWS: Rows = {"d": is_dir(0o750, 7), "d/f": is_file(DATA), "g": is_file(b"short")}


def plain_of(name: str) -> bytes:
    """PLAIN with one file more, so that no two images share a chain and are here too early."""
    return file(b"name", name.encode()) + PLAIN


def rows_of(name: str) -> Rows:
    return {**ROWS, "name": is_file(name.encode())}


def one(name: str, pack: Callable[[bytes], bytes], label: str = OCI_GZIP) -> ImageCase:
    """An image of one layer that ``pack`` has packed."""
    plain = plain_of(name)
    return image(name, [Blob(pack(plain), digest(plain), label)], rows_of(name))


def harmless() -> ImageCase:
    return image("harmless", [gzipped(PLAIN)], ROWS)


def wrong_labels() -> list[ImageCase]:
    """Every label on every content: the content decides."""
    labels = [OCI_GZIP, OCI_ZSTD, OCI_PLAIN, DOCKER_GZIP, f"{DOCKER}.image.rootfs.diff.tar"]
    blobs, rows = [], {}
    for n, label in enumerate(labels):
        for pack in (gzipped, zstandarded, as_it_is):
            name = f"{n}-{pack.__name__}"
            blobs.append(pack(layer(file(name.encode(), DATA + name.encode())), label))
            rows[name] = is_file(DATA + name.encode())
    return [
        image("wrong labels", blobs, rows),
        image("wrong labels in a docker manifest", blobs[::-1], rows, docker=True),
    ]


def foreign() -> list[ImageCase]:
    """Layers that must not be distributed are fetched like any if the registry has them."""
    kinds = [
        f"{OCI}.layer.nondistributable.v1.tar+gzip",
        f"{OCI}.layer.nondistributable.v1.tar+zstd",
        f"{OCI}.layer.nondistributable.v1.tar",
        f"{DOCKER}.image.rootfs.foreign.diff.tar.gzip",
    ]
    packs = (gzipped, zstandarded, as_it_is, gzipped)
    blobs = [
        pack(layer(file(b"f%d" % n, DATA[n:])), kind)
        for n, (kind, pack) in enumerate(zip(kinds, packs, strict=True))
    ]
    rows = {f"f{n}": is_file(DATA[n:]) for n in range(len(blobs))}
    return [image("nondistributable", blobs, rows)]


def _cuts(data: bytes, *at: int) -> list[bytes]:
    bounds = [0, *at, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def _flushed_gzip(plain: bytes) -> bytes:
    stream = zlib.compressobj(6, zlib.DEFLATED, 31)
    parts = [stream.compress(p) + stream.flush(zlib.Z_FULL_FLUSH) for p in _cuts(plain, 9, 7777)]
    return b"".join(parts) + stream.flush()


def _in_members(*at: int) -> Callable[[bytes], bytes]:
    return lambda plain: b"".join(map(member, _cuts(plain, *at)))


def gzip_streams() -> list[ImageCase]:
    """Gzip as RFC 1952 allows it, and hardly anybody writes it."""
    extra = b"\x1f\x8b\x08\x1f\0\0\0\0\0\xff" + b"\4\0" + b"ab\0\0" + b"name\0" + b"comment\0"
    extra += (zlib.crc32(extra) & 0xFFFF).to_bytes(2, "little")
    return [
        one("gzip three members", _in_members(700, 100_000)),
        one("gzip a member cut in a tar header", _in_members(200, 513)),
        one("gzip tiny members", _in_members(*range(300, 270_000, 300))),
        one("gzip empty members", lambda plain: member(b"") + member(plain) + member(b"") * 3),
        one("gzip all header fields", lambda plain: member(plain, header=extra)),
        one("gzip stored", lambda plain: member(plain, level=0)),
        one(
            "gzip stored and packed members",
            lambda plain: member(plain[:70_000], level=0) + member(plain[70_000:]),
        ),
        one("gzip flushed", _flushed_gzip),
    ]


def _frames_of_all_kinds(plain: bytes) -> bytes:
    parts = _cuts(plain, 200, 513, 150_000)
    frames = [
        skippable(b"first"),
        frame(parts[0], write_checksum=True),
        frame(b""),
        frame(parts[1], write_checksum=False),
        skippable(b"", 15),
        frame(parts[2], write_content_size=False),
        skippable(b"x" * 70_000, 7),
        frame(parts[3], write_checksum=True, write_content_size=False),
        skippable(b"last"),
    ]
    return b"".join(frames)


def _flushed_zstd(plain: bytes) -> bytes:
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK
    parts = [stream.compress(part) + stream.flush(flush) for part in _cuts(plain, 5, 150_000)]
    return b"".join(parts) + stream.flush()


def _many_frames(plain: bytes) -> bytes:
    return b"".join(frame(plain[at : at + 997]) for at in range(0, len(plain), 997))


def zstd_streams() -> list[ImageCase]:
    """Zstandard as RFC 8878 allows it; a decoder that stops after one frame shows less."""
    contents = skippable(json.dumps({"n": 1}).encode())
    return [
        one("zstd frames of all kinds", _frames_of_all_kinds, OCI_ZSTD),
        one("zstd one frame flushed", _flushed_zstd, OCI_ZSTD),
        one("zstd contents behind", lambda plain: frame(plain) + contents, OCI_ZSTD),
        one("zstd many frames", _many_frames, OCI_ZSTD),
        one("zstd skippable alone first", lambda plain: contents * 9 + frame(plain), OCI_ZSTD),
    ]


def empty_layers() -> list[ImageCase]:
    """Layers of nothing, the same one more than once, and an image of nothing but them."""
    dot = layer(directory(b"./", 0o711, uid=5))
    nothing = [
        Blob(gzip.compress(END, mtime=0), digest(END)),
        Blob(gzip.compress(END, mtime=0), digest(END)),
        Blob(gzip.compress(b"", mtime=0), digest(b"")),
        Blob(frame(b""), digest(b""), OCI_ZSTD),
        as_it_is(END),
        as_it_is(bytes(10240)),
        gzipped(dot),
        zstandarded(bytes(3 << 20)),
    ]
    return [
        image(
            "empty layers between",
            [*nothing, gzipped(plain_of("empty layers between")), *nothing],
            rows_of("empty layers between"),
        ),
        image("nothing but empty layers", nothing, {}),
        image("one empty layer", [gzipped(END)], {}),
    ]


def repeated() -> list[ImageCase]:
    """The same layer again, as it is or in another blob; what lies between it is hidden anew."""
    other = layer(file(b"d/.wh.f"), file(b"g", b"other"), file(b"h", b"h"))
    twice: Rows = {**ROWS, "h": is_file(b"h")}
    between = [gzipped(PLAIN), gzipped(other), gzipped(PLAIN), gzipped(other), gzipped(PLAIN)]
    return [
        image("a layer three times", between, twice),
        image(
            "a layer in three packings",
            [gzipped(PLAIN), zstandarded(PLAIN), gzipped(other), as_it_is(PLAIN)],
            twice,
        ),
    ]


def indexes() -> list[ImageCase]:
    """Indexes in indexes, with attestations and other architectures beside what is wanted."""
    wanted = one("indexes", gzip.compress)
    manifest, here = wanted.documents[-1], json.loads(wanted.contents[-1])["architecture"]
    foreign_layer = gzipped(layer(file(b"foreign", b"wrong machine")))
    foreign_config = json.loads(config_of([foreign_layer.diff_id]))
    foreign_config["architecture"] = "s390x"
    config = json.dumps(foreign_config).encode()
    other = manifest_of(config, [foreign_layer])
    note = as_it_is(b'{"predicate": "nothing to mount"}', "application/vnd.in-toto+json")
    note_config = json.dumps(
        {"os": "unknown", "architecture": "unknown", "rootfs": {"type": "layers", "diff_ids": []}}
    ).encode()
    attestation = manifest_of(note_config, [note])
    contents = (*wanted.contents, foreign_layer.data, config, note.data, note_config)
    attested = entry_of(
        attestation,
        "unknown/unknown",
        annotations={**ATTESTATION, "vnd.docker.reference.digest": digest(manifest)},
    )
    inner = index_of(attested, entry_of(other, "linux/s390x"), entry_of(manifest, f"linux/{here}"))
    shapes = {
        "index": (inner,),
        "index in an index": (inner, index_of(attested, entry_of(inner))),
        "index in an index in an index": (
            inner,
            index_of(entry_of(inner)),
            index_of(attested, entry_of(index_of(entry_of(inner)))),
        ),
        "index without platforms": (index_of(attested, entry_of(other), entry_of(manifest)),),
        "manifest list": (
            index_of(
                entry_of(other, "linux/s390x"), entry_of(manifest, f"linux/{here}"), docker=True
            ),
        ),
    }
    return [
        replace(
            wanted,
            name=name,
            contents=contents,
            documents=(attestation, other, manifest, *documents),
        )
        for name, documents in shapes.items()
    ]


def documents() -> list[ImageCase]:
    """Manifests and configs that are right, but for what people expect of them."""
    history = [{"created_by": "x", "empty_layer": n > 0} for n in range(200)]
    settings: dict[str, dict[str, Any]] = {
        "history that does not fit": {"history": history},
        "a large config": {"config": {"Labels": {"l": "x" * 2_000_000}}},
        "an unknown key": {"moby": {"?": None}},
    }
    docker = gzipped(plain_of("docker types"), DOCKER_GZIP)
    return [
        image("docker types", [docker], rows_of("docker types"), docker=True),
        *(
            image(name, [gzipped(plain_of(name))], rows_of(name), **more)
            for name, more in settings.items()
        ),
    ]


def large() -> list[ImageCase]:
    """Enough of each packing for several chunks and checkpoints, half of it noise."""
    noise = random.Random(7)
    files = {f"big/{n}": noise.randbytes(700_000) + DATA * 2 + bytes([n]) * 5000 for n in range(5)}
    common = b"".join(file(name.encode(), data) for name, data in files.items())
    rows: Rows = {"big": is_dir(), **{name: is_file(data) for name, data in files.items()}}

    def in_parts(pack: Callable[[bytes], bytes]) -> Callable[[bytes], Blob]:
        def packed(plain: bytes) -> Blob:
            parts = [plain[at : at + 900_001] for at in range(0, len(plain), 900_001)]
            return Blob(b"".join(map(pack, parts)), digest(plain))

        return packed

    packers: dict[str, Callable[[bytes], Blob]] = {
        "gzip": gzipped,
        "gzip of members": in_parts(member),
        "zstd": zstandarded,
        "zstd of frames": in_parts(frame),
        "tar": as_it_is,
    }
    return [
        image(
            f"large {name}",
            [pack(layer(file(b"name", name.encode()), common))],
            {**rows, "name": is_file(name.encode())},
        )
        for name, pack in packers.items()
    ]


def chain_of_layers(count: int) -> ImageCase:
    """``count`` layers; each has a file of its own and replaces one that all of them have."""
    blobs = [gzipped(layer(file(b"n/%d" % n, b"%d" % n), file(b"same", b"%d" % n)))
             for n in range(count)]  # fmt: skip
    rows: Rows = {f"n/{n}": is_file(b"%d" % n) for n in range(count)}
    rows |= {"n": is_dir(), "same": is_file(b"%d" % (count - 1))}
    return image(f"{count} layers", blobs, rows)


def odd_images() -> list[ImageCase]:
    """All that can be shown."""
    return [
        harmless(), *wrong_labels(), *foreign(), *gzip_streams(), *zstd_streams(),
        *empty_layers(), *repeated(), *indexes(), *documents(), *large(), chain_of_layers(100),
    ]  # fmt: skip
