"""The shape of the repository: links, the wheel's contents, and what a base install says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"schemas", "client", "service", "demo", "bench"}


def test_src_holds_links_and_nothing_else():
    links = {path.name: os.readlink(path) for path in (ROOT / "src" / "headrace").iterdir()}
    assert links == {name: f"../../{name}" for name in PACKAGES}
    assert not (ROOT / "src" / "headrace" / "__init__.py").exists()


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path):
    """A checkout without link support builds an empty wheel silently; this one does not."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT],
        check=True, cwd=tmp_path, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "headrace = headrace.service.__main__:main" in archive.read(entry_points).decode()
    wanted = {
        f"headrace/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert wanted <= packed
    assert {name.split("/")[1] for name in packed} == PACKAGES


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
from headrace.service.__main__ import main
sys.argv = ["headrace", *{arguments!r}]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("blocked", "arguments", "extra"),
    [
        (["typer", "click", "pydantic", "fastapi", "msgspec"], ["serve"], "service"),
        (["msgspec"], ["serve"], "service"),
        (["matplotlib"], ["demo", "--steps", "1"], "demo"),
        (["torch"], ["demo", "--steps", "1"], "torch"),
    ],
)
def test_a_missing_extra_is_named(blocked, arguments, extra):
    code = BLOCKED.format(blocked=set(blocked), arguments=arguments)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert f"pip install 'headrace[{extra}]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_modules_stay_short():
    """The house rule: 400 lines want a reason, 600 are too many."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 600, path


def test_no_registry_host_is_named():
    hosts = re.compile(r"(pypi|npmjs|debian)\.(org|com)|files\.pythonhosted", re.IGNORECASE)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_symlink() or path == Path(__file__):
            continue
        assert not hosts.search(path.read_bytes().decode("utf-8", "replace")), name
