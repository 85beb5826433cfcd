"""The program that cleans up after a killed launcher: `guard PARENT MARK FOLDER MEMORY`.

It has its own session, so that what ends the launcher does not also end the guard.
"""

import os
import shutil
import sys
import time
from pathlib import Path

from elche_jax.launch.marked import end_marked
from elche_jax.launch.memory import remove_memory

EVERY_S = 0.1


def main(parent: int, mark: str, folder: str, memory: str) -> None:
    """Wait until the launcher is gone, then kill what it has started and remove its folders."""
    while os.getppid() == parent:
        time.sleep(EVERY_S)
    end_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)
    if memory:
        remove_memory(Path(memory))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
