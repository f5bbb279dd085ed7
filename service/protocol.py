"""One connection: uvicorn's httptools protocol, with bounds on time, bytes and requests.

Where the reading of a connection stands:

             head whole           message whole           next byte
    HEAD ─────────────────► BODY ─────────────────► IDLE ───────────► HEAD
      └──────────┬────────────┴───────────┐           └─── last answer sent ───► closed
                 │ refused while requests │ refused, or answered
                 ▼ before it are open     ▼ before its end
               DEAF ──────────────────► LEFT ──────────────────────────────────► closed

HEAD   from the first moment of a connection: server.head_timeout_s, server.max_head_bytes. A client
       that began a request gets 408, a silent one nothing
BODY   server.body_timeout_s for the whole, server.min_body_rate_bytes_s on average after GRACE_S.
       Only the time counts in which this side reads; until the body is whole, an answer closes
IDLE   uvicorn's keep-alive timer runs once the message is answered
DEAF   nothing is parsed any more; the refusal is sent after the answers that are still due
LEFT   the last answer is written and the sending half closed. What still arrives is thrown away,
       at most LINGER_BYTES in LINGER_S: closing over unread bytes resets the connection, and a
       reset can take the answer from the client

With server.fast_protocol, a route that knows READ_INTO has a body read from the socket straight
into its buffer, copied once, by the kernel. While it waits, a BodyReader stands in for the protocol
at the transport; states, timers and bounds stay the same. Not under TLS, whose bytes come from
another layer.

`Gate` is what all connections of a server share. Its one timer looks at every connection each
TICK_S, so that a chunk of a body costs no timer. Refusals made here are problem documents as the
routes make them. A parser that refused is never fed again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import Any, cast
from weakref import ref

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from headrace.schemas.errors import (
    Draining,
    HeadTooLarge,
    MalformedHead,
    Refused,
    TooManyConnections,
    TooSlow,
)
from headrace.service.routes.problems import problem
from headrace.service.settings import Server

__all__ = ["READ_INTO", "DoorProtocol", "Gate"]

READ_INTO = "headrace.read_into"  # the ASGI extension: `read_into`, awaited with a buffer
TICK_S = 0.25
GRACE_S = 5.0
LINGER_S = 2.0
LINGER_BYTES = 1 << 20
MAX_AHEAD = 64  # requests of one connection that wait for their turn
SPARE_CONNECTIONS = 64  # beyond max_connections, so that most of those refused can read why
DRAIN_RETRY_S = 2


class Reading(Enum):
    """See the module."""

    HEAD = auto()
    BODY = auto()
    IDLE = auto()
    DEAF = auto()
    LEFT = auto()


# By global names: an attribute of an Enum costs as much as the rest of a look at a connection.
HEAD, BODY, IDLE, DEAF, LEFT = Reading


class Gate:
    """Bounds, counts and the clock of all connections of one server. `note` hears each refusal and
    the host that it went to.
    """

    def __init__(self, settings: Server, note: Callable[[Refused, str | None], None]) -> None:
        self.settings = settings
        self.draining = False
        self.counts: Counter[str] = Counter()  # connections refused or cut off here, by code
        self._note = note
        self._timer: asyncio.TimerHandle | None = None

    def note(self, refused: Refused, host: str | None) -> None:
        """Count a refusal and pass it on."""
        self.counts[refused.code] += 1
        self._note(refused, host)

    def watch(self, loop: asyncio.AbstractEventLoop, connections: Iterable[DoorProtocol]) -> None:
        """Look after `connections`, a set that changes, for as long as there are any."""
        if self._timer is None:
            self._timer = loop.call_later(TICK_S, self._look, loop, connections, loop.time())

    def _look(
        self, loop: asyncio.AbstractEventLoop, connections: Iterable[DoorProtocol], before: float
    ) -> None:
        # A loop that was held up is no fault of the clients.
        passed_s = min(loop.time() - before, 2 * TICK_S)
        for connection in list(connections):
            connection.look(passed_s)
        self._timer = None
        if connections:
            self.watch(loop, connections)


class _Exit:
    """What a request sees of its transport: to close it is to leave well."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, leave: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, leave


