"""AsyncRolloutClient: RolloutClient for asyncio. The same outbox and sender threads, awaited.

    await submit(datum) -> copy, check -> outbox -> sender threads -> POST /v1/datums -> 202
                           (this task)              (as in rollout.py)

    async with AsyncRolloutClient("http://host:8421") as client:
        policy = await client.wait_policy()
        await client.submit(datums, policy_version=policy.version)
        report = await client.flush(30)

Says and raises what RolloutClient does. Never blocks the event loop: a full outbox is awaited, a
list is copied a few datums at a time, posts are packed and sent by the threads, policies are asked
for with httpx's async client. Submits are admitted in the order in which they were awaited.

A cancelled `submit` took nothing of its list, or, if it waited for room, the part that had found
some; each datum of the rest is in the next report as failed. A cancelled `flush` leaves its news to
the next one. A cancelled `close` has stopped the client. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import os
from types import TracebackType
from typing import Any, Self

import httpx
import stamina

from headrace.client.admit import AdmissionAsk
from headrace.client.answers import PolicyInfo, Report
from headrace.client.core import RolloutCore, given_datums
from headrace.client.policy import PolicyPoll, Question
from headrace.client.snapshot import snapshot
from headrace.schemas.errors import ClientClosed
from headrace.schemas.wire import WireDatum

__all__ = ["AsyncRolloutClient"]

COPIED_AT_ONCE = 16  # datums; some 50 us each


class AsyncRolloutClient(RolloutCore):
    """A client of one service for the tasks of one event loop; its arguments: core.py."""

    def _prepare(self) -> None:
        self._admitting = asyncio.Lock()  # first come, first served
        self._closing = asyncio.Lock()
        self._polls: set[asyncio.Task[PolicyInfo]] = set()
        self._async_http: httpx.AsyncClient | None = None

    async def submit(self, datums: Any, policy_version: int | None = None) -> range:
        """As `RolloutClient.submit`; a full outbox is awaited. Leave `datums` alone until then."""
        self._check_process()
        copies: list[WireDatum] = []
        for place, datum in enumerate(given_datums(datums)):
            if place % COPIED_AT_ONCE == 0:
                await asyncio.sleep(0)
            copies.append(snapshot(datum, policy_version))
        async with self._admitting:
            return await self._outbox.admit_async(copies, block=self._block)

    async def flush(self, timeout: float | None = None) -> Report:
        """As `RolloutClient.flush`."""
        self._check_open()
        return await self._outbox.flush_async(timeout)

    async def close(self) -> Report:
        """As `RolloutClient.close`; ends every `wait_policy` with ClientClosed."""
        self._check_process()
        async with self._closing:
            if self._report is None:
                self._outbox.seal()
                try:
                    self._report = await self._outbox.flush_async(self._close_deadline_s)
                finally:
                    self._stop()
                    for poll in self._polls:
                        poll.cancel()
                    await asyncio.wait([asyncio.create_task(self._release_async())])
                self._tell(self._report)
            return self._report

    async def wait_policy(self, newer_than: int = -1, timeout: float | None = None) -> PolicyInfo:
        """As `RolloutClient.wait_policy`."""
        self._check_open()
        poll = asyncio.create_task(self._poll(newer_than, timeout))
        self._polls.add(poll)
        try:
            return await poll
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if self._outbox.stopped and (me is None or not me.cancelling()):
                raise ClientClosed("wait_policy: this client was closed") from None
            raise
        finally:
            self._polls.discard(poll)

    async def admit(self, groups: int = 1, timeout: float | None = None) -> None:
        """As `RolloutClient.admit`."""
        self._check_open()
        http = self._async_client()
        ask = AdmissionAsk(groups, timeout, self._deadline_s, self._connection)
        while not ask.granted:
            await asyncio.sleep(ask.delay_s)
            try:
                response = await http.post(**ask.request)
            except httpx.TransportError as error:
                ask.missed(error)
            else:
                ask.hear(response)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == self._pid:
            await self.close()

    async def _poll(self, newer_than: int, timeout: float | None) -> PolicyInfo:
        http = self._async_client()
        poll = PolicyPoll(newer_than, timeout, self._deadline_s)
        while poll.found is None:
            poll.hear(await self._ask(poll.question(), http))
        self._policy = poll.found
        return poll.found

    def _async_client(self) -> httpx.AsyncClient:
        if self._async_http is None:
            self._async_http = self._connection.async_client()
        return self._async_http

    async def _ask(self, question: Question, http: httpx.AsyncClient) -> PolicyInfo | None:
        with question.explained(self._connection):
            async for attempt in stamina.retry_context(**question.retry):
                with attempt:
                    await asyncio.sleep(question.delay_s)
                    return question.read(await http.get(**question.request))
        raise AssertionError("retry_context yields at least once")

    async def _release_async(self) -> None:
        await asyncio.to_thread(self._release)
        if self._async_http is not None:
            await self._async_http.aclose()
