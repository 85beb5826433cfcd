"""Two CPU devices, each of a client of its own. Import this before anything uses JAX.

Each has one thread, or with the option `--shared` as many as there are processors.
"""

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

spec = find_spec("xla_plugins.xla_cpu_pjrt")
assert spec is not None and spec.submodule_search_locations, "pip install xla_cpu_pjrt"
(plugin,) = Path(spec.submodule_search_locations[0]).glob("*.so")

with tempfile.TemporaryDirectory() as folder:
    described = Path(folder) / "twin.json"
    options = {"cpu_device_count": 1}
    described.write_text(json.dumps({"library_path": str(plugin), "create_options": options}))
    os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"twin:{described}"
    # A client makes as many threads as it has devices or finds processors, whichever is more, and
    # they share the work of a program.
    if "--shared" not in sys.argv:
        os.environ["NPROC"] = os.environ["PJRT_NPROC"] = "1"

    import jax

    assert len(jax.devices("cpu")) == len(jax.devices("twin")) == 1
