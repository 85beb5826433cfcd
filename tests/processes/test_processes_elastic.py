"""Jobs whose number of processes changes: each generation goes on where the last one stopped."""

import json
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import children
import jax
import jobs
import numpy as np
import pytest
from elastic import BATCH, EPOCHS, EXAMPLES, ROWS, TOTAL, build
from reference import params
from waits import eventually

import elche_jax as elche
from elche_jax.launch.memory import IN_MEMORY

PROGRAM = Path(__file__).parent / "elastic.py"
ENV = {"PYTHONPATH": ":".join(map(str, jobs.PATHS))}
SAID = "elche-jax launch: "
KNOWN = "counts begin with the speeds that are known"


class Launched:
    """A launcher, and what it says while it runs."""

    def __init__(self, process):
        self.process, self.err, self.out = process, [], []
        pairs = (process.stderr, self.err), (process.stdout, self.out)
        self._readers = [
            threading.Thread(target=lines.extend, args=[pipe]) for pipe, lines in pairs
        ]
        for reader in self._readers:
            reader.start()

    @property
    def said(self):
        return [line[len(SAID) :].strip() for line in self.err if line.startswith(SAID)]

    def ended(self):
        for reader in self._readers:
            reader.join(jobs.LIMIT)
        return self.process.wait(10)


@contextmanager
def launched(how, folder, *options, **happens):
    command = sys.executable, "-m", "elche_jax", "launch", "--cpu-devices", "1", *options
    program = PROGRAM, how, folder, json.dumps(happens)
    with children.started(*command, *program, env=ENV, limit=jobs.LIMIT, cwd=folder) as process:
        yield Launched(process)


@pytest.fixture(scope="module")
def alone():
    """The losses and the parameters of one process that trains from the start to the end."""
    train, losses = build(devices=jax.devices()[:1]), []
    state = train.init(params())
    for window in train.windows(ROWS, BATCH, EPOCHS, seed=3):
        state, metrics = train(state, window)
        losses.append(float(metrics["loss"]))
    return losses, elche.unreplicate(state.params)


def check(folder, alone, out, sizes, repeated=()):
    """Every example once an epoch, the losses of one run, and generations of these sizes."""
    rows = [json.loads(line) for line in (folder / "journal").read_text().splitlines()]
    indices = [row[0] for row in rows]
    assert sorted(one for one in {*indices} if indices.count(one) > 1) == [*repeated]
    rows = [row for at, row in enumerate(rows) if row[0] not in indices[at + 1 :]]
    assert [row[0] for row in rows] == list(range(len(alone[0]))), "no window twice, none left out"
    for epoch in range(EPOCHS):
        plans = [(first, sum(counts)) for _, of, first, counts, _ in rows if of == epoch]
        assert plans == [(at, TOTAL) for at in range(0, EXAMPLES // BATCH, TOTAL)]
    found = [len(row[3]) for row in rows]
    assert [size for at, size in enumerate(found) if [size] != found[at - 1 : at]] == sizes
    np.testing.assert_allclose([row[4] for row in rows], alone[0], rtol=1e-4)
    ends = [json.loads(line.split("] ", 1)[1]) for line in out if "{" in line]
    assert len(ends) == sizes[-1]
    for end in ends:
        for name, leaf in alone[1].items():
            np.testing.assert_allclose(end[name], leaf, rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # test_another_number_is_wanted; test_processes_saving resumes over processes
@pytest.mark.parametrize(
    ("how", "sizes"), [("loop", (1, 2)), ("loop", (3, 2, 4)), ("fit", (1, 3, 2))]
)
def test_as_many_processes_as_are_wanted(how, sizes, alone, tmp_path):
    number = tmp_path / "number"
    options = "-n", sizes[0], "--elastic", f"{min(sizes)}:{max(sizes)}", "--number-file", number
    windows = [4, 15][: len(sizes) - 1]
    with launched(how, tmp_path, *options, pauses=windows) as job:
        for window, wanted in zip(windows, sizes[1:], strict=True):
            eventually(lambda at=window: [*tmp_path.glob(f"at-{at}-*")], 120)
            number.write_text(f"{wanted}\n")
            eventually(lambda n=wanted: f"{n} processes are wanted ({number})" in job.said)
            (tmp_path / f"go-{window}").touch()
        assert job.ended() == 0, "".join(job.err)
    begun = [
        f"generation {number}: {size} process{'es' if size > 1 else ''}"
        for number, size in enumerate(sizes, 1)
    ]
    begun[1:] = [f"{line}, resuming" for line in begun[1:]]
    assert [line for line in job.said if "generation" in line] == begun
    check(tmp_path, alone, job.out, [*sizes])
    assert "".join(job.err).count(KNOWN) == len(sizes) - 1, "once in each that resumed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "others", "repeated"),
    [
        ([11, 0], "ending the others", [8, 9, 10]),  # all go on from the last checkpoint
        ([7, 1], "the others are asked to save and to end", []),
    ],
)
def test_a_process_that_was_lost_comes_back(kill, others, repeated, alone, tmp_path):
    with launched("loop", tmp_path, "-n", "2", "--elastic", "1:2", kill=kill) as job:
        assert job.ended() == 0, "".join(job.err)
    assert job.said == [
        "generation 1: 2 processes",
        f"process {kill[1]} ended with SIGKILL, {others}",
        "generation 2: 2 processes, resuming",
    ]
    check(tmp_path, alone, job.out, [2], repeated)
    assert "".join(job.err).count(KNOWN) == (kill[1] == 1)


@pytest.mark.slow
@pytest.mark.further  # test_checkpoint_memory.py has each part
@pytest.mark.skipif(not os.access(IN_MEMORY, os.W_OK), reason="no file system in memory")
def test_what_the_disk_did_not_take_is_in_memory(alone, tmp_path):
    """The first process ends while it writes; no window is trained again."""
    options = "-n", "2", "--elastic", "1:2"
    with launched("loop", tmp_path, *options, kill=[5, 1], dies_saving=True) as job:
        assert job.ended() == 0, "".join(job.err)
    assert (tmp_path / "died").exists()
    assert [line for line in job.said if "generation" in line] == [
        "generation 1: 2 processes", "generation 2: 2 processes, resuming",
    ]  # fmt: skip
    check(tmp_path, alone, job.out, [2])
