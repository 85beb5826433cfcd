
"use strict";
(() => {
const $ = (selector, root = document) => root.querySelector(selector);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// Errors are shown, not swallowed: a page that is not whole says so.
function fail(error) {
  const place = $("#error");
  place.hidden = false;
  place.textContent += `This page could not be drawn as a whole: ${error && error.message || error}. `;
}
addEventListener("error", (event) => fail(event.error || event.message));
document.addEventListener("securitypolicyviolation", (event) => fail(`refused ${event.blockedURI}`));

const SVG = "http://www.w3.org/2000/svg";
function make(name, attributes = {}, parent = null, text = null) {
  const node = name in HTML ? document.createElement(name) : document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
const HTML = { section: 1, h2: 1, div: 1, p: 1, span: 1 };

// numbers and words

const plain = (value) => value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3
  ? value.toExponential(2) : String(+value.toPrecision(4));
const percent = (value) => `${+(100 * value).toPrecision(3)}%`;
// A time, as exactly as one tells times apart in a span of so many seconds.
function seconds(value, span = value) {
  const digits = [0.02, 0.2, 2, 20, 120].filter((limit) => span < limit).length;
  if (value < 600) return `${+value.toFixed(digits)} s`;
  const two = (n) => String(n).padStart(2, "0");
  const part = 10 ** digits, whole = Math.floor(Math.round(value * part) / part);
  const rest = digits ? (Math.round(value * part) / part - whole).toFixed(digits).slice(1).replace(/\.?0+$/, "") : "";
  const clock = `${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}${rest}`;
  return whole < 3600 ? clock : `${Math.floor(whole / 3600)}:${clock}`;
}

function ticks(low, high, wanted, steps = [1, 2, 5]) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = ten * ([...steps, 10].find((n) => n * ten >= rough * (1 - 1e-9)) || 10);
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(0, Math.min(count, 50)) }, (_, i) => +((first + i) * step).toPrecision(12));
}
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
function timeTicks(low, high, wanted) {
  const step = CLOCK.find((n) => n >= (high - low) / wanted);
  if (high - low < wanted || !step) return ticks(low, high, wanted);
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) out.push(at);
  return out;
}

