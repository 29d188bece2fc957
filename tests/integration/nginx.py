"""Debian's nginx with TLS and HTTP/2 before a registry, as registries are often run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.integration.test_registry_real import free_port, is_up
from tests.patience import until

CONFIGURATION = """\
user root; daemon off; worker_processes 1; pid {folder}/nginx.pid;
error_log {folder}/error.log notice;
events {{ worker_connections 256; }}
http {{
  log_format short '$server_protocol $status $request_method $uri $http_range';
  access_log {folder}/access.log short;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port} ssl http2;
    ssl_certificate {certificate}; ssl_certificate_key {key};
    {more}
    location / {{ proxy_pass http://{behind}; proxy_set_header Host $http_host; }}
  }}
}}
"""


class Nginx:
    """A running nginx; ``certificate`` is read again at `reload`."""

    def __init__(self, folder: Path, behind: str) -> None:
        self._folder = folder
        self._behind = behind
        self.port = free_port()
        self.process: asyncio.subprocess.Process | None = None

    @property
    def authority(self) -> str:
        return f"127.0.0.1:{self.port}"

    def configure(self, pair: tuple[Path, Path], more: str = "") -> None:
        text = CONFIGURATION.format(
            folder=self._folder,
            port=self.port,
            certificate=pair[0],
            key=pair[1],
            more=more,
            behind=self._behind,
        )
        (self._folder / "nginx.conf").write_text(text)

    def reload(self) -> None:
        """Take up the configuration; new connections have it once this returns."""
        assert self.process is not None
        began = self.log("error").count("gracefully shutting down")
        self.process.send_signal(signal.SIGHUP)
        assert until(lambda: self.log("error").count("gracefully shutting down") > began, 10)

    def log(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def spoken(self) -> list[str]:
        """Lines `HTTP/2.0 206 GET /v2/… bytes=…` of what it answered."""
        return self.log("access").splitlines()


@asynccontextmanager
async def nginx_before(
    behind: str, folder: Path, pair: tuple[Path, Path], more: str = ""
) -> AsyncIterator[Nginx]:
    """nginx that passes everything on to ``behind``; ``more`` goes into its server block."""
    folder.mkdir()
    made = Nginx(folder, behind)
    made.configure(pair, more)
    made.process = await asyncio.create_subprocess_exec(
        "/usr/sbin/nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")
    )
    try:
        up = await asyncio.to_thread(until, lambda: is_up(made.port), 10)
        assert up, made.log("error")
        yield made
    finally:
        if made.process.returncode is None:
            made.process.terminate()
            await made.process.wait()
