// Charts of the last minutes, one slot a span, the newest at the right. A finger, the mouse or the
// arrow keys choose a slot in all charts at once: legends have its figures then, else the newest.

import { age, element, mark, say } from "./parts.js";

const SLOTS = 60;
const HEIGHT = 132, LEFT = 46, RIGHT = 4, TOP = 8, BOTTOM = 18;

let shown = null;
let chosen = null; // the slot, or nothing
const charts = [];

// Of a kind: its `title`, `style` (lines, bars), `scale` (log, share, count, linear), `say` for a
// value in words and `axis` where that says values of the scale otherwise; `rows(span, shown)` are
// [name, class, value or null], `slo(shown)` a line to stay below. `shown` has `history`, a list of
// spans each with `age_s`, and `span_s`.
export function makeCharts(into, kinds) {
  for (const kind of kinds) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const chart = {
      ...kind, svg,
      when: element("span"),
      legend: element("ul", { class: "legend" }),
      details: element("details", {}, element("summary", {}, "as a table")),
      table: element("div", { class: "scroll", tabindex: "0", role: "region",
        "aria-label": kind.title + ", as a table" }),
    };
    // Arrow keys move along it as they do along a slider, and what a slot says is read out.
    for (const [key, value] of Object.entries({ tabindex: "0", role: "slider",
      "aria-label": kind.title, "aria-valuemin": "0", "aria-valuemax": String(SLOTS - 1) }))
      svg.setAttribute(key, value);
    svg.addEventListener("pointermove", (event) => choose(slotAt(svg, event.clientX)));
    svg.addEventListener("pointerleave", () => choose(null));
    svg.addEventListener("blur", () => choose(null));
    svg.addEventListener("keydown", (event) => step(event));
    chart.details.append(chart.table);
    chart.details.addEventListener("toggle", () => tabulate(chart));
    into.append(element("figure", {}, element("figcaption", {}, kind.title, chart.when),
      chart.legend, svg, chart.details));
    charts.push(chart);
  }
  new ResizeObserver(draw).observe(into);
}

export function showCharts(fresh) {
  shown = fresh;
  draw();
}

function choose(slot) {
  if (slot === chosen) return;
  chosen = slot;
  draw();
}

function slotAt(svg, x) {
  const box = svg.getBoundingClientRect();
  const at = (x - box.left - LEFT) / (box.width - LEFT - RIGHT);
  return Math.max(0, Math.min(SLOTS - 1, Math.floor(SLOTS * at)));
}

function step(event) {
  const now = chosen ?? SLOTS - 1;
  const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: SLOTS - 1, Escape: null };
  if (!(event.key in to)) return;
  event.preventDefault();
  const slot = to[event.key];
  choose(slot === null ? null : Math.max(0, Math.min(SLOTS - 1, slot)));
}

// The span of a slot; nothing before the server started.
const spanAt = (slot) => shown.history[slot - SLOTS + shown.history.length];

function draw() {
  if (shown) for (const chart of charts) drawOne(chart);
}

// What a legend has: the chosen slot; else the newest with a value, or the sum of what is counted.
function figures(chart) {
  const known = (rows) => rows.some(([, , value]) => value !== null);
  const each = shown.history.map((span) => chart.rows(span, shown));
  if (chosen === null && chart.scale === "count") {
    const all = each[0].map(([name, kind], at) =>
      [name, kind, each.reduce((total, rows) => total + rows[at][2], 0)]);
    return { rows: all, when: `in ${age(shown.history.length * shown.span_s)}` };
  }
  const newest = each.findLastIndex(known);
  const at = chosen === null ? newest : chosen - SLOTS + each.length;
  if (chosen !== null && at < 0) return { rows: [], when: "before the start" };
  const { age_s } = shown.history[Math.max(at, 0)];
  return {
    rows: at < 0 ? each.at(-1) : each[at],
    when: at < 0 ? "nothing yet" : age_s < shown.span_s / 2 ? "now" : age(age_s) + " ago",
  };
}

function drawOne(chart) {
  const { rows, when } = figures(chart);
  const told = rows.map(([name, , value]) =>
    `${name} ${value === null ? "–" : chart.say(value)}`);
  const slo = chart.slo ? chart.slo(shown) : 0;
  const limit = (chart.axis || String)(slo);
  if (slo) told.push("SLO " + limit);
  say(chart.when, when);
  const items = rows.map(([name, kind, value]) => element("li", {},
    element("i", { class: `swatch c-${kind} ${chart.style === "lines" ? "stroke" : ""}` }),
    name + " ", element("b", {}, value === null ? "–" : chart.say(value))));
  if (slo) items.push(element("li", {}, element("i", { class: "swatch stroke c-slo" }),
    "SLO ", element("b", {}, limit)));
  if (!items.length) items.push(element("li", {}, "none"));
  chart.legend.replaceChildren(...items);
  mark(chart.svg, "aria-valuenow", String(chosen ?? SLOTS - 1));
  mark(chart.svg, "aria-valuetext", `${when}: ${told.join(", ") || "none"}`);
  plot(chart, slo);
  if (chart.details.open) tabulate(chart);
}

