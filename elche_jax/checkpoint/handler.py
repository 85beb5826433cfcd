"""Orbax handler that has no write in flight when it raises an error.

Orbax writes items and arrays concurrently in event loops, which it closes on the first error. On
a full disk nearly all writes fail: the remaining ones find a closed loop, print a traceback each,
and still write into the folder while it is being deleted. This handler therefore writes the items
one after another and waits for all arrays.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from elche_jax.checkpoint.store import MANIFEST, STATE


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
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


@dataclass
class Content(ocp.args.CheckpointArgs):
    """The content of a checkpoint.

    Attributes:
        arrays: Nested dicts of arrays.
        manifest: The manifest of the arrays, as JSON values.
    """

    arrays: dict[str, Any]
    manifest: dict[str, Any]


class Handler(ocp.CheckpointHandler):
    """Write a checkpoint to the temporary folder that `ocp.Checkpointer` renames when done."""

    def __init__(self):
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, Arrays()))
        self._state = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_zarr3=False, type_handler_registry=registry
        )

    def save(self, directory: Any, *_: Any, args: Content) -> None:
        """Write the arrays, then the manifest."""
        (directory / STATE).mkdir()
        self._state.save(directory / STATE, args=ocp.args.PyTreeSave(args.arrays))
        self._state.finalize(directory / STATE)
        manifest = directory / MANIFEST
        manifest.parent.mkdir()
        manifest.write_text(json.dumps(args.manifest))

    def restore(self, directory: Any, *_: Any, **__: Any) -> Any:
        """Not used: `Store` reads checkpoints itself, as Orbax raises errors of many kinds."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the threads of Orbax."""
        self._state.close()


ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)(Content)
