"""The page of a run: its numbers against the lines of the timeline, its looks in a browser."""

import base64
import hashlib
import json
import re
import statistics
from html.parser import HTMLParser

import pytest

import elche_jax as elche
from elche_jax.observe import page as module, page_data
from elche_jax.observe.page import write_page
from elche_jax.observe.report import limit_share
from elche_jax.observe.run import read_run

nasty = "</script><b>\"&'{{title}}"


class Page(HTMLParser):
    """What a page holds: tags, texts by element id, tables, policy."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.tables = [], {}, {}
        self.policy = self._id = None
        self._text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policy = attrs["content"]
        if attrs.get("role") == "region":
            self._rows = self.tables.setdefault(attrs["aria-label"], [])
        if tag == "tr":
            self._rows.append([])
        if tag in ("script", "style"):
            self._id = attrs.get("id", tag)
        if tag in ("th", "td", "title", "h1"):
            self._text = ""

    def handle_data(self, data):
        self._text += data
        if self._id:
            self.ids[self._id] = self.ids.get(self._id, "") + data

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._id = None
        elif tag in ("th", "td"):
            self._rows[-1].append(self._text)
        elif tag in ("title", "h1"):
            self.ids[tag] = self._text

    @property
    def data(self):
        return json.loads(self.ids["data"])


def figures(text):
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>", text)
    return {name: (value, note) for name, value, note in found}


def of(lines, kind):
    return [line for line in lines if line["event"] == kind]


@pytest.fixture
def run16(tmp_path, made):
    """The lines of a resumed run of 18 windows, and the run."""
    return made.resumed(tmp_path / "timeline.jsonl"), read_run(tmp_path)


def written(run, tmp_path, title=None):
    return write_page(run, tmp_path / "new" / "report.html", title).read_text("utf-8")


def test_the_embedded_windows_are_those_of_the_timeline(run16, tmp_path):
    lines, run = run16
    page = Page(written(run, tmp_path))
    gantt, windows = page.data["gantt"], of(lines, "window")
    assert gantt["total"] == len(windows) == 18
    for name, field in (
        ("window", "window"), ("epoch", "epoch"), ("counts", "counts"), ("examples", "examples"),
    ):  # fmt: skip
        assert gantt[name] == [line[field] for line in windows]
    assert gantt["steady"] == [int(line["steady"]) for line in windows]
    for name, field in (("ms", "wall_ms"), ("sync", "sync_ms"), ("skew", "skew_ms")):
        assert gantt[name] == pytest.approx([line[field] for line in windows], rel=1e-5)
    for row, line in zip(gantt["busy"], windows, strict=True):
        assert row == pytest.approx(line["busy_ms"], rel=1e-5)
    gone = max(line["at"] for line in lines[: lines.index(windows[12])])
    ends = [line["at"] + gone * (at >= 12) for at, line in enumerate(windows)]
    begins = [end - line["wall_ms"] / 1e3 for end, line in zip(ends, windows, strict=True)]
    assert gantt["begin"] == pytest.approx(begins, abs=1e-5)
    assert page.data["devices"] == ["a", "b", "c"] and page.data["target"] == 0.1
    assert page.data["begins"] == pytest.approx([gone + 0.01], abs=1e-5)


def test_the_embedded_curves(run16, tmp_path):
    lines, run = run16
    data = Page(written(run, tmp_path)).data
    windows = of(lines, "window")
    curves = data["curves"]
    assert curves["bucket"] == 1 and curves["window"] == [line["window"] for line in windows]
    assert curves["counts"] == [[line["counts"][rank] for line in windows] for rank in range(3)]
    shares = [
        (line["steady"] and line["sync_ms"] / max(line["busy_ms"])) or None for line in windows
    ]
    assert curves["overhead"] == [share and pytest.approx(share, rel=1e-5) for share in shares]
    for share, line in zip(curves["limit"], windows, strict=True):
        rate = sum(n / ms for n, ms in zip(line["counts"], line["busy_ms"], strict=True))
        expected = sum(line["counts"]) / line["wall_ms"] / rate
        assert share == (pytest.approx(expected, rel=1e-5) if line["steady"] else None)
    assert data["anchor"]["v"] == [2, 5, 2, 5]
    metrics = {
        (metric["name"], series["label"]): series["v"]
        for metric in data["metrics"]
        for series in metric["series"]
    }
    assert metrics == {
        ("loss", "window"): pytest.approx([line["loss"] for line in of(lines, "loss")], rel=1e-5),
        ("loss", "epoch"): pytest.approx([2 / 9], rel=1e-5),
        ("loss", "evaluation"): pytest.approx([2.5 / 9], rel=1e-5),
        ("accuracy", "evaluation"): [0.1],
    }
    marks = {kind["kind"]: (kind["total"], kind["text"]) for kind in data["marks"]}
    assert {name: total for name, (total, _) in marks.items()} == {
        "run": 2, "compile": 2, "evaluation": 1, "checkpoint": 1, "verdict": 2, "skip": 2,
    }  # fmt: skip
    assert marks["skip"][1][0] == "update of window 11 dropped: not finite"
    assert marks["verdict"][1][0] == "nudge down by 0.5 after window 11"
    assert marks["compile"][1][0] == "accumulate compiled in 0.40 s, waited for"
    assert marks["checkpoint"][1] == ["window 9 saved in 0.10 s, 1.00 kB: c/9"]
    assert marks["run"][1][1] == "starts or resumes at window 10, ElChe()"
    text = "evaluated after window 9 in 0.25 s: accuracy 0.1, loss 0.27778"
    assert marks["evaluation"][1] == [text]


def test_a_cadence_with_the_counts_of_many_windows_is_cut(tmp_path, made):
    begin = made.begin(0.0) | {"cadence": repr(elche.Replay([(1, 2)] * 100))}
    run = read_run(made.write(tmp_path / "timeline.jsonl", [begin, made.window(0, 1.0)]))
    [text] = Page(written(run, tmp_path)).data["marks"][0]["text"]
    assert text.startswith("starts or resumes at window 0, Replay(counts_per_window=((1, 2), (1, ")
    assert text.endswith("[...]") and len(text) < 240


def test_shares_of_a_device_add_up(run16, tmp_path):
    lines, run = run16
    steady = [line for line in of(lines, "window") if line["steady"]]
    wall = sum(line["wall_ms"] for line in steady)
    for rank, share in enumerate(Page(written(run, tmp_path)).data["shares"]):
        busy = sum(line["busy_ms"][rank] for line in steady) / wall
        assert share["busy"] == pytest.approx(busy, rel=1e-5)
        assert share["sync"] == pytest.approx(0.02, rel=1e-4)
        assert share["busy"] + share["sync"] + share["idle"] == pytest.approx(1, abs=1e-5)


def test_a_synchronisation_beside_work_takes_no_more_than_is_left(tmp_path, made):
    lines = [made.window(0, 1.0, busy_ms=(60.0, 76.0, 90.0), sync_ms=8.0)]
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    shares = Page(written(run, tmp_path)).data["shares"]
    found = [tuple(share[part] for part in ("busy", "sync", "idle")) for share in shares]
    assert found[0] == pytest.approx((0.75, 0.1, 0.15))
    assert found[1] == pytest.approx((0.95, 0.05, 0)) and found[2] == (1, 0, 0)


def test_figures_and_tables(run16, tmp_path):
    lines, run = run16
    text = written(run, tmp_path, "A title")
    page, shown = Page(text), figures(text)
    assert page.ids["title"] == page.ids["h1"] == "A title"
    steady = [line for line in of(lines, "window") if line["steady"]]
    seconds = sum(line["wall_ms"] for line in steady) / 1e3
    speed = sum(line["examples"] for line in steady) / seconds
    assert shown["Examples per second"][0] == f"{speed:,.0f}"
    limit = limit_share([w.record for w in run.windows if w.record.steady])
    assert shown["Share of the limit"][0] == f"{limit:.1%}"
    assert shown["Windows"] == ("18", f"in {run.seconds:.1f} s")
    assert shown["Devices"][0] == "3" and shown["Dropped updates"][0] == "2"
    assert shown["Exchange"] == ("4.00 MB", "per device and window")
    assert shown["Compiling"] == ("0.8 s", "2 waited for, 0 ahead")
    sync, skew = (statistics.median(line[key] for line in steady) for key in ("sync_ms", "skew_ms"))
    assert shown["Synchronising"] == (f"{sync:.2f} ms", f"median; skew {skew:.2f} ms")
    head, *rows = page.tables["Devices, with times of the steady windows"]
    assert head[0] == "Device" and [row[0] for row in rows] == ["a", "b", "c"]
    for rank, row in enumerate(rows):
        ms = statistics.median(line["busy_ms"][rank] / line["counts"][rank] for line in steady)
        done = sum(line["counts"][rank] for line in of(lines, "window"))
        assert row[1:4] == [f"{ms:.2f}", str(of(lines, "window")[-2]["counts"][rank]), str(done)]
    expected = [["0", "10", "700", "0.25", "2,800", "0.22222"]]
    assert page.tables["Epochs"][1:] == expected
    assert page.tables["Evaluations"] == [
        ["Epoch", "Window", "Seconds", "accuracy", "loss"],
        ["0", "9", "0.25", "0.1", "0.27778"],
    ]
    note = "The run has 2 parts, shown one after another; 2 windows were run twice."
    assert f"<p class=note>{note}</p>" in text


def test_windows_without_a_device_are_no_dropped_updates(tmp_path, made):
    reasons = ["not finite", "left out: late", "left out: late", "left out: not finite"]
    lines = [
        {"event": "skip", "window": at, "epoch": 0, "reason": reason, "at": 1.0}
        for at, reason in enumerate(reasons)
    ]
    run = read_run(made.write(tmp_path / "timeline.jsonl", [made.window(0, 0.5), *lines]))
    text = written(run, tmp_path)
    assert figures(text)["Dropped updates"] == ("1", "not finite")
    apart = re.findall(r"<dt>Averaged without a device</dt><dd>(.*?)<small>(.*?)</small>", text)
    assert apart == [("2", "windows; late"), ("1", "windows; not finite")]
    (skips,) = [kind for kind in Page(text).data["marks"] if kind["kind"] == "skip"]
    assert skips["text"][:2] == [
        "update of window 0 dropped: not finite",
        "window 1 averaged without a device: late",
    ]
    empty = made.write(tmp_path / "timeline.jsonl", [made.window(0, 0.5)])
    assert figures(written(read_run(empty), tmp_path))["Dropped updates"] == ("0", "not finite")


def test_one_window_was_done_twice(tmp_path, made):
    lines = made.process(0, 3, 1) + made.process(2, 4, 2)
    text = written(read_run(made.write(tmp_path / "timeline.jsonl", lines)), tmp_path)
    assert "shown one after another; 1 window was run twice." in text


def test_curves_of_two_steps_in_turns_are_thinned(tmp_path, made):
    lines = [made.begin(0.0), made.begin(0.1, names=("x", "y"))]
    for number in range(2000):
        at = 1.0 + number / 5
        lines.append(made.window(number, at))
        lines.append(made.window(number, at + 0.1, (3, 3), busy_ms=(70.0, 70.0)))
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    curves = Page(written(run, tmp_path)).data["curves"]
    assert len(curves["t"]) <= page_data.POINTS + 1 and curves["t"] == sorted(curves["t"])
    assert {*zip(*curves["counts"], strict=True)} == {(4, 2, 1), (3, 3, None)}


def test_metrics_without_a_curve_are_counted(tmp_path, made):
    named = {f"m{number}": number for number in range(page_data.METRICS)}
    lines = [made.window(0, 1.0), made.metrics("evaluation", 0, 1.1, **named)]
    path = made.write(tmp_path / "timeline.jsonl", lines)
    text = written(read_run(path), tmp_path)
    assert "Curves are of" not in text and len(Page(text).data["metrics"]) == page_data.METRICS
    path = made.write(path, [*lines, made.metrics("epoch", 0, 1.2, loss=1.0, m3=2.0)])
    page = Page(text := written(read_run(path), tmp_path))
    assert "Curves are of the first 12 of 13 metrics; the tables have all." in text
    shown = {metric["name"]: metric["series"] for metric in page.data["metrics"]}
    assert [*shown] == ["loss", "m3", "m0", "m1", "m2", *(f"m{number}" for number in range(4, 11))]
    assert {one["label"]: one["v"] for one in shown["m3"]} == {"epoch": [2], "evaluation": [3]}
    assert "m11" in page.tables["Evaluations"][0]


def test_the_runs_name_is_the_title(run16, tmp_path):
    assert Page(written(run16[1], tmp_path)).ids["title"] == tmp_path.name


def test_the_page_may_run_its_own_script_alone(run16, tmp_path):
    text = written(run16[1], tmp_path)
    page = Page(text)
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))

    def hashed(content):
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "script-src": hashed(page.ids["script"]),
        "style-src": hashed(page.ids["style"]),
    }
    assert not [
        tag for tag, attrs in page.tags if attrs.keys() & {"src", "href", "style", "onload"}
    ]
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object")]
    assert "innerHTML" not in text and "http://www.w3.org/2000/svg" in text
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}


def test_texts_of_the_run_are_texts(tmp_path, made):
    nasty = made.NASTY
    run = read_run(made.write(tmp_path / "timeline.jsonl", made.nasty()))
    text = written(run, tmp_path, title=nasty)
    page = Page(text)
    assert "<b>" not in text and not [tag for tag, _ in page.tags if tag == "b"]
    assert page.data["devices"][0] == nasty and page.ids["title"] == page.ids["h1"] == nasty
    assert page.data["metrics"][1]["name"] == nasty
    rows = page.tables["Devices, with times of the steady windows"]
    assert rows[1][0] == nasty and page.tables["Evaluations"][0][-1] == nasty
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert not set("<>&") & set(page.ids["data"])


def test_a_lone_surrogate_is_written(tmp_path, made):
    lines = [made.begin(0.0, names=("\udcff", "b", "c")), made.window(0, 1.0)]
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    assert r"\udcff" in written(run, tmp_path)


def test_a_run_without_a_window(tmp_path, made):
    run = read_run(made.write(tmp_path / "timeline.jsonl", []))
    text = written(run, tmp_path)
    assert "No window has finished yet." in text and figures(text)["Share of the limit"][0] == "-"
    assert Page(text).data["gantt"]["begin"] == [] and Page(text).tables == {}


def test_a_long_run_is_thinned(tmp_path, made):
    lines = made.long_run(12_000)
    made.write(tmp_path / "timeline.jsonl", lines)
    windows = of(lines, "window")
    text = written(read_run(tmp_path), tmp_path)
    page = Page(text)
    gantt, curves = page.data["gantt"], page.data["curves"]
    assert len(text) < 1_000_000  # no more with more windows: the parts below are bounded
    shown = page_data.GANTT_NUMBERS // (2 * 8 + 8)
    assert gantt["window"] == list(range(12_000 - shown, 12_000)) and gantt["total"] == 12_000
    assert curves["bucket"] == 20 and curves["window"] == list(range(0, 12_000, 20))
    for at in (0, 17, 599):
        bucket = windows[20 * at : 20 * at + 20]
        for rank in range(8):
            counts = [line["counts"][rank] for line in bucket]
            assert curves["counts"][rank][at] == statistics.median_low(counts)
        overhead = statistics.median(line["sync_ms"] / max(line["busy_ms"]) for line in bucket)
        assert curves["overhead"][at] == pytest.approx(overhead, rel=1e-5)
    (loss,) = [
        series for series in page.data["metrics"][0]["series"] if series["label"] == "window"
    ]
    assert loss["v"][3] == pytest.approx(
        statistics.median(1 / (1 + n) for n in range(60, 80)), 1e-5
    )
    (skips,) = [kind for kind in page.data["marks"] if kind["kind"] == "skip"]
    assert skips["total"] == 600 and len(skips["t"]) == page_data.MARKS
    table = page.tables["Epochs, the last 200 of 600"]
    assert len(table) == 1 + module.ROWS
    assert figures(text)["Windows"][0] == "12,000" and figures(text)["Dropped updates"][0] == "600"


def test_devices_that_changed(tmp_path, made):
    lines = made.process(0, 4, 1) + made.process(4, 8, 2, names=("a", "x"))
    text = written(read_run(made.write(tmp_path / "timeline.jsonl", lines)), tmp_path)
    page = Page(text)
    assert page.data["devices"] == ["a", "x", "c"]  # the last one of each rank
    assert page.data["curves"]["counts"][2][4:] == [None] * 4
    assert "speeds and shares are those of the last 4 windows" in text
    _, *rows = page.tables["Devices, with times of the steady windows"]
    assert [row[0] for row in rows] == ["a", "x"]


def test_long_durations(tmp_path, made):
    for at, text in ((119.94, "119.9 s"), (725, "12 min 05 s"), (11520.0, "3 h 12 min")):
        run = read_run(made.write(tmp_path / "timeline.jsonl", [made.window(0, at)]))
        assert figures(written(run, tmp_path))["Windows"] == ("1", f"in {text}")


def test_what_is_refused(run16, tmp_path):
    with pytest.raises(TypeError, match=r"^write_page: run must be of type Run, got 'x' \(str\)"):
        write_page("x", tmp_path / "r")
    with pytest.raises(TypeError, match=r"^write_page: title must be of type str, got 3 \(int\)"):
        write_page(run16[1], tmp_path / "r", 3)
