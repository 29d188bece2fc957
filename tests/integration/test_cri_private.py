"""Private images through CRI: pod pull secrets that the proxy saw, tokens, and `ember pull`.

Ember pulls nothing here that the kubelet's own calls did not teach it, or the docker config.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench.bed.bed import Bed
from bench.bed.link import Shape
from bench.bed.process import BedError
from tests.cases.images import ImageCase
from tests.fakes.gates import BasicGate, TokenGate, basic
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import FakeRegistry, is_blob
from tests.integration.registry_scene import Registries, noisy
from tests.integration.test_cri import Cri, KubeletNode, push
from tests.node import words_of
from tests.readers import ended_well, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

SECRET = ("pod", "pull:secret")
NODE_OWN = ("node", "own:word")
KNOWN = "127.0.0.5:5005"
"""The registry that the node's docker config knows."""
KUBELET = "k8s.io"


@pytest.fixture(scope="module", params=[1, 2], ids=["containerd 1.6", "containerd 2.x"])
def kubelet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeletNode]:
    folder = tmp_path_factory.mktemp("cri")
    pair = base64.b64encode(":".join(NODE_OWN).encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {KNOWN: {"auth": pair}}}))
    with Bed(Shape(0), cache=folder / "cache") as bed:
        ember = bed.ember(request.param)
        socket = str(ember.state / "cri.sock")
        ember.configure(
            completion=False,  # requests are counted
            sections={
                "cri_proxy": {"address": socket},
                "registry": {"docker_config": [str(folder / "config.json")]},
                "fetch": {"readahead": 0, "miss_timeout": 20},
            },
        )
        containerd = bed.containerd(
            request.param,
            ember_socket=ember.socket,
            ember_root=ember.root,
            pause="localhost:5000/bed/pause:1",
        )
        ember.start()
        with KubeletNode(bed, ember, containerd) as made:
            assert made.until(lambda: prepares(made), 15)
            made.cri = Cri(Path(socket))
            yield made
            made.cri.close()


@pytest.fixture
def registries(kubelet: KubeletNode) -> Iterator[Registries]:
    made = Registries(kubelet.bed.name)
    yield made
    made.stop()


@pytest.fixture
def registry(registries: Registries) -> Iterator[FakeRegistry]:
    with registries.another() as made:
        yield made


def prepares(at: KubeletNode) -> bool:
    """Whether containerd reaches Ember: it redials only now and then."""
    words = ["snapshots", "--snapshotter", "ember"]
    try:
        at.containerd.ctr(*words, "prepare", "reached")
        at.containerd.ctr(*words, "rm", "reached")
    except BedError:
        return False
    return True


def without_bytes(at: KubeletNode, reference: str, case: ImageCase) -> None:
    """The image has been started once, and its bytes are gone."""
    with at.mounted(case.chain_id, namespace=KUBELET):
        pass
    assert at.until(lambda: not at.drop(reference).kept, 10)


def read_all(at: KubeletNode, case: ImageCase) -> list[str]:
    with at.mounted(case.chain_id, namespace=KUBELET) as root:
        readers = [reader(root / name, sha256_of(case, name)) for name in sorted(case.rows)]
        return [ended_well(process, 20) for process in readers]


def of_ember(seen: list[Seen]) -> list[Seen]:
    return [each for each in seen if each.headers["user-agent"].startswith("ember")]


def test_a_pod_s_secret_gets_tokens_for_reads_that_come_later(
    kubelet: KubeletNode, registry: FakeRegistry
) -> None:
    gate = TokenGate(registry, users=dict([SECRET]))
    case = noisy("bearer secret")
    reference = push(registry, case)
    kubelet.cri.pull(reference, SECRET)
    assert kubelet.image(reference)["lazy"], kubelet.image(reference)["reason"]
    without_bytes(kubelet, reference, case)
    gate.revoke()
    gate.asked.clear()
    assert read_all(kubelet, case) == ["", ""]
    (asked,) = of_ember(gate.asked)
    assert asked.headers["authorization"] == basic(*SECRET)
    assert f"repository:{case.repository}:pull" in asked.query["scope"]


