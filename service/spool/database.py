"""The spool's database: the one truth about what was accepted.

A post exists if and only if its row's transaction committed. Methods run inside a transaction that
the caller opened (`with database.transaction():`) on the spool's thread, and nowhere else.

    run      key -> JSON            spool version, meta dtype, schema, policy, committed step
    posts    post, token, key, hash, count, actor, segment, offset, nbytes, columns, meta, ids,
             answer, at
    names    kind, number, name     groups and sources that meta refers to
    drops    number, reason         datums that will never be planned, until their post is dead
    plans    step, plan

A post whose datums are all committed keeps its row, without segment and meta, while its
Idempotency-Key is remembered.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from headrace.schemas.errors import SpoolVersion
from headrace.service.records import DATUM_META, Plan, Post

__all__ = ["SPOOL_VERSION", "Database"]

SPOOL_VERSION = 1

TABLES = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS posts (
    post INTEGER PRIMARY KEY, token TEXT NOT NULL, key TEXT, hash BLOB NOT NULL,
    count INTEGER NOT NULL, actor TEXT, segment INTEGER, offset INTEGER, nbytes INTEGER,
    columns TEXT, meta BLOB, ids BLOB, answer TEXT NOT NULL, at REAL NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS posts_by_key ON posts (token, key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS dead_posts ON posts (at) WHERE segment IS NULL;
CREATE TABLE IF NOT EXISTS names (
    kind TEXT NOT NULL, number INTEGER NOT NULL, name TEXT NOT NULL, PRIMARY KEY (kind, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS drops (number INTEGER PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS plans (step INTEGER PRIMARY KEY, plan BLOB NOT NULL);
"""


class Database:
    """One SQLite file in WAL mode, opened and used on one thread."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # The page cache belongs to the kernel: what is committed outlives this process without a
        # sync.
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "temp_store = MEMORY"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.executescript(TABLES)
        with self.transaction():
            version = self.get("spool_version")
            if version not in (None, SPOOL_VERSION):
                raise SpoolVersion(f"{path}: got spool version {version}, want {SPOOL_VERSION}")
            self.put("spool_version", SPOOL_VERSION)
            self.put("meta_dtype", DATUM_META.descr)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def get(self, key: str) -> Any:
        row = self._connection.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, value: Any) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO run (key, value) VALUES (?, ?)", (key, json.dumps(value))
        )

    def add_post(self, number: int, post: Post) -> None:
        columns = json.dumps([[c.key, c.axis, c.dtype, c.offset, c.trailing] for c in post.columns])
        answer = json.dumps(
            {"dropped": dict(post.dropped), "skipped": [f.to_dict() for f in post.skipped]}
        )
        ids = None if post.ids is None else msgpack.packb(list(post.ids))
        self._connection.execute(
            "INSERT INTO posts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number, post.token, post.key, post.body_hash, len(post.meta), post.actor,
                post.segment, post.offset, post.nbytes, columns, post.meta.tobytes(), ids, answer,
                time.time(),
            ),
        )  # fmt: skip
        self._connection.executemany("INSERT OR IGNORE INTO names VALUES (?, ?, ?)", post.new_names)
        for key, value in post.run_values.items():
            self.put(key, value)

    def add_plan(self, plan: Plan) -> None:
        self._connection.execute("INSERT INTO plans VALUES (?, ?)", (plan.step, plan.pack()))

    def drop(self, numbers: list[int], reason: str, dead_posts: list[int]) -> None:
        """These datums are dropped; `dead_posts` hold no other."""
        self._connection.executemany(
            "INSERT OR IGNORE INTO drops VALUES (?, ?)", [(number, reason) for number in numbers]
        )
        self._bury(dead_posts)

    def _bury(self, dead_posts: list[int]) -> None:
        run = self._connection
        run.executemany(
            "UPDATE posts SET segment = NULL, columns = NULL, meta = NULL, ids = NULL "
            "WHERE post = ?",
            [(post,) for post in dead_posts],
        )
        run.executemany(
            "DELETE FROM drops WHERE number >> 16 = ?", [(post,) for post in dead_posts]
        )

    def forget(
        self, step: int, dead_posts: list[int], groups: list[int], keys_before: float
    ) -> None:
        """Drop plans up to `step`, the payload of `dead_posts`, names of `groups`, and dead rows
        older than a time.
        """
        run = self._connection
        run.execute("DELETE FROM plans WHERE step <= ?", (step,))
        self._bury(dead_posts)
        run.executemany(
            "DELETE FROM names WHERE kind = 'group' AND number = ?", [(group,) for group in groups]
        )
        run.execute("DELETE FROM posts WHERE segment IS NULL AND at < ?", (keys_before,))
        self.put("committed_step", step)

    def close(self) -> None:
        self._connection.close()
