"""Devices that are held until a test lets them go."""

import threading
from collections import defaultdict


class Held:
    """An emulation in which `(window, rank)` is done only when it was let go.

    A device without work is done at once.

    Args:
        held: Those that wait; all others are done at once.
    """

    def __init__(self, held):
        self._gates = defaultdict(threading.Event)
        self._held = set(held)
        self.reached = defaultdict(threading.Event)

    def let_go(self, window, rank):
        self._gates[window, rank].set()

    def hold_again(self):
        """Holds all for another run, as if none had been let go."""
        self._gates.clear()
        self.reached.clear()

    def on_host(self):
        return self._seconds

    def _seconds(self, window, rank, count):
        self.reached[window, rank].set()
        if count and (window, rank) in self._held:
            assert self._gates[window, rank].wait(60)
        return 0.0

    def check(self, world_size):
        pass

    def begin(self, device, step, fresh):
        raise NotImplementedError  # the host waits, no program does

    def around(self, body, device, i, carry):
        raise NotImplementedError  # see begin

    def end(self, device, count, carry):
        raise NotImplementedError  # see begin

    def settle(self):
        pass
