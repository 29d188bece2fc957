"""The images of the bed: Debian with Python below, wheels in the middle, a program on top.

Made from Debian packages and PyPI wheels, from whatever mirrors this machine is set up to use.
Built once and kept in the cache folder; a lock lets two runs at once build only one of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
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
# What serves a model: the CUDA libraries come with it, and no GPU is needed to import them.
GPU_WHEELS = ("torch", "numpy")
GPU_PROGRAM = """\
import torch

assert (torch.eye(64) @ torch.ones(64, 64)).sum() == 64 * 64
print("ready", flush=True)
"""
COMMAND = ("python3", "-B", "/app/main.py")
BUILD_S = 1800.0
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


def wheels_tree(tree: Path, base: Path, wheels: Sequence[str], say: Say) -> Path:
    """The wheels, unpacked where the Python of ``base`` looks for packages."""
    if tree.exists():
        return tree
    say(f"wheels: {', '.join(wheels)}")
    part = tree.with_name(f"{tree.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    version = (base / "usr/bin/python3").readlink().name.removeprefix("python")
    words = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    words += ["--no-compile", "--only-binary=:all:", "--python-version", version]
    words += ["--root-user-action=ignore", "--target", str(part / SITE), *wheels]
    run(words, timeout_s=BUILD_S)
    part.rename(tree)
    return tree


def program_tree(tree: Path, program: str) -> Path:
    (tree / "app").mkdir(parents=True, exist_ok=True)
    (tree / "app" / "main.py").write_text(program)
    return tree


def science_image(cache: Path, compression: str = "gzip", say: Say = print) -> Image:
    """The image of the demo; built on the first call, loaded from ``cache`` afterwards."""
    folder = cache / "trees"
    with locked(cache / "lock"):
        with contextlib.suppress(FileNotFoundError):
            return load("bed/science", compression, cache / "images")
        folder.mkdir(parents=True, exist_ok=True)
        base = base_tree(folder, say)
        wheels = wheels_tree(folder / "wheels", base, WHEELS, say)
        trees = [base, wheels, program_tree(folder / "program", PROGRAM)]
        say(f"packing the layers ({compression})")
        return build("bed/science", compression, trees, COMMAND, cache / "images", compression)


def gpu_image(cache: Path, say: Say = print) -> Image:
    """An image with PyTorch and CUDA, 6 GB; its unpacked wheels are not kept beside it."""
    folder = cache / "trees"
    folder.mkdir(parents=True, exist_ok=True)
    # A lock of its own: nobody else waits for the minutes that this takes.
    with locked(cache / "gpu.lock"):
        with contextlib.suppress(FileNotFoundError):
            return load("bed/gpu", "gzip", cache / "images")
        with locked(cache / "lock"):
            base = base_tree(folder, say)
        wheels = wheels_tree(folder / "gpu-wheels", base, GPU_WHEELS, say)
        trees = [base, wheels, program_tree(folder / "gpu-program", GPU_PROGRAM)]
        say("packing the layers of 6 GB (minutes)")
        image = build("bed/gpu", "gzip", trees, COMMAND, cache / "images")
        shutil.rmtree(wheels)
        return image
