// The tables of workers and requests.

import { SOURCES, SOURCE_NAMES, STAGES } from "./kinds.js";
import { age, bar, count, element, fill, mark, percent, say, seconds, sum } from "./parts.js";
import { tail, words } from "./parts.js";
import { body, cell, define, keep, table, withBar } from "./rows.js";

// -- workers

const STATE_CLASS = { there: "good", draining: "warn", lost: "bad" };
let workers = null;

export function showWorkers(stats) {
  workers ||= table(document.getElementById("workers"), "Workers", [
    ["worker", "left"], ["role", "left"], ["state", "left"], ["seen", ""],
    ["load of its SLO", "left"], ["queued", ""], ["decoding", ""], ["KV in use", "left"],
    ["kept blocks", ""], ["between tokens", ""], ["role changes", "left"],
  ]);
  keep(workers, stats.workers, (worker) => worker.address, makeWorker);
}

function makeWorker() {
  const role = element("span"), load = bar(), kv = bar();
  const loadText = element("span"), kvText = element("span");
  const cells = {
    name: cell("left name"), role: cell("left", "", role), state: cell("left", ""),
    seen: cell("", "seen"), load: cell("left wide", "", withBar("load", loadText, load)),
    queued: cell("", "queued"), running: cell("", "decoding"),
    kv: cell("left wide", "", withBar("KV in use", kvText, kv)), kept: cell("", "kept blocks"),
    tbt: cell("", "between tokens"), changes: cell("left", "role changes"),
  };
  return {
    body: body(...Object.values(cells)),
    update(worker) {
      say(cells.name, worker.id);
      mark(cells.name, "title", `${worker.id} at ${worker.address}`);
      say(role, worker.role);
      mark(role, "class", "role " + worker.role);
      say(cells.state, worker.state);
      mark(cells.state, "class", "left " + STATE_CLASS[worker.state]);
      say(cells.seen, worker.seen_s < 2 ? "now" : age(worker.seen_s) + " ago");
      say(loadText, percent(worker.load));
      fill(load, [[worker.load > 1 ? "bad" : worker.role, worker.load]],
        `predicted time is ${percent(worker.load)} of the SLO`);
      say(cells.queued, worker.queued);
      say(cells.running, worker.running);
      say(kvText, percent(worker.kv_used));
      fill(kv, [["queue", worker.kv_used]], `${percent(worker.kv_used)} of its KV blocks`);
      say(cells.kept, count(worker.kept_blocks));
      say(cells.tbt, seconds(worker.tbt_s));
      const last = worker.changes.at(-1);
      say(cells.changes, last
        ? `${worker.changes.length}, to ${last.role} ${age(last.age_s)} ago` : "none");
    },
  };
}

// -- requests

let requests = null;

export function showRequests(stats, which, most) {
  requests ||= table(document.getElementById("requests"), "Last requests, newest first", [
    ["request", "left"], ["stage", "left"], ["age", ""], ["prompt tokens, by source", "left"],
    ["answer", ""], ["TTFT", ""], ["time, by stage", "left"], ["prefill at", "left minor"],
    ["decode at", "left minor"],
  ]);
  const found = stats.requests.filter((request) => !which || request.kind === which);
  keep(requests, found.slice(0, most), (request) => request.request, makeRequest);
  return found.length;
}

const KIND_CLASS = { answered: "good", refused: "warn", failed: "bad", cancelled: "soft" };
let rows = 0;

function makeRequest(request) {
  const more = `more-${++rows}`;
  const open = element("button", { class: "open", type: "button", "aria-expanded": "false",
    "aria-controls": more, title: request.request }, tail(request.request));
  const stage = element("span", { class: "pill" });
  const from = element("span"), source = bar(), took = element("span"), time = bar();
  const cells = {
    name: cell("left", "", open), stage: cell("left", "", stage), age: cell("soft", "age"),
    prompt: cell("left wide", "", withBar("prompt", from, source)), answer: cell("", "answer"),
    ttft: cell("", "TTFT"), time: cell("left wide", "", withBar("time", took, time)),
    prefill: cell("left name minor", "prefill at"), decode: cell("left name minor", "decode at"),
  };
  const facts = element("dl");
  const below = element("tr", { class: "more", role: "row", id: more },
    element("td", { class: "more", role: "cell", colspan: "9" }, facts));
  below.hidden = true;
  let shown = request;
  open.addEventListener("click", () => {
    below.hidden = !below.hidden;
    mark(open, "aria-expanded", String(!below.hidden));
    explain(facts, shown);
  });
  const lines = element("tbody", { role: "rowgroup" },
    element("tr", { role: "row" }, ...Object.values(cells)), below);
  return {
    body: lines,
    update(fresh) {
      shown = fresh;
      const turnedAway = fresh.kind === "refused" && !fresh.attempts;
      say(stage, fresh.kind === "answered" ? fresh.kind : words(fresh.stage));
      mark(stage, "class", "pill " + (KIND_CLASS[fresh.kind] || "stage-" + fresh.stage));
      say(cells.age, age(fresh.age_s));
      showPrompt(from, source, fresh);
      say(cells.answer, count(fresh.generated_tokens));
      say(cells.ttft, seconds(fresh.ttft_s));
      say(took, seconds(fresh.total_s));
      const all = sum(fresh.seconds);
      source.hidden = time.hidden = turnedAway;
      for (const each of [cells.prompt, cells.time])
        mark(each, "class", turnedAway ? "left" : "left wide");
      for (const each of [cells.answer, cells.ttft]) mark(each, "class", turnedAway ? "minor" : "");
      fill(time, STAGES.filter((name) => fresh.seconds[name] > 0)
        .map((name) => [name, fresh.seconds[name] / all]), timesOf(fresh));
      for (const side of ["prefill", "decode"]) {
        say(cells[side], fresh[side] || "–");
        mark(cells[side], "title", fresh[side]);
      }
      if (!below.hidden) explain(facts, shown);
    },
  };
}

function showPrompt(text, source, request) {
  const found = SOURCES.filter((name) => request.sources[name]);
  const all = sum(request.sources);
  const told = found.map((name) => `${SOURCE_NAMES[name]} ${count(request.sources[name])}`);
  const hits = all ? `, ${percent(1 - (request.sources.computed || 0) / all)} found` : "";
  say(text, count(request.prompt_tokens) + hits);
  fill(source, found.map((name) => [name, request.sources[name] / all]),
    told.join(", ") || "not computed yet");
}

const timesOf = (request) => STAGES
  .map((name) => `${name} ${seconds(request.seconds[name])}`).join(", ");

// Everything that is known of a request, under its row.
function explain(into, request) {
  const facts = [["request", request.request]];
  if (request.why) facts.unshift([words(request.stage), request.why]);
  const whole = facts.length;
  if (request.attempts) facts.push(
    ["prefill at", request.prefill || "–"],
    ["decode at", request.decode || "–"],
    ["attempts", count(request.attempts)],
    ["total", seconds(request.total_s)],
    ...STAGES.map((name) => [name, seconds(request.seconds[name])]),
    ...SOURCES.map((name) => [`tokens, ${SOURCE_NAMES[name]}`, count(request.sources[name] || 0)]),
  );
  define(into, facts, whole);
}
