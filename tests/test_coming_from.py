"""`docs/coming-from.md`: every line that stands for another system's name runs and keeps its word.

The page's block of code is run as it stands: its first part once, the part below the mark
before every row. The names of every line exist, and what it calls takes its arguments; the slow
tests run each line and put to use what it makes: a training step, configuration, cadence,
optimizer or iterator of windows is trained with.
"""

import ast
import inspect
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.train.evaluate import EvalStep

PAGE = (Path(__file__).parents[1] / "docs" / "coming-from.md").read_text(encoding="utf-8")
SETUP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MARK = "# Every row starts over from here.\n"
SYSTEMS = ["flodl", "entrenar", "tenflowers", "torch DDP", "Hugging Face Accelerate"]
NOTHING = "-"


@dataclass(frozen=True)
class Row:
    """A row of one of the tables.

    Attributes:
        system: The table's heading.
        there: The name there, as it is written, without backticks.
        here: The line of code; None where there is nothing of the kind.
        claims: The assertions in the note.
        note: The note.
        cells: The cells as they are.
    """

    system: str
    there: str
    here: str | None
    claims: tuple[str, ...]
    note: str
    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.system} | {' | '.join(self.cells)}"


def read_row(system: str, line: str) -> Row:
    cells = tuple(cell.strip() for cell in line.strip()[1:-1].split("|"))
    there, here, note = (*cells, "", "")[:3]
    code = re.match(r"`([^`]+)`", here)
    return Row(
        system,
        there.replace("`", ""),
        code[1] if code else None,
        tuple(re.findall(r"`(assert [^`]+)`", note)),
        note,
        cells,
    )


def read_tables(page: str) -> list[Row]:
    sections = re.split(r"^## (.*)$", page, flags=re.MULTILINE)[1:]
    rows = []
    for system, text in zip(sections[::2], sections[1::2], strict=True):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert lines[0] == "| there | here | note |", system
        rows += [read_row(system, line) for line in lines[2:]]
    return rows


ROWS = read_tables(PAGE)
LINES = [row for row in ROWS if row.here is not None]
CODE = "\n".join([*SETUP, *re.findall(r"`([^`\n]+)`", PAGE)])


def row_id(row: Row) -> str:
    return f"{row.system}: {row.there}"


@pytest.fixture(scope="module")
def once() -> dict[str, Any]:
    """What the first part of the page's code has made."""
    names: dict[str, Any] = {}
    exec(SETUP[0].split(MARK)[0], names)
    return names


@pytest.fixture
def names(once):
    """The names that a row finds, their buffers not given up yet."""
    fresh = dict(once)
    exec(SETUP[0].split(MARK)[1], fresh)
    opened = fresh["windows"]
    yield fresh
    for windows in (opened, fresh["windows"]):  # a row may have opened others
        windows.close()


def test_the_page_has_the_five_systems():
    assert list(dict.fromkeys(row.system for row in ROWS)) == SYSTEMS
    assert all(sum(row.system == system for row in LINES) >= 10 for system in SYSTEMS)
    assert len(SETUP) == 1
    assert SETUP[0].count(MARK) == 1


def test_a_row_has_its_form():
    for row in ROWS:
        assert len(row.cells) == 3, str(row)
        assert row.there, str(row)
        if row.here is None:
            assert row.cells[1] == NOTHING, f"{row}\nneither code nor {NOTHING!r}"
            assert row.note and not row.claims, f"{row}\nmust say why there is nothing"
        else:
            assert row.cells[1] == f"`{row.here}`", f"{row}\nmore than one line of code"


def test_no_name_stands_twice():
    ids = [row_id(row) for row in ROWS]
    assert sorted({name for name in ids if ids.count(name) > 1}) == []


def test_every_line_is_spelled_as_the_library_is(names):
    wrong = [f"{row}\n{said}" for row in LINES for said in misspelled(row, names)]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train = elche.build_train_stop(loss_fn, tx)", "has no attribute 'build_train_stop'"),
        ("speeds = train.throughputs", "has no attribute 'throughputs'"),
        ("loss = loss_fm(params)", "name 'loss_fm' is not defined"),
        ("config = elche.DDPConfig(polizy='sync')", "unexpected keyword argument 'polizy'"),
        ("train = elche.build_train_step(loss_fn)", "missing a required argument: 'optimizer'"),
    ],
)
def test_what_is_misspelled_is_found(line, said, names):
    (found,) = misspelled(Row("", "", line, (), "", ()), names)
    assert said in found


