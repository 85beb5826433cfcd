"""Single-threaded CPU devices of two clients. Import this before anything uses JAX."""

import os
from importlib.util import find_spec
from pathlib import Path

spec = find_spec("xla_plugins.xla_cpu_pjrt")
assert spec is not None and spec.submodule_search_locations, "pip install xla_cpu_pjrt"
(plugin,) = Path(spec.submodule_search_locations[0]).glob("*.so")

os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"twin:{plugin}"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
