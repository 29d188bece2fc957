"""Which hosts to ask for a blob now, in order: the files of certs.d plus what was learnt.

Learnt are three things, all forgotten after a while: a host that answers ranges with whole
bodies, one that failed or broke off (a dead mirror must not cost every read a timeout), and one
that a blob was not had from, for it has none, lied about it, or gave bytes that failed their
digest. Whom something was noted of last is asked last, nobody is left out. Files are looked at
again from time to time, never on every read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from snapshotter.clock import Clock
from snapshotter.content import Digest
from snapshotter.oci.hosts import Host, host_directory, load_hosts
from snapshotter.oci.recollection import Recollection

_RECHECK_S = 10.0
_LEARNT_S = 600.0
_FAILED_S = 30.0
"""For how long the first failure of a host counts; each that follows when it is tried again counts
twice as long, up to _LEARNT_S: a reader pays for each try."""


class HostBook:
    """Hosts by registry and blob."""

    def __init__(
        self, clock: Clock, certs_dirs: Sequence[Path] = (), plain_http: Sequence[str] = ()
    ) -> None:
        self._certs_dirs = tuple(certs_dirs)
        self._plain_http = frozenset(plain_http)
        self._hosts: Recollection[str, tuple[object, list[Host]]] = Recollection(clock, _RECHECK_S)
        self._loaded: Recollection[str, tuple[object, list[Host]]] = Recollection(clock, 86400)
        self._rangeless: Recollection[tuple[str, str], bool] = Recollection(clock, _LEARNT_S)
        self._notes = itertools.count(1)
        self._failed: Recollection[str, int] = Recollection(clock, _FAILED_S)
        self._strikes: Recollection[str, int] = Recollection(clock, 2 * _LEARNT_S)
        self._suspects: Recollection[tuple[str, Digest], dict[str, int]]
        self._suspects = Recollection(clock, _LEARNT_S)

    def hosts(self, registry: str, capability: str) -> list[Host]:
        """The hosts that have ``capability`` for ``registry``, mirrors first, failing ones last.

        Raises ConfigError if the registry's hosts.toml can't be used.
        """
        known = self._hosts.get(registry)
        if known is None:
            stamp = self._stamp(registry)
            known = self._loaded.get(registry)
            if known is None or known[0] != stamp:
                plain = registry in self._plain_http
                known = (stamp, load_hosts(self._certs_dirs, registry, plain_http=plain))
                self._loaded.put(registry, known)
            self._hosts.put(registry, known)
        able = [host for host in known[1] if capability in host.capabilities]
        return sorted(able, key=lambda host: self._failed.get(host.base) or 0)

    def _stamp(self, registry: str) -> object:
        """Changes when the registry's directory, its hosts.toml or the directory's entries do."""
        directory = host_directory(self._certs_dirs, registry)
        if directory is None:
            return None
        found = []
        for path in (directory, directory / "hosts.toml"):
            try:
                state = path.stat()
            except OSError:
                continue
            found.append((path, state.st_mtime_ns, state.st_size, state.st_ino))
        return tuple(found)

    def for_blob(self, registry: str, repository: str, digest: Digest) -> list[Host]:
        """The hosts to pull a blob from: those that it was not had from come last."""
        hosts = self.hosts(registry, "pull")
        suspects = self._suspects.get((f"{registry}/{repository}", digest))
        if suspects:
            hosts.sort(key=lambda host: suspects.get(host.base, 0))
        return hosts

    def suspect(self, name: str, digest: Digest, host: Host) -> None:
        """A blob of ``name`` (registry/repository) was not had from ``host``: it has none, lied
        about it, or gave bytes that failed their digest."""
        known = self._suspects.get((name, digest)) or {}
        self._suspects.put((name, digest), {**known, host.base: next(self._notes)})

    def note_failed(self, host: Host) -> None:
        """``host`` gave no answer or none that is of use, or broke off in the middle of one."""
        strikes = self._strikes.get(host.base) or 0
        if host.base not in self._failed:
            strikes += 1
            self._strikes.put(host.base, strikes)
        keep_s = min(_LEARNT_S, _FAILED_S * 2.0 ** min(max(strikes - 1, 0), 16))
        self._failed.put(host.base, next(self._notes), keep_s)

    def note_worked(self, host: Host) -> None:
        """``host`` answered well: its next failure is a first one again."""
        if host.base not in self._failed:
            self._strikes.drop(host.base)

    def note_rangeless(self, host: Host, repository: str) -> None:
        """``host`` does not serve ranges of this repository."""
        self._rangeless.put((host.base, repository), True)

    def is_rangeless(self, host: Host, repository: str) -> bool:
        """Whether that was noted and is believed still."""
        return self._rangeless.get((host.base, repository)) is not None
