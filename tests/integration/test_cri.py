"""CRI, as the kubelet uses it: pods of two containers on lazy layers, pulls, secrets, removal.

The calls are made by number (k8s.io/cri-api, runtime/v1), so that no client stands between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench.bed.bed import Bed
from bench.bed.image import Image, build
from bench.bed.link import Shape
from bench.bed.tiny import tiny_image
from tests.cases.images import OCI, ImageCase
from tests.fakes.gates import BasicGate
from tests.fakes.registry import FakeRegistry
from tests.integration.registry_scene import Registries, noisy
from tests.node import Node
from tests.readers import ended_well, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

NODE_NETWORK = 2
RUNNING = 1
Fields = list[tuple[int, int | bytes]]


def encoded(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A protobuf message of varints and length-delimited fields."""
    out = bytearray()

    def varint(value: int) -> None:
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)

    for number, value in fields:
        if isinstance(value, int):
            varint(number << 3)
            varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            varint(number << 3 | 2)
            varint(len(data))
            out.extend(data)
    return bytes(out)


def decoded(data: bytes) -> Fields:
    """The varints and length-delimited fields of a message, in order."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    fields: Fields = []
    while at < len(data):
        key = varint()
        assert key & 7 in (0, 2), "a field of a kind that CRI does not have"
        if key & 7 == 0:
            fields.append((key >> 3, varint()))
        else:
            length = varint()
            fields.append((key >> 3, data[at : at + length]))
            at += length
    return fields


def field(data: bytes, number: int) -> bytes:
    return next(
        (value for n, value in decoded(data) if n == number and isinstance(value, bytes)), b""
    )


class Cri:
    """The runtime and image services of one socket."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}")

    def call(self, service: str, verb: str, *fields: tuple[int, int | str | bytes]) -> bytes:
        method = self._channel.unary_unary(f"/runtime.v1.{service}Service/{verb}", None, None)
        answer: bytes = method(encoded(*fields), timeout=60)
        return answer

    def close(self) -> None:
        self._channel.close()

    def pull(self, reference: str, secret: tuple[str, str] | None = None) -> None:
        fields: list[tuple[int, int | str | bytes]] = [(1, encoded((1, reference)))]
        if secret is not None:
            fields.append((2, encoded((1, secret[0]), (2, secret[1]))))
        self.call("Image", "PullImage", *fields)

    def images(self) -> int:
        return len(decoded(self.call("Image", "ListImages")))


def sandbox_config(name: str, logs: Path) -> bytes:
    network = encoded((1, encoded((1, NODE_NETWORK))))
    return encoded(
        (1, encoded((1, name), (2, f"uid-{name}"), (3, "default"))),
        (3, str(logs)),
        (8, encoded((2, network))),
    )


def container(cri: Cri, pod: bytes, config: bytes, name: str, image: str) -> bytes:
    """Create and start a container that waits; its id."""
    described = encoded(
        (1, encoded((1, name))),
        (2, encoded((1, image))),
        (3, "/program"),
        (4, "wait"),
        (11, f"{name}.log"),
    )
    made = field(cri.call("Runtime", "CreateContainer", (1, pod), (2, described), (3, config)), 1)
    cri.call("Runtime", "StartContainer", (1, made))
    return made


def state(cri: Cri, made: bytes) -> int:
    status = field(cri.call("Runtime", "ContainerStatus", (1, made)), 1)
    return next((int(v) for n, v in decoded(status) if n == 3 and isinstance(v, int)), 0)


class KubeletNode(Node):
    """A node whose containerd serves CRI on Ember."""

    cri: Cri
    pod_image: Image
    logs: Path


def pause_image(folder: Path, program: Path) -> Image:
    tree = folder / "tree"
    tree.mkdir(parents=True)
    (tree / "program").write_bytes(program.read_bytes())
    (tree / "program").chmod(0o755)
    return build("bed/pause", "gzip", [tree], ["/program", "wait"], folder / "images")


@pytest.fixture(scope="module", params=[1, 2], ids=["containerd 1.6", "containerd 2.x"])
def kubelet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeletNode]:
    folder = tmp_path_factory.mktemp("cri")
    with Bed(Shape(0), cache=folder / "cache") as bed:
        image = tiny_image(folder / "tiny", layers=3)
        pause = pause_image(folder / "pause", folder / "tiny" / "tree0" / "program")
        image.push(bed.registry)
        pause.push(bed.registry)
        ember = bed.ember(request.param)
        ember.configure()
        with ember.configuration.open("a") as file:
            file.write(f'[cri_proxy]\naddress = "{ember.state}/cri.sock"\n')
        containerd = bed.containerd(
            request.param,
            ember_socket=ember.socket,
            ember_root=ember.root,
            pause=pause.reference,
        )
        ember.start()
        with KubeletNode(bed, ember, containerd) as made:
            made.wait_for_containerd()
            made.cri = Cri(ember.state / "cri.sock")
            made.pod_image = image
            made.logs = bed.directory / "logs"
            yield made
            made.cri.close()


def test_a_pod_of_two_containers_starts_on_lazy_layers(kubelet: KubeletNode) -> None:
    cri, reference = kubelet.cri, kubelet.pod_image.reference
    cri.pull(reference)
    shown = kubelet.image(reference)
    assert shown["lazy"], shown["reason"]
    config = sandbox_config("pod", kubelet.logs)
    pod = field(cri.call("Runtime", "RunPodSandbox", (1, config)), 1)
    try:
        made = [container(cri, pod, config, name, reference) for name in ("one", "two")]
        deadline_s = time.monotonic() + 10
        while [state(cri, each) for each in made] != [RUNNING, RUNNING]:
            assert time.monotonic() < deadline_s
        assert len(kubelet.image(reference)["containers"]) == 2
    finally:
        cri.call("Runtime", "StopPodSandbox", (1, pod))
        cri.call("Runtime", "RemovePodSandbox", (1, pod))


