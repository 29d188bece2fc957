"""The configuration file: what is accepted, what is refused by name, and that all is documented.

The document is held to the model, key by key, so neither can change alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from snapshotter.config import Config, Section, differences, load, parse
from snapshotter.errors import ConfigError

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def documented_keys() -> set[str]:
    section, keys = "", set()
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## `\[(\w+)\]`", line):
            section = heading[1] + "."
        elif row := re.match(r"\| `(\w+)` \|", line):
            keys.add(section + row[1])
    return keys


def model_keys(model: type[Section], prefix: str = "") -> set[str]:
    keys = set()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys |= model_keys(field.annotation, f"{name}.")
        else:
            keys.add(prefix + name)
    return keys


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    assert documented_keys() == model_keys(Config)


def test_an_empty_file_is_valid() -> None:
    assert parse("", "x") == Config()


def test_sizes_and_durations_may_be_written_as_people_do() -> None:
    config = parse('[fetch]\nmiss_timeout = "5m"\n[completion]\nrate = "20MB/s"\n', "x")
    assert config.fetch.miss_timeout == 300
    assert config.completion.rate == 20_000_000
    assert parse('[cache]\nballast = "64MiB"\n', "x").cache.ballast == 64 * 1024 * 1024


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("colour = 1", "colour: no such key"),
        ("[fetch]\nspeed = 1", "fetch.speed: no such key"),
        ('[fetch]\nmiss_timeout = "soon"', "fetch.miss_timeout: 'soon' is not a duration"),
        ("[fetch]\ndemand_slots = 0", "fetch.demand_slots: "),
        ('[first_pull]\nmode = "maybe"', "first_pull.mode: "),
        ('[cache]\nballast = "-1"', "cache.ballast: "),
        ("[completion]\nrate = -1", "completion.rate: "),
        ("[lazy", "not valid TOML"),
        ('root = "/a\\u0000b"', "root: "),
        ('root = "relative/path"', "root: "),
        ('[registry]\ncredential_provider_config = "/x"', "registry: credential_provider_config"),
        ('[metrics]\naddress = "9464"', "metrics.address: '9464' is not host:port"),
        ('[cri_proxy]\naddress = "rel.sock"', "cri_proxy.address: 'rel.sock' is not an absolute"),
        ('[containerd]\ntimeout = "0s"', "containerd.timeout: "),
        ('[completion]\nenabled = "yes"', "completion.enabled: must be true or false"),
        ('[registry]\nplain_http = "a"', "registry.plain_http: must be a list, such as "),
        ('[registry]\nplain_http = ["http://a"]', "'http://a' is not a registry's host"),
        ('[registry]\ndocker_config = ["~/config.json"]', "is not an absolute path"),
        ("root = 5", "root: must be a path in quotes"),
        ("fetch = 1", "fetch: must be a table"),
        ("[cache]\nballast = true", "cache.ballast: true is not a size"),
        ("[fetch]\nmiss_timeout = true", "fetch.miss_timeout: true is not a duration"),
        ("[fetch]\nmiss_timeout = 0", "fetch.miss_timeout: must be more than 0"),
        ("[fetch]\nmiss_timeout = inf", "fetch.miss_timeout: must be a number that ends"),
        ("[fetch]\ndemand_slots = 1.5", "fetch.demand_slots: must be a whole number"),
        ('[fetch]\ndemand_slots = "1O"', "fetch.demand_slots: must be a whole number"),
        ("[fetch]\ndemand_slots = 1025", "fetch.demand_slots: must be at most 1024"),
        ("[first_pull]\nmode = 1", "must be 'auto', 'stream' or 'overlay'"),
        ('[containerd]\naddress = "unix:/a"', "'unix:/a' is not an absolute path"),
        (f'state = "/{"x" * 90}"', "state: longer than 90 bytes"),
    ],
)
def test_what_cannot_be_used_is_named_with_file_and_key(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "/etc/ember/config.toml")
    assert "/etc/ember/config.toml: " in str(caught.value)
    assert named in str(caught.value)
    library = ("Input should", "tuple", "<class", "pydantic")
    assert not [word for word in library if word in str(caught.value)]


def test_a_socket_may_be_written_as_the_kubelet_writes_it() -> None:
    config = parse('[containerd]\naddress = "unix:///run/k3s/containerd.sock"', "x")
    assert config.containerd.address == Path("/run/k3s/containerd.sock")


def test_what_differs_between_two_files_is_told_by_key() -> None:
    text = 'log_level = "debug"\n[fetch]\nmiss_timeout = "5m"\nreadahead = 0\n'
    assert differences(parse("", "x"), parse(text, "x")) == {"log_level", "fetch.readahead"}
    assert differences(parse(text, "x"), parse(text, "y")) == set()


def test_every_fault_of_a_file_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("a = 1\nb = 2\n[fetch]\ndemand_slots = 0", "f")
    assert len(str(caught.value).splitlines()) == 3


def test_a_file_that_is_not_there_is_an_error_only_if_it_was_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "absent.toml")
