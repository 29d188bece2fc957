"""Where an index is looked for: with the image's credentials, past mirrors, again after a kill."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from snapshotter.oci.referrers import fallback_tag
from tests.cases.images import ImageCase
from tests.fakes.gates import BasicGate
from tests.fakes.registry import FakeRegistry
from tests.indexes import artifact_of, offer
from tests.integration.registry_scene import noisy, read_all
from tests.integration.test_found_indexes import Found, found_in, manifest_of, slowly

pytestmark = [pytest.mark.root, pytest.mark.containerd]

USER, PASSWORD = "someone", "pass:word"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    directory = tmp_path_factory.mktemp("elsewhere")
    (directory / "certs").mkdir()
    more = f'docker_config = ["{directory}/config.json"]\nhosts_dir = "{directory}/certs"\n'
    with found_in(directory, "", registry=more) as made:
        yield made


def moved(found: Found, name: str, registry: FakeRegistry) -> tuple[str, ImageCase]:
    """An image in ``registry`` with a signed index beside it, of which nothing is here."""
    case = noisy(name, 1_000_000)
    files = found.built(case)
    key = found.key(name.replace(" ", "-"), trusted=True)
    reference = found.scene.add(case, registry)
    made = artifact_of(case.documents[-1], files, keys=[key])
    offer(registry, case.repository, manifest_of(case), [made])
    return reference, case


def reads_right_by_a_signed_index(found: Found, reference: str, case: ImageCase) -> None:
    node = found.scene.node
    image = node.image(reference)
    assert image["lookup"] == {"outcome": "found", "why": ""}
    assert {layer["index_from"]["origin"] for layer in image["layers"]} == {"signed"}
    with node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]


def test_a_private_images_index_is_looked_for_with_its_credentials(found: Found) -> None:
    with found.scene.registries.another() as registry:
        pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        auths = {"auths": {registry.authority: {"auth": pair}}}
        (found.directory / "config.json").write_text(json.dumps(auths))
        reference, case = moved(found, "private image", registry)
        registry.gate = BasicGate({USER: PASSWORD})
        assert found.scene.node.pull(reference).lazy_layers == 2
        reads_right_by_a_signed_index(found, reference, case)


def test_a_mirror_that_has_the_image_and_no_index_is_passed_by(found: Found) -> None:
    registries = found.scene.registries
    with registries.another() as registry, registries.another() as mirror:
        folder = found.directory / "certs" / registry.authority
        folder.mkdir()
        (folder / "hosts.toml").write_text(f'server = "{registry.url}"\n[host."{mirror.url}"]\n')
        reference, case = moved(found, "mirrored image", registry)
        found.scene.add(case, mirror)
        assert found.scene.node.pull(reference).lazy_layers == 2
        assert mirror.asked("/referrers/")
        reads_right_by_a_signed_index(found, reference, case)


def test_a_daemon_that_is_killed_in_the_middle_of_a_lookup_leaves_nothing_in_the_way(
    found: Found,
) -> None:
    registry, node = found.scene.registry, found.scene.node
    reference, case = moved(found, "killed in between", registry)
    tag = fallback_tag(manifest_of(case))
    registry.inject(slowly(30), lambda seen: tag in seen.path)
    assert node.pull(reference).lazy_layers == 2
    assert node.image(reference)["lookup"]["outcome"] == "slow"
    node.ember.kill()
    registry.heal()
    node.start_again()
    assert node.until(lambda: found.gone(reference))
    assert node.pull(reference).lazy_layers == 2
    reads_right_by_a_signed_index(found, reference, case)
    left = [path.name for path in (node.ember.root / "index").iterdir()]
    assert not [name for name in left if ".tmp" in name], left
