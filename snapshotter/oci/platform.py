"""Platforms of images: which entry of an index is for this node, and how well it fits.

Normalisation and the order of ARM variants follow containerd's `platforms` package, so that Ember
chooses the manifest that containerd chooses. Pure, but for `host_platform`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from snapshotter.errors import InvalidArgumentError

_ARCHITECTURES = {
    "x86_64": ("amd64", ""),
    "x86-64": ("amd64", ""),
    "amd64": ("amd64", ""),
    "aarch64": ("arm64", ""),
    "arm64": ("arm64", ""),
    "armhf": ("arm", "v7"),
    "armel": ("arm", "v6"),
    "armv7l": ("arm", "v7"),
    "armv6l": ("arm", "v6"),
    "i386": ("386", ""),
    "i486": ("386", ""),
    "i586": ("386", ""),
    "i686": ("386", ""),
}
_BASELINE = {"amd64": 1, "arm64": 8, "arm": 7}
_OLDEST = {"amd64": 1, "arm64": 8, "arm": 5}


@dataclass(frozen=True, slots=True)
class Platform:
    """Operating system, architecture and variant, in the words of the image spec (GOOS, GOARCH)."""

    os: str
    architecture: str
    variant: str = ""

    @classmethod
    def of(cls, os: str, architecture: str, variant: str = "") -> Platform:
        """Build from words as they are found in the wild, normalised."""
        known, implied = _ARCHITECTURES.get(architecture.lower(), (architecture.lower(), ""))
        variant = variant.lower() or implied
        if variant.isdecimal():
            variant = f"v{variant}"
        if variant == f"v{_BASELINE.get(known, 0)}":
            variant = ""
        return cls(os.lower(), known, variant)

    @classmethod
    def parse(cls, text: str) -> Platform:
        """Parse ``os/architecture[/variant]``."""
        parts = text.split("/")
        if len(parts) not in (2, 3) or not all(parts):
            raise InvalidArgumentError(
                f"platform {text[:100]!r} is not of the form os/architecture[/variant]"
            )
        return cls.of(*parts)

    def _level(self) -> int | None:
        """The variant's number; None if it has none that can be compared."""
        baseline = _BASELINE.get(self.architecture)
        if baseline is None:
            return None
        if not self.variant:
            return baseline
        digits = self.variant.removeprefix("v").partition(".")[0]
        return int(digits) if digits.isdecimal() and len(digits) < 4 else None

    def rank(self, offered: Platform) -> int | None:
        """How well ``offered`` runs here: 0 is exact, more is worse, None is not at all.

        An older variant of the same architecture runs (arm v6 on v7), a newer one does not.
        """
        if (self.os, self.architecture) != (offered.os, offered.architecture):
            return None
        if self.variant == offered.variant:
            return 0
        mine, theirs = self._level(), offered._level()
        if mine is None or theirs is None:
            return None
        if _OLDEST[self.architecture] <= theirs <= mine:
            return mine - theirs
        return None

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


def host_platform() -> Platform:
    """The platform of the node that this runs on."""
    return Platform.of("linux", os.uname().machine)
