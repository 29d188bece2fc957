"""Build steps that a declarative build cannot express.

Three things are generated: the cffi module over ioengine/csrc, the keeper (a C program), and
the Python bindings of proto/. All of them land inside the packages, so a wheel is complete.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PB = ROOT / "snapshotter" / "rpc" / "pb"
CFLAGS = ["-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fstack-protector-strong"]


def generate_protobuf() -> None:
    """Compile proto/**/*.proto into snapshotter/rpc/pb."""
    subprocess.run([sys.executable, str(ROOT / "proto" / "generate.py"), str(PB)], check=True)


def build_keeper(directory: Path) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    command = [
        compiler,
        *CFLAGS,
        "-D_GNU_SOURCE",
        *map(str, sorted((ROOT / "ioengine/csrc").glob("keeper*.c"))),
        "-o",
        str(directory / "ember-keeper"),
    ]
    subprocess.run(command, check=True)


class BuildExt(build_ext):
    def run(self) -> None:
        super().run()
        target = ROOT if self.inplace else Path(self.build_lib)
        (target / "ioengine").mkdir(parents=True, exist_ok=True)
        build_keeper(target / "ioengine")


# Before the packages are listed: what is generated holds packages too.
generate_protobuf()
setup(cffi_modules=["ioengine/_build.py:ffi"], cmdclass={"build_ext": BuildExt})
