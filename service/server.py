"""Runs the app on uvicorn (httptools, uvloop, one worker) until SIGTERM or Ctrl-C, and then ends
well.

uvicorn re-raises the signal after its shutdown, so the process would die by it, and it leaves no
word for clients on open connections; both are done here:

    first signal    no more connections; posts that are open are finished, new ones on open
                    connections get 503 `draining`, long polls are answered at once. Within
                    server.drain_timeout_s the run is closed and `serve` returns, whatever a client
                    still holds back
    second signal   open posts are not waited for; the run is closed at once
    third signal    ends the process as the signal does by default
    SIGHUP          the tokens are read again

A TLS handshake has the time of a head, and counts as a connection once it is done.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import uvicorn
import uvloop
from fastapi import FastAPI

from headrace.schemas.errors import Refused, SettingsError
from headrace.service.app import create_app
from headrace.service.malloc import tune_malloc
from headrace.service.protocol import DoorProtocol, Gate
from headrace.service.settings import Settings

__all__ = ["serve"]

log = logging.getLogger(__name__)

OWN_FILES = 512  # beside connections: segments, rings, database
POLL_S = 0.02
LAST_ANSWERS_S = 0.5
CLOSING_S = 3.0  # of the drain's time, at most half of it: the run is closed in it


def serve(settings: Settings, *, discard: bool = False) -> None:
    """Serve one run until a signal. Raises what `Pipeline.open` raises, SettingsError where TLS
    files cannot be used, and OSError where the port is taken.
    """
    if settings.server.malloc_tuning:
        tune_malloc()
    sys.setswitchinterval(settings.server.switch_interval_s)
    _allow_files(settings.server.max_connections)
    app = create_app(settings, discard=discard)
    server = _Server(settings, app)
    error: Exception | None = None
    with (
        _listen(settings) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            runner.run(server.serve(sockets=[listener]))
        except SystemExit:  # a lifespan that did not start
            error = getattr(app.state, "start_error", None)
            if error is None:
                raise
    if error is not None:
        raise error


def _allow_files(connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = connections + OWN_FILES
    if hard != resource.RLIM_INFINITY and hard < want:
        log.warning(
            "server.max_connections = %d needs about %d open files and the process may have %d: "
            "raise the limit (ulimit -n), or lower the setting", connections, want, hard,
        )  # fmt: skip
        want = hard
    if soft != resource.RLIM_INFINITY and soft < want:
        resource.setrlimit(resource.RLIMIT_NOFILE, (want, hard))


def _calm_collector() -> None:
    """A full collection walks everything that is held (150 ms at 400,000 datums, the loop and all
    threads stopped). What ends here ends by reference counts, so they are made rare: what is here
    at the start is left out, and millions of objects more than now must live for the next one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 5, 50)


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
        own = settings.server
        config = uvicorn.Config(
            app,
            http=DoorProtocol,
            loop="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            timeout_keep_alive=own.keep_alive_s,
            ssl_certfile=own.tls_cert,
            ssl_keyfile=own.tls_key,
            ssl_ca_certs=None if own.tls_client_ca is None else str(own.tls_client_ca),
            ssl_cert_reqs=ssl.CERT_NONE if own.tls_client_ca is None else ssl.CERT_REQUIRED,
        )
        try:
            config.load()
        except OSError as error:
            raise SettingsError(
                f"server.tls_cert = {own.tls_cert}, server.tls_key = {own.tls_key}, "
                f"server.tls_client_ca = {own.tls_client_ca}: {error}; want PEM files that belong "
                "together and that this user can read"
            ) from error
        super().__init__(config)
        self._settings, self._app = settings, app
        self._gate = Gate(own, self._note)
        app.state.gate = self._gate

    def _note(self, refused: Refused, host: str | None) -> None:
        refusals = getattr(self._app.state, "refusals", None)
        if refusals is not None:
            refusals.note(refused.code, str(refused), client=host)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        yield

    def _stop(self) -> None:
        if self.should_exit:
            self.force_exit = True
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        self.should_exit = self._gate.draining = True
        pipeline = getattr(self._app.state, "pipeline", None)
        if pipeline is not None:
            pipeline.drain()

    def _reload(self) -> None:
        guard = getattr(self._app.state, "guard", None)
        if guard is not None:
            guard.reload()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(uvicorn.config.STARTUP_FAILURE)
        loop = asyncio.get_running_loop()

        def made() -> DoorProtocol:
            return DoorProtocol(
                self.config, self.server_state, self.lifespan.state, loop, gate=self._gate
            )

        context = self.config.ssl
        handshake_s = None if context is None else self._settings.server.head_timeout_s
        self.servers = [
            await loop.create_server(
                made,
                sock=listener,
                ssl=context,
                ssl_handshake_timeout=handshake_s,
                backlog=self.config.backlog,
            )
            for listener in sockets or []
        ]
        _calm_collector()
        self.started = True
        if sockets and not self.should_exit:
            self._say_ready(sockets[0])

    def _say_ready(self, listener: socket.socket) -> None:
        scheme = "http" if self.config.ssl is None else "https"
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        run, queue = self._settings.run.name, self._settings.queue.dir
        print(f"headrace serving on {scheme}://{host}:{port} run={run} queue={queue}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gate.draining = True
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in self._connections():
            connection.drain()
        bound_s = self._settings.server.drain_timeout_s
        await self._wait(bound_s - min(CLOSING_S, bound_s / 2), lambda c: c.is_open)
        for connection in self._connections():
            connection.end()
        await self.lifespan.shutdown()
        # What the run finished while it was closed is still to be sent.
        await self._wait(LAST_ANSWERS_S, lambda _: True)
        for connection in self._connections():
            connection.transport.abort()

    async def _wait(self, bound_s: float, holds: Callable[[DoorProtocol], bool]) -> None:
        """Until no connection `holds`, for at most `bound_s` seconds; not after a second signal."""
        loop = asyncio.get_running_loop()
        until = loop.time() + bound_s
        while not self.force_exit and loop.time() < until:
            if not any(holds(connection) for connection in self._connections()):
                return
            await asyncio.sleep(POLL_S)

    def _connections(self) -> list[DoorProtocol]:
        return cast("list[DoorProtocol]", list(self.server_state.connections))
