"""The same as `process_worker.py` with torch: DDP over gloo, or a separate loop per process."""

import json
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed
from torch import nn

BATCH, FEATURES = 64, 64


def main(mode: str, model: str) -> None:
    """Answer requests until standard input ends; `mode`: `solo`, or microbatches per step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, steps = {"1 MB": 432, "20 MB": 2200}[model], 40 if mode == "solo" else int(mode)
    net: nn.Module = nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip
    if mode != "solo":
        rank, size = int(os.environ["ELCHE_PROCESS_ID"]), int(os.environ["ELCHE_NUM_PROCESSES"])
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        net = nn.parallel.DistributedDataParallel(net)
    adam, loss = torch.optim.Adam(net.parameters(), 1e-3), nn.CrossEntropyLoss()
    x, y = torch.randn(2**17, FEATURES), torch.randint(0, 10, (2**17,))

    def step() -> None:
        adam.zero_grad()
        for at in range(steps):
            rows = torch.randint(0, len(x), (BATCH,))
            last = mode == "solo" or at == steps - 1
            with nullcontext() if last else net.no_sync():
                (loss(net(x[rows]), y[rows]) / steps).backward()
        adam.step()

    whole = 1 if mode == "solo" else 2
    for line in sys.stdin:
        seconds, asked = json.loads(line)
        begun, taken = time.perf_counter(), 0
        while taken < asked or (mode == "solo" and time.perf_counter() - begun < seconds):
            step()
            taken += 1
        print(json.dumps([time.perf_counter() - begun, taken, taken * steps * whole]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
