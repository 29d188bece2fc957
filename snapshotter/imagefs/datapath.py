"""The lazy data path of this kernel: found by trying, set up, and kept from ever closing.

The guard's descriptors are held by the keeper before the first mark is set, and again within
moments should the keeper die. If the guard could not be adopted though guarded mounts are there,
what they may have shown in between is suspect, and is said so. Where readers wait for a guard that
outlived its daemon, nothing is probed that could keep the new one from them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from ioengine import mounts
from ioengine.guard import GROUP_NAME, RESERVED_DESCRIPTORS, Guard
from ioengine.keeper import Keeper, SilentKeeperError
from ioengine.kept_memory import KeptMemory
from ioengine.probe_lazy import FANOTIFY, LazyProbe, probe_directio, probe_lazy
from snapshotter.errors import UnavailableError

log = logging.getLogger(__name__)

KEEPER_RETRY_S = 1.0
_OFF = 'lazy.mode = "off": Ember is a plain overlay snapshotter'


class _New:
    """What a start has set up and nothing depends on yet, so that one that fails leaves none."""

    def __init__(self, guarded: Path, layers: Path, socket: Path) -> None:
        self._guarded = guarded
        self._layers = layers
        self._socket = socket
        self.is_kept = False
        self.is_bound = False

    def take_down(self) -> None:
        """Where layers are mounted it stays: their readers wait, and must not see holes."""
        if any(mount.target.parent == self._layers for mount in mounts.mountinfo()):
            return
        try:
            if self.is_kept:
                with Keeper.connect(self._socket) as keeper:
                    keeper.drop(*keeper.names())
                    keeper.quit()
            if self.is_bound:
                mounts.unmount(self._guarded, detach=True)
        except OSError as error:
            log.warning("what this start had set up could not all be taken down: %s", error)


class DataPath:
    """``guard`` is None where there is no lazy path; ``reasons`` says why, or what it is."""

    def __init__(
        self,
        probe: LazyProbe | None,
        reasons: tuple[str, ...],
        guard: Guard | None = None,
        keeper: Keeper | None = None,
        keeper_socket: Path | None = None,
        stored: Mapping[str, int] | None = None,
        new: _New | None = None,
    ) -> None:
        self._new = new
        self.name = probe.path if probe is not None and guard is not None else None
        self.directio = bool(probe is not None and probe.directio)
        self.reasons = reasons
        self.guard = guard
        self._keeper = keeper
        self._keeper_pid = keeper.ping().pid if keeper is not None else 0
        self._keeper_socket = keeper_socket
        self._stored = dict(stored or {})
        self._memories: dict[str, KeptMemory] = {}
        self._revival: asyncio.Task[None] | None = None
        self.keeper_losses = 0

    @classmethod
    def open(cls, root: Path, state: Path, *, wanted: bool, stored: Mapping[str, int]) -> DataPath:
        """Probe and set up; a kernel that offers nothing is no error, images are fetched whole.

        Not ``wanted`` it is nevertheless set up where layers are lazy from before: those can be
        served in no other way.
        """
        if not wanted and not _any_lazy(root):
            return cls(None, (_OFF,))
        views, guarded = root / "views", state / "guarded"
        socket = state / "keeper.sock"
        new = _New(guarded, state / "layers", socket)
        try:
            if _outlived(views, guarded, socket, stored):
                probe = LazyProbe(FANOTIFY, probe_directio(root), ())
            else:
                probe = probe_lazy(root)
            if probe.path is None:
                return cls(probe, tuple(probe.reasons))
            views.mkdir(mode=0o700, parents=True, exist_ok=True)
            guarded.mkdir(mode=0o700, parents=True, exist_ok=True)
            reserve = min(RESERVED_DESCRIPTORS, raise_descriptor_limit() // 2)
            if not mounts.is_mounted(guarded):
                mounts.bind_private(views, guarded)
                new.is_bound = True
            keeper = Keeper.connect_or_start(socket)
            new.is_kept = keeper.is_new
            guard = Guard.open(keeper, guarded, stored=stored, reserve=reserve)
        except SilentKeeperError as error:
            new.take_down()
            raise UnavailableError(
                f"{error}; let it go on (kill -CONT): if it ends, what is lazy and mounted may be"
                " read as zeros"
            ) from None
        except OSError as error:
            new.take_down()
            if error.errno == errno.EPROTO:
                raise UnavailableError(
                    f"what the keeper behind {socket} holds is not a journal that this Ember"
                    " reads: start the Ember that made it again, or kill the keeper (`fuser"
                    f" {socket}` tells which) and start this one, which then names every"
                    " container whose reads are in doubt"
                ) from None
            raise UnavailableError(
                f"the lazy data path can't be set up: {error}; `ember doctor` says more, and"
                ' lazy.mode = "off" does without it where no image is lazy yet'
            ) from None
        for remark in keeper.remarks:
            log.warning("keeper: %s", remark)
        reasons = tuple(probe.reasons)
        if not wanted:
            reasons = (_OFF, "layers that are lazy from before are served on", *reasons)
        return cls(probe if wanted else None, reasons, guard, keeper, socket, stored, new)

    def settle(self) -> None:
        """The daemon serves: whatever was set up outlives it from now on."""
        self._new = None

    def descriptors(self) -> dict[str, int]:
        """What must outlive this process, by name, for a service manager's store."""
        if self.guard is None:
            return {}
        memories = {name: memory.fileno() for name, memory in self._memories.items()}
        return {**self.guard.descriptors(), **memories}

    def memory(self, name: str, capacity_bytes: int, *, make: bool) -> KeptMemory | None:
        """Memory that outlives this process: what is held under ``name``, or else new.

        None where nobody would hold it, and where nothing is held and ``make`` is false.
        """
        if self._keeper is None:
            return None
        try:
            memory = self._held_memory(name)
            if memory is None and not make:
                return None
            memory = memory or KeptMemory.make(name, capacity_bytes)
            self._keeper.put({name: memory.fileno()})
        except OSError as error:
            log.error("%s will not be known after a restart: %s", name, error)
            return None
        self._memories[name] = memory
        return memory

    def _held_memory(self, name: str) -> KeptMemory | None:
        assert self._keeper is not None
        held = self._keeper.get(name) or []
        if not held and name in self._stored:
            held = [os.dup(self._stored[name])]
        for descriptor in held:
            try:
                return KeptMemory(descriptor)
            except OSError as error:
                os.close(descriptor)
                log.error("what is held as %s is not used: %s", name, error)
        return None

    def let_go_of_stored(self) -> None:
        """Close what the service manager gave back: what is used of it was taken over."""
        for descriptor in self._stored.values():
            os.close(descriptor)
        self._stored.clear()

    def watch_keeper(self) -> None:
        """From now on a keeper that dies is replaced at once."""
        if self._keeper is not None:
            self._keeper.watch(self._keeper_died)

    def _keeper_died(self) -> None:
        self.keeper_losses += 1
        log.error("the keeper died; while a new one starts, the guard is held by the daemon alone")
        self._revival = asyncio.get_running_loop().create_task(self._revive())

    async def _revive(self) -> None:
        assert self._keeper_socket is not None and self.guard is not None
        while True:
            try:
                keeper, pid = await asyncio.to_thread(
                    _entrust, self._keeper_socket, _duplicates(self.descriptors())
                )
            except OSError as error:
                log.error("no keeper yet: %s; tried again in %g s", error, KEEPER_RETRY_S)
                await asyncio.sleep(KEEPER_RETRY_S)
                continue
            if self._keeper is not None:
                self._keeper.close()
            self._keeper, self._keeper_pid = keeper, pid
            keeper.watch(self._keeper_died)
            log.warning("a new keeper holds the guard")
            return

    def keeper_text(self) -> str:
        """One line about the keeper for `ember status`; asks it nothing, so it cannot wait.

        Its connection belongs to the loop that watches it: an answer to somebody else's question
        would look like its death.
        """
        if self.guard is None:
            return "not needed"
        if self._keeper is not None and self._keeper.alive():
            return f"pid {self._keeper_pid}"
        return "DEAD, being replaced: a crash of the daemon now would make reads unsafe"

    def close(self) -> None:
        """Leave the guard to the keeper; readers wait for the next daemon.

        What was set up by a start that failed is taken down again.
        """
        if self._revival is not None:
            self._revival.cancel()
        if self._keeper is not None:
            self._keeper.unwatch()
        if self.guard is not None:
            self.guard.close()
        if self._keeper is not None:
            self._keeper.close()
        for memory in self._memories.values():
            memory.close()
        self.let_go_of_stored()
        if self._new is not None:
            self._new.take_down()