const NICE = [1, 2, 2.5, 5, 10];
function niceStep(most, ticks) {
  const rough = most / ticks, power = 10 ** Math.floor(Math.log10(rough));
  return power * NICE.find((one) => one * power >= rough * 0.999);
}

// {y: value -> height in the chart, ticks: [value]}; heights go from 0 to 1.
function scaleOf(chart, values, slo) {
  const known = values.filter((value) => value !== null);
  if (chart.scale === "share") return { y: (value) => value, ticks: [0, 0.5, 1] };
  if (chart.scale === "log") {
    const all = [...known.filter((value) => value > 0), slo];
    const low = Math.floor(Math.log10(Math.min(...all) * 0.9));
    const high = Math.max(low + 2, Math.log10(Math.max(...all) * 1.4));
    const ticks = [];
    for (let power = low; power <= high; power++) ticks.push(10 ** power);
    return { y: (value) => (Math.log10(value) - low) / (high - low), ticks };
  }
  const most = Math.max(slo * 1.1, ...known, chart.scale === "count" ? 2 : 1e-4);
  const distance = Math.max(chart.scale === "count" ? 1 : 0, niceStep(most, 3));
  const top = distance * Math.ceil(most / distance), ticks = [];
  for (let value = 0; value <= top * 1.001; value += distance) ticks.push(value);
  return { y: (value) => value / top, ticks };
}

function plot(chart, slo) {
  const { svg } = chart, width = svg.clientWidth || 400, shapes = [];
  const add = (name, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    shapes.push(node);
  };
  const each = [];
  for (let slot = 0; slot < SLOTS; slot++)
    each.push(spanAt(slot) ? chart.rows(spanAt(slot), shown) : []);
  const values = chart.style === "bars"
    ? each.map((rows) => rows.reduce((all, [, , value]) => all + (value || 0), 0))
    : each.flatMap((rows) => rows.map(([, , value]) => value));
  const scale = scaleOf(chart, values, slo);
  const apart = (width - LEFT - RIGHT) / SLOTS;
  const x = (slot) => LEFT + apart * slot;
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - scale.y(value));
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  for (const tick of scale.ticks) {
    add("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) });
    add("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, axis(chart, tick));
  }
  add("text", { x: LEFT, y: HEIGHT - 3 }, age(SLOTS * shown.span_s) + " ago");
  add("text", { x: width - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "now");
  (chart.style === "bars" ? bars : lines)(add, each, x, y, apart);
  if (slo)
    add("line", { class: "slo", x1: LEFT, x2: width - RIGHT, y1: y(slo), y2: y(slo) });
  if (chosen !== null)
    add("rect", { class: "cursor", x: x(chosen), y: TOP, width: apart,
      height: HEIGHT - TOP - BOTTOM });
  svg.replaceChildren(...shapes);
}

function axis(chart, tick) {
  if (chart.axis) return chart.axis(tick);
  return chart.scale === "linear" ? String(+tick.toFixed(2)) : chart.say(tick);
}

function bars(add, each, x, y, apart) {
  each.forEach((rows, slot) => {
    let below = 0;
    for (const [, kind, value] of rows) {
      if (!value) continue;
      add("rect", { class: "c-" + kind, x: x(slot) + 0.5, y: y(below + value),
        width: Math.max(1, apart - 1), height: y(below) - y(below + value) });
      below += value;
    }
  });
}

// A line goes on over slots without a value, and a value alone is a dot.
function lines(add, each, x, y, apart) {
  const names = Math.max(...each.map((rows) => rows.length));
  for (let at = 0; at < names; at++) {
    const points = [];
    let kind = "";
    each.forEach((rows, slot) => {
      if (!rows[at] || rows[at][2] === null) return;
      kind = rows[at][1];
      points.push([x(slot) + apart / 2, y(rows[at][2])]);
    });
    const path = points.map(([h, v]) => `${h.toFixed(1)},${v.toFixed(1)}`).join(" ");
    if (points.length > 1) add("polyline", { class: `stroke c-${kind}`, points: path });
    for (const [h, v] of points) add("circle", { class: "c-" + kind, cx: h, cy: v, r: 1.6 });
  }
}

function tabulate(chart) {
  if (!shown || !chart.details.open) return;
  const names = chart.rows(shown.history.at(-1), shown).map(([name]) => name);
  const cell = (name, text, more = {}) => element(name, more, text);
  const head = ["when", ...names].map((name) => cell("th", name, { scope: "col" }));
  const rows = [...shown.history].reverse().map((span) => element("tr", {},
    cell("th", age(span.age_s) + " ago", { scope: "row" }),
    ...chart.rows(span, shown).map(([, , value]) =>
      cell("td", value === null ? "–" : chart.say(value)))));
  const { scrollTop } = chart.table;
  chart.table.replaceChildren(element("table", {},
    element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
  chart.table.scrollTop = scrollTop;
}
