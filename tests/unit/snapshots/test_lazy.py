"""What must hold of layers that are not unpacked: containerd's remote-snapshot protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from snapshotter.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from snapshotter.snapshots import labels as known
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.model import Info, Kind, Mount, Usage
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig
from tests.fakes.lazy import FakeLazyLayers, digest

BOTTOM, TOP = str(digest("bottom")), str(digest("top"))


def of(chain_id: str) -> dict[str, str]:
    return {
        known.SNAPSHOT_REF: chain_id,
        known.IMAGE_REF: "registry.example/app:1",
        known.MANIFEST_DIGEST: str(digest("manifest")),
        known.LAYER_DIGEST: str(digest("layer " + chain_id)),
        known.IMAGE_LAYERS: f"{digest('layer ' + chain_id)},{digest('above')},cut-of",
        known.DIFF_ID: "not a digest",
    }


async def take(snapshotter: Snapshotter, chain_id: str, parent: str = "") -> None:
    with pytest.raises(AlreadyExistsError):
        await snapshotter.prepare(f"extract {chain_id} on {parent}", parent, of(chain_id), "k8s.io")


async def containerd_finds(snapshotter: Snapshotter, chain_id: str, parent: str) -> Info:
    """The look-up that containerd makes after "already exists"; exactly one may answer."""
    text = f'labels."{known.SNAPSHOT_REF}"=={chain_id},parent=="{parent}"'
    (info,) = [info async for block in snapshotter.walk([text]) for info in block]
    assert info.kind is Kind.COMMITTED
    assert info.parent == parent
    return info


async def test_a_taken_layer_is_committed_under_its_chain_id_with_label_and_parent(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    lazy.taken = {BOTTOM, TOP}
    await take(snapshotter, BOTTOM)
    await take(snapshotter, TOP, BOTTOM)
    assert (await containerd_finds(snapshotter, BOTTOM, "")).name == BOTTOM
    info = await containerd_finds(snapshotter, TOP, BOTTOM)
    assert info == await snapshotter.stat(TOP)
    assert info.labels == of(TOP)
    with pytest.raises(NotFoundError):
        await snapshotter.stat(f"extract {TOP} on {BOTTOM}")


async def test_a_layer_that_proved_unfit_is_unpacked_beside_and_then_found_instead(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    lazy.taken = {BOTTOM}
    await take(snapshotter, BOTTOM)
    lazy.taken, lazy.unfit = set(), {digest("layer " + BOTTOM)}
    assert (await containerd_finds(snapshotter, BOTTOM, "")).name == BOTTOM
    await snapshotter.prepare("again", "", of(BOTTOM))
    await snapshotter.commit("unpacked", "again", of(BOTTOM))
    assert (await containerd_finds(snapshotter, BOTTOM, "")).name == "unpacked"
    await take(snapshotter, BOTTOM)
    await snapshotter.remove(BOTTOM)


async def test_a_claim_says_all_that_the_labels_say(
    snapshotter: Snapshotter, lazy: FakeLazyLayers, tmp_path: Path
) -> None:
    lazy.taken = {BOTTOM}
    await take(snapshotter, BOTTOM)
    await snapshotter.prepare("key", BOTTOM, of(TOP), "k8s.io")
    claim = lazy.claims[-1]
    assert (claim.namespace, claim.chain_id, claim.parent) == ("k8s.io", TOP, BOTTOM)
    assert claim.image_ref == "registry.example/app:1"
    assert claim.manifest_digest == digest("manifest")
    assert claim.layer_digest == digest("layer " + TOP)
    assert claim.image_layers == (digest("layer " + TOP), digest("above"))
    assert claim.diff_id is None
    (below,) = claim.below
    assert (below.name, below.chain_id, below.layer) == (BOTTOM, BOTTOM, digest("layer " + BOTTOM))
    assert below.directory == tmp_path / "snapshots/1/fs"


async def test_a_claim_says_whether_the_layer_is_being_unpacked_for_somebody_else(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    await snapshotter.prepare("default/1/extract", "", of(BOTTOM))
    await snapshotter.prepare("k8s.io/2/extract", "", of(BOTTOM), "k8s.io")
    await snapshotter.remove("default/1/extract")
    await snapshotter.commit("k8s.io/3/" + BOTTOM, "k8s.io/2/extract", of(BOTTOM))
    await snapshotter.prepare("default/4/extract", "k8s.io/3/" + BOTTOM, of(TOP))
    await snapshotter.remove("default/4/extract")
    await snapshotter.prepare("default/5/extract", "k8s.io/3/" + BOTTOM, of(TOP))
    assert [claim.being_unpacked for claim in lazy.claims] == [False, True, False, False]


async def test_a_layer_that_is_not_taken_is_an_ordinary_snapshot(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    (mount,) = await snapshotter.prepare("key", "", of(BOTTOM))
    assert mount.type == "bind"
    await snapshotter.commit("default/2/" + BOTTOM, "key", of(BOTTOM))
    assert len(lazy.claims) == 1


async def test_a_layer_that_is_here_is_not_claimed_again(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    await snapshotter.prepare("key", "", of(BOTTOM))
    await snapshotter.commit("default/2/" + BOTTOM, "key", of(BOTTOM))
    await take(snapshotter, BOTTOM)
    assert (await containerd_finds(snapshotter, BOTTOM, "")).name == "default/2/" + BOTTOM
    assert len(lazy.claims) == 1


async def test_the_same_layer_on_another_parent_is_another_snapshot(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    for name in ("a/1/base", "b/1/base"):
        await snapshotter.prepare("key", "", {})
        await snapshotter.commit(name, "key", {})
    lazy.taken = {TOP}
    await take(snapshotter, TOP, "a/1/base")
    await take(snapshotter, TOP, "b/1/base")
    await take(snapshotter, TOP, "b/1/base")
    assert (await containerd_finds(snapshotter, TOP, "a/1/base")).name == TOP
    assert (await containerd_finds(snapshotter, TOP, "b/1/base")).name == f"{TOP}@b/1/base"


async def test_a_taken_name_does_not_stop_a_layer(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    lazy.taken = {BOTTOM}
    for name in (BOTTOM, f"{BOTTOM}@"):
        await snapshotter.prepare(name, "", {})
    await take(snapshotter, BOTTOM)
    assert (await containerd_finds(snapshotter, BOTTOM, "")).name == f"{BOTTOM}@#2"


async def test_twenty_clients_that_pull_at_once_ask_once_and_share_one_snapshot(
    snapshotter: Snapshotter, lazy: FakeLazyLayers, tmp_path: Path
) -> None:
    lazy.taken = {BOTTOM}
    lazy.claim_gate.clear()
    asking = [
        asyncio.create_task(snapshotter.prepare(f"key {n}", "", of(BOTTOM), "k8s.io"))
        for n in range(20)
    ]
    await lazy.claimed.wait()
    asking[0].cancel()
    lazy.claim_gate.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert all(isinstance(answer, AlreadyExistsError) for answer in answers[1:])
    await containerd_finds(snapshotter, BOTTOM, "")
    await snapshotter.cleanup()
    assert len(list((tmp_path / "snapshots").iterdir())) == 1


@pytest.mark.parametrize("error", [UnavailableError("registry down"), RuntimeError("a bug")])
async def test_a_claim_that_fails_means_unpack_it(
    snapshotter: Snapshotter, lazy: FakeLazyLayers, error: Exception
) -> None:
    lazy.claim_error = error
    assert await snapshotter.prepare("key", "", of(BOTTOM))
    assert (await snapshotter.stat("key")).kind is Kind.ACTIVE


async def test_a_claim_that_does_not_answer_means_unpack_it(
    database: Database, tmp_path: Path, lazy: FakeLazyLayers
) -> None:
    config = SnapshotterConfig(claim_wait_s=0.01, overlay_options=())
    snapshotter = Snapshotter(database, tmp_path, lazy, config)
    await snapshotter.start()
    lazy.claim_gate.clear()
    assert await snapshotter.prepare("key", "", of(BOTTOM))
    await snapshotter.close()


async def test_errors_of_names_come_before_the_claim(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    lazy.taken = {TOP}
    with pytest.raises(NotFoundError):
        await snapshotter.prepare("key", "missing", of(TOP))
    assert lazy.claims == []


async def test_lazy_layers_are_mounted_before_something_stands_on_them(
    snapshotter: Snapshotter, lazy: FakeLazyLayers, tmp_path: Path
) -> None:
    lazy.taken = {BOTTOM}
    await take(snapshotter, BOTTOM)
    assert not (tmp_path / "snapshots/1/fs").exists()
    (mount,) = await snapshotter.view("view", BOTTOM, {})
    assert mount == Mount("bind", str(tmp_path / "snapshots/1/fs"), ("ro", "rbind"))
    assert lazy.mounted == {1}
    assert lazy.waits_s == [1.5]
    await snapshotter.mounts("view")
    assert lazy.waits_s == [1.5, 110.0]


async def test_prepare_answers_while_a_layer_is_not_ready_and_mounts_says_how_far_it_is(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    lazy.taken, lazy.ready = {BOTTOM}, False
    await take(snapshotter, BOTTOM)
    prepared = await snapshotter.prepare("key", BOTTOM, {})
    with pytest.raises(UnavailableError, match="3 of 10 MiB"):
        await snapshotter.mounts("key")
    lazy.ready = True
    assert await snapshotter.mounts("key") == prepared


async def test_nothing_is_unpacked_onto_a_layer_that_is_not_ready(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    lazy.taken, lazy.ready = {BOTTOM}, False
    await take(snapshotter, BOTTOM)
    with pytest.raises(UnavailableError):
        await snapshotter.prepare("key", BOTTOM, of(TOP))
    with pytest.raises(NotFoundError):
        await snapshotter.stat("key")


async def test_mounting_that_takes_long_holds_up_no_prepare_and_goes_on(
    tmp_path: Path, database: Database, lazy: FakeLazyLayers
) -> None:
    config = SnapshotterConfig(prepare_wait_s=0.05, overlay_options=())
    snapshotter = Snapshotter(database, tmp_path, lazy, config)
    await snapshotter.start()
    lazy.taken = {BOTTOM}
    await take(snapshotter, BOTTOM)
    lazy.mount_gate.clear()
    async with asyncio.timeout(5):
        prepared = await snapshotter.prepare("key", BOTTOM, {})
        with pytest.raises(UnavailableError, match=r"not mounted yet after 0\.05 s"):
            await snapshotter.prepare("extract", BOTTOM, of(TOP))
    with pytest.raises(NotFoundError):
        await snapshotter.stat("extract")
    assert lazy.mounted == set()
    lazy.mount_gate.set()
    assert await snapshotter.mounts("key") == prepared
    assert lazy.mounted == {1}
    await snapshotter.close()


async def test_plain_layers_are_never_asked_for(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    await snapshotter.prepare("key", "", {})
    await snapshotter.commit("name", "key", {})
    await snapshotter.view("view", "name", {})
    await snapshotter.mounts("view")
    assert lazy.waits_s == []


async def test_plain_and_lazy_layers_mix_in_one_stack(
    snapshotter: Snapshotter, lazy: FakeLazyLayers, tmp_path: Path
) -> None:
    await snapshotter.prepare("key", "", {})
    await snapshotter.commit("base", "key", {})
    lazy.taken = {TOP}
    await take(snapshotter, TOP, "base")
    base = tmp_path / "snapshots"
    (mount,) = await snapshotter.view("view", TOP, {})
    assert mount.options[0] == f"lowerdir={base}/2/fs:{base}/1/fs"
    (stack,) = await snapshotter.lazy_stacks()
    assert [(e.name, e.layer is None, e.view is None) for e in stack] == [
        ("base", True, True),
        (TOP, False, False),
    ]


async def test_a_removed_layer_is_released_after_its_row_is_gone(
    snapshotter: Snapshotter, lazy: FakeLazyLayers, tmp_path: Path
) -> None:
    lazy.taken = {BOTTOM}
    await take(snapshotter, BOTTOM)
    await snapshotter.view("view", BOTTOM, {})
    with pytest.raises(FailedPreconditionError):
        await snapshotter.remove(BOTTOM)
    assert lazy.released == []
    await snapshotter.remove("view")
    await snapshotter.remove(BOTTOM)
    assert [entry.name for entry in lazy.released] == [BOTTOM]
    assert not (tmp_path / "snapshots/1").exists()


async def test_remove_answers_though_releasing_fails_or_hangs(
    database: Database, tmp_path: Path, lazy: FakeLazyLayers
) -> None:
    config = SnapshotterConfig(release_wait_s=0.01, close_wait_s=0.01, overlay_options=())
    snapshotter = Snapshotter(database, tmp_path, lazy, config)
    await snapshotter.start()
    lazy.taken = {BOTTOM, TOP}
    await take(snapshotter, BOTTOM)
    await take(snapshotter, TOP)
    lazy.release_error = RuntimeError("busy")
    await snapshotter.remove(BOTTOM)
    lazy.release_gate.clear()
    await snapshotter.remove(TOP)
    with pytest.raises(NotFoundError):
        await snapshotter.stat(TOP)
    await snapshotter.close()


async def test_usage_of_a_lazy_layer_is_what_is_here_of_it(
    snapshotter: Snapshotter, lazy: FakeLazyLayers
) -> None:
    lazy.taken = {BOTTOM}
    await take(snapshotter, BOTTOM)
    assert await snapshotter.usage(BOTTOM) == Usage(4096, 1)


async def test_lazy_layers_are_there_after_a_restart(
    database: Database, snapshotter: Snapshotter, lazy: FakeLazyLayers, tmp_path: Path
) -> None:
    lazy.taken = {BOTTOM, TOP}
    await take(snapshotter, BOTTOM)
    await take(snapshotter, TOP, BOTTOM)
    await snapshotter.close()
    again = Snapshotter(database, tmp_path, lazy, SnapshotterConfig(overlay_options=()))
    await again.start()
    stacks = await again.lazy_stacks()
    assert [[entry.chain_id for entry in stack] for stack in stacks] == [[BOTTOM], [BOTTOM, TOP]]
    assert stacks[1][-1].view == digest("view " + TOP)
    assert again.damaged == ()
    await take(again, TOP, BOTTOM)
    await again.close()
