"""Unsigned indexes on a whole node that trusts registries, and what comes of comparing them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from snapshotter.content import Digest
from snapshotter.image.indexer import LayerIndexer
from snapshotter.oci.documents import digest_of
from tests.cases.images import ImageCase, as_it_is, image
from tests.cases.rows import is_file
from tests.cases.tars import file, layer
from tests.indexes import Change, artifact_of, for_layer, with_set_uid, with_wrong_chunks
from tests.integration.registry_scene import noise_blobs, noisy, read_all
from tests.integration.test_found_indexes import Found, found_in, hex_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    with found_in(tmp_path_factory.mktemp("compared"), 'trust = "registry"\n') as made:
        yield made


def unsigned(found: Found, case: ImageCase, change: Change = bytes) -> str:
    """The image's index lies beside it, unsigned, and nothing of it is here."""
    files = found.built(case)
    return found.offer(case, [artifact_of(case.documents[-1], files, change=change)])


def origins(found: Found, reference: str) -> list[tuple[str, bool]]:
    """Who made the index of each layer that has one, and whether it was compared."""
    layers = found.scene.node.image(reference)["layers"]
    those = [layer["index_from"] for layer in layers if layer["index_from"]]
    return [(one["origin"], one["compared"]) for one in those]


def complete(found: Found) -> None:
    *_, last = found.scene.node.drain()
    assert last.views_left == 0, last


def test_a_right_index_is_compared_once_its_layer_is_complete_and_counts_from_then_on(
    found: Found,
) -> None:
    case = noisy("right and unsigned")
    reference = unsigned(found, case)
    node = found.scene.node
    assert node.pull(reference).lazy_layers == 2
    assert origins(found, reference) == [("registry", False)] * 2
    with node.mounted(case.chain_id) as root:
        assert read_all(found.scene, case, root) == ["", ""]
        complete(found)
        assert node.until(lambda: origins(found, reference) == [("registry", True)] * 2)
    assert any("until it is complete and compared" in note for note in node.status()["notes"])


def test_what_was_not_compared_yet_is_compared_by_the_next_daemon(found: Found) -> None:
    case = noisy("compared later")
    reference = unsigned(found, case)
    node = found.scene.node
    assert node.pull(reference).lazy_layers == 2
    with node.mounted(case.chain_id):
        complete(found)
        assert node.until(lambda: origins(found, reference) == [("registry", True)] * 2)
    node.ember.kill()
    for digest in case.stored[:2]:
        note = node.ember.root / "index" / f"{hex_of(digest)}.from"
        note.write_text(json.dumps({**json.loads(note.read_text()), "compared": False}))
    node.start_again()
    assert node.until(lambda: origins(found, reference) == [("registry", True)] * 2)


def test_an_index_that_gives_other_rights_is_found_out_said_and_replaced(found: Found) -> None:
    case = noisy("set user id")
    reference = unsigned(found, case, with_set_uid)
    node, mark = found.scene.node, len(found.scene.node.ember.log())
    assert node.pull(reference).lazy_layers == 2
    with node.mounted(case.chain_id) as root:
        name = sorted(case.rows)[0]
        assert (root / name).stat().st_mode & 0o4000
        assert read_all(found.scene, case, root) == ["", ""]
        complete(found)
        assert node.until(lambda: len(node.status()["daemon"]["index"]["wrong"]) == 2)
        assert node.until(lambda: origins(found, reference) == [("here", False)] * 2)
        image = node.image(reference)
        assert "turned out wrong" in image["suspect"]
    assert "IS WRONG: its file system is not what the layer's tar holds" in node.ember.log()[mark:]
    with node.mounted(case.chain_id) as root:  # whoever comes next
        assert not (root / name).stat().st_mode & 0o4000
        assert read_all(found.scene, case, root) == ["", ""]
    node.containerd.ctr("images", "rm", "--sync", reference)
    again = node.pull(reference)
    assert again.lazy_layers == 0
    assert "an index of it from elsewhere was wrong" in again.reason
    assert any("is never used again" in note for note in node.status()["notes"])


def test_what_one_repository_gave_unsigned_decides_nothing_for_another_one(found: Found) -> None:
    """Whoever can push there must not say what a layer means that an image elsewhere has too."""
    case = noisy("two owners")
    reference = unsigned(found, case, with_set_uid)
    blobs, rows = noise_blobs("two owners")
    name = sorted(rows)[1]
    mine = image("the top layer alone", blobs[1:], {name: rows[name]})
    node = found.scene.node
    assert node.pull(reference).lazy_layers == 2
    with node.mounted(case.chain_id) as root:
        assert (root / name).stat().st_mode & 0o4000
        pulled = node.pull(found.scene.add(mine))
        assert pulled.lazy_layers == 0
        assert "is not compared yet" in pulled.reason
        with node.mounted(mine.chain_id) as own:
            assert not (own / name).stat().st_mode & 0o4000
    node.containerd.ctr("images", "rm", "--sync", reference)
    # A foreign overlay without an upper directory may look like one on ours while it is there.
    assert node.until(lambda: not node.drop(reference).kept, 20)
    again = image("the top layer twice", [blobs[1], blobs[1]])
    again_reference = found.scene.add(again)
    pulled = node.pull(again_reference, "others")
    assert pulled.lazy_layers == 2, pulled.reason  # nobody stands on it any more
    assert {origin for origin, _ in origins(found, again_reference)} == {"here"}
    with node.mounted(again.chain_id, namespace="others") as own:
        assert not (own / name).stat().st_mode & 0o4000


