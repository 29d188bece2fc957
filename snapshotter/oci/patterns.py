"""Which image names a pattern means: Docker's config keys and the kubelet's matchImages. Pure.

A pattern is ``[scheme://]host[:port][/path]``. ``*`` stands for characters within one label of
the host. The path must be the name's own beginning, whole components of it (the kubelet also lets
``team`` match ``teamster``: here it doesn't, it would hand a secret to a neighbour).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from snapshotter.oci.hosts import DOCKER_HUB_HOST
from snapshotter.oci.reference import DOCKER_HUB

_HUB_NAMES = frozenset({DOCKER_HUB, f"index.{DOCKER_HUB}", DOCKER_HUB_HOST})


def match_image(pattern: str, registry: str, repository: str) -> tuple[int, int] | None:
    """How specific ``pattern`` is if it means ``registry/repository``, else None.

    More specific compares greater: components of the path first, then literal characters.
    """
    host, _, path = (
        pattern.partition("://")[2].partition("/") if "://" in pattern else (pattern.partition("/"))
    )
    path = path.strip("/")
    if path in ("v1", "v2"):
        path = ""
    if not _host_matches(host.lower(), registry.lower()):
        return None
    if path and not (repository == path or repository.startswith(f"{path}/")):
        return None
    literal = len(host) - host.count("*")
    return (path.count("/") + 1 if path else 0), literal


def _host_matches(pattern: str, registry: str) -> bool:
    if registry in _HUB_NAMES and pattern in _HUB_NAMES:
        return True
    if "*" not in pattern and "?" not in pattern and "[" not in pattern:
        return pattern == registry
    pattern_host, _, pattern_port = pattern.partition(":")
    host, _, port = registry.partition(":")
    if pattern_port != port:
        return False
    wanted, labels = pattern_host.split("."), host.split(".")
    return len(wanted) == len(labels) and all(
        fnmatchcase(label, glob) for glob, label in zip(wanted, labels, strict=True)
    )
