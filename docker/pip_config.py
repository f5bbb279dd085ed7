"""Hands this machine's pip configuration to a build: a `pip.conf` and the mounts that it needs.

    python -m pip config list | python docker/pip_config.py CONF

Reads `section.key='value'` lines, writes CONF with one [global] section (the environment wins over
the files), and prints a `--volume=HOST:CONTAINER:ro` flag a line: CONF as /etc/pip.conf, and what
the values name on this machine's disk, at the same place. A path is mounted itself; of a file: URL
the folder above, since an index keeps its files beside its pages. Called by docker/test.sh.
"""

import ast
import sys
from pathlib import Path


def merge(lines: list[str]) -> dict[str, str]:
    """Key -> value of what `pip config list` prints, for `pip install`."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in lines:
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found and key != "config-file":
            found[section][key] = ast.literal_eval(value)
    return found["global"] | found["install"] | found[":env:"]


def local_paths(values: list[str]) -> set[Path]:
    """The files and folders of this machine that the values name."""
    paths = set()
    for word in (word for value in values for word in value.split()):
        if word.startswith("file://"):
            paths.add(Path(word.removeprefix("file://")).parent)
        elif word.startswith("/"):
            paths.add(Path(word))
    return {path for path in paths if path != Path("/") and path.exists()}


def main(conf: str) -> None:
    settings = merge(sys.stdin.read().splitlines())
    body = "".join(f"{key} = {value}\n" for key, value in settings.items())
    Path(conf).write_text(f"[global]\n{body}")
    print(f"--volume={conf}:/etc/pip.conf:ro")
    for path in sorted(local_paths(list(settings.values()))):
        print(f"--volume={path}:{path}:ro")


if __name__ == "__main__":
    main(sys.argv[1])
