"""Two processes, one three times as fast as the other, against their speeds alone.

    python benchmarks/processes.py [--model "1 MB"] [--repeats 5] [--out FILE]

Each has a CPU device with one thread on its own processor; the second process gets a third of its
processor. These take turns in one run: both processes at once in separate loops without an exchange
(the control, whose sum is the limit), plain pmap with equal shares, of one microbatch or many per
step, and this library. If torch is installed, DDP over gloo trains the same model, as a share of
the sum of torch's own separate loops.
"""

import importlib.util
import json
import os
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from measure import Result, interleave, options_of, ratios, result, show
from slowed import slowed, started

TURN_S, SLOWER = 12.0, 3
SYSTEMS = ("pmap", "pmap, accumulating", "ElChe", "FixedTotal")
HERE = Path(__file__).parent


class Job:
    """Processes that train in turns, on request.

    Args:
        program: The worker.
        mode: What it does.
        model: Its model.
        group: The control group of the slow process, or None.
        stack: Ends the processes.
    """

    def __init__(self, program: str, mode: str, model: str, group, stack: ExitStack):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._children = [
            stack.enter_context(
                started(
                    [str(HERE / program), mode, model], core, group if core else None,
                    env=os.environ | {
                        "NPROC": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
                        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                        "ELCHE_NUM_PROCESSES": "2", "ELCHE_PROCESS_ID": str(core),
                        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
                    }, **pipes,
                )
            )
            for core in range(2)
        ]  # fmt: skip
        self._apart = mode.endswith("solo")
        self._steps = 2

    def rates(self, seconds: float = TURN_S) -> list[float]:
        """Return microbatches per ms: of each process if they train separately, else of the job."""
        for child in self._children:
            child.stdin.write(json.dumps([seconds, self._steps]) + "\n")
        said = [_answer(child) for child in self._children]
        took, steps, _ = said[0]
        self._steps = 1 if self._apart else max(2, round(steps * seconds / took))
        return [done / (1e3 * took) for took, _, done in (said if self._apart else said[:1])]

    def rate(self) -> float:
        """Return microbatches per ms of all processes."""
        return sum(self.rates())


def _answer(child) -> list[float]:
    """Read what a process reports about its turn; skip the lines that gloo prints."""
    while (line := child.stdout.readline()).startswith("[Gloo]"):
        pass
    if not line:
        raise SystemExit(f"a process ended with {child.wait()}: {' '.join(map(str, child.args))}")
    return json.loads(line)


def measure(model: str, repeats: int) -> list[Result]:
    """Measure a model."""
    systems = {"control": "solo"} | {name: name for name in SYSTEMS}
    jobs: dict[str, Job] = {}
    with ExitStack() as stack:
        group = stack.enter_context(slowed(core=1, parts=SLOWER))
        for name, mode in systems.items():
            jobs[name] = Job("process_worker.py", mode, model, group, stack)
        torch = importlib.util.find_spec("torch") is not None
        for name in ("solo", "1", "40") if torch else ():
            jobs[f"torch {name}"] = Job("torch_worker.py", name, model, group, stack)
        for job in jobs.values():  # compile, find speeds, and find how many steps fill a turn
            for seconds in (0.0, 2.0, TURN_S, TURN_S):
                job.rates(seconds)
        alone = jobs["control"].rates()
        rates = interleave({name: job.rate for name, job in jobs.items()}, repeats)
    print(f"{model}: alone {alone[0]:.2f} and {alone[1]:.2f} microbatches/ms", end=", ")
    print("quota" if group else "busy neighbours")
    asked = {"ElChe": {"least": 0.9}, "FixedTotal": {"least": 0.9}}
    found = [
        result(model, f"{name}, of the sum of solo speeds", ratios(rates[name], rates["control"]),
               **asked.get(name, {}))
        for name in SYSTEMS
    ]  # fmt: skip
    for name in asked:
        found.append(
            result(model, f"{name}, times pmap", ratios(rates[name], rates["pmap"]), least=2.2)
        )
    for steps in ("1", "40") if torch else ():
        share = ratios(rates[f"torch {steps}"], rates["torch solo"])
        found.append(result(model, f"torch DDP, {steps} microbatches a step, of its own", share))
    print({name: round(median(values), 3) for name, values in rates.items()})
    return found


def main() -> None:
    """Run the benchmark."""
    parser = options_of(__doc__, "benchmarks/results/processes.json", 5)
    parser.add_argument("--model", choices=("1 MB", "20 MB"), action="append")
    arguments = parser.parse_args()
    found = []
    for model in arguments.model or ("1 MB", "20 MB"):
        found += measure(model, arguments.repeats)
    show(found, arguments.out)


if __name__ == "__main__":
    main()
