"""The page of a run in a browser: all is drawn, nothing is loaded, errors are seen."""

import contextlib
import html
import json
import re
import shutil
import socket
import threading

import children
import pytest

from elche_jax.observe.page import write_page
from elche_jax.observe.run import read_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
# Each starts a browser: one page is enough for `make test`, the others are slow.
in_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium, to open the page")


@pytest.fixture
def page(tmp_path, made):
    """The page of a resumed run of 18 windows."""
    made.resumed(tmp_path / "timeline.jsonl")
    return write_page(read_run(tmp_path), tmp_path / "report.html")


def dom(path, folder, *more):
    """The page as it is after its script has run."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --disable-dev-shm-usage"
    )
    command = [BROWSER, *flags.split(), f"--user-data-dir={folder}", *more, "--dump-dom"]
    done = children.run(*command, f"file://{path}", encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def drawn(text):
    """How much was drawn in each section."""
    found = {}
    for part in text.split("<section")[1:]:
        name = re.search(r"id=\"?(\w+)|data-metric", part[:200])
        count = re.search(r"data-drawn=\"(\d+)\"", part)
        if name and count:
            found.setdefault(name[1] or "metric", []).append(int(count[1]))
    return found


def no_error(text):
    """Whether the place for errors is empty."""
    return re.search(r"<p id=\"error\" role=\"alert\" hidden=\"\"></p>", text) is not None


@in_browser
def test_every_picture_is_drawn(page, tmp_path):
    text = dom(page, tmp_path / "profile", "--window-size=1400,2000")
    assert no_error(text) and 'data-ready="yes"' in text
    # 18 windows of 3 devices; 10 marks; 3 counts and the anchor; 3 devices of 3 parts; curves
    assert drawn(text) == {
        "gantt": [54], "marks": [10], "counts": [4], "shares": [9], "limit": [1], "overhead": [1],
        "metric": [4, 1],
    }  # fmt: skip
    assert re.search(r"<svg[^>]*aria-label=\"Counts and anchor: from 1 to 9; a at the end ", text)
    assert "18 windows, " in text


@in_browser
@pytest.mark.slow
def test_a_long_run_and_a_narrow_window(tmp_path, made):
    made.write(tmp_path / "timeline.jsonl", made.long_run(3000))
    page = write_page(read_run(tmp_path), tmp_path / "report.html")
    text = dom(page, tmp_path / "profile", "--window-size=400,800", "--force-dark-mode")
    assert no_error(text) and "The last 2500 of 3000 windows are shown." in text
    assert "Curves over windows are medians of 5 windows each" in text
    assert drawn(text)["gantt"][0] >= 60 * 8  # the last 60 windows to begin with


@in_browser
@pytest.mark.slow
def test_nasty_names_and_empty_runs(tmp_path, made):
    run = read_run(made.write(tmp_path / "timeline.jsonl", made.nasty()))
    page = write_page(run, tmp_path / "report.html", made.NASTY)
    text = dom(page, tmp_path / "profile")
    assert no_error(text) and "<b>" not in text and len(drawn(text)) == 7
    page = write_page(read_run(made.write(tmp_path / "t.jsonl", [])), tmp_path / "empty.html")
    text = dom(page, tmp_path / "profile")
    assert no_error(text) and drawn(text) == {} and 'data-ready="yes"' in text


class Server:
    """Notes whether anybody connects."""

    def __enter__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/x"
        self.asked = 0
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        return self

    def _listen(self):
        with contextlib.suppress(OSError):  # it is shut down
            while True:
                self._socket.accept()[0].close()
                self.asked += 1

    def __exit__(self, *error):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_nothing_is_loaded_and_no_other_script_runs(page, tmp_path, strict):
    # A copy that tries, with the policy and, to see that the test can fail, without it.
    text = page.read_text()
    with Server() as server:
        attack = f'<img src="{server.url}"><script>document.title = "taken"</script>'
        text = text.replace("</body>", attack + "</body>")
        if not strict:
            text = re.sub("<meta http-equiv.*>", "", text)
        page.write_text(text)
        found = dom(page, tmp_path / "profile")
        assert (server.asked > 0) is not strict and ("<title>taken" in found) is not strict
        assert (f"refused {server.url}" in found) is strict and no_error(found) is not strict


@in_browser
@pytest.mark.slow
def test_a_script_error_is_shown(page, tmp_path):
    text = page.read_text()
    page.write_text(re.sub(r'"curves":\{', '"curvs":{', text))
    found = dom(page, tmp_path / "profile")
    assert "This page could not be drawn as a whole: Cannot read properties" in found
    assert drawn(found)["gantt"] == [54]  # the others are there


HANDS = """
const canvas = document.querySelector("canvas"), shown = document.querySelector("#gantt output");
const told = {}, tip = document.querySelector("#tip"), box = () => canvas.getBoundingClientRect();
const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", {key: name}));
const at = (share, y) => ({
  clientX: box().left + 30 + share * (box().width - 30), clientY: box().top + y, bubbles: true,
});
const point = (node, place) => {
  node.dispatchEvent(new PointerEvent("pointermove", place));
  return tip.hidden ? "" : tip.textContent;
};
const settle = () => new Promise((done) => setTimeout(done, 50));
(async () => {
  told.all = shown.textContent;
  told.bar = point(canvas, at(0, 18 + 28 * 1.5));
  told.mark = [...Array(200).keys()].map((i) => point(canvas, at(i / 200, 9))).find(Boolean);
  for (const name of ["+", "+", "Home"]) key(name);
  await settle(); told.begin = shown.textContent;
  key("ArrowRight"); await settle(); told.right = shown.textContent;
  key("End"); await settle(); told.end = shown.textContent;
  document.querySelector("[data-do=all]").click(); await settle(); told.again = shown.textContent;
  const wheel = {deltaY: -50, ctrlKey: true, ...at(0.5, 40), cancelable: true};
  told.taken = !canvas.dispatchEvent(new WheelEvent("wheel", wheel));
  await settle(); told.wheel = shown.textContent;
  told.left = canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: 50, cancelable: true}));
  const svg = document.querySelector("#counts svg[role=img]"), plot = svg.getBoundingClientRect();
  told.curve = point(svg, {clientX: plot.right - 11, clientY: plot.top + 50, bubbles: true});
  document.body.insertAdjacentHTML("beforeend", `<pre id=told></pre>`);
  document.querySelector("#told").textContent = JSON.stringify(told);
})();
"""


@in_browser
@pytest.mark.slow
def test_it_is_moved_zoomed_and_read_by_pointing(page, tmp_path, made):
    text = re.sub("<meta http-equiv.*>", "", page.read_text())  # it would refuse our script
    # Nobody looks at the page, so that there are no frames to wait for.
    frames = "<script>requestAnimationFrame = (draw) => setTimeout(draw, 0)</script>"
    text = text.replace("<body>", "<body>" + frames)
    page.write_text(text.replace("</body>", f"<script>{HANDS}</script></body>"))
    found = dom(page, tmp_path / "profile", "--virtual-time-budget=5000")
    told = json.loads(html.unescape(re.search('<pre id="told">(.*?)</pre>', found)[1]))
    assert no_error(found)

    def view(name):
        windows, first, last = re.match(r"(\d+) windows, (.*) s to (.*) s", told[name]).groups()
        return int(windows), float(first), float(last)

    first, last = view("all")[1:]
    assert view("all")[0] == 18 and view("again") == view("all")
    assert view("begin")[1] == first and view("end")[2] == last
    quarter = (last - first) / 4
    for name in ("begin", "right", "end"):
        windows, low, high = view(name)
        assert windows < 9 and high - low == pytest.approx(quarter, abs=0.02)
    assert view("right")[1] - first == pytest.approx(0.2 * quarter, abs=0.02)
    assert first < view("wheel")[1] < view("wheel")[2] < last
    assert told["taken"] and told["left"]  # a wheel alone scrolls the page
    window = read_run(tmp_path).windows[0]
    assert told["bar"].splitlines()[0] == "b, window 0, epoch 0"
    assert f"{window.record.counts[1]} microbatches, busy " in told["bar"]
    assert "it waited for a compile" in told["bar"]
    assert "evaluated after window 9 in 0.25 s: accuracy 0.1" in told["mark"]
    counts = read_run(tmp_path).windows[-1].record.counts
    for name, count in zip("abc", counts, strict=True):
        assert f"{name}: {count}" in told["curve"].splitlines()
    assert "anchor: 2" in told["curve"].splitlines()  # it becomes 5 with the end
