"""The images of the bed: Debian with Python below, wheels in the middle, a program on top.

Made from Debian packages and PyPI wheels, from whatever mirrors this machine is set up to use.
Built once and kept in the cache folder; a lock lets two runs at once build only one of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.bed.image import Image, build, load
from bench.bed.process import BedError, run

Say = Callable[[str], None]
# About 270 MB compressed: what a service with the usual scientific packages carries.
WHEELS = ("numpy", "scipy", "pandas", "scikit-learn", "matplotlib", "pyarrow", "sympy")
SITE = "usr/lib/python3/dist-packages"
PROGRAM = """\
import numpy
import scipy.linalg

assert abs(scipy.linalg.det(numpy.eye(3)) - 1) < 1e-9
print("ready", flush=True)
"""
EMPTY_FOLDERS = ("var/cache/apt/archives", "var/lib/apt/lists", "tmp", "var/log")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def release() -> dict[str, str]:
    rows = Path("/etc/os-release").read_text().splitlines()
    return {key: value.strip('"') for key, _, value in (row.partition("=") for row in rows)}


def mirror(codename: str) -> str:
    """The mirror that apt uses here for this release; empty when apt does not say."""
    rows = run(["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)"])
    for row in rows.splitlines():
        name, component, *uri = row.split()
        if name == codename and component == "main" and uri:
            return uri[0]
    return ""


def base_tree(folder: Path, say: Say) -> Path:
    """Debian minbase with python3, cleaned of what only apt needs."""
    tree = folder / "base"
    if tree.exists():
        return tree
    codename = release().get("VERSION_CODENAME", "")
    if not codename:
        raise BedError("/etc/os-release names no codename: debootstrap needs a Debian-like system")
    say("Debian base with Python (debootstrap)")
    part = folder / "base.part"
    shutil.rmtree(part, ignore_errors=True)
    words = ["debootstrap", "--variant=minbase", "--include=python3", codename, str(part)]
    run([*words, mirror(codename)] if mirror(codename) else words, timeout_s=600)
    for name in EMPTY_FOLDERS:
        shutil.rmtree(part / name, ignore_errors=True)
        (part / name).mkdir(parents=True)
    (part / "tmp").chmod(0o1777)
    part.rename(tree)
    return tree


def wheels_tree(folder: Path, base: Path, say: Say) -> Path:
    """The wheels, unpacked where the Python of ``base`` looks for packages."""
    tree = folder / "wheels"
    if tree.exists():
        return tree
    say(f"wheels: {', '.join(WHEELS)}")
    part = folder / "wheels.part"
    shutil.rmtree(part, ignore_errors=True)
    version = (base / "usr/bin/python3").readlink().name.removeprefix("python")
    words = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    words += ["--no-compile", "--only-binary=:all:", "--python-version", version]
    words += ["--root-user-action=ignore", "--target", str(part / SITE), *WHEELS]
    run(words, timeout_s=600)
    part.rename(tree)
    return tree


def program_tree(folder: Path) -> Path:
    tree = folder / "program"
    (tree / "app").mkdir(parents=True, exist_ok=True)
    (tree / "app" / "main.py").write_text(PROGRAM)
    return tree


def science_image(cache: Path, compression: str = "gzip", say: Say = print) -> Image:
    """The image of the demo; built on the first call, loaded from ``cache`` afterwards."""
    folder = cache / "trees"
    with locked(cache / "lock"):
        with contextlib.suppress(FileNotFoundError):
            return load("bed/science", compression, cache / "images")
        folder.mkdir(parents=True, exist_ok=True)
        base = base_tree(folder, say)
        trees = [base, wheels_tree(folder, base, say), program_tree(folder)]
        say(f"packing the layers ({compression})")
        command = ["python3", "-B", "/app/main.py"]
        return build("bed/science", compression, trees, command, cache / "images", compression)
