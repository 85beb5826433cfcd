"""The program that watches the process that started it: `watcher PARENT FOLDER TIMEOUT`.

It ends with that process, however that ends.
"""

import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from elche_jax._progress import ProgressFile
from elche_jax.launch.marked import descendants, kill
from elche_jax.launch.watchdog import Watchdog

PROGRESS_FILE = "progress"
"""Name of the file in the folder."""

EVERY_S = 0.1


def main(watched: int, folder: Path, timeout: float) -> None:
    """Watch a process until it ends; kill it if it makes no progress."""
    file = ProgressFile(folder / PROGRESS_FILE)
    watchdog = Watchdog({0: file}, timeout)
    while os.getppid() == watched:
        for stuck in watchdog.look({0: watched}, time.monotonic()):
            stuck = stuck._replace(process=file.read().process)
            with suppress(OSError):  # the reader may be gone, or a disk full
                print(f"elche-jax watch: {stuck}", file=sys.stderr, flush=True)
            for pid in [*descendants(watched), watched]:
                if pid != os.getpid():
                    kill(pid)
        time.sleep(min(EVERY_S, watchdog.every))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