def test_a_registry_that_lies_about_bytes_and_index_alike_is_found_out_by_the_whole_digest(
    found: Found,
) -> None:
    plain = layer(file(b"word", b"right " * 50_000))
    wrong = plain.replace(b"right ", b"wrong ")
    case = image("wholly wrong", [as_it_is(plain)], {"word": is_file(b"right " * 50_000)})
    scene, node = found.scene, found.scene.node
    blob = Digest.parse(case.stored[0])
    with LayerIndexer(
        digest_of(wrong), None, blob_bytes=len(wrong), sink=None, directory=found.directory
    ) as indexer:
        indexer.feed(wrong)
        indexer.finish()
    made = artifact_of(
        case.documents[-1],
        [found.directory / f"{digest_of(wrong).hex}.idx"],
        change=lambda index: for_layer(index, blob, blob),
    )
    scene.add(case)
    scene.registry.add_blob(case.repository, wrong, blob)
    reference = found.offer(case, [made])
    assert node.pull(reference).lazy_layers == 1
    with node.mounted(case.chain_id) as root:
        assert (root / "word").read_bytes().startswith(b"wrong ")  # whoever trusts so gets it so
        complete(found)
        assert node.until(lambda: "its chunks make up" in node.ember.log())
        assert node.until(lambda: "turned out wrong" in node.image(reference)["suspect"])
        assert node.until(lambda: not (node.ember.root / "views" / blob.hex).exists())
        with pytest.raises(grpc.RpcError, match="refused"):
            node.shown(case.chain_id)  # nobody new sees it
        assert (root / "word").read_bytes().startswith(b"wrong ")


@pytest.fixture(scope="module")
def completing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """As ``found``, where what is mounted is fetched at once."""
    more = 'trust = "registry"\n[completion]\ndelay = 0\n'
    directory = tmp_path_factory.mktemp("completing")
    with found_in(directory, more, completion=None, miss_s=2.0) as made:
        yield made


def test_an_index_that_is_wrong_about_bytes_shows_none_of_them_and_is_found_out(
    completing: Found,
) -> None:
    """Such a layer never becomes complete: it is read once more from its registry instead."""
    case = noisy("wrong chunks")
    reference = unsigned(completing, case, with_wrong_chunks)
    node = completing.scene.node
    assert node.pull(reference).lazy_layers == 2
    with node.mounted(case.chain_id) as root:
        said = read_all(completing.scene, case, root)
        assert all("Input/output error" in words for words in said), said
        assert node.until(lambda: len(node.status()["daemon"]["index"]["wrong"]) == 2)
        assert "its chunks are not the layer's" in node.ember.log()
    node.containerd.ctr("images", "rm", "--sync", reference)
    assert node.pull(reference).lazy_layers == 0  # the layers are containerd's from now on
    with node.mounted(case.chain_id) as root:
        assert read_all(completing.scene, case, root) == ["", ""]


def test_a_layer_that_lies_and_never_becomes_complete_is_found_out_all_the_same(
    completing: Found,
) -> None:
    """What its registry has is not what the config promises, and one chunk can't be had."""
    plain = layer(file(b"word", b"other " * 1_000_000))
    wrong = plain.replace(b"other ", b"wrong ")
    blob, view = digest_of(wrong), digest_of(plain)
    stored = replace(as_it_is(wrong), diff_id=str(view))
    case = image("wrong, and never whole", [stored], {"word": is_file(b"other " * 1_000_000)})
    with LayerIndexer(
        blob, None, blob_bytes=len(wrong), sink=None, directory=completing.directory
    ) as indexer:
        indexer.feed(wrong)
        indexer.finish()
    made = artifact_of(
        case.documents[-1],
        [completing.directory / f"{blob.hex}.idx"],
        change=lambda index: with_wrong_chunks(for_layer(index, blob, view), -1),
    )
    scene, node = completing.scene, completing.scene.node
    scene.add(case)
    reference = completing.offer(case, [made])
    assert node.pull(reference).lazy_layers == 1
    with node.mounted(case.chain_id) as root:
        with open(root / "word", "rb") as shown:
            assert b"wrong " in shown.read(12)
        assert node.until(lambda: "turned out wrong" in node.image(reference)["suspect"])
        assert f"THE INDEX of layer {blob}" in node.ember.log()
        assert node.until(lambda: not (node.ember.root / "views" / view.hex).exists())
        with pytest.raises(grpc.RpcError, match="refused"):
            node.shown(case.chain_id)
