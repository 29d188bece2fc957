"""The way of docs/install.md on a real containerd, with CRI, and `ember rm` of what CRI pulled.

The configuration is the document's own, word by word; only paths and the platform are this node's.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bench.bed.bed import Bed
from bench.bed.containerd import CONFIG_1, CONFIG_2, CRI_PLUGINS, Containerd
from bench.bed.ember import ROOT
from bench.bed.image import Image
from bench.bed.link import Shape
from bench.bed.process import run
from bench.bed.tiny import tiny_image
from tests.documents import shell_lines, snippet
from tests.fakes.daemon import STATUS
from tests.integration.test_cri import Cri, KubeletNode, pause_image

pytestmark = [pytest.mark.root, pytest.mark.containerd]

WORDS = {1: "containerd 1.6 and 1.7", 2: "containerd 2.x"}
SANDBOX = {
    1: '[plugins."io.containerd.grpc.v1.cri"]\nsandbox_image = "{pause}"\n',
    2: '[plugins."io.containerd.cri.v1.images".pinned_images]\nsandbox = "{pause}"\n',
}
EXAMPLE = "docker.io/library/python:3.12"


class Documented(Containerd):
    """A containerd with what the document says to write into its configuration."""

    def configuration(self) -> str:
        socket, root = self._ember
        base = CONFIG_1 if self.major == 1 else CONFIG_2
        platform = f"linux/{run(['dpkg', '--print-architecture']).strip()}"
        base = base.replace(CRI_PLUGINS[self.major][0], "")
        base = base.partition("[[plugins")[0].format(
            root=self.directory / "root", state=self.directory / "state", address=self.address
        )
        written = snippet("install", WORDS[self.major])
        for theirs, ours in (
            ("/run/ember/ember.sock", str(socket)),
            ("/var/lib/ember", str(root)),
            ("linux/amd64", platform),
        ):
            assert theirs in written or self.major == 1
            written = written.replace(theirs, ours)
        return base + written + SANDBOX[self.major].format(pause=self._pause)


@pytest.fixture(scope="module", params=[1, 2], ids=["containerd 1.6", "containerd 2.x"])
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeletNode]:
    folder = tmp_path_factory.mktemp("documents")
    with Bed(Shape(0), cache=folder / "cache") as bed:
        image = tiny_image(folder / "tiny", layers=2)
        pause = pause_image(folder / "pause", folder / "tiny" / "tree0" / "program")
        image.push(bed.registry)
        ember = bed.ember(request.param)
        containerd = Documented(
            bed.directory,
            bed.link,
            major=request.param,
            ember_socket=ember.socket,
            ember_root=ember.root,
            pause=pause.reference,
        )
        containerd.start()
        try:
            ember.start()
            with KubeletNode(bed, ember, containerd) as made:
                made.cri = Cri(containerd.address)
                made.pod_image = image
                yield made
                made.cri.close()
        finally:
            containerd.stop()


def ember(node: KubeletNode, *words: str) -> subprocess.CompletedProcess[str]:
    """What a user of this node gets who has EMBER_CONFIG set."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "EMBER_CONFIG": str(node.ember.configuration),
    }
    command = [*node.bed.link.enter(), sys.executable, "-B", "-m", "snapshotter.cli.main", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def link_images(node: KubeletNode) -> None:
    """The link that the page has for containerd 1.x."""
    (line,) = [line for line in shell_lines(ROOT / "docs" / "install.md") if "ln -s /var" in line]
    theirs = line.replace("/var/lib/ember", str(node.ember.root))
    run(theirs.replace("/var/lib/containerd", str(node.containerd.directory / "root")).split())


def test_the_doctor_finds_that_all_of_it_fits_together(installed: KubeletNode) -> None:
    if installed.containerd.major == 1:
        link_images(installed)
    asked = ember(installed, "doctor", "--json")
    rows = {row["what"]: row for row in json.loads(asked.stdout)}
    names = ["daemon", "containerd", "proxy plugin", "image labels", "CRI", "image place"]
    names += ["transfer service"] if installed.containerd.major == 2 else []
    assert [rows[name] for name in names if rows[name]["result"] != "ok"] == []
    assert rows["CRI"]["found"] == "pods' images go to Ember"
    assert rows["daemon"]["found"] == f"process {installed.ember.pid} at {installed.ember.socket}"
    assert asked.returncode == 0, asked.stdout


def test_what_the_document_says_to_try_works(installed: KubeletNode) -> None:
    reference = installed.pod_image.reference
    lines = [line for line in shell_lines(ROOT / "docs" / "install.md") if EXAMPLE in line]
    assert [line.split()[:2] for line in lines] == [
        *[["ember", "pull"], ["ctr", "--namespace"], ["ember", "status"]]
    ]
    for line in lines:
        program, *words = shlex.split(line.replace(EXAMPLE, reference))
        if program == "ember":
            done = ember(installed, *words)
            assert (done.returncode, done.stderr) == (0, "")
            assert reference in done.stdout
            assert words[0] != "pull" or " in namespace k8s.io after " in done.stdout
        else:
            words = words[: words.index("python3")]
            words[words.index("t")] = f"{installed.namespace}-t"
            fifo = ["--fifo-dir", str(installed.containerd.directory / "fifo")]
            where, words = words[:3], words[3:]
            assert where == ["--namespace", "k8s.io", "run"]
            assert "ready" in installed.containerd.ctr(*where, *fifo, *words, "/program")
    assert installed.image(reference)["lazy"]


def shape(value: Any) -> Any:
    """Keys all the way down; of a list its first entry's."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items() if key not in ("tiers", "guard")}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return None


def test_the_status_document_has_the_shape_that_commands_are_tested_with(
    installed: KubeletNode,
) -> None:
    reference = installed.pod_image.reference
    assert ember(installed, "pull", "-n", installed.namespace, reference).returncode == 0
    real, fake = (shape(each) for each in (installed.status(), STATUS))
    for document in (real, fake):
        for name in ("indexing", "waiting", "notes"):
            assert isinstance(document.pop(name), list)
        document["images"][0].pop("containers")
        document["images"][0].pop("lookup")  # None where an earlier test left an index
        document["images"][0]["layers"][0].pop("index_from")  # None before it is indexed
        document["daemon"]["data_path"].pop("reasons")
        for name in ("keys", "problems", "lookups", "wrong"):
            assert isinstance(document["daemon"]["index"].pop(name), list)
    assert real == fake


def pulled_by_cri(node: KubeletNode) -> Image:
    node.cri.pull(node.pod_image.reference)
    assert node.cri.images() == 1
    return node.pod_image


def test_rm_takes_all_that_cri_made_of_an_image(installed: KubeletNode) -> None:
    reference = pulled_by_cri(installed).reference
    ember(installed, "rm", "-n", installed.namespace, reference)
    refused = ember(installed, "rm", "-n", "wrong", reference)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "not in containerd's namespace wrong but in k8s.io" in refused.stderr
    done = ember(installed, "rm", "-n", "k8s.io", reference, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["kept"] == []
    assert document["freed_bytes"] > 0
    assert f"image {reference} in namespace k8s.io" in document["removed"]
    assert installed.until(lambda: installed.cri.images() == 0)
    assert json.loads(ember(installed, "images", "--json").stdout) == []


def test_rm_of_one_of_two_names_leaves_the_other(installed: KubeletNode) -> None:
    reference, place = installed.pod_image.reference, installed.namespace
    second = f"{reference}-second"
    assert ember(installed, "pull", "-n", place, reference).returncode == 0
    installed.containerd.ctr("images", "tag", reference, second)
    done = ember(installed, "rm", "-n", place, reference)
    assert done.stdout.startswith(f"removed image {reference} in namespace {place}\n")
    assert done.returncode == 0
    assert f"it is also {second} in namespace {place}" in done.stderr
    assert installed.containerd.ctr("images", "ls", "-q").split() == [second]
    installed.containerd.remove_image(second)
    digest = json.loads(ember(installed, "images", "--json").stdout)[0]["manifest"]
    done = ember(installed, "rm", "-n", place, digest)
    assert (done.returncode, done.stderr) == (0, "")
    assert ember(installed, "images", "--json").stdout == "[]\n"


def test_rm_of_an_image_with_a_container_names_the_container(installed: KubeletNode) -> None:
    reference, place = installed.pod_image.reference, installed.namespace
    containerd, name = installed.containerd, f"{place}-stays"
    assert ember(installed, "pull", "-n", place, reference).returncode == 0
    containerd.ctr("containers", "create", "--snapshotter", "ember", reference, name, "/program")
    done = ember(installed, "rm", "-n", place, reference)
    assert done.stdout == f"removed image {reference} in namespace {place}\nfreed 0 B\n"
    assert f"ember: kept image {reference}: container {place}/{name} is made of it\n" in done.stderr
    containerd.ctr("containers", "rm", name)
    containerd.collect_garbage()
    assert installed.until(lambda: installed.status()["images"] == [])