def misspelled(row: Row, names: dict[str, Any]) -> list[str]:
    """What a row's code names that is not there, or calls with other arguments."""
    nodes = [node for code in (row.here, *row.claims) for node in ast.walk(ast.parse(code or ""))]
    made = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    wrong = []
    for node in nodes:
        try:
            if isinstance(node, ast.Call) and is_known(node.func, made):
                check_call(value_of(node.func, names), node)
            elif is_known(node, made):
                value_of(node, names)
        except (AttributeError, NameError, TypeError) as error:
            wrong.append(str(error))
        except ValueError:  # a function of C, which tells nothing of its arguments
            pass
    return list(dict.fromkeys(wrong))


def is_known(node: ast.AST, made: set[str]) -> bool:
    """Whether it is a name with dots, none that the row itself makes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id not in made


def value_of(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "row", "eval"), names)


def check_call(function: Any, call: ast.Call) -> None:
    """TypeError unless the function takes the arguments."""
    signature, positional = inspect.signature(function), call.args
    words = {word.arg: word.value for word in call.keywords if word.arg is not None}
    if any(isinstance(argument, ast.Starred) for argument in positional):
        signature.bind_partial(**words)
    elif len(words) < len(call.keywords):
        signature.bind_partial(*positional, **words)
    else:
        signature.bind(*positional, **words)


@pytest.fixture(scope="module")
def used() -> set[str]:
    """Lines that were put to use; several rows have the same."""
    return set()


FIRST = [next(row for row in LINES if row.system == system) for system in SYSTEMS]


@pytest.mark.parametrize("row", [row if row in FIRST else slow(row) for row in LINES], ids=row_id)
def test_the_line_of_a_row_runs_and_keeps_its_word(row, names, used):
    try:
        made = execute(row.here, names)
        for claim in row.claims:
            exec(claim, names)
        if row.here not in used and not any("run(" in claim for claim in row.claims):
            for value in made:
                put_to_use(value, names)
            used.add(row.here)
    except Exception as error:
        raise AssertionError(f"{row}\n{type(error).__name__}: {error}") from error


def execute(line: str, names: dict[str, Any]) -> list[Any]:
    """Runs a line and gives the values that it has made: of its names, or of itself."""
    body = ast.parse(line).body
    if isinstance(body[-1], ast.Expr):
        exec(compile(ast.Module(body[:-1], []), line, "exec"), names)
        return [eval(compile(ast.Expression(body[-1].value), line, "eval"), names)]
    exec(line, names)
    targets = [t for part in body if isinstance(part, ast.Assign) for t in part.targets]
    nodes = [node for target in targets for node in ast.walk(target)]
    named = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [names[name] for name in named]


def put_to_use(value: Any, names: dict[str, Any]) -> None:
    """Trains with what a row has made, where one can train with it."""

    def build(optimizer=names["tx"], **options):
        return elche.build_train_step(names["loss_fn"], optimizer, **options)

    if isinstance(value, elche.Windows):
        with value as windows:
            state = names["train"].init(names["params"])
            for window in windows:
                state, _ = names["train"](state, window)
        elche.check_replicas(state)
    elif isinstance(value, elche.TrainState):
        elche.check_replicas(value)
    elif isinstance(value, EvalStep):
        value(names["state"], names["odd"], batch_size=8)
    else:
        if isinstance(value, elche.DDPConfig):
            value = build(config=value)
        elif isinstance(value, optax.GradientTransformation):
            value = build(value)
        elif callable(getattr(value, "update", None)) and callable(getattr(value, "init", None)):
            value = build(cadence=value)
        if isinstance(value, elche.TrainStep):
            final = names["run"](value)
            assert np.isfinite(final.params["w"]).all()
            assert np.abs(final.params["w"]).max() > 0, "nothing was learned"


def test_public_names_of_the_page_exist():
    public = {name for name in dir(elche) if not name.startswith("_")}
    used = set(re.findall(r"\belche\.(\w+)", CODE))
    assert used - public == set()
    things = [getattr(elche, name) for name in used]
    assert [thing for thing in things if inspect.ismodule(thing)] == []
    for name in re.findall(r"\belche_jax((?:\.\w+)+)", CODE):
        assert pkgutil.resolve_name("elche_jax" + name) is not None


def test_members_of_the_page_exist(names):
    """`train.counts`, `state.params` and the like, in the notes too, which are not run."""
    for name in (
        "train",
        "state",
        "window",
        "windows",
        "ddp",
        "config",
        "cadence",
        "plan",
        "report",
    ):
        used = set(re.findall(rf"\b{name}\.(\w+)", CODE))
        assert used - set(dir(names[name])) == set(), name
