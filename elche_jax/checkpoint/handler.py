"""Arrays in the format of Orbax, with no write in flight once an error is raised.

Orbax's own checkpointer writes items and arrays concurrently in event loops, which it closes on
the first error. On a full disk nearly all writes fail: the remaining ones find a closed loop, each
print a traceback, and still write into the folder while it is being deleted. This module therefore
uses only Orbax's pytree handler, and waits for all arrays.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts


class Arrays(ocp.type_handlers.NumpyHandler):
    """Write arrays like Orbax, but wait for all of them even after an error."""

    async def serialize(
        self, values: Sequence[np.ndarray], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[ocp.Future]:
        """Write arrays; they are on disk when this returns."""
        specs = [_spec(value, info) for value, info in zip(values, infos, strict=True)]
        opening = [
            ts.open(spec, create=True, open=True, context=info.ts_context)
            for spec, info in zip(specs, infos, strict=True)
        ]
        stores = _all(opening)
        _all(store.write(value).commit for store, value in zip(stores, values, strict=True))
        return []


def _spec(value: np.ndarray, info: Any) -> Any:
    spec = ocp.type_handlers.get_json_tspec_write(
        info, use_ocdbt=True, global_shape=value.shape, local_shape=value.shape,
        dtype=value.dtype, process_index=0,
    )  # fmt: skip
    # orbax 0.12.0 to 0.12.4 do not set the dtype
    return ts.Spec({"dtype": value.dtype.name} | spec)


def _all(futures: Iterable[Any]) -> list[Any]:
    """Wait for all futures, then return their results or raise the first error."""
    futures = list(futures)
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


def write_arrays(folder: Path, arrays: Any) -> None:
    """Write nested dicts of arrays into an existing folder, in the format of Orbax."""
    from etils import epath  # Orbax's path type; a dependency of Orbax, not ours

    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, Arrays()))
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=False, type_handler_registry=registry
    )
    directory = epath.Path(folder)
    with closing(handler):
        handler.save(directory, args=ocp.args.PyTreeSave(arrays))
        handler.finalize(directory)