def _duplicates(descriptors: Mapping[str, int]) -> dict[str, int]:
    return {name: os.dup(descriptor) for name, descriptor in descriptors.items()}


def _entrust(socket: Path, descriptors: Mapping[str, int]) -> tuple[Keeper, int]:
    """A new keeper that holds ``descriptors``, which are closed here, and its pid; blocks.

    They are the thread's own: the daemon may close its own ones meanwhile.
    """
    try:
        keeper = Keeper.connect_or_start(socket)
        try:
            keeper.put(descriptors)
            return keeper, keeper.ping().pid
        except BaseException:
            keeper.close()
            raise
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _any_lazy(root: Path) -> bool:
    """Whether some snapshot is a lazy layer: its directory is a link to a mount."""
    return any(link.is_symlink() for link in (root / "snapshots").glob("*/fs"))


def _outlived(views: Path, guarded: Path, socket: Path, stored: Mapping[str, int]) -> bool:
    """Whether the guard of the daemon before this one is held, with its mount in place."""
    try:
        if not mounts.is_mounted(guarded) or not guarded.samefile(views):
            return False
        if GROUP_NAME in stored:
            return True
        with Keeper.connect(socket) as keeper:
            return GROUP_NAME in keeper.names()
    except SilentKeeperError:
        raise
    except OSError:
        return False


def raise_descriptor_limit() -> int:
    """As many descriptors as the hard limit allows: each waiting event needs one. How many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1_048_576
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted)))
    except (ValueError, OSError):
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        log.warning(
            "LimitNOFILE is %d: so many reads, less some, can wait at once; the unit sets more",
            hard,
        )
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def stored_descriptors() -> dict[str, int]:
    """What systemd's fd store gave back, by name (sd_listen_fds(3))."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    count = int(os.environ.get("LISTEN_FDS", "0"))
    found = {name: 3 + n for n, name in enumerate(names[:count]) if name}
    for descriptor in found.values():
        os.set_inheritable(descriptor, False)
    return found
