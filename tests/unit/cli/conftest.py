"""A place with a configuration, a daemon that answers there, and `ember` as a user calls it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from snapshotter.cli.main import app
from tests.fakes.daemon import FakeOperations, daemon

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-B", "-m", "snapshotter.cli.main"]
LIMIT_S = 60
NOTHING: Mapping[str, str] = {}


class Place:
    """Where the configuration lies; ``ember`` runs a command in this process, ``process`` as a
    process of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "s"
        self.socket = self.state / "ember.sock"
        self.config = directory / "config.toml"
        self.config.write_text(
            f'root = "{directory}/root"\nstate = "{self.state}"\n'
            f'[containerd]\naddress = "{directory}/containerd.sock"\n'
        )
        self.environment = {"EMBER_CONFIG": str(self.config), "TERM": "xterm", "COLUMNS": "80"}

    def ember(self, *words: str, **environment: str) -> Any:
        return CliRunner().invoke(
            app, list(words), env=self.environment | environment, prog_name="ember"
        )

    @contextlib.contextmanager
    def popen(
        self, *words: str, stdout: int = subprocess.PIPE, environment: Mapping[str, str] = NOTHING
    ) -> Iterator[subprocess.Popen[str]]:
        """A process that runs for the length of a block and no longer, whatever fails in there."""
        own = self.environment | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            [*PROGRAM, *words],
            env={**os.environ, **own, **environment},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            try:
                yield running
            finally:
                running.kill()

    def process(
        self, *words: str, stdout: int = subprocess.PIPE, environment: Mapping[str, str] = NOTHING
    ) -> subprocess.CompletedProcess[str]:
        with self.popen(*words, stdout=stdout, environment=environment) as running:
            out, err = running.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(words, running.returncode, out or "", err or "")


@pytest.fixture
def place() -> Iterator[Place]:
    """A short path: a socket's has room for 107 bytes. Others may look into it."""
    with tempfile.TemporaryDirectory(prefix="ember-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Place(Path(name))


@pytest.fixture
def served(place: Place) -> Iterator[FakeOperations]:
    """The daemon of ``place``."""
    with daemon(place.socket) as operations:
        yield operations
