"""Builds ioengine._native from csrc/: the only place that names the C sources.

The cdef is the part of csrc/ember_io.h between its two markers: one list of declarations.
"""

from __future__ import annotations

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
CSRC = HERE / "csrc"
SOURCES = (
    "ring.c",
    "ring_turn.c",
    "guard.c",
    "guard_thread.c",
    "journal.c",
    "guard_ahead.c",
    "guard_answer.c",
    "streams.c",
    "views.c",
    "inflate.c",
    "inflate_decode.c",
    "inflate_isal.c",
    "inflate_trim.c",
    "bits.c",
)


def declarations() -> str:
    """The text of ember_io.h between ``cffi: begin`` and ``cffi: end``."""
    text = (CSRC / "ember_io.h").read_text(encoding="utf-8")
    return text.split("/* cffi: begin */")[1].split("/* cffi: end */")[0]


def has_isal() -> bool:
    """Whether ISA-L is here; inflate_isal.c asks the same of the compiler."""
    headers = (Path(root) / "isa-l/igzip_lib.h" for root in ("/usr/include", "/usr/local/include"))
    return any(header.exists() for header in headers)


ffi = FFI()
ffi.cdef(declarations())
ffi.set_source(
    "ioengine._native",
    '#include "ember_io.h"',
    sources=[os.path.relpath(CSRC / name, HERE.parent) for name in SOURCES],
    include_dirs=[str(CSRC)],
    depends=[str(header) for header in sorted(CSRC.glob("*.h"))],
    libraries=["uring", "z", "pthread", *(["isal"] if has_isal() else [])],
    extra_compile_args=[
        "-O2",
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Wno-unused-function",
        "-D_GNU_SOURCE",
    ],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
