"""References are read as Docker's and containerd's own parser reads them."""

from __future__ import annotations

import pytest

from snapshotter.content import Digest
from snapshotter.errors import InvalidArgumentError
from snapshotter.oci.reference import parse_reference, split_name

SHA = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("nginx", "docker.io/library/nginx:latest"),
        ("nginx:1.27", "docker.io/library/nginx:1.27"),
        ("team/app", "docker.io/team/app:latest"),
        ("docker.io/nginx", "docker.io/library/nginx:latest"),
        ("index.docker.io/library/nginx", "docker.io/library/nginx:latest"),
        ("localhost/app", "localhost/app:latest"),
        ("localhost:5000/app", "localhost:5000/app:latest"),
        ("localhost:5000", "docker.io/library/localhost:5000"),
        ("127.0.0.1:5000/a/b/c:v1", "127.0.0.1:5000/a/b/c:v1"),
        ("[::1]:5000/app", "[::1]:5000/app:latest"),
        ("Registry/app", "Registry/app:latest"),
        ("quay.io/a__b/c-d.e--f:V_1.x-y", "quay.io/a__b/c-d.e--f:V_1.x-y"),
        (f"quay.io/app@{SHA}", f"quay.io/app@{SHA}"),
        (f"quay.io/app:v1@{SHA}", f"quay.io/app:v1@{SHA}"),
    ],
)
def test_a_reference_is_brought_to_its_full_form(text: str, normal: str) -> None:
    reference = parse_reference(text)
    assert str(reference) == normal
    assert parse_reference(str(reference)) == reference


def test_the_digest_wins_over_the_tag() -> None:
    reference = parse_reference(f"quay.io/app:v1@{SHA}")
    assert reference.identifier == SHA
    assert reference.tag == "v1"
    assert parse_reference("quay.io/app").identifier == "latest"
    pinned = parse_reference("quay.io/app:v1").with_digest(Digest.parse(SHA))
    assert pinned == reference


@pytest.mark.parametrize(
    "text",
    [
        "registry.example:99999/app",
        "registry.example:0/app",
        "[:::::]:5000/app",
        "[1]/app",
        "",
        "/",
        "a" * 64,
        "Nginx",
        "quay.io/App",
        "quay.io/a..b",
        "quay.io/../etc",
        "quay.io/a//b",
        "quay.io/app:",
        "quay.io/app:ta g",
        "quay.io/app:" + "t" * 129,
        "quay.io/app@sha256:12",
        f"quay.io/app@{SHA}@{SHA}",
        "quay.io/app?x=1",
        "quay.io/app\n",
        "http://quay.io/app",
        "user@quay.io/app",
        "quay.io/" + "a" * 250,
        "qu_ay.io/app",
        "quay.io:port/app",
        "quay.io/ä",
    ],
)
def test_what_is_no_reference_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_reference(text)


def test_a_blob_s_repository_splits_into_registry_and_path() -> None:
    assert split_name("registry.example:5000/team/app") == ("registry.example:5000", "team/app")
    assert split_name("docker.io/library/nginx") == ("docker.io", "library/nginx")
