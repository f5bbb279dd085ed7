"""How a service starts, what it finds, and how it ends: real processes and real signals."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest


def test_sigterm_and_ctrl_c_end_it_with_exit_0_and_leave_nothing(serve, queue_dir):
    for number in (signal.SIGTERM, signal.SIGINT):
        service = serve()
        assert service.client.get("/readyz").status_code == 204
        assert service.client.get("/healthz").content == b""
        assert service.stop(number) == 0
        assert os.listdir(queue_dir) == []


def test_held_datums_outlive_a_stop(serve, posts, queue_dir):
    service = serve()
    assert service.post(posts.body(posts.datum())).status_code == 202
    assert service.stop() == 0
    assert os.listdir(queue_dir) == ["default.spool"]
    assert "1 accepted datums are not committed" in service.stderr.read_text()
    with pytest.raises(RuntimeError, match=r"exit 1: .*default\.spool.*--discard"):
        serve()
    again = serve("--discard")
    assert again.books()["accepted"] == 0


def test_after_kill_9_a_start_refuses_until_told_to_discard(serve, posts, queue_dir):
    service = serve()
    assert service.post(posts.body(posts.datum())).status_code == 202
    assert service.stop(signal.SIGKILL) == -signal.SIGKILL
    left = sorted(os.listdir(queue_dir))
    assert left == ["default.0.ring", "default.spool"]
    with pytest.raises(RuntimeError, match=r"exit 1: .*default\.0\.ring, default\.spool"):
        serve()
    assert sorted(os.listdir(queue_dir)) == left
    assert serve(**{"run.name": "another"}).books()["accepted"] == 0
    assert serve("--discard").books()["accepted"] == 0


def test_a_second_service_on_the_same_names_is_told_whose_they_are(serve):
    service = serve()
    for flags in ((), ("--discard",)):
        with pytest.raises(RuntimeError, match=f"exit 1: .*in use by .*{service.process.pid}"):
            serve(*flags)
    assert service.client.get("/readyz").status_code == 204


def test_a_taken_port_is_said(serve, queue_dir):
    port = serve().url.rpartition(":")[2]
    with pytest.raises(RuntimeError, match=rf"exit 1: .*server\.port = {port}"):
        serve(**{"server.port": port, "run.name": "other"})
    assert sorted(os.listdir(queue_dir)) == ["default.0.ring", "default.spool"]


def test_settings_that_contradict_each_other_end_with_exit_2(serve):
    with pytest.raises(RuntimeError, match=r"exit 2: headrace: .*planner\.batch_groups"):
        serve(**{"planner.batch_size": 1, "planner.batch_groups": 1})


def test_a_long_poll_is_answered_when_the_service_stops(serve):
    service = serve()
    assert service.client.get("/v1/policy").json() == {"version": None, "uri": None}
    answers = []

    def poll():
        answers.append(service.client.get("/v1/policy?newer_than=-1&wait=30"))

    thread = threading.Thread(target=poll)
    thread.start()
    began = time.monotonic()
    while not any(":" in line for line in _established(service)):
        assert time.monotonic() - began < 5
    service.process.send_signal(signal.SIGTERM)
    thread.join(10)
    assert not thread.is_alive()
    assert answers[0].json() == {"version": None, "uri": None}
    assert service.stop() == 0


def _established(service):
    """Lines of this machine's TCP table that belong to a connection to the service."""
    port = int(service.url.rpartition(":")[2])
    with open("/proc/net/tcp") as table:
        return [line for line in table if f":{port:04X} " in line and " 01 " in line]
