"""What people and programs read: tables that lose nothing, JSON whose shape stays, plain pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import struct
import termios
from fcntl import ioctl
from typing import Any

import pytest

from snapshotter.cli.screen import share, size
from snapshotter.rpc.control import DrainState, Removal
from tests.fakes.daemon import LAZY, PLAIN, STATUS, FakeOperations
from tests.unit.cli.conftest import Place

ESCAPE = "\x1b"
PULLED = {
    "image": "app",
    "digest": "sha256:d",
    "namespace": "k8s.io",
    "layers": 2,
    "lazy_layers": 1,
    "why_not_lazy": "",
    "seconds": 0.0,
}


def printed(place: Place, *words: str) -> Any:
    result = place.ember(*words, "--json")
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_json_is_the_status_document_itself(place: Place, served: FakeOperations) -> None:
    assert printed(place, "status") == STATUS
    assert printed(place, "images") == STATUS["images"]
    assert printed(place, "status", LAZY["names"][0]) == LAZY
    assert printed(place, "status", "222222") == PLAIN


def test_the_status_of_a_node_with_thousands_of_layers_arrives(
    place: Place, served: FakeOperations
) -> None:
    served.document["images"] *= 20_000
    assert len(printed(place, "images")) == 40_000


def test_json_of_no_images_is_an_empty_list(place: Place, served: FakeOperations) -> None:
    served.document["images"] = []
    assert printed(place, "images") == []


def test_json_of_a_pull_has_the_documented_keys(place: Place, served: FakeOperations) -> None:
    assert printed(place, "pull", "app") | {"seconds": 0.0} == PULLED
    printed(place, "pull", "app", "-n", "k8s.io")
    assert served.asked == [("pull", "app", "", ""), ("pull", "app", "k8s.io", "")]


def test_json_of_a_warm_image_has_the_documented_keys(place: Place, served: FakeOperations) -> None:
    assert printed(place, "warm", "app", "--platform", "linux/arm64") | {"seconds": 0.0} == {
        "image": "app",
        "digest": "sha256:d",
        "size_bytes": 1000,
        "fetched_bytes": 900,
        "layers": [{"digest": "sha256:l0", "size_bytes": 1000, "fetched_bytes": 900}],
        "seconds": 0.0,
    }
    assert served.asked == [("warm", "app", "linux/arm64")]


def test_json_of_a_removal_says_what_went_and_what_stayed(
    place: Place, served: FakeOperations
) -> None:
    served.removal = Removal(1500, ("image sha256:1",), ("layer sha256:a: app:2 has it too",))
    assert printed(place, "rm", "app", "--data", "-n", "k8s.io") == {
        "image": "app",
        "freed_bytes": 1500,
        "removed": ["image sha256:1"],
        "kept": ["layer sha256:a: app:2 has it too"],
    }
    assert served.asked == [("rm", "app", "k8s.io", True)]


def test_json_of_a_drain_says_whether_all_is_here(place: Place, served: FakeOperations) -> None:
    done = {"complete": True, "views_left": 0, "bytes_left": 0, "failed": []}
    assert printed(place, "drain") == done
    served.states = (DrainState(1, 5, ("view sha256:v: out of reach",)),)
    result = place.ember("drain", "--json")
    assert result.exit_code == 1
    failed = ["view sha256:v: out of reach"]
    wanted = {"complete": False, "views_left": 1, "bytes_left": 5, "failed": failed}
    assert json.loads(result.stdout) == wanted


def test_a_pipe_gets_one_line_for_each_image_however_long(
    place: Place, served: FakeOperations
) -> None:
    long = f"registry.example/{'team/' * 40}app:1"
    served.document["images"][0]["names"] = [long]
    lines = place.ember("images", COLUMNS="40").stdout.splitlines()
    assert len(lines) == 6
    assert lines[0].split() == ["IMAGE", "DIGEST", "HERE", "OF", "SHARE", "RUNNING", "STATE"]
    assert re.split(r"  +|(?<=\S) (?=111)", lines[1].strip()) == [
        *[f"{long}", "111111111111", "65.5 kB", "100.0 kB", "65 %", "2", "lazy"]
    ]


def test_nothing_that_an_image_says_is_taken_for_markup(
    place: Place, served: FakeOperations
) -> None:
    for words in (["images"], ["status"], ["status", "222222"]):
        out = place.ember(*words).stdout
        assert PLAIN["names"][0] in out
        assert f"not lazy   {PLAIN['names'][0]}: {PLAIN['reason']}\n" in out
    assert "note       1 layer was unpacked as [plain] overlay" in place.ember("status").stdout
    served.document["images"][1]["suspect"] = "zeros [b]perhaps[/b]"
    suspect = f"SUSPECT    {PLAIN['names'][0]}: zeros [b]perhaps[/b]\n"
    assert suspect in place.ember("images").stdout


def test_where_an_image_stands_is_said_in_a_word_and_why_in_a_line(
    place: Place, served: FakeOperations
) -> None:
    lazy, plain = served.document["images"]
    lines = place.ember("images").stdout.splitlines()
    assert lines[2].endswith("overlay, indexed")
    plain["layers"] = [{**plain["layers"][0], "state": "no index"}]
    assert place.ember("images").stdout.splitlines()[2].endswith("not lazy")
    lazy["namespaces"] = []
    out = place.ember("images").stdout
    assert out.splitlines()[1].endswith("not in containerd")
    assert f"not in containerd   {lazy['names'][0]}: no namespace" in out
    lazy["namespaces"] = None  # containerd does not answer
    assert "not in containerd" not in place.ember("images").stdout


def test_no_images_is_said_and_not_shown_as_an_empty_table(
    place: Place, served: FakeOperations
) -> None:
    served.document["images"] = []
    note = f"note       {served.document['notes'][0]}\n"
    told = "no images yet; `ember pull IMAGE` brings one\n"
    assert place.ember("images").stdout == told + note
    served.document["notes"] = []
    assert place.ember("images").stdout == told
    out = place.ember("status").stdout
    assert "no images yet" in out
    assert "DIGEST" not in out


def test_status_says_what_the_document_says(place: Place, served: FakeOperations) -> None:
    out = place.ember("status").stdout
    for wanted in (
        "ember 0.1.0, pid 4321, up 12 s",
        "data path  fanotify",
        "keeper     pid 4322",
        "misses     3 asked, 0 failed, longest wait 0.25 s",
        f"waiting    2 reads of view {LAZY['layers'][0]['diff_id']}, 42 s: registry: [gone]",
        "from registry: 30.0 kB",
        "engine     uring (io_uring works)",
        "indexes    trust signed, 1 trusted key in /etc/ember/keys",
        "lookups    1 found",
        f"indexing   {LAZY['layers'][0]['digest']} of {LAZY['names'][0]}: 40 % of 40.0 kB",
    ):
        assert wanted in out
    served.document["images"][0]["layers"][0]["trouble"] = "registry [x]: 503"
    trouble = f"trouble    layer {LAZY['layers'][0]['digest']} of {LAZY['names'][0]} does not come"
    assert f"{trouble}: registry [x]: 503\n" in place.ember("status").stdout
    assert f"{trouble}: registry [x]: 503\n" in place.ember("status", "111111").stdout
    served.document["daemon"]["data_path"] = {"name": None, "reasons": ["refused by tmpfs"]}
    out = place.ember("status").stdout
    assert "data path  none: images are fetched whole\n           refused by tmpfs" in out
    out = place.ember("status", LAZY["names"][0]).stdout
    assert "registry 30.0 kB" in out
    assert "runs: k8s.io/c1\nruns: default/c2\n" in out
    assert f"key {'c' * 16}" in out
    assert "index of others: found\n" in out


def test_an_image_has_a_row_for_each_of_its_names(place: Place, served: FakeOperations) -> None:
    first, second = served.document["images"]
    first["names"].append("registry.example/team/app:latest")
    second["names"] = []
    first["layers"][0]["state"] = "being indexed, 40 %"
    rows = [line.split("  ")[0] for line in place.ember("images").stdout.splitlines()[1:4]]
    assert [row.split()[0] for row in rows] == [*first["names"], second["manifest"]]
    assert place.ember("images").stdout.count("lazy, indexing") == 2
    for name in first["names"]:
        assert " ".join(first["names"]) in place.ember("status", name).stdout


def test_a_first_pull_that_does_not_get_on_is_shown(place: Place, served: FakeOperations) -> None:
    served.document["indexing"][0]["quiet_s"] = 34.7
    layer = served.document["images"][0]["layers"][0]
    layer["state"] = "being indexed, 40 %, nothing has come for 35 s"
    out = place.ember("status").stdout
    assert "40 % of 40.0 kB, nothing has come for 35 s" in out
    assert "lazy, stalled" in out


def test_a_short_name_means_what_it_means_everywhere(place: Place, served: FakeOperations) -> None:
    served.document["images"][0]["names"] = ["docker.io/library/python:latest"]
    assert "docker.io/library/python:latest sha256:1" in place.ember("status", "python").stdout


def test_keepers_that_died_are_counted(place: Place, served: FakeOperations) -> None:
    served.document["daemon"]["keeper_losses"] = 2
    assert "keeper     pid 4322, 2 others died before it\n" in place.ember("status").stdout


def on_a_terminal(place: Place, *words: str, columns: int, **environment: str) -> str:
    """What a terminal of so many columns is sent."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    sized = {"COLUMNS": str(columns), "TERM": "xterm-256color", **environment}
    with place.popen(*words, stdout=theirs, environment=sized):
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:
            pass  # a terminal whose other end is closed
        finally:
            os.close(ours)
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [20, 80, 250])
def test_a_terminal_of_any_width_gets_one_line_for_each_thing(
    place: Place, served: FakeOperations, columns: int
) -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", on_a_terminal(place, "images", columns=columns))
    assert shown == place.ember("images").stdout
    assert LAZY["names"][0] in shown.splitlines()[1]
    assert all(line == line.rstrip() for line in shown.splitlines())


def test_colours_are_for_terminals_that_want_them(place: Place, served: FakeOperations) -> None:
    assert ESCAPE in on_a_terminal(place, "images", columns=80)
    for silent in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        shown = on_a_terminal(place, "images", columns=80, **silent)
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]", shown)
    assert ESCAPE not in place.process("images").stdout
    assert ESCAPE not in place.process("pull", "app").stderr


def test_numbers_are_in_words_and_100_percent_means_all() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_500_000, 2 * 10**9, 3 * 10**15)] == [
        *["0 B", "999 B", "1.0 kB", "1.5 MB", "2.0 GB", "3000.0 TB"]
    ]
    assert [share(*pair) for pair in ((0, 0), (0, 5), (999, 1000), (5, 5), (6, 5))] == [
        *["–", "0 %", "99 %", "100 %", "100 %"]
    ]