def test_a_secret_is_for_its_own_image_alone(kubelet: KubeletNode, registry: FakeRegistry) -> None:
    registry.gate = BasicGate(dict([SECRET]))
    own, other = noisy("own secret"), noisy("other's secret")
    kubelet.cri.pull(push(registry, own), SECRET)
    reference = push(registry, other)
    with pytest.raises(grpc.RpcError):
        kubelet.cri.pull(reference)
    with pytest.raises(grpc.RpcError) as refused:
        kubelet.pull(reference, namespace=KUBELET)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    asked = [seen for seen in of_ember(registry.seen) if other.repository in seen.target]
    assert asked
    assert not [seen for seen in asked if "authorization" in seen.headers]


def test_a_secret_that_the_registry_refuses_teaches_nothing(
    kubelet: KubeletNode, registry: FakeRegistry
) -> None:
    registry.gate = gate = BasicGate(dict([SECRET]))
    reference = push(registry, noisy("refused secret"))
    with pytest.raises(grpc.RpcError):
        kubelet.cri.pull(reference, ("pod", "wrong:secret"))
    gate.users["pod"] = "wrong:secret"
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        kubelet.pull(reference, namespace=KUBELET)


def test_a_secret_lasts_over_a_restart_and_a_changed_one_is_learnt_in_mid_read(
    kubelet: KubeletNode, registry: FakeRegistry
) -> None:
    registry.gate = gate = BasicGate(dict([SECRET]))
    case = noisy("restarted secret")
    reference = push(registry, case)
    kubelet.cri.pull(reference, SECRET)
    without_bytes(kubelet, reference, case)
    first, second = sorted(case.rows)
    with kubelet.mounted(case.chain_id, namespace=KUBELET) as root:
        kubelet.ember.stop()
        kubelet.start_again()
        assert kubelet.until(lambda: prepares(kubelet), 15)
        assert ended_well(reader(root / first, sha256_of(case, first)), 20) == ""
        registry.seen.clear()
        gate.users["pod"] = "changed:secret"
        waiting = reader(root / second, sha256_of(case, second))
        assert kubelet.until(lambda: bool(of_ember(registry.seen)), 10)
        assert waiting.poll() is None
        kubelet.cri.pull(reference, ("pod", "changed:secret"))
        assert ended_well(waiting, 20) == ""


@pytest.mark.parametrize("scheme", ["basic", "bearer"])
def test_ember_pull_goes_through_cri_with_the_node_s_docker_config(
    kubelet: KubeletNode, registries: Registries, scheme: str
) -> None:
    address, _, port = KNOWN.partition(":")
    with registries.another(address, int(port)) as registry:
        if scheme == "basic":
            registry.gate = BasicGate(dict([NODE_OWN]))
        else:
            TokenGate(registry, users=dict([NODE_OWN]))
        case = noisy(f"docker config {scheme}")
        reference = push(registry, case)
        before = kubelet.cri.images()
        assert kubelet.pull(reference, namespace=KUBELET).lazy_layers == 2
        assert kubelet.cri.images() == before + 1
        without_bytes(kubelet, reference, case)
        assert read_all(kubelet, case) == ["", ""]
        assert len(of_ember(registry.seen)) < len(registry.seen), "containerd asked it too"
    assert NODE_OWN[1] not in kubelet.ember.log()


def test_a_link_that_containerd_was_sent_to_is_not_repeated(
    kubelet: KubeletNode, registry: FakeRegistry
) -> None:
    """containerd's own words hold the whole link, signature included."""
    reference = push(registry, noisy("signed away"))

    def away(seen: Seen, answer: Answer) -> Answer:
        link = "http://me:c4ret@127.0.0.1:9/blob?X-Amz-Signature=51gnature&x=y"
        return Answer(307, [("Location", link)])

    registry.inject(away, lambda seen: is_blob(seen) and not of_ember([seen]))
    mark = len(kubelet.ember.log())
    with pytest.raises(grpc.RpcError) as failed:
        kubelet.pull(reference, namespace=KUBELET)
    words = words_of(failed.value)
    assert "127.0.0.1:9/blob" in words
    said = words + kubelet.ember.log()[mark:]
    assert "51gnature" not in said
    assert "c4ret" not in said