// Last place in a sorted list whose value is at most this one.
function place(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

const tip = $("#tip");
function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${clamp(event.clientY + 14, 4, innerHeight - box.height - 4)}px`;
}
const hideTip = () => { tip.hidden = true; };

// Draws again when the width or the colours change.
const drawings = [];
function drawing(host, draw) {
  let width = 0;
  const again = (force) => {
    const now = Math.floor(host.clientWidth);
    if (now > 0 && (force || now !== width)) { width = now; try { draw(now); } catch (error) { fail(error); } }
  };
  drawings.push(again);
  again(true);
}
const all = (force) => drawings.forEach((again) => again(force));
addEventListener("resize", () => all(false));
for (const media of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(media).addEventListener("change", () => all(true));
}

const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const color = (index) => `var(--d${index % 8})`;
// Eight colours, then again with other dashes; two of one height tell apart by dashes as well.
const look = (index) => ({ stroke: color(index), dash: DASHES[(index + Math.floor(index / 8)) % 4] });

function legend(host, series) {
  const box = make("div", { class: "legend" }, host);
  for (const one of series) {
    const item = make("span", {}, box);
    const icon = make("svg", { width: 26, height: 10, "aria-hidden": "true" }, item);
    if (one.dots) make("circle", { cx: 13, cy: 5, r: 3.5, fill: one.stroke }, icon);
    else make("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: one.stroke, "stroke-width": one.wide || 2, "stroke-dasharray": one.dash || "" }, icon);
    item.append(one.label);
  }
}

// A chart of curves over time. series: label, t, v, stroke, dash, dots, step.
function chart(id, spec) {
  const section = typeof id === "string" ? $(`#${id}`) : id;
  const series = spec.series.filter((one) => one.v.some((value) => value !== null));
  if (!series.length) return;
  section.hidden = false;
  const host = $("div", section);
  if (series.length > 1 || spec.legend || spec.most) legend(host, series.concat(spec.target ? [{ label: spec.targetLabel, stroke: "var(--target)", dash: "6 4" }] : []));
  const holder = make("div", {}, host);
  const values = series.flatMap((one) => one.v.filter((value) => value !== null));
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const summary = `${$("h2", section).textContent}: from ${spec.format(low)} to ${spec.format(high)}; `
    + series.slice(0, 8).map((one) => `${one.label} at the end ${spec.format(one.v.findLast((value) => value !== null))}`).join(", ");
  if (spec.low !== undefined) low = Math.min(low, spec.low);
  if (spec.high !== undefined) high = Math.max(high, spec.high);
  if (spec.most) {
    const most = spec.most(values);
    if (most < high) { high = most; make("span", {}, $(".legend", host), "(peaks are cut off)"); }
  }
  if (!(high > low)) { const pad = Math.abs(low) * 0.1 || 1; high += pad; if (spec.low === undefined) low -= pad; }
  else if (spec.low === undefined) { const pad = (high - low) * 0.05; low -= pad; high += pad; }
  drawing(holder, (width) => {
    holder.replaceChildren();
    const height = 210, left = 52, right = 10, top = 10, bottom = 24;
    const x = (t) => left + t / (data.seconds || 1) * (width - left - right);
    const y = (v) => top + (high - v) / (high - low) * (height - top - bottom);
    const svg = make("svg", { width, height, role: "img", "aria-label": summary }, holder);
    for (const at of ticks(low, high, 4)) {
      make("line", { class: "grid", x1: left, x2: width - right, y1: y(at), y2: y(at) }, svg);
      make("text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, svg, spec.format(at));
    }
    for (const at of timeTicks(0, data.seconds, Math.max(2, width / 110))) {
      make("text", { x: x(at), y: height - 6, "text-anchor": at === 0 ? "start" : x(at) > width - 30 ? "end" : "middle" }, svg, seconds(at, data.seconds));
    }
    for (const at of data.begins) make("line", { class: "part", x1: x(at), x2: x(at), y1: top, y2: height - bottom }, svg);
    if (spec.target) make("line", { class: "target", x1: left, x2: width - right, y1: y(spec.target), y2: y(spec.target) }, svg);
    const clip = `clip${drawings.length}${Math.random().toString(36).slice(2)}`;
    make("rect", { x: left - 4, y: top - 4, width: Math.max(0, width - left - right + 8), height: height - top - bottom + 8 }, make("clipPath", { id: clip }, make("defs", {}, svg)));
    const plot = make("g", { "clip-path": `url(#${clip})` }, svg);
    for (const one of series) {
      if (!one.dots) make("path", { d: line(one, x, y), fill: "none", stroke: one.stroke, "stroke-width": one.wide || 1.75, "stroke-dasharray": one.dash || "", "stroke-linejoin": "round" }, plot);
      if (one.dots || one.t.length === 1) one.t.forEach((t, i) => { if (one.v[i] !== null) make("circle", { cx: x(t), cy: y(one.v[i]), r: one.t.length > 60 ? 2 : 3.5, fill: one.stroke }, plot); });
    }
    const cursor = make("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" }, svg);
    svg.addEventListener("pointerleave", () => { hideTip(); cursor.setAttribute("visibility", "hidden"); });
    svg.addEventListener("pointermove", (event) => {
      const at = (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right) * data.seconds;
      if (at < 0 || at > data.seconds) { hideTip(); return; }
      cursor.setAttribute("visibility", "visible");
      cursor.setAttribute("x1", x(at)); cursor.setAttribute("x2", x(at));
      const lines = series.map((one) => [one, place(one.t, at)]).filter(([one, i]) => i >= 0 && one.v[i] !== null).map(([one, i]) => `${one.label}: ${spec.format(one.v[i])}`);
      showTip(event, [seconds(at, data.seconds), ...lines.slice(0, 16)].join("\n"));
    });
    holder.dataset.drawn = svg.querySelectorAll("path, circle").length;
  });
}
function line(one, x, y) {
  let path = "", before = null;
  one.t.forEach((t, i) => {
    const value = one.v[i];
    if (value === null) { before = null; return; }
    const to = `${x(t).toFixed(1)} ${y(value).toFixed(1)}`;
    path += before === null ? `M${to}` : one.step ? `H${x(t).toFixed(1)}V${y(value).toFixed(1)}` : `L${to}`;
    before = value;
  });
  return path + (one.step && before !== null ? `H${x(data.seconds).toFixed(1)}` : "");
}

