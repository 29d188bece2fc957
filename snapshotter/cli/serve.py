"""`ember serve`: the daemon in the foreground, with the manners of a service.

READY=1 is sent when containerd can be answered. SIGHUP reads the configuration again (log level;
the rest needs a restart, and says so), SIGTERM and SIGINT end it cleanly: mounts and containers
stay, and the keeper holds what must not be let go of.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import uvloop

from snapshotter.cli.connection import EXIT_FAILED, fail
from snapshotter.config import Config, differences, load
from snapshotter.daemon import Daemon
from snapshotter.errors import ConfigError, EmberError

log = logging.getLogger("ember")

SWITCH_S = 0.001
"""So long a thread that computes may keep the interpreter from the event loop."""


def notify(message: str, descriptors: Sequence[int] = ()) -> None:
    """Tell the service manager (sd_notify(3)); without one this does nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(address)
        socket.send_fds(sender, [message.encode()], list(descriptors))


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for collectors."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def worth_a_line(record: logging.LogRecord) -> bool:
    """A client that hangs up while it is answered is no fault; gRPC has a traceback for each.

    The same error in a call of our own (it names what is sent "FromClient") stays.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError" or "FromClient" in str(error)


def set_up_logging(config: Config) -> None:
    """Log to stderr in the configured form and level."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(text))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    for chatty in ("grpc", "hpack"):
        logging.getLogger(chatty).setLevel(max(logging.INFO, root.level))
    logging.getLogger("grpc._cython.cygrpc").addFilter(worth_a_line)


async def _serve(config: Config, path: Path | None) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    early = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, early.set)
    daemon = Daemon(config)
    await daemon.start()
    try:
        for name, descriptor in daemon.descriptors().items():
            # FDPOLL=0: an event in the group is no reason to throw it out of the store.
            notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [descriptor])
        notify(f"READY=1\nMAINPID={os.getpid()}\nSTATUS={daemon.summary()}")
        log.info("ready: %s", daemon.summary())
        gc.freeze()  # what is here now stays: no collection need look at it again
        # Not before: the end of a reload says READY=1 too.
        loop.add_signal_handler(signal.SIGHUP, _reload, config, path)
        if early.is_set():
            _reload(config, path)
        await ended.wait()
    finally:
        notify("STOPPING=1")
        log.info("stopping; mounts and containers stay")
        await daemon.stop()


def _reload(config: Config, path: Path | None) -> None:
    micros = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notify(f"RELOADING=1\nMONOTONIC_USEC={micros}")
    try:
        fresh = load(path)
    except ConfigError as error:
        log.error("the configuration stays as it was: %s", error)
    else:
        logging.getLogger().setLevel(fresh.log_level.upper())
        changed = ", ".join(sorted(differences(config, fresh) - {"log_level"}))
        log.info(
            "configuration read again%s", f"; a restart is needed for {changed}" if changed else ""
        )
    notify("READY=1")


def run(config: Config, path: Path | None) -> NoReturn:
    """Serve until a signal ends it; start-up faults are one line and exit code 1."""
    set_up_logging(config)
    # Whoever stops reading the log must not end the daemon with it.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.umask(0o022)
    sys.setswitchinterval(SWITCH_S)
    try:
        uvloop.run(_serve(config, path))
    except (EmberError, OSError) as error:
        fail(str(error), EXIT_FAILED)
    sys.exit(0)
