"""The image runs for real: non-root, healthy, one step through shared memory, exit 0 on SIGTERM.

`docker/test.sh` builds the image and runs this file. It names the image in HEADRACE_TEST_IMAGE, the
podman command with its storage in HEADRACE_TEST_PODMAN, and in HEADRACE_TEST_TMPFS a folder on
tmpfs that it removes at the end. A container is on the host's network and shares one folder in there with
the host. That folder belongs to the image's own uid, and the host's side runs as that uid: no root
on either end of the ring.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.skipif(
        "HEADRACE_TEST_IMAGE" not in os.environ, reason="needs the image that docker/test.sh builds"
    ),
]

UID = 10001  # the Dockerfile's default
START_TIMEOUT_S = 120.0
ONE_STEP = Path(__file__).with_name("one_step.py")
SERVICE_FLAGS = (
    *("--queue.bytes", "8MiB", "--spool.segment_bytes", "8MiB", "--limits.max_body_bytes", "8MiB"),
    *("--planner.layout", "thd", "--planner.batch_size", "4", "--planner.microbatch_tokens", "40"),
)


def podman(*args: str) -> subprocess.CompletedProcess[str]:
    """One podman command; its timers need systemd, which this machine need not have."""
    return subprocess.run(
        [*shlex.split(os.environ["HEADRACE_TEST_PODMAN"]), *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "DISABLE_HC_SYSTEMD": "true"},
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A running service: `name` for podman, `url` and `queue_dir` as the host sees them."""

    name: str
    url: str
    queue_dir: Path

    def logs(self) -> str:
        logs = podman("logs", self.name)
        return logs.stdout + logs.stderr

    def inspect(self, field: str) -> str:
        return podman("inspect", "--format", "{{" + field + "}}", self.name).stdout.strip()

    def wait_healthy(self) -> None:
        """Until the image's own health check passes; a container that has ended fails at once."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while podman("healthcheck", "run", self.name).returncode != 0:
            running = self.inspect(".State.Running") == "true"
            assert running, f"the container has ended: {self.logs()}"
            late = time.monotonic() > deadline
            assert not late, f"{self.inspect('json .State.Health')}\n{self.logs()}"
            time.sleep(0.2)


@pytest.fixture
def container() -> Iterator[Container]:
    queue_dir = Path(tempfile.mkdtemp(prefix="headrace-", dir=os.environ["HEADRACE_TEST_TMPFS"]))
    os.chown(queue_dir, UID, UID)
    name, port = queue_dir.name, free_port()
    try:
        # The two ulimits: runc may not raise the engine's defaults on every machine.
        started = podman(
            *("run", "--detach", "--name", name, "--network", "host", "--shm-size", "64m"),
            *("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"),
            *("--volume", f"{queue_dir}:/queue", "--env", f"HEADRACE_SERVER__PORT={port}"),
            *(os.environ["HEADRACE_TEST_IMAGE"], *SERVICE_FLAGS),
        )
        assert started.returncode == 0, started.stderr
        running = Container(name=name, url=f"http://127.0.0.1:{port}", queue_dir=queue_dir)
        running.wait_healthy()
        yield running
    finally:
        podman("rm", "--force", "--time", "0", name)
        shutil.rmtree(queue_dir)


def host_side(*command: str) -> subprocess.CompletedProcess[str]:
    """Run `command` as UID with one capability, to *read* any file: the checkout or the interpreter
    may lie in a folder closed to that uid. It does not open the ring, which is opened for writing.
    """
    as_uid = f"setpriv --reuid {UID} --regid {UID} --clear-groups"
    may_read = "--inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search"
    return subprocess.run(
        [*as_uid.split(), *may_read.split(), "--", *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env={**os.environ, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"},
    )


def test_one_step_goes_through(container: Container) -> None:
    done = host_side(sys.executable, str(ONE_STEP), container.url, str(container.queue_dir))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{container.logs()}"
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "uid": UID,
        "step": 0,
        "microbatches": 2,
        "datums": 4,
        "policy": [1, "weights/1"],
    }
    ring = container.queue_dir / "default.0.ring"
    assert (ring.stat().st_uid, ring.stat().st_mode & 0o777) == (UID, 0o600)


def test_runs_as_its_uid_without_torch(container: Container) -> None:
    look = (
        "import importlib.util as u, os; print(os.getuid(), os.getgid(), "
        "*(u.find_spec(n) is not None for n in ('headrace.service', 'torch', 'hypothesis')))"
    )
    seen = podman("exec", container.name, "/opt/headrace/bin/python", "-c", look)
    assert seen.stdout.split() == [str(UID), str(UID), "True", "False", "False"], seen.stderr


def test_health_check_tells_healthy_from_not(container: Container) -> None:
    assert container.inspect(".State.Health.Status") == "healthy"
    nobody = f"HEADRACE_SERVER__PORT={free_port()}"
    check = ("python3", "/opt/headrace/healthcheck.py")
    answered = podman("exec", "--env", nobody, container.name, *check)
    assert answered.returncode == 1
    assert "does not answer" in answered.stdout


def test_sigterm_ends_it_with_exit_0(container: Container) -> None:
    stopped = podman("stop", "--time", "60", container.name)  # SIGTERM, SIGKILL only after 60 s
    assert stopped.returncode == 0, stopped.stderr
    assert container.inspect(".State.ExitCode") == "0", container.logs()
