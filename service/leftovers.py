"""What an earlier process left in the queue's folder, and the start that meets it.

A run's files are `{run}.{rank}.ring` and the folder `{run}.spool`. A start refuses while any lock
on them is held, and names the holder; else it refuses with LeftoverFound, unless told to discard
them.
"""

from __future__ import annotations

from pathlib import Path

from headrace.schemas.errors import LeftoverFound, RingBusy
from headrace.service.ring import find_leftovers, remove_leftover
from headrace.service.spool.local import discard, refuse_if_held

__all__ = ["clear_leftovers", "spool_directory"]


def spool_directory(queue_dir: Path, run: str) -> Path:
    return queue_dir / f"{run}.spool"


def clear_leftovers(queue_dir: Path, run: str, *, discard_them: bool) -> list[Path]:
    """Make sure that the run's names are free; the paths that were removed.

    Raises RingBusy or SpoolBusy where a live process holds one of them, LeftoverFound where they
    are merely there and `discard_them` is false.
    """
    rings = find_leftovers(queue_dir, run)
    for ring in rings:
        if ring.held:
            raise RingBusy(
                f"{ring.path} is in use by {', '.join(ring.holders) or 'a live process'}: stop it, "
                "or choose another "
                f"run.name or queue.dir"
            )
    spool = spool_directory(queue_dir, run)
    refuse_if_held(spool)
    found = [
        *(ring.path for ring in rings),
        *([spool] if spool.exists() or spool.is_symlink() else []),
    ]
    if found and not discard_them:
        names = ", ".join(path.name for path in found)
        raise LeftoverFound(
            f"{queue_dir} holds {names} of an earlier process of run {run!r}, and no process uses "
            "them. Datums that "
            "were accepted and not committed are in there. Start with --discard to remove them, "
            "or choose another "
            f"run.name"
        )
    for ring in rings:
        remove_leftover(ring)
    discard(spool)
    return found