// What happened when: a row of marks for each kind, told apart by shape, too.
const SHAPES = { run: "M0-6V6M-3-6H3", compile: "M-5-5H5V5H-5Z", evaluation: "M0-6L6 5H-6Z", checkpoint: "M0-6L6 0L0 6L-6 0Z", verdict: "M-6-5H6L0 6Z", skip: "M-5-5L5 5M5-5L-5 5" };
const KINDS = { run: ["begins", 6], compile: ["compile", 3], evaluation: ["evaluation", 2], checkpoint: ["checkpoint", 0], verdict: ["verdict", 5], skip: ["dropped or left out", 1] };
function mark(kind, x, y, parent) {
  const open = kind === "run" || kind === "skip";
  return make("path", open ? { d: SHAPES[kind], transform: `translate(${x} ${y})`, fill: "none", stroke: color(KINDS[kind][1]), "stroke-width": 2 } : { class: "mark", d: SHAPES[kind], transform: `translate(${x} ${y})`, fill: color(KINDS[kind][1]) }, parent);
}
function marks() {
  const kinds = data.marks.filter((kind) => kind.t.length);
  if (!kinds.length) return;
  const section = $("#marks"), holder = $("div", section);
  section.hidden = false;
  drawing(holder, (width) => {
    holder.replaceChildren();
    const left = 158, right = 10, row = 26, height = kinds.length * row + 26;
    const x = (t) => left + t / (data.seconds || 1) * (width - left - right);
    const label = `What happened when: ${kinds.map((kind) => `${KINDS[kind.kind][0]} ${kind.total} times`).join(", ")}`;
    const svg = make("svg", { width, height, role: "img", "aria-label": label }, holder);
    kinds.forEach((kind, index) => {
      const y = index * row + row / 2;
      make("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }, svg);
      make("text", { x: 0, y: y + 4 }, svg, `${KINDS[kind.kind][0]} (${kind.total})`);
      kind.t.forEach((t, i) => make("title", {}, mark(kind.kind, x(t).toFixed(1), y, svg), `${seconds(t, data.seconds)}: ${kind.text[i]}`));
    });
    for (const at of timeTicks(0, data.seconds, Math.max(2, width / 110))) {
      make("text", { x: x(at), y: height - 6, "text-anchor": at === 0 ? "start" : x(at) > width - 30 ? "end" : "middle" }, svg, seconds(at, data.seconds));
    }
    holder.dataset.drawn = svg.querySelectorAll("path").length;
  });
}

// Shares of each device: a bar of three parts.
function shares() {
  if (!data.shares.length) return;
  const section = $("#shares"), holder = $("div", section);
  section.hidden = false;
  drawing(holder, (width) => {
    holder.replaceChildren();
    const row = 40, wide = width - 54, height = data.shares.length * row;
    const label = `Busy share: ${data.shares.map((one) => `${one.name} ${percent(one.busy)}`).join(", ")}`;
    const svg = make("svg", { width, height, role: "img", "aria-label": label }, holder);
    data.shares.forEach((one, index) => {
      let at = 0;
      make("text", { x: 0, y: index * row + 12 }, svg, one.name);
      for (const part of ["busy", "sync", "idle"]) {
        const bar = make("rect", { x: at * wide, y: index * row + 18, width: Math.max(0, one[part] * wide), height: 13, fill: `var(--${part})` }, svg);
        make("title", {}, bar, `${one.name}: ${part === "sync" ? "synchronising" : part} ${percent(one[part])}`);
        at += one[part];
      }
      make("text", { x: width, y: index * row + 29, "text-anchor": "end" }, svg, `${(100 * one.busy).toFixed(1)}%`);
    });
    holder.dataset.drawn = svg.querySelectorAll("rect").length;
  });
}

// Bars of every device and window, to be moved and zoomed.
function gantt() {
  const g = data.gantt, n = g.begin.length, lanes = data.devices.length;
  if (!n) return;
  const section = $("#gantt"), canvas = $("canvas", section), shown = $("output", section);
  section.hidden = false;
  const end = (i) => g.begin[i] + g.ms[i] / 1e3;
  const first = g.begin[0], last = end(n - 1), least = Math.min(1e-3, (last - first) / 2) || 1e-6;
  const lane = lanes > 24 ? 12 : lanes > 10 ? 18 : 28, head = 18, foot = 24;
  const events = data.marks.flatMap((kind) => kind.t.map((t, i) => ({ kind: kind.kind, t, text: kind.text[i] }))).filter((one) => one.t >= first && one.t <= last);
  let from = n > 120 ? g.begin[n - 60] : first, to = last, width = 0, left = 0, queued = false;
  if (n < g.total) $(".note", section).textContent = `The last ${n} of ${g.total} windows are shown.`;
  const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  canvas.setAttribute("aria-label", `Busy time of ${counted(lanes, "device")} in ${counted(n, "window")}; the table of devices has the sums`);

  const x = (t) => left + (t - from) / (to - from) * (width - left);
  const time = (px) => from + (px - left) / (width - left) * (to - from);
  function view(low, high) {
    const span = clamp(high - low, least, last - first || least);
    from = clamp(low, first, Math.max(first, last - span));
    to = from + span;
    if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; draw(width); }); }
  }
  const zoom = (factor, at = (from + to) / 2) => view(at - (at - from) * factor, at + (to - at) * factor);
  const move = (share) => view(from + share * (to - from), to + share * (to - from));

  function draw(now) {
    width = now;
    const height = head + lanes * lane + foot, dots = devicePixelRatio || 1;
    canvas.width = Math.round(width * dots); canvas.height = Math.round(height * dots);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    const inks = Object.fromEntries(["paper", "soft", "line", "busy", "cold", "sync", "idle"].map((name) => [name, css(`--${name}`)]));
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    left = Math.min(width * 0.3, 14 + Math.max(...data.devices.map((name) => pen.measureText(name).width)));
    pen.textBaseline = "middle";
    data.devices.forEach((name, rank) => {
      if (lane < 14 && rank % 2) return;
      pen.fillStyle = inks.soft;
      let text = name;
      while (text.length > 3 && pen.measureText(text).width > left - 10) text = `${text.slice(0, -2)}\u2026`;
      pen.fillText(text, 0, head + (rank + 0.5) * lane);
    });
    pen.save();
    pen.beginPath(); pen.rect(left, 0, width - left, height); pen.clip();
    for (let rank = 0; rank < lanes; rank++) {
      pen.fillStyle = inks.idle;
      pen.fillRect(left, head + rank * lane + 2, width - left, lane - 4);
    }
    const low = Math.max(0, place(g.begin, from)), high = place(g.begin, to);
    const drawn = (high - low + 1) > (width - left) / 2 ? columns(pen, inks, low, high) : bars(pen, inks, low, high);
    for (const at of data.begins) if (at >= from && at <= to) { pen.fillStyle = inks.soft; pen.fillRect(x(at), 0, 1, height - foot); }
    for (const one of events) {
      if (one.t < from || one.t > to) continue;
      pen.save(); pen.translate(x(one.t), head / 2); pen.scale(0.85, 0.85);
      const shape = new Path2D(SHAPES[one.kind]); pen.fillStyle = pen.strokeStyle = css(`--d${KINDS[one.kind][1]}`); pen.lineWidth = 2;
      if (one.kind === "run" || one.kind === "skip") pen.stroke(shape); else pen.fill(shape);
      pen.restore();
    }
    pen.fillStyle = inks.soft; pen.textBaseline = "alphabetic"; pen.textAlign = "center";
    for (const at of timeTicks(from, to, Math.max(2, width / 110))) {
      const text = seconds(at, to - from), half = pen.measureText(text).width / 2;
      pen.fillText(text, clamp(x(at), left + half, width - half), height - 7);
      pen.fillRect(x(at), head + lanes * lane, 1, 4);
    }
    pen.restore();
    shown.textContent = `${high - low + 1} windows, ${seconds(from, data.seconds)} to ${seconds(to, data.seconds)}`;
    canvas.dataset.drawn = drawn;
  }
  const box = (pen, t0, t1, rank, gap) => {
    const a = Math.max(x(t0), left), b = Math.min(x(t1), width);
    if (b > a) pen.fillRect(a, head + rank * lane + 2, Math.max(b - a - (b - a > 5 ? gap : 0), 0.5), lane - 4);
  };
  const syncFrom = (i) => Math.max(g.begin[i], end(i) - Math.max(0, g.sync[i]) / 1e3);
  function bars(pen, inks, low, high) {
    let drawn = 0;
    for (let i = low; i <= high; i++) g.busy[i].forEach((ms, rank) => {
      pen.fillStyle = inks.sync; box(pen, syncFrom(i), end(i), rank, 1);
      pen.fillStyle = g.steady[i] ? inks.busy : inks.cold;
      box(pen, g.begin[i], g.begin[i] + ms / 1e3, rank, 1);
      drawn++;
    });
    return drawn;
  }
  // More windows than pixels: how much of each pixel's time was busy, as strength of colour.
  function columns(pen, inks, low, high) {
    const size = Math.ceil(width - left), step = (to - from) / size;
    for (let rank = 0; rank < lanes; rank++) {
      const share = new Float64Array(size + 1);
      for (let i = low; i <= high; i++) {
        const ms = g.busy[i][rank];
        if (ms === undefined) continue;
        let a = (g.begin[i] - from) / step;
        const b = Math.min(size, a + ms / 1e3 / step);
        for (a = Math.max(a, 0); a < b; a = Math.floor(a) + 1) share[Math.floor(a)] += Math.min(b, Math.floor(a) + 1) - a;
      }
      pen.fillStyle = inks.busy;
      for (let px = 0; px < size; px++) { pen.globalAlpha = clamp(share[px], 0, 1); pen.fillRect(left + px, head + rank * lane + 2, 1, lane - 4); }
      pen.globalAlpha = 1;
    }
    return (high - low + 1) * lanes;
  }

  function under(event) {
    const at = canvas.getBoundingClientRect(), px = event.clientX - at.left, py = event.clientY - at.top;
    if (px < left) return "";
    if (py < head) {
      const near = events.map((one) => [Math.abs(x(one.t) - px), one]).sort((a, b) => a[0] - b[0])[0];
      return near && near[0] < 8 ? `${seconds(near[1].t, data.seconds)}: ${near[1].text}` : "";
    }
    const rank = Math.floor((py - head) / lane), i = place(g.begin, time(px));
    if (rank < 0 || rank >= lanes || i < 0 || time(px) > end(i) || g.busy[i][rank] === undefined) return "";
    return [
      `${data.devices[rank]}, window ${g.window[i]}, epoch ${g.epoch[i]}`,
      `${g.counts[i][rank]} microbatches, busy ${plain(g.busy[i][rank])} ms of ${plain(g.ms[i])} ms`,
      `synchronising ${plain(g.sync[i])} ms, skew ${plain(g.skew[i])} ms`,
      `${g.examples[i]} examples in the window${g.steady[i] ? "" : "; it waited for a compile"}`,
    ].join("\n");
  }

  const held = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("held");
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => { held.delete(event.pointerId); canvas.classList.toggle("held", held.size > 0); });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) { showTip(event, under(event)); return; }
    hideTip();
    const before = held.get(event.pointerId), offset = canvas.getBoundingClientRect().left;
    const other = [...held].find(([id]) => id !== event.pointerId);
    held.set(event.pointerId, event.clientX);
    if (!other) { move((before - event.clientX) / (width - left)); return; }
    const apart = Math.abs(event.clientX - other[1]);
    if (apart > 1) zoom(Math.abs(before - other[1]) / apart, time(other[1] - offset));
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(clamp(event.deltaY, -50, 50) / 100), time(event.offsetX)); }
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); move((event.deltaX || event.deltaY) / (width - left)); }
  }, { passive: false });
  const deeds = { in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.5), right: () => move(0.5), all: () => view(first, last) };
  section.addEventListener("click", (event) => { const deed = deeds[event.target.dataset && event.target.dataset.do]; if (deed) deed(); });
  const keys = { "+": deeds.in, "=": deeds.in, "-": deeds.out, ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), Home: () => view(first, first + to - from), End: () => view(last - (to - from), last), 0: deeds.all };
  canvas.addEventListener("keydown", (event) => { if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); keys[event.key](); } });
  drawing(canvas, draw);
}