class DoorProtocol(HttpToolsProtocol):
    """Made by the server for each connection it accepts."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        *,
        gate: Gate,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.gate = gate
        self._reading = HEAD
        self._begun = False  # in HEAD: a byte of a request line came
        self._bytes = 0  # of what is being read now
        self._waited_s = 0.0  # for it
        self._stalled_s = 0.0  # the client does not read what was sent
        self._keep_alive = True  # what the request being read asks for
        self._refusal: Refused | None = None  # in DEAF: what will be said

    @property
    def is_open(self) -> bool:
        """A request is not answered to its end."""
        if self._reading is LEFT or self.cycle is None:
            return False
        return not self.cycle.response_complete

    # the transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        most = self.gate.settings.max_connections
        beyond = len(self.connections) - most
        super().connection_made(transport)
        self._exit = cast(asyncio.Transport, _Exit(transport, self._leave))
        self.gate.watch(self.loop, cast("Iterable[DoorProtocol]", self.connections))
        if beyond >= 0:
            message = f"server.max_connections = {most} are open: reuse one, or come back later"
            self._refuse(TooManyConnections(message))
            if beyond >= SPARE_CONNECTIONS:
                transport.close()

    def data_received(self, data: bytes) -> None:
        if self._reading in (DEAF, LEFT):
            self._throw_away(len(data))
            return
        self._unset_keepalive_if_required()
        if self._reading is IDLE:
            self._turn(HEAD)
        if self._reading is HEAD:
            self._bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is spoken; the request was taken as it is
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, Refused) else _malformed(error))
        else:
            if self._reading is HEAD and self._bytes > self.gate.settings.max_head_bytes:
                self._refuse(self._head_too_large(self._bytes))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Without these, no reference leads back here: a connection ends by reference counts.
        self.pipeline.clear()
        self.cycle = self.scope = self._exit = None  # type: ignore[assignment]

    def look(self, passed_s: float) -> None:
        """The gate's clock: `passed_s` seconds have passed since it last looked."""
        reading = self._reading
        if reading is LEFT:
            self._waited_s += passed_s
            if self._waited_s > LINGER_S:
                self.transport.abort()
        elif self.transport.is_closing():
            self._turn(LEFT)
        elif self.flow.write_paused:
            self._stalled_s += passed_s
            if self._stalled_s > self.gate.settings.body_timeout_s:
                self.gate.counts["answer_not_read"] += 1
                self.transport.abort()
        else:
            self._stalled_s = 0.0
            if reading is HEAD and not self.is_open:
                self._waited_s += passed_s
                if self._waited_s > self.gate.settings.head_timeout_s:
                    self._end_half_head()
            elif reading is BODY and self._reads:
                self._waited_s += passed_s
                self._mind_rate()

    # the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._reading is IDLE:  # it follows another one in the same bytes
            self._turn(HEAD)
        self._begun = True

    def on_headers_complete(self) -> None:
        nbytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if nbytes > self.gate.settings.max_head_bytes:
            raise self._head_too_large(nbytes)
        if len(self.pipeline) >= MAX_AHEAD:
            raise MalformedHead(
                f"more than {MAX_AHEAD} requests were sent ahead: wait for answers before the next"
            )
        if self.gate.draining and self.parser.get_method() == b"POST":
            raise _draining()
        super().on_headers_complete()
        self._turn(BODY)
        self.cycle.transport = self._exit
        if self.scheme == "http" and self.gate.settings.fast_protocol:
            read_into = partial(self.read_into, ref(self.cycle))  # its scope is not to hold it
            cast("dict[str, Any]", self.scope)["extensions"] = {READ_INTO: read_into}
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_body(self, body: bytes) -> None:
        self._bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive and not self.gate.draining
        self._turn(IDLE)

    # the requests' calls

    async def read_into(
        self, asked: ref[RequestResponseCycle], buffer: memoryview
    ) -> tuple[int, bool]:
        """Read the body of the request `asked` into `buffer`, which is as long as was announced.
        Returns how many bytes came, and whether they are the whole body: they are not where the
        client left, or was refused meanwhile.

        What is not here yet goes from the socket into `buffer`: the parser only counts a body's
        bytes, so it is left out and begins anew behind them.
        """
        cycle = asked()
        if cycle is None or cycle.disconnected:
            return 0, False
        at = len(cycle.body)
        buffer[:at] = cycle.body
        cycle.body = bytearray()
        if not cycle.more_body or self.transport.is_closing():
            return at, not cycle.more_body
        if cycle.waiting_for_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        reader = BodyReader(self, buffer[at:])
        self.receive_by(reader)
        try:
            while cycle.more_body and not cycle.disconnected:
                cycle.message_event.clear()
                await cycle.message_event.wait()
        finally:
            reader.stop()
            if cycle.more_body and self._reading is BODY:
                self.transport.abort()  # given up amid a body: the parser has lost its place
        return at + reader.nbytes, not (cycle.more_body or cycle.disconnected)

    def receive_by(self, protocol: asyncio.BaseProtocol) -> None:
        """Let `protocol` have what comes next."""
        if self.transport.is_closing():
            self.transport.set_protocol(protocol)
            return
        # uvloop looks at the kind of protocol when reading starts, and only then.
        self.transport.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.read_paused = False
        self.transport.resume_reading()

    def body_arrived(self, nbytes: int, *, whole: bool) -> None:
        """For BodyReader: `nbytes` more are in the buffer."""
        if self._reading is not BODY:
            return  # refused, and the request does not know it yet
        self._bytes += nbytes
        if whole:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.on_message_complete()

    def on_response_complete(self) -> None:
        if self._reading is LEFT:
            self.server_state.total_requests += 1
            return
        was_last = not self.pipeline
        super().on_response_complete()
        if self._refusal is not None and was_last:
            self._answer(self._refusal)

    # the server's calls

    def drain(self) -> None:
        """Close after the answers that are due; an idle connection stays, to be told."""
        if self.is_open:
            self.cycle.keep_alive = False

    def end(self) -> None:
        """Close now; a request that is not whole is refused, one that is keeps its connection."""
        if not self.is_open:
            self.transport.close()
        elif self._reading is BODY:
            self._refuse(_draining())

    # leaving

    def _refuse(self, refused: Refused) -> None:
        """Answer what is being read now with `refused`, in its turn, and leave."""
        self.gate.note(refused, self.client[0] if self.client else None)
        cycle = self.cycle
        if self._reading is BODY:
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()  # its turn had not come
            else:
                cycle.disconnected = True
                cycle.message_event.set()
                if cycle.response_started:
                    self._leave()
                else:
                    self._answer(refused)
                return
        elif not self.is_open:
            self._answer(refused)
            return
        self._refusal = refused
        self._turn(DEAF)

    def _answer(self, refused: Refused) -> None:
        answer = problem(refused, close=True)
        parts = [STATUS_LINE[answer.status_code]]
        for name, value in (*self.server_state.default_headers, *answer.raw_headers):
            parts += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*parts, b"\r\n", bytes(answer.body)]))
        self._leave()

    def _leave(self) -> None:
        whole = self._reading is IDLE
        self._turn(LEFT)
        self.pipeline.clear()
        self._unset_keepalive_if_required()
        if whole:
            self.transport.close()
        elif not self.transport.is_closing():
            self.flow.resume_reading()
            if self.transport.can_write_eof():  # not so under TLS
                self.transport.write_eof()

    def _throw_away(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes <= LINGER_BYTES:
            return
        if self._reading is LEFT:
            self.transport.close()
        else:
            self.flow.pause_reading()

    def _turn(self, to: Reading) -> None:
        self._reading = to
        self._bytes, self._waited_s, self._begun = 0, 0.0, False

    # time and size

    @property
    def _reads(self) -> bool:
        """Nothing on this side keeps the client from sending the body."""
        return not (self.flow.read_paused or self.cycle.waiting_for_100_continue or self.pipeline)

    def _end_half_head(self) -> None:
        if self._begun:
            most = self.gate.settings.head_timeout_s
            message = f"the head is not whole after server.head_timeout_s = {most:g} s"
            self._refuse(TooSlow(message))
        else:
            self.gate.counts["silent"] += 1
            self.transport.close()

    def _mind_rate(self) -> None:
        settings, waited_s = self.gate.settings, self._waited_s
        if waited_s > settings.body_timeout_s:
            why = f"is not whole after server.body_timeout_s = {settings.body_timeout_s:g} s"
        elif waited_s > GRACE_S and self._bytes < settings.min_body_rate_bytes_s * waited_s:
            why = f"is slower than server.min_body_rate_bytes_s = {settings.min_body_rate_bytes_s}"
        else:
            return
        self._refuse(TooSlow(f"the body {why}: {self._bytes} bytes in {waited_s:.1f} s"))

    def _head_too_large(self, nbytes: int) -> HeadTooLarge:
        most = int(self.gate.settings.max_head_bytes)
        return HeadTooLarge(
            f"got a head of {nbytes} bytes or more, want at most server.max_head_bytes = {most}"
        )


class BodyReader(asyncio.BufferedProtocol):
    """Stands in for its DoorProtocol at the transport until `rest` is full, or until `stop`.

    It is no asyncio.Protocol, and must not be: uvloop would take it for one that wants bytes, and
    lose some.
    """

    def __init__(self, door: DoorProtocol, rest: memoryview) -> None:
        self._door, self._rest = door, rest
        self.nbytes = 0  # that came

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._rest = self._rest[nbytes:]
        whole = not self._rest
        if whole:
            self.stop()
        self._door.body_arrived(nbytes, whole=whole)

    def stop(self) -> None:
        """Let go of the buffer, and give the transport back; safe to call again."""
        self._rest = memoryview(b"")  # the transport may keep a reader for long after this
        if self._door.transport.get_protocol() is self:
            self._door.receive_by(self._door)

    def eof_received(self) -> bool | None:
        self._door.eof_received()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.connection_lost(exc)

    def pause_writing(self) -> None:
        self._door.pause_writing()

    def resume_writing(self) -> None:
        self._door.resume_writing()


def _draining() -> Draining:
    return Draining(
        "the service is ending: posts that are open are finished, new ones are not taken; send it "
        "again when it is back",
        DRAIN_RETRY_S,
    )


def _malformed(error: Exception) -> MalformedHead:
    # The parser's own words; they name no bytes of the client.
    what = "a URL or header that cannot be read" if error.__context__ is not None else str(error)
    return MalformedHead(f"this is not HTTP/1.1: {what}")
