"""The daemon's side of ``ember-keeper``: start it, hand it descriptors, get them back, miss it.

The keeper (csrc/keeper.c, which also describes the packets) holds descriptors beyond the life of
this process. Invariant here: a call never waits longer than ``TIMEOUT_S``. This module must not
know what the descriptors mean.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "ember-keeper"
CGROUP = "ember-keeper"
TIMEOUT_S = 10.0
_PACKET_BYTES = 8192
_WORDS_MAX = 16
_ABSENT = (errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)
_RUNNING = 3  # exit status: another keeper holds the lock


class KeeperError(OSError):
    """The keeper cannot be started or reached, or refused a request; the text says which."""


class SilentKeeperError(KeeperError):
    """A keeper is there, and holds what it holds, but gives no answer: it stands still."""


@dataclass(frozen=True, slots=True)
class KeeperStatus:
    """What the keeper says of itself; ``oom_score_adj`` is -1000 where that was allowed."""

    pid: int
    oom_score_adj: int
    own_cgroup: bool


class Keeper:
    """One held connection to a keeper; not for use by several threads at once."""

    def __init__(self, path: Path, connection: socket.socket, remarks: Sequence[str] = ()) -> None:
        self.path = path
        self.remarks = tuple(remarks)
        """What the keeper could not do at its start, one line each; empty if it ran already."""
        self.is_new = False
        """Whether it was started to be joined."""
        self._socket = connection
        self._watching: asyncio.AbstractEventLoop | None = None

    @classmethod
    def connect(cls, path: Path) -> Keeper:
        """Join a running keeper; KeeperError (ENOENT, ECONNREFUSED, …) if there is none."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A socket with a timeout does not wait at all for room in the backlog; this one does.
            limit = struct.pack("ll", int(TIMEOUT_S), 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.connect(str(path))
            connection.settimeout(TIMEOUT_S)
            keeper = cls(path, connection)
            keeper.ping()
        except KeeperError:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            if isinstance(error, TimeoutError | BlockingIOError):
                raise SilentKeeperError(
                    errno.ETIMEDOUT, f"the keeper on {path} is there but does not answer"
                ) from error
            raise KeeperError(error.errno, f"no keeper answers on {path}: {error}") from error
        return keeper

    @classmethod
    def connect_or_start(
        cls, path: Path, *, program: Path = PROGRAM, cgroup: str | None = CGROUP
    ) -> Keeper:
        """Join the keeper on the socket ``path``, starting ``program`` if none answers there.

        ``cgroup`` names the control group the new keeper moves to (None: it stays in ours, as
        under a unit of its own). Raises KeeperError with the program's own words.
        """
        try:
            return cls.connect(path)
        except KeeperError as error:
            if error.errno not in _ABSENT:
                raise
        command = [str(program), *(("--cgroup", cgroup) if cgroup else ()), str(path.absolute())]
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KeeperError(errno.EIO, f"cannot start {program}: {error}") from error
        said = ended.stderr.decode(errors="replace").strip()
        if ended.returncode not in (0, _RUNNING):
            raise KeeperError(errno.EIO, said or f"{program} ended with {ended.returncode}")
        keeper = cls._join_started(path, said)
        keeper.is_new = ended.returncode == 0
        keeper.remarks = tuple(said.splitlines()) if keeper.is_new else ()
        return keeper

    @classmethod
    def _join_started(cls, path: Path, said: str) -> Keeper:
        """Connect to a keeper that was started by us, or by somebody else at the same moment."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return cls.connect(path)
            except KeeperError as error:
                if time.monotonic() > deadline:
                    text = f"{error.strerror}; the program said: {said or 'nothing'}"
                    way_out = f"end the process that holds {path}.lock, then start again"
                    raise KeeperError(error.errno, f"{text}; {way_out}") from error
            time.sleep(0.02)

    def ping(self) -> KeeperStatus:
        """Ask the keeper who it is."""
        words, _ = self._ask("ping")
        return KeeperStatus(int(words[0]), int(words[1]), words[2] == "own")

    def put(self, descriptors: Mapping[str, int]) -> None:
        """Have the keeper hold these descriptors too: all of them or, on an error, none.

        A name that it holds already is replaced. Names: up to 63 of ``A-Za-z0-9._-``; at most 16
        at once and 64 in all.
        """
        self._ask(" ".join(["put", *descriptors]), list(descriptors.values()))

    def get(self, *names: str) -> list[int] | None:
        """New descriptors (close-on-exec, the caller's) of the names; None if one is not held."""
        words, descriptors = self._ask(" ".join(["get", *names]))
        if words is _NONE:
            return None
        if len(descriptors) != len(names):
            for descriptor in descriptors:
                os.close(descriptor)
            raise KeeperError(errno.EMFILE, f"descriptors of {names} got lost: none are left here")
        return descriptors

    def names(self) -> list[str]:
        """What the keeper holds."""
        return self._ask("list")[0]

    def drop(self, *names: str) -> None:
        """Have the keeper close what it holds under these names; unknown ones are passed over."""
        for first in range(0, len(names), _WORDS_MAX):
            self._ask(" ".join(["drop", *names[first : first + _WORDS_MAX]]))

    def quit(self) -> None:
        """End the keeper; KeeperError (EBUSY) while it holds anything."""
        self._ask("quit")

    def fileno(self) -> int:
        """The connection's descriptor; it becomes readable when the keeper dies."""
        return self._socket.fileno()

    def alive(self) -> bool:
        """False once the keeper has closed its end (so: has died)."""
        readable = select.poll()
        try:
            readable.register(self._socket, select.POLLIN)
        except ValueError:
            return False
        if not readable.poll(0):
            return True
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call ``on_death`` once, from the running loop, when the keeper dies."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            if not self.alive():
                self.unwatch()
                on_death()

        loop.add_reader(self.fileno(), look)
        self._watching = loop

    def unwatch(self) -> None:
        """Stop watching; harmless if nothing is watched."""
        if self._watching is not None:
            self._watching.remove_reader(self.fileno())
            self._watching = None

    def close(self) -> None:
        """Leave the keeper; it keeps what it holds."""
        self.unwatch()
        self._socket.close()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _who(self) -> str:
        """The process at the other end, as the kernel knows it (unix(7), SO_PEERCRED)."""
        length = struct.calcsize("3i")
        pid = struct.unpack(
            "3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, length)
        )[0]
        return f"process {pid}"

    def _ask(self, request: str, descriptors: Sequence[int] = ()) -> tuple[list[str], list[int]]:
        """Send one packet, return the words behind ``ok`` and the descriptors of the answer."""
        verb = request.split(" ", 1)[0]
        got: list[int] = []
        try:
            socket.send_fds(self._socket, [request.encode()], list(descriptors))
            answer, got, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES, _WORDS_MAX)
            for descriptor in got:
                os.set_inheritable(descriptor, False)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise KeeperError(error.errno, f"keeper on {self.path} has died") from error
        except TimeoutError as error:
            raise SilentKeeperError(
                errno.ETIMEDOUT,
                f"the keeper on {self.path} ({self._who()}) did not answer {verb} for"
                f" {TIMEOUT_S:g} s",
            ) from error
        except OSError as error:
            raise KeeperError(
                error.errno or errno.EIO, f"keeper on {self.path} did not answer {verb}: {error}"
            ) from error
        status, *words = answer.decode(errors="replace").split(" ") if answer else ["gone"]
        if status == "ok":
            return words, got
        for descriptor in got:
            os.close(descriptor)
        if status == "none":
            return _NONE, []
        if status == "busy":
            raise KeeperError(errno.EBUSY, f"keeper on {self.path} still holds descriptors")
        if status == "gone":
            raise KeeperError(errno.EPIPE, f"keeper on {self.path} has died")
        raise KeeperError(
            errno.EINVAL, f"keeper on {self.path} refused {verb}: {' '.join(words) or status}"
        )


_NONE: list[str] = []
