"""`ember` among other programs: pipes that close, interrupts, odd locales, help and completion."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from snapshotter.cli.main import app
from snapshotter.cli.serve import worth_a_line
from tests.fakes.daemon import FakeOperations
from tests.unit.cli.conftest import LIMIT_S, PROGRAM, ROOT, Place

VERBS = ["serve", "pull", "warm", "images", "status", "rm", "drain", "doctor", "index"]
INDEX_VERBS = ["build", "show", "pull", "verify", "keygen"]
NO_CONFIGURATION: list[list[str]] = [[], ["index"], ["index", "keygen"]]
TAKEN_S = 30


def test_the_verbs_are_these() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    assert list(command.commands) == VERBS


@pytest.mark.parametrize("words", [[], ["index"]])
def test_no_line_of_the_help_is_cut(place: Place, words: list[str]) -> None:
    shown = place.ember(*words, "--help").stdout
    assert "Commands:" in shown
    assert "..." not in shown.partition("Commands:")[2]


_LOADING = """
import signal, sys
print("loading", flush=True)
signal.pause()
"""


def test_an_interrupt_while_the_command_is_loaded_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(_LOADING)
    code = "from snapshotter.cli.entry import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "loading\n"
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=LIMIT_S) == ("", "")
    assert command.returncode == -signal.SIGINT


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(
    place: Place, served: FakeOperations, form: list[str]
) -> None:
    served.document["images"] *= 5000
    with (
        place.popen("images", *form) as command,
        subprocess.Popen(["head", "-1"], stdin=command.stdout, stdout=subprocess.PIPE) as head,
    ):
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        first, _ = head.communicate(timeout=LIMIT_S)
        assert command.stderr.read() == ""
        assert command.wait(LIMIT_S) == -signal.SIGPIPE
    assert first.count(b"\n") == 1


def test_a_small_answer_to_a_closed_pipe_is_quiet_too(place: Place, served: FakeOperations) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = place.process("images", stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize(
    "words", [["images"], ["pull", "app"], ["warm", "app"], ["rm", "app"], ["drain"]]
)
def test_an_interrupt_ends_the_command_and_what_it_asked_for(
    place: Place, served: FakeOperations, words: list[str]
) -> None:
    served.hangs = True
    with place.popen(*words) as command:
        assert served.taken.wait(TAKEN_S)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert served.left.wait(TAKEN_S)


def test_an_odd_locale_costs_a_character_and_not_the_answer(
    place: Place, served: FakeOperations
) -> None:
    served.document["images"][0]["here_bytes"] = served.document["images"][0]["plain_bytes"] = 0
    ended = place.process("images", environment={"PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "registry.example/team/app:1" in ended.stdout


@pytest.mark.parametrize(
    "words", [[], *([verb] for verb in VERBS), *(["index", verb] for verb in INDEX_VERBS)]
)
def test_help_of_every_command_is_plain_text_on_stdout(place: Place, words: list[str]) -> None:
    result = place.ember(*words, "--help")
    narrow = place.process(*words, "--help", environment={"COLUMNS": "40"})
    assert (result.exit_code, result.stderr) == (narrow.returncode, narrow.stderr) == (0, "")
    for text, columns in ((result.stdout, 80), (narrow.stdout, 50)):
        assert text.startswith(f"Usage: {' '.join(['ember', *words])}")
        assert max(map(len, text.splitlines())) <= columns
        assert not set(text) & set("╭│╰\x1b")
        assert words in NO_CONFIGURATION or "EMBER_CONFIG" in text


STARTS_PROGRAMS = """
import snapshotter.cli.main
import asyncio, sys
import grpc.aio

async def main(path):
    server = grpc.aio.server()
    server.add_insecure_port(path)
    await server.start()
    channel = grpc.aio.insecure_channel(path)
    call = channel.unary_unary("/none/none")

    async def ask():
        for _ in range(200):
            try:
                await call(b"")
            except grpc.aio.AioRpcError:
                pass

    async def start():
        for _ in range(20):
            await (await asyncio.create_subprocess_exec("true")).wait()

    await asyncio.gather(ask(), start())
    await channel.close()
    await server.stop(None)

