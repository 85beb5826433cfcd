"""Names of the metrics that the library itself reports, which a loss must not use."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reserved:
    """Metric names that are reserved under some options.

    Attributes:
        names: The names.
        by: What reports them and when, for the error message.
    """

    names: tuple[str, ...]
    by: str

    def check(self, aux: Iterable[str]) -> None:
        """Raise `TypeError` if the loss reports a metric under one of these names."""
        for name in aux:
            if name in self.names:
                raise TypeError(
                    f"loss_fn: aux must not use the name {name!r}, {self.by}. Choose another name."
                )


WINDOW = Reserved(("finite", "loss", "weight"), "which every window reports already")
SCALE = Reserved(("loss_scale",), f"{WINDOW.by} where the scale is dynamic")
DEVICES = Reserved(("device_loss",), f"{WINDOW.by} with device_loss=True")
LOCAL_STEPS = Reserved(
    ("cosine", "distance", "exchange_bytes", "share", "update_norm", "workers"),
    f"{WINDOW.by} where parameters are averaged",
)
EPOCH = Reserved(("examples_per_s", "seconds"), "which every epoch of Trainer reports already")
