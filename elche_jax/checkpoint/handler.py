"""How a checkpoint is written: by orbax, with nothing under way any more once an error is raised.

orbax writes its items and their arrays concurrently, in event loops that it closes with the
first error. On a full disk nearly all of them fail: the others then find a closed loop, print a
traceback each, and still write into the folder while it is deleted. So the items are written one
after another here, and all arrays are waited for.
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
    """Writes arrays as orbax does; it waits for all of them even after an error."""

    async def serialize(
        self, values: Sequence[np.ndarray], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[ocp.Future]:
        """Writes arrays; they are on the disk when this returns."""
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
    # orbax 0.12.0 to 0.12.4 leave it to the caller to name the type
    return ts.Spec({"dtype": value.dtype.name} | spec)


def _all(futures: Iterable[Any]) -> list[Any]:
    """Waits for all, then gives their results or raises the first error."""
    futures = list(futures)
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


@dataclass
class Content(ocp.args.CheckpointArgs):
    """A checkpoint to be written.

    Attributes:
        arrays: Nested dicts of arrays.
        manifest: The list of them, for JSON.
    """

    arrays: dict[str, Any]
    manifest: dict[str, Any]


class Handler(ocp.CheckpointHandler):
    """Writes a checkpoint into the folder that an `ocp.Checkpointer` moves to its place."""

    def __init__(self):
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, Arrays()))
        self._state = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_zarr3=False, type_handler_registry=registry
        )

    def save(self, directory: Any, *_: Any, args: Content) -> None:
        """Writes it."""
        (directory / STATE).mkdir()
        self._state.save(directory / STATE, args=ocp.args.PyTreeSave(args.arrays))
        self._state.finalize(directory / STATE)
        manifest = directory / MANIFEST
        manifest.parent.mkdir()
        manifest.write_text(json.dumps(args.manifest))

    def restore(self, directory: Any, *_: Any, **__: Any) -> Any:
        """Never called: orbax raises errors of many kinds, so `Store` reads by itself."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends orbax's threads."""
        self._state.close()


ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)(Content)
