// Segments by tier, and the workers that lend them.

import { age, bar, count, element, fill, mark, percent, say } from "./parts.js";
import { body, cell, keep, table, withBar } from "./rows.js";
import { change } from "./changes.js";
import { filled, size } from "./words.js";

const $ = (id) => document.getElementById(id);
const STATE_CLASS = {
  ok: "good", alive: "good", suspect: "warn", draining: "warn", drained: "warn",
};
const tiers = {};
let workers = null;

export function showSegments({ segments, segments_all, tiers: found }) {
  for (const { tier, used, size: all } of found) tiers[tier] ||= makeTier(tier);
  for (const [tier, view] of Object.entries(tiers)) {
    const mine = segments.filter((segment) => segment.tier === tier);
    const sums = found.find((one) => one.tier === tier);
    view.panel.hidden = !mine.length;
    if (sums) say(view.sum, `${size(sums.used)} of ${size(sums.size)} in use`);
    keep(view.rows, mine, (segment) => segment.name, makeSegment);
  }
  more($("segments-more"), segments.length, segments_all, "segments");
}

function makeTier(tier) {
  const rows = element("div"), sum = element("span", { class: "soft" });
  const panel = element("div", { class: "panel" },
    element("div", { class: "line" }, element("h2", {}, tier), sum), rows);
  $("segments").append(panel);
  const view = table(rows, `Segments: ${tier}`, [
    ["segment", "left"], ["state", "left"], ["in use", "left"], ["size", ""], ["worker", "left"],
    ["host", "left"], ["for", "left"], ["", ""],
  ]);
  return { panel, sum, rows: view };
}

function makeSegment({ name }) {
  const line = bar(), text = element("span");
  const drain = element("button", { type: "button" }, "Drain…");
  const cells = {
    name: cell("left name"), state: cell("left"),
    used: cell("left wide", "", withBar("in use", text, line)),
    size: cell("", "size"), worker: cell("left name", "worker"), host: cell("left name", "host"),
    whose: cell("left name", "for"), does: cell("", "", drain),
  };
  drain.setAttribute("aria-label", `Drain ${name}`);
  drain.addEventListener("click", () => change({
    title: `Drain segment ${name}`,
    what: "The segment takes no new objects from now on. Everything on it is copied to other "
      + "segments, as far as there is room, and it is empty when that has ended.",
    name: "Drain the segment", path: "v1/drain", body: { segment: name },
    done: () => `Segment ${name} is being drained.`,
  }));
  return {
    body: body(...Object.values(cells)),
    update(segment) {
      const full = filled(segment.used, segment.size);
      say(cells.name, segment.name);
      mark(cells.name, "title", segment.name);
      say(cells.state, segment.fault ? `fails: ${segment.fault}` : segment.state);
      mark(cells.state, "class",
        "left " + (segment.fault ? "bad" : STATE_CLASS[segment.state] || "bad"));
      say(text, percent(full));
      fill(line, [[segment.tier, full]], `${size(segment.used)} of ${size(segment.size)} in use`);
      say(cells.size, size(segment.size));
      for (const key of ["worker", "host"]) {
        say(cells[key], segment[key] || "–");
        mark(cells[key], "title", segment[key]);
      }
      say(cells.whose, segment.namespace || "all");
      drain.hidden = segment.state !== "ok";
    },
  };
}

export function showWorkers({ workers: found, workers_all }) {
  workers ||= table($("workers"), "Workers", [
    ["worker", "left"], ["state", "left"], ["heard", ""], ["host", "left"], ["segments", ""],
    ["in use", "left"], ["lends", ""], ["what fails", "left"],
  ]);
  keep(workers, found, (worker) => worker.name, makeWorker);
  more($("workers-more"), found.length, workers_all, "workers");
}

function makeWorker() {
  const line = bar(), text = element("span");
  const cells = {
    name: cell("left name"), state: cell("left"), heard: cell("", "heard"),
    host: cell("left name", "host"), segments: cell("", "segments"),
    used: cell("left wide", "", withBar("in use", text, line)), size: cell("", "lends"),
    faults: cell("left", "what fails"),
  };
  return {
    body: body(...Object.values(cells)),
    update(worker) {
      const full = filled(worker.used, worker.size);
      say(cells.name, worker.name);
      mark(cells.name, "title", worker.name);
      say(cells.state, worker.state);
      mark(cells.state, "class", "left " + (STATE_CLASS[worker.state] || "bad"));
      say(cells.heard, worker.silent_s < 2 ? "now" : age(worker.silent_s) + " ago");
      say(cells.host, worker.host || "–");
      say(cells.segments, count(worker.segments));
      say(text, percent(full));
      fill(line, [["memory", full]], `${size(worker.used)} of ${size(worker.size)} in use`);
      say(cells.size, size(worker.size));
      say(cells.faults, worker.faults.join("; ") || "nothing");
    },
  };
}

function more(node, shown, all, what) {
  node.hidden = shown >= all;
  say(node, `${count(shown)} of ${count(all)} ${what} are shown, those in trouble first.`);
}
