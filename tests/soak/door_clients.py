"""Many clients of a door in one process, most of them good: raw HTTP/1.1 over asyncio.

    python door_clients.py PORT FIRST CLIENTS SECONDS OUT

Clients FIRST .. FIRST + CLIENTS - 1 post to 127.0.0.1:PORT for SECONDS, one post every PAUSE_S on
average, one in ten of them hostile; then each sees its last post through. A good post has 64 datums
in 8 whole groups, per datum or columnar, an Idempotency-Key, and ids "client-post-index"; it is
sent again, same key and bytes, until there is an answer. Some good clients leave without reading
the answer first. Ids of hostile posts begin with "bad".

OUT becomes JSON: the good posts as [client, post, seconds of the first answer], statuses of good
posts, and for each kind of hostility how often which answer came ("closed": none).
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from pathlib import Path

import msgpack
import numpy as np

DATUMS, GROUP, TOKENS = 64, 8, 64
PAUSE_S = 2.0  # on average between two posts of a client
HOSTILE, IMPATIENT = 0.1, 0.05
ANSWER_S = 30.0  # any answer, or the end of a hostile connection
GIVE_UP_S = 120.0


def tensor(array):
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


class Client:
    """One actor: its random draws, its connection, and what it was answered."""

    def __init__(self, port, number):
        self.port, self.number, self.posts = port, number, 0
        self.draw = random.Random(number)
        rng = np.random.default_rng(number)
        size = (DATUMS, TOKENS)
        self.columns = {
            "input_ids": rng.integers(0, 1000, size, dtype=np.int32),
            "target_tokens": rng.integers(0, 1000, size, dtype=np.int32),
            "weights": np.ones(size, np.float32),
            "logprobs": -rng.random(size, dtype=np.float32),
            "advantages": rng.normal(size=(DATUMS, 1)).astype(np.float32),
        }
        self.stream, self.attacks = None, 0
        self.good, self.statuses, self.hostile = [], Counter(), Counter()

    async def run(self, until):
        await asyncio.sleep(self.draw.random() * PAUSE_S)
        while time.monotonic() < until:
            if self.draw.random() < HOSTILE:
                await self.attack(ATTACKS[(self.number + self.attacks) % len(ATTACKS)])
            else:
                await self.post()
            await asyncio.sleep(self.draw.uniform(0.5, 1.5) * PAUSE_S)
        self.hang_up()

    # good posts

    def body(self, name, columns=None, columnar=None, **fields):
        columns = self.columns if columns is None else columns
        head = {"version": 1, "policy_version": 0, "actor": f"client-{self.number}"} | fields
        ids = [f"{name}-{i}" for i in range(DATUMS)]
        groups = [f"{name}-g{i // GROUP}" for i in range(DATUMS)]
        if self.draw.random() < 0.5 if columnar is None else columnar:
            more = {
                "lengths": tensor(np.full(DATUMS, TOKENS, np.int32)),
                "columns": {k: tensor(v.reshape(-1)) for k, v in columns.items()},
                "ids": ids, "group_ids": groups, "group_sizes": [GROUP] * DATUMS,
            }  # fmt: skip
        else:
            more = {
                "datums": [
                    {
                        "input_ids": tensor(columns["input_ids"][i]),
                        "loss_fn_inputs": {k: tensor(v[i]) for k, v in columns.items() if k != "input_ids"},
                        "id": ids[i], "group_id": groups[i], "group_size": GROUP,
                    }
                    for i in range(DATUMS)
                ]
            }  # fmt: skip
        return msgpack.packb(head | more)

    async def post(self):
        name = f"{self.number}-{self.posts}"
        self.posts += 1
        request = self.request(self.body(name), key=name)
        if self.draw.random() < IMPATIENT:
            _, writer = await self.connect()
            writer.write(request)
            await writer.drain()
            self.reset(writer)
        give_up = time.monotonic() + GIVE_UP_S
        started, tries = time.monotonic(), 0
        while time.monotonic() < give_up:
            tries += 1
            try:
                if self.stream is None:
                    self.stream = await self.connect()
                reader, writer = self.stream
                writer.write(request)
                status, answer = await self.answer(reader)
            except (OSError, EOFError):
                self.statuses["no answer"] += 1
                self.hang_up()
                await asyncio.sleep(0.1)
                continue
            self.statuses[str(status)] += 1
            if status == 202:
                if answer["accepted"] != DATUMS or any(answer["dropped"].values()):
                    self.statuses[f"short: {answer}"] += 1
                self.good.append(
                    (
                        self.number,
                        self.posts - 1,
                        time.monotonic() - started if tries == 1 else None,
                    )
                )
                return
            if status not in (429, 503):
                self.statuses[f"refused: {answer}"] += 1
                return
            await asyncio.sleep(0.5)
        self.statuses["gave up"] += 1

    # hostility

    async def attack(self, kind):
        name = f"bad-{self.number}-{self.attacks}"
        self.attacks += 1
        reader, writer = await self.connect()
        try:
            outcome = await asyncio.wait_for(kind(self, name, reader, writer), ANSWER_S)
        except (OSError, EOFError):
            outcome = "closed"
        except TimeoutError:
            outcome = "nothing happened"
        finally:
            writer.close()
        self.hostile[f"{kind.__name__}: {outcome}"] += 1

    async def told(self, reader, writer, data):
        writer.write(data)
        return (await self.answer(reader))[0]

    async def half_head(self, name, reader, writer):
        return await self.told(reader, writer, b"POST /v1/datums HTTP/1.1\r\nHost: loc")

    async def half_body(self, name, reader, writer):
        request = self.request(self.body(name), key=name)
        writer.write(request[: len(request) // 2])
        await writer.drain()
        self.reset(writer)
        return "left"

    async def trickle(self, name, reader, writer):
        request = self.request(self.body(name), key=name)
        writer.write(request[:1000])
        answer = asyncio.create_task(self.answer(reader))
        while not answer.done():
            writer.write(b"\0")
            await asyncio.wait([answer], timeout=0.5)
        return answer.result()[0]

    async def garbage_bytes(self, name, reader, writer):
        return await self.told(reader, writer, self.draw.randbytes(300) + b"\r\n\r\n")

    async def garbage_body(self, name, reader, writer):
        return await self.told(reader, writer, self.request(b"\xc1" + self.draw.randbytes(5000)))

    async def empty_lists(self, name, reader, writer):
        return await self.told(reader, writer, self.request(b"\x90" * 1_000_000))

    async def nan(self, name, reader, writer):
        return await self.told(reader, writer, self.request(self.changed(name, "logprobs", np.nan)))

    async def positive_logprob(self, name, reader, writer):
        return await self.told(reader, writer, self.request(self.changed(name, "logprobs", 0.5)))

    async def negative_id(self, name, reader, writer):
        return await self.told(reader, writer, self.request(self.changed(name, "input_ids", -1)))

    async def short_weights(self, name, reader, writer):
        short = self.columns | {"weights": self.columns["weights"][:, 1:]}
        return await self.told(reader, writer, self.request(self.body(name, short)))

    async def oversized(self, name, reader, writer):
        return await self.told(reader, writer, self.request(b"", length=1 << 30))

    async def no_length(self, name, reader, writer):
        head = self.request(b"").replace(
            b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n"
        )
        return await self.told(reader, writer, head)

    async def wrong_length(self, name, reader, writer):
        body = self.body(name)
        return await self.told(reader, writer, self.request(body, length=len(body) - 100))

    async def other_bytes(self, name, reader, writer):
        if not self.good:
            return 409
        _, post, _ = self.good[-1]
        return await self.told(
            reader, writer, self.request(self.body(name), key=f"{self.number}-{post}")
        )

    async def odd_encoding(self, name, reader, writer):
        return await self.told(
            reader, writer, self.request(self.body(name), more=b"Content-Encoding: br\r\n")
        )

    async def long_head(self, name, reader, writer):
        return await self.told(
            reader, writer, self.request(self.body(name), more=b"X: " + b"x" * 100_000 + b"\r\n")
        )

    def changed(self, name, key, value):
        array = self.columns[key].copy()
        array[self.draw.randrange(DATUMS), self.draw.randrange(array.shape[1])] = value
        return self.body(name, self.columns | {key: array})

    # HTTP

    def request(self, body, key=None, length=None, more=b""):
        head = (
            f"POST /v1/datums HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/msgpack\r\n"
            f"Content-Length: {len(body) if length is None else length}\r\n"
        ) + (f"Idempotency-Key: {key}\r\n" if key else "")
        return head.encode() + more + b"\r\n" + body

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answer(self, reader):
        """(status, content) of one answer, at most ANSWER_S away; EOFError where there is none."""
        async with asyncio.timeout(ANSWER_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
            content = await reader.readexactly(int(fields["content-length"]))
        if fields.get("connection") == "close":
            self.hang_up(only=reader)
        return int(head.split(" ", 2)[1]), json.loads(content)

    def hang_up(self, only=None):
        if self.stream is not None and only in (None, self.stream[0]):
            self.stream[1].close()
            self.stream = None

    def reset(self, writer):
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()


ATTACKS = [
    Client.half_head, Client.half_body, Client.trickle, Client.garbage_bytes, Client.garbage_body, Client.empty_lists,
    Client.nan, Client.positive_logprob, Client.negative_id, Client.short_weights, Client.oversized, Client.no_length,
    Client.wrong_length, Client.other_bytes, Client.odd_encoding, Client.long_head,
]  # fmt: skip


async def main():
    port, first, count, seconds, out = sys.argv[1:]
    clients = [Client(int(port), int(first) + i) for i in range(int(count))]
    until = time.monotonic() + float(seconds)
    await asyncio.gather(*(client.run(until) for client in clients))
    told = {
        "good": [post for client in clients for post in client.good],
        "statuses": sum((client.statuses for client in clients), Counter()),
        "hostile": sum((client.hostile for client in clients), Counter()),
    }
    Path(out).write_text(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
