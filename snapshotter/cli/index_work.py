"""What the verbs of `ember index` share: the registry client, trusted keys, an end for each error.

The client is the daemon's, with the credentials of whoever runs the command added: Docker's and
podman's files. An interrupted command takes back what it had half done before it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from snapshotter import __version__
from snapshotter.cli.connection import EXIT_USAGE, fail
from snapshotter.clock import SystemClock
from snapshotter.config import Config
from snapshotter.daemon.opening import registry_settings
from snapshotter.errors import ConfigError, EmberError, InvalidArgumentError, UnauthorizedError
from snapshotter.indexes.build import LayerSource, resolve_all
from snapshotter.indexes.keys import PUBLIC_SUFFIX, Keyring, TrustedKeys, load_keyring
from snapshotter.oci.assembly import open_registry
from snapshotter.oci.platform import Platform, host_platform
from snapshotter.oci.reference import Reference
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.resolver import ResolvedImage, resolve_image

T = TypeVar("T")

ALL = "all"
"""Instead of a platform: every one that the image is offered for."""
_TERMINATED = 128 + signal.SIGTERM


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, or the command to its own with one line and an exit code."""
    try:
        return asyncio.run(_interruptible(work))
    except EmberError as error:
        wrong = isinstance(error, ConfigError | InvalidArgumentError)
        fail(str(error), EXIT_USAGE if wrong else 1)
    except OSError as error:  # a file of the user's: what is Ember's own comes as an EmberError
        fail(str(error))
    except asyncio.CancelledError:
        raise typer.Exit(_TERMINATED) from None


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    """SIGTERM, with which builds are cancelled, ends the work in order as Ctrl-C does."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


@asynccontextmanager
async def registry(config: Config) -> AsyncGenerator[RegistryClient, None]:
    """A client with the configuration's registries and this user's credentials."""
    settings = registry_settings(config)
    files = [path for path in _credential_files(os.environ) if path not in settings.docker_configs]
    client = open_registry(
        replace(
            settings,
            docker_configs=(*files, *settings.docker_configs),
            user_agent=f"ember/{__version__}",
        ),
        SystemClock(),
    )
    try:
        yield client
    finally:
        await client.close()


def _credential_files(environment: Any) -> list[Path]:
    """Where `docker login` and `podman login` of this user leave credentials."""
    found = []
    if environment.get("DOCKER_CONFIG"):
        found.append(Path(environment["DOCKER_CONFIG"]) / "config.json")
    if environment.get("REGISTRY_AUTH_FILE"):
        found.append(Path(environment["REGISTRY_AUTH_FILE"]))
    if environment.get("XDG_RUNTIME_DIR"):
        found.append(Path(environment["XDG_RUNTIME_DIR"]) / "containers" / "auth.json")
    if environment.get("HOME"):
        found.append(Path(environment["HOME"]) / ".docker" / "config.json")
    return [path.absolute() for path in found]


def trusted(config: Config, given: Sequence[Path]) -> Keyring:
    """The keys in ``given``, files or directories; without any, those that the node trusts, with a
    line on stderr for each that it can't.

    ConfigError for a file that was given and is no key.
    """
    if not given:
        ring = TrustedKeys(config.index.trusted_keys).read()
        for problem in ring.problems:
            typer.echo(f"ember: {problem}", err=True)
        return ring
    paths: list[Path] = []
    for path in given:
        inner = sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
        if not inner:
            raise ConfigError(f"--key {path}: no *{PUBLIC_SUFFIX} in this directory")
        paths += inner
    ring = load_keyring(paths)
    if ring.problems:
        raise ConfigError(ring.problems[0])
    return ring


def platform_of(text: str) -> Platform:
    """The platform that was asked for; empty is this machine's, for Linux."""
    return Platform.parse(text) if text else host_platform()


async def resolved(source: LayerSource, image: Reference, platform: str) -> list[ResolvedImage]:
    """The image for the platform that was asked for, or (``all``) for each there is."""
    if platform == ALL:
        return await resolve_all(source, image)
    return [await resolve_image(source, image, platform_of(platform))]


def refused(error: EmberError) -> EmberError:
    """A registry that lets nobody push says so in words of pulling; add what is meant."""
    if isinstance(error, UnauthorizedError):
        return UnauthorizedError(f"{error}; to push, the credential needs the right to")
    return error


def short(key_id: str) -> str:
    """A key as people see it."""
    return key_id[:16]
