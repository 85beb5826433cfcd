"""What the scenes of several programs have in common."""

import gc
import threading


def collect_seldom():
    """Lets the garbage collector look less often: tracing makes many objects, see `conftest.py`."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class Noted:
    """A dataset that notes which examples are read for windows, in the thread that reads ahead.

    Args:
        rows: The examples, arrays by name.
    """

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __len__(self):
        return len(next(iter(self.rows.values())))

    def __getitem__(self, number):
        if threading.current_thread() is not threading.main_thread():
            self.read.append(int(number))
        return {name: row[number] for name, row in self.rows.items()}


def raised(fn):
    """What a call raises, as text."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
