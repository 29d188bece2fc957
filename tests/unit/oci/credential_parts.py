"""What several tests of credentials stand on: who is asked for, who is found, scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from snapshotter.oci.credentials import (
    Credential,
    Wanted,
)

HUB = Wanted("docker.io", "library/nginx")


APP = Wanted("registry.example:5000", "team/app")


def user(name: str) -> Credential:
    return Credential(name, "word")


def names(found: Sequence[Credential]) -> list[str]:
    return [credential.username for credential in found]


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


CONFIG = """
apiVersion: kubelet.config.k8s.io/v1
kind: CredentialProviderConfig
providers:
  - name: fake
    apiVersion: credentialprovider.kubelet.k8s.io/v1
    matchImages: ["*.example:5000", "registry.example:5000/team"]
    defaultCacheDuration: 10m
    args: [get]
    env: [{name: WHO, value: robot}]
  - name: tokens
    apiVersion: credentialprovider.kubelet.k8s.io/v1
    matchImages: ["*.example:5000"]
    defaultCacheDuration: 0s
    tokenAttributes: {serviceAccountTokenAudience: x}
"""
