// What is wrong, figures at a glance, how full each tier is, and the course of the last hour.

import { makeCharts, showCharts } from "./charts.js";
import { bar, count, element, fill, mark, percent, say } from "./parts.js";
import { filled, rate, short, size } from "./words.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 60, SPANS_MAX = 720;
const TIERS = ["memory", "disk", "cold"];

const TILES = {
  objects: "Objects", memory: "Memory", hits: "Hit rate", read: "Read", written: "Written",
  keys: "Keys asked for", evicted: "Evicted", workers: "Workers",
};
const tiles = {}, bars = {};
let spans = []; // the oldest first
let now = 0;
let stats = null;

const each_s = (span, name) => span[name] / span.seconds;
const KINDS = [
  {
    title: "Throughput", style: "lines", scale: "linear", say: rate,
    axis: (value) => rate(value).replace("/s", ""),
    rows: (span) => [["read", "read", each_s(span, "read_bytes")],
      ["written", "written", each_s(span, "written_bytes")]],
  },
  {
    title: "Hit rate of gets", style: "lines", scale: "share", say: percent,
    rows: (span) => [["found", "found", share(span.hits, span.misses)]],
  },
  {
    title: "Keys and requests, each second", style: "lines", scale: "linear", say: short,
    axis: short,
    rows: (span) => [["keys", "read", each_s(span, "keys")],
      ["requests", "written", each_s(span, "requests")]],
  },
  {
    title: "In use, by tier", style: "lines", scale: "share", say: percent,
    rows: (span) => TIERS.filter((tier) => tier === "memory" || span[tier] !== null)
      .map((tier) => [tier, tier, span[tier]]),
  },
  {
    title: "Evicted, and moved between tiers", style: "bars", scale: "count", say: count,
    rows: (span) => [["evicted", "evicted", span.evicted_objects],
      ["demoted", "disk", span.demoted_objects], ["promoted", "found", span.promoted_objects]],
  },
  {
    title: "Objects", style: "lines", scale: "linear", say: count, axis: short,
    rows: (span) => [["objects", "memory", span.objects]],
  },
];

const share = (hits, misses) => hits + misses ? hits / (hits + misses) : null;

export function makeOverview() {
  for (const [key, title] of Object.entries(TILES)) {
    const figure = element("dd", { class: "figure" }, "–");
    const more = element("dd", { class: "more" });
    tiles[key] = { figure, more };
    $("tiles").append(element("div", {}, element("dt", {}, title), figure, more));
  }
  makeCharts($("charts"), KINDS);
  $("range").addEventListener("change", draw);
}

export function takeSpans({ fields, span_s, spans: fresh }, anew) {
  const read = (span) => Object.fromEntries(fields.map((name, at) => [name, span[at]]));
  spans = [...(anew ? [] : spans), ...fresh.map(read)].slice(-SPANS_MAX);
  spans.span_s = span_s;
}

export function showOverview(fresh) {
  stats = fresh;
  now = stats.now;
  showProblems(stats.problems);
  showTiles(stats);
  showTiers(stats.tiers);
  draw();
}

function showProblems(problems) {
  const shown = problems.slice(0, 12).map(({ grave, what, view }) =>
    element("li", { class: grave }, element("b", {}, grave === "bad" ? "Wrong: " : "Look at: "),
      what, " ", element("a", { href: "#" + view }, view === "overview" ? "" : `see ${view}`)));
  if (problems.length > 12) shown.push(element("li", {}, `and ${problems.length - 12} more`));
  const told = shown.map((one) => one.textContent).join("\n");
  if (told !== $("problems").dataset.told) $("problems").replaceChildren(...shown);
  $("problems").dataset.told = told;
  $("problems").hidden = !problems.length;
  $("wrong").hidden = !problems.length;
  say($("wrong"), problems.length);
}

function tile(key, figure, more, kind = "") {
  say(tiles[key].figure, figure);
  say(tiles[key].more, more);
  mark(tiles[key].figure, "class", "figure " + kind);
}

function showTiles({ rates, tiers, objects, evicted, shards, workers, workers_all }) {
  const memory = tiers.find(({ tier }) => tier === "memory");
  const recent = spans.slice(-SHOWN);
  const total = (name) => recent.reduce((all, span) => all + span[name], 0);
  const hits = share(total("hits") + rates.hits, total("misses") + rates.misses);
  const writing = shards.reduce((all, shard) => all + shard.writing, 0);
  tile("objects", count(objects), `${count(writing)} being written`);
  tile("memory", memory ? percent(filled(memory.used, memory.size)) : "none",
    memory ? `${size(memory.used)} of ${size(memory.size)}` : "no worker lends any",
    memory ? "" : "bad");
  tile("hits", hits === null ? "–" : percent(hits),
    hits === null ? "nobody asked yet" : "of the last 5 minutes");
  tile("read", rate(rates.read_bytes), `${short(rates.hits)} found/s`);
  tile("written", rate(rates.written_bytes), "of puts that ended");
  tile("keys", `${short(rates.keys)}/s`, `${short(rates.requests)} requests/s`);
  tile("evicted", `${short(rates.evicted_objects)}/s`, `${count(evicted)} so far`);
  const well = workers_all - workers.filter(({ state }) => state !== "alive").length;
  tile("workers", `${well} of ${workers_all}`, "alive", well < workers_all ? "warn" : "");
}

function showTiers(tiers) {
  for (const { tier, used, size: all, segments } of tiers) {
    bars[tier] ||= makeTier(tier);
    const { text, line } = bars[tier];
    const told = `${size(used)} of ${size(all)} in ${count(segments)} `
      + (segments === 1 ? "segment" : "segments");
    say(text, `${percent(filled(used, all))}, ${told}`);
    fill(line, [[tier, filled(used, all)]], `${tier}: ${told}`);
  }
  for (const [tier, { row }] of Object.entries(bars))
    row.hidden = !tiers.some((one) => one.tier === tier);
}

function makeTier(tier) {
  const text = element("span", { class: "soft" }), line = bar();
  const row = element("div", { class: "tier" }, element("b", {}, tier), line, text);
  $("tiers").append(row);
  return { text, line, row };
}

// So many spans as one: what was counted adds up, what was measured is the last.
function joined(group) {
  const last = { ...group.at(-1) };
  for (const name of Object.keys(last))
    if (!["at", "objects", ...TIERS].includes(name))
      last[name] = group.reduce((all, span) => all + span[name], 0);
  return last;
}

function draw() {
  if (!stats || !spans.length || $("view-overview").hidden) return;
  const at_once = Number($("range").value), history = [];
  for (let end = spans.length; end > 0 && history.length < SHOWN; end -= at_once)
    history.unshift(joined(spans.slice(Math.max(0, end - at_once), end)));
  for (const span of history) span.age_s = Math.max(0, now - span.at);
  showCharts({ history, span_s: at_once * spans.span_s });
}