asyncio.run(main(sys.argv[1]))
"""


def test_programs_that_are_started_beside_calls_write_nothing_into_the_log(place: Place) -> None:
    ended = subprocess.run(
        [PROGRAM[0], "-c", STARTS_PROGRAMS, f"unix:{place.directory}/g"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_version_is_told_without_a_configuration(place: Place) -> None:
    result = place.ember("--version", EMBER_CONFIG="/nonexistent")
    assert result.exit_code == 0
    assert result.stdout.startswith("ember ")


def test_the_configuration_is_found_by_option_before_environment(place: Place) -> None:
    place.config.write_text("colour = 1")
    result = place.ember("images")
    assert f"{place.config}: colour" in result.stderr
    other = place.directory / "other.toml"
    other.write_text("shape = 1")
    assert f"{other}: shape" in place.ember("images", "--config", str(other)).stderr


def test_serve_check_says_which_file_it_looked_at(place: Place) -> None:
    result = place.ember("serve", "--check")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{place.config}: the configuration can be used\n"


def ember_on_path(place: Place) -> dict[str, str]:
    """A directory with `ember` in it, in front of all others."""
    folder = place.directory / "bin"
    folder.mkdir()
    program = folder / "ember"
    words = " ".join(PROGRAM)
    program.write_text(f'#!/bin/sh\nexport PYTHONPATH="{ROOT}"\nexec {words} "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def asked(place: Place, **environment: str) -> str:
    """What `ember` answers to a shell's question."""
    ended = subprocess.run(
        [ember_on_path(place)["PATH"].split(":")[0] + "/ember"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.stderr == ""
    return ended.stdout


@pytest.mark.parametrize(
    ("shell", "question"),
    [
        ("bash", {"COMP_WORDS": "ember st", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "ember st"}),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "ember st", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        ),
    ],
)
def test_each_shell_is_offered_the_verbs(
    place: Place, shell: str, question: dict[str, str]
) -> None:
    answer = asked(place, _EMBER_COMPLETE=f"complete_{shell}", **question)
    assert "status" in answer
    assert "drain" not in answer


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_each_shell_can_be_read_by_it(place: Place, shell: str) -> None:
    script = asked(place, _EMBER_COMPLETE=f"source_{shell}")
    assert f"_EMBER_COMPLETE=complete_{shell}" in script
    if path := shutil.which(shell):
        file = place.directory / "script"
        file.write_text(script)
        read = subprocess.run([path, "-n", str(file)], capture_output=True, text=True)
        assert (read.returncode, read.stderr) == (0, "")


def test_bash_completes_a_verb_and_an_option(place: Place) -> None:
    script = (
        'eval "$(_EMBER_COMPLETE=source_bash ember)"\n'
        'COMP_WORDS=(ember dr); COMP_CWORD=1; _ember_completion ember; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(ember rm --da); COMP_CWORD=2; _ember_completion ember; echo "${COMPREPLY[@]}"'
    )
    bash = shutil.which("bash")
    assert bash is not None
    ended = subprocess.run(
        [bash, "-c", script],
        env=ember_on_path(place),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (ended.stdout, ended.stderr) == ("drain\n--data\n", "")


class ExecuteBatchError(Exception):
    """As gRPC's, which nobody but gRPC can make."""


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ExecuteBatchError("Failed: (<SendStatusFromServerOperation>,)"), False),
        (ExecuteBatchError("Failed: (<SendMessageOperation>,)"), False),
        (ExecuteBatchError("Failed: (<SendCloseFromClientOperation>,)"), True),
        (ValueError("Failed"), True),
        (None, True),
    ],
)
def test_a_client_that_hangs_up_leaves_no_traceback_in_the_log(
    error: Exception | None, kept: bool
) -> None:
    told = (type(error), error, None) if error is not None else None
    record = logging.LogRecord("grpc", logging.ERROR, "server.pyx", 1, "raised", (), told)
    assert worth_a_line(record) is kept
