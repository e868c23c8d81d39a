// Asks the server once a second and shows what it says. When it does not answer the page says so,
// keeps what was known, and goes on asking. A page that nobody sees does not ask.

import { makeCharts, showCharts } from "./charts.js";
import { KINDS, SOURCES, SOURCE_NAMES, STAGES } from "./kinds.js";
import { age, count, element, exact, legend, mark, percent, say, seconds, sum } from "./parts.js";
import { words } from "./parts.js";
import { showRequests, showWorkers } from "./tables.js";

const EVERY_MS = 1000, ANSWER_MS = 4000, LINES = 16;
const KEY = "mooncake-key"; // of the tab's storage, which ends with the tab
const $ = (id) => document.getElementById(id);

let last = null; // what was heard last
let lostAt = 0;
let timer = 0;

// -- at a glance

const TILES = {
  under: "Under way", answered: "Answered", refused: "Refused", failed: "Failed",
  ttft: "TTFT, median", tbt: "TBT, median", found: "Hit rate", pool: "Pool",
};
const tiles = {};

function makeTiles() {
  for (const [key, title] of Object.entries(TILES)) {
    const figure = element("dd", { class: "figure" }, "–");
    const more = element("dd", { class: "more" });
    tiles[key] = { figure, more };
    $("tiles").append(element("div", {}, element("dt", {}, title), figure, more));
  }
}

function tile(key, figure, more, kind = "") {
  say(tiles[key].figure, figure);
  say(tiles[key].more, more);
  tiles[key].figure.className = "figure " + kind;
}

// "queue 2, decode 1", of what is not zero.
const listed = (values) => Object.entries(values).filter(([, value]) => value)
  .map(([name, value]) => `${words(name)} ${count(value)}`).join(", ");

function showTiles(stats) {
  const { ended, slo } = stats;
  const refused = sum(ended.refused), failed = sum(ended.failed);
  tile("under", count(stats.under_way), listed(stats.stages) || "nothing waits");
  tile("answered", count(sum(ended.answered)), `${count(stats.generated_tokens)} tokens`);
  tile("refused", count(refused), listed(ended.refused) || "none", refused ? "warn" : "");
  tile("failed", count(failed), listed({ ...ended.failed, ...ended.cancelled }) || "none",
    failed ? "bad" : "");
  for (const [key, times, most] of [
    ["ttft", stats.ttft_s, slo.ttft_s], ["tbt", stats.tbt_s, slo.tbt_s]])
    tile(key, seconds(times.median), `p99 ${seconds(times.p99)}, SLO ${exact(most)}`,
      times.median > most ? "bad" : "");
  const all = sum(stats.sources);
  tile("found", all ? percent(1 - stats.sources.computed / all) : "–", all
    ? SOURCES.slice(0, 3).map((name) => `${name} ${percent(stats.sources[name] / all)}`).join(", ")
    : "no prompt yet");
  const [store, why] = stats.health.store.split(": ");
  tile("pool", store, why || `${count(stats.pool_blocks)} objects known`,
    store === "down" ? "bad" : "");
}

// -- what is heard

function show(stats) {
  last = stats;
  lostAt = 0;
  const { health } = stats;
  document.title = `${stats.under_way} under way – ${stats.model || "mooncake serve"}`;
  say($("model"), stats.model);
  say($("facts"), `${health.workers.prefill} prefill, ${health.workers.decode} decode, `
    + `up for ${age(stats.uptime_s)}`);
  showTiles(stats);
  showCharts(stats);
  showWorkers(stats);
  showLines();
  if (!health.serving) state("troubled", "not serving: a worker of each role is needed");
  else state("live", "live");
}

function showLines() {
  if (!last) return;
  const all = $("all").getAttribute("aria-pressed") === "true";
  const found = showRequests(last, $("which").value, all ? Infinity : LINES);
  $("all").hidden = found <= LINES;
  say($("all"), all ? `Show ${LINES}` : `Show all ${found}`);
}

function state(name, text) {
  document.body.dataset.state = name;
  say($("status"), text);
  $("lost").hidden = name !== "lost";
  $("unlock").hidden = name !== "locked";
  document.querySelector("main").hidden = name === "locked";
  $("forget").hidden = !sessionStorage.getItem(KEY);
}

function lost() {
  lostAt ||= Date.now();
  state("lost", "disconnected");
  say($("lost"), `The server has not answered for ${age((Date.now() - lostAt) / 1000)}. `
    + (last ? "What is shown was known then. " : "") + "The page goes on asking.");
}

// What the server says; nothing where it wants a key.
async function ask() {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch("stats", { headers, signal: AbortSignal.timeout(ANSWER_MS) });
  if (answer.status === 401) {
    sessionStorage.removeItem(KEY);
    lock(key ? "The server does not know this key." : "");
    return null;
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

async function refresh() {
  clearTimeout(timer);
  if (document.hidden) return;
  let stats = null;
  try {
    stats = await ask();
  } catch {
    lost();
  }
  clearTimeout(timer); // of another question that was under way
  if (document.body.dataset.state !== "locked" || stats) timer = setTimeout(refresh, EVERY_MS);
  if (stats) show(stats);
}

// -- the key

function lock(why) {
  if (document.body.dataset.state !== "locked") {
    state("locked", "an API key is needed");
    $("key").focus();
  }
  say($("wrong"), why);
}

$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  $("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) return lock("A key has no such characters."); // nor has a header
  sessionStorage.setItem(KEY, key);
  refresh();
});

$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  refresh();
});

// -- beginning

makeTiles();
makeCharts($("charts"), KINDS);
legend($("stages"), Object.fromEntries(STAGES.map((stage) => [stage, stage])));
legend($("sources"), SOURCE_NAMES);
$("which").addEventListener("change", showLines);
$("all").addEventListener("click", () => {
  mark($("all"), "aria-pressed", String($("all").getAttribute("aria-pressed") !== "true"));
  showLines();
});
document.addEventListener("visibilitychange", refresh);
refresh();
