"""The program that ends the processes of a launcher that was killed: `guard PARENT MARK FOLDER...`.

It has a session of its own, so that what ends the launcher does not end it, too.
"""

import os
import shutil
import sys
import time
from collections.abc import Sequence

from elche_jax.launch.marked import end_marked

EVERY_S = 0.1


def main(parent: int, mark: str, folders: Sequence[str]) -> None:
    """Wait until the launcher is gone, then end what it has started, and remove its folders."""
    while os.getppid() == parent:
        time.sleep(EVERY_S)
    end_marked(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