function curves() {
  const c = data.curves, t = c.t;
  const counts = data.devices.map((label, rank) => ({ label, t, v: c.counts[rank], step: true, ...look(rank) }));
  const anchor = { label: "anchor", t: data.anchor.t, v: data.anchor.v, step: true, stroke: "var(--ink)", wide: 1.25, dash: "1 3" };
  chart("counts", { series: [...counts, anchor], format: plain, low: 0, legend: true });
  chart("limit", { series: [{ label: "share of the limit", t, v: c.limit, stroke: color(0) }], format: percent, low: 0, high: 1 });
  // A peak, of a window that something disturbed, would flatten all the rest.
  const most = (values) => Math.max(1.5 * data.target, 1.2 * [...values].sort((a, b) => a - b)[Math.floor(0.98 * (values.length - 1))]) || Infinity;
  chart("overhead", { series: [{ label: "cost", t, v: c.overhead, stroke: "var(--sync)" }], format: percent, low: 0, high: 1.5 * data.target, most, target: data.target, targetLabel: "target", legend: data.target > 0 });
  const looks = { window: { stroke: "var(--d4)" }, epoch: { stroke: "var(--d0)", wide: 2.5 }, evaluation: { stroke: "var(--d1)", dots: true } };
  for (const metric of data.metrics) {
    const section = make("section", { class: "chart", "data-metric": "" }, $("#metrics"));
    make("h2", {}, section, metric.name.slice(0, 1).toUpperCase() + metric.name.slice(1));
    make("div", {}, section);
    chart(section, { series: metric.series.map((one) => ({ ...one, ...looks[one.label], label: `per ${one.label}` })), format: plain, legend: true });
  }
  if (c.bucket > 1) $("#thinned").textContent = `Curves over windows are medians of ${c.bucket} windows each; losses likewise, of as many as leave 600 points. Figures and tables are of all windows.`;
}

const data = JSON.parse($("#data").textContent);
for (const part of [gantt, marks, shares, curves]) {
  try { part(); } catch (error) { fail(error); }
}
document.documentElement.dataset.ready = "yes";
})();