def test_ember_pull_goes_through_cri_where_cri_uses_ember(kubelet: KubeletNode) -> None:
    reference = kubelet.pod_image.reference
    kubelet.cri.call("Image", "RemoveImage", (1, encoded((1, reference))))
    before = kubelet.cri.images()
    pulled = kubelet.pull(reference, namespace="k8s.io")
    assert pulled.lazy_layers == 3
    assert kubelet.cri.images() == before + 1


def test_who_names_no_namespace_pulls_for_the_kubelet_and_removes_there(
    kubelet: KubeletNode,
) -> None:
    reference = kubelet.pod_image.reference
    kubelet.cri.call("Image", "RemoveImage", (1, encoded((1, reference))))
    before = kubelet.cri.images()
    kubelet.ember.command("pull", reference)
    assert kubelet.cri.images() == before + 1
    assert kubelet.image(reference)["lazy"]
    kubelet.ember.command("rm", reference)
    assert kubelet.cri.images() == before


def test_an_image_that_the_kubelet_removes_is_gone_from_ember_too(kubelet: KubeletNode) -> None:
    reference = kubelet.pod_image.reference
    kubelet.cri.pull(reference)
    kubelet.cri.call("Image", "RemoveImage", (1, encoded((1, reference))))
    listed = kubelet.containerd.ctr(
        "--namespace", "k8s.io", "snapshots", "--snapshotter", "ember", "ls"
    )
    assert kubelet.until(
        lambda: (
            kubelet.pod_image.layers[0].diff_id
            not in kubelet.containerd.ctr(
                "--namespace", "k8s.io", "snapshots", "--snapshotter", "ember", "ls"
            )
        )
    ), listed


def test_the_image_file_system_is_told_for_the_kubelets_collector(kubelet: KubeletNode) -> None:
    info = kubelet.cri.call("Image", "ImageFsInfo")
    usage = field(info, 1)
    assert field(field(usage, 2), 1)


def push(registry: FakeRegistry, case: ImageCase) -> str:
    """Add the image; returns its reference."""
    for content in case.contents:
        registry.add_blob(case.repository, content)
    kind = f"{OCI}.manifest.v1+json"
    registry.add_manifest(case.repository, case.documents[-1], kind, "1")
    return f"{registry.authority}/{case.repository}:1"


@pytest.fixture
def private(kubelet: KubeletNode) -> Iterator[FakeRegistry]:
    registries = Registries(kubelet.bed.name)
    registry = registries.start()
    registry.gate = BasicGate({"user": "pass:word"})
    yield registry
    registries.do(registry.stop())
    registries.stop()


def test_a_private_image_is_lazy_with_the_secret_that_the_proxy_saw_and_overlay_without(
    kubelet: KubeletNode, private: FakeRegistry
) -> None:
    secret = ("user", "pass:word")
    seen, unseen = noisy("seen secret"), noisy("unseen secret")
    with_proxy, without = push(private, seen), push(private, unseen)
    kubelet.cri.pull(with_proxy, secret)
    assert kubelet.image(with_proxy)["lazy"], kubelet.image(with_proxy)["reason"]
    direct = Cri(kubelet.containerd.address)
    direct.pull(without, secret)
    direct.close()
    shown = kubelet.image(without)
    assert not shown["lazy"]
    assert "no credentials" in shown["reason"]
    assert "pass:word" not in kubelet.ember.log()
    assert "pass:word" not in str(kubelet.status())
    for case in (seen, unseen):
        rows = kubelet.shown(case.chain_id, namespace="k8s.io")
        assert all(rows[name].sha256 == row.sha256 for name, row in case.rows.items())


def test_what_containerd_does_not_know_is_told_as_by_containerd_itself(
    kubelet: KubeletNode,
) -> None:
    """The kubelet falls back on UNIMPLEMENTED, and takes anything else for a fault."""
    for _ in range(20):
        for service, verb in (("Image", "Nope"), ("Runtime", "Nope")):
            with pytest.raises(grpc.RpcError) as caught:
                kubelet.cri.call(service, verb, (1, "x"))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, caught.value


def files_with(secret: bytes, *folders: Path) -> list[Path]:
    """The files below ``folders`` that hold ``secret``."""
    return [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and secret in path.read_bytes()
    ]


def test_a_pod_reads_on_after_a_crash_with_the_secret_that_its_pull_had(
    kubelet: KubeletNode, private: FakeRegistry
) -> None:
    case = noisy("kept secret")
    reference = push(private, case)
    kubelet.cri.pull(reference, ("user", "pass:word"))
    with kubelet.mounted(case.chain_id, namespace="k8s.io"):
        pass
    kubelet.ember.command("rm", "--data", "--namespace", "k8s.io", reference)
    first, second = sorted(case.rows)
    with kubelet.mounted(case.chain_id, namespace="k8s.io") as root:
        kubelet.ember.kill()
        reads = reader(root / first, sha256_of(case, first))
        kubelet.start_again()
        assert ended_well(reads) == ""
        kubelet.ember.stop()
        kubelet.start_again()
        assert ended_well(reader(root / second, sha256_of(case, second))) == ""
    assert files_with(b"pass:word", kubelet.ember.root, kubelet.ember.state) == []
    assert "pass:word" not in kubelet.ember.log()
