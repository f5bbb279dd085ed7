"""Runs the app on uvicorn (httptools, uvloop, one worker) until SIGTERM or Ctrl-C, and then ends
well.

uvicorn re-raises the signal after its shutdown, so the process would die by it; here the signal
only asks the server to stop: open posts finish within `server.drain_timeout_s`, long polls are
answered at once, the run is closed, and `serve` returns. A second signal stops waiting for open
posts.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
import uvloop
from fastapi import FastAPI

from headrace.service.app import create_app
from headrace.service.settings import Settings

__all__ = ["serve"]

log = logging.getLogger(__name__)


def serve(settings: Settings, *, discard: bool = False) -> None:
    """Serve one run until a signal. Raises what `Pipeline.open` raises, and OSError where the port
    is taken.
    """
    sys.setswitchinterval(settings.server.switch_interval_s)
    app = create_app(settings, discard=discard)
    server = _Server(settings, app)
    error: Exception | None = None
    with (
        _listen(settings) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            runner.run(server.serve(sockets=[listener]))
        except SystemExit:  # uvicorn's word for a lifespan that did not start
            error = getattr(app.state, "start_error", None)
            if error is None:
                raise
    if error is not None:
        raise error


@contextmanager
def _listen(settings: Settings) -> Iterator[socket.socket]:
    host, port = settings.server.host, settings.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OSError(
                error.errno,
                f"server.host = {host}, server.port = {port}: {error.strerror}; choose another "
                "port",
            ) from error
        yield listener


class _Server(uvicorn.Server):
    def __init__(self, settings: Settings, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                loop="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                ws="none",
                server_header=False,
                timeout_keep_alive=settings.server.keep_alive_s,
                timeout_graceful_shutdown=settings.server.drain_timeout_s,
            )
        )
        self._settings, self._app = settings, app

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        pipeline = getattr(self._app.state, "pipeline", None)
        if pipeline is not None:
            pipeline.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.should_exit or not sockets:
            return
        host, port = sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        run, queue = self._settings.run.name, self._settings.queue.dir
        print(f"headrace serving on http://{host}:{port} run={run} queue={queue}", flush=True)
