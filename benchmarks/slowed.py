"""Processes pinned to one processor each, some of them slowed to a share of its speed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

PERIOD_US = 10_000
CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def started(command: list[str], core: int, group: Path | None = None, **options) -> Iterator:
    """Run a Python program on one processor, in a control group or none; kill it at the end."""
    begin = partial(_place, core, group)
    with subprocess.Popen(
        [sys.executable, *command], preexec_fn=begin, text=True, bufsize=1, **options
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def _place(core: int, group: Path | None) -> None:
    os.sched_setaffinity(0, {core})
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def slowed(core: int, parts: int) -> Iterator[Path | None]:
    """Limit processes on a processor to `1 / parts` of it.

    If permitted, set the quota of a control group, version 1 or 2, and yield the group. Otherwise
    start `parts - 1` busy neighbours, which take the rest of the processor, and yield None.
    """
    with suppress(OSError), ExitStack() as stack:
        group = stack.enter_context(_group(parts))
        yield group
        return
    with ExitStack() as stack:
        for _ in range(parts - 1):
            stack.enter_context(started(["-c", "while True: pass"], core))
        yield None


@contextmanager
def _group(parts: int) -> Iterator[Path]:
    one = (CGROUPS / "cpu").is_dir()  # version 1
    group = (CGROUPS / "cpu" if one else CGROUPS) / f"elche-{os.getpid()}"
    group.mkdir()
    try:
        quota = PERIOD_US // parts
        if one:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
            (group / "cpu.shares").write_text(str(2**18))  # so that others do not take its quota
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            (group / "cpu.weight").write_text("10000")
        yield group
    finally:
        for line in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(line)
        group.rmdir()
