// Listens to the master and shows what it says, in the view that the address names. When nothing is
// heard the page says so, keeps what was known, and tries again. A page that nobody sees listens to
// nothing.

import { age, say } from "./parts.js";
import { makeChanges } from "./changes.js";
import { makeEvents, showEvents, takeEvents } from "./events.js";
import { showJournal } from "./journal.js";
import { hideKeys, makeKeys, showKeys } from "./keys.js";
import { makeOverview, showOverview, takeSpans } from "./overview.js";
import { showSegments, showWorkers } from "./places.js";

const $ = (id) => document.getElementById(id);
const AGAIN_MS = 1000, SILENCE_MS = 12000;
const VIEWS = [...document.querySelectorAll("nav a")].map((link) => link.dataset.view);

let last = null; // the figures that were heard last
let source = null, lostAt = 0, timer = 0;

// -- views

const SHOW = {
  overview: () => showOverview(last),
  segments: () => showSegments(last),
  workers: () => showWorkers(last),
  events: showEvents,
  journal: () => showJournal(last),
};

const named = () => {
  const [view, ...more] = location.hash.slice(1).split("/");
  return VIEWS.includes(view) ? [view, more.join("/")] : ["overview", ""];
};

function show() {
  if (!last) return;
  const [view] = named();
  say($("facts"), `${last.ready ? "ready" : "not ready"}, version ${last.version}, `
    + `${last.shards.length === 1 ? "1 shard" : `${last.shards.length} shards`}, `
    + `up for ${age(last.uptime_s)}`);
  document.title = last.problems.length
    ? `${last.problems.length} to look at – mooncake master` : "mooncake master";
  if (view !== "overview") SHOW.overview(); // what is wrong is counted beside its name
  SHOW[view]?.();
}

function go() {
  const [view, more] = named();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const name of VIEWS) $(`view-${name}`).hidden = name !== view;
  $("done").hidden = true;
  show();
  if (view === "keys") showKeys(decodeURIComponent(more));
  else hideKeys();
}

// -- what is heard

function state(name, text) {
  document.body.dataset.state = name;
  say($("status"), text);
  $("lost").hidden = name !== "lost";
}

function lost() {
  source?.close();
  lostAt ||= Date.now();
  state("lost", "disconnected");
  say($("lost"), `The master has not been heard for ${age((Date.now() - lostAt) / 1000)}. `
    + (last ? "What is shown was known then. " : "") + "The page tries again.");
  clearTimeout(timer);
  timer = setTimeout(listen, AGAIN_MS);
}

function listen() {
  clearTimeout(timer);
  source?.close();
  if (document.hidden) return;
  let anew = { spans: true, events: true };
  const heard = (kind, take) => source.addEventListener(kind, ({ data }) => {
    clearTimeout(timer);
    timer = setTimeout(lost, SILENCE_MS);
    take(JSON.parse(data), anew[kind]);
    anew[kind] = false;
  });
  source = new EventSource("page/live");
  heard("spans", takeSpans);
  heard("events", takeEvents);
  heard("figures", (figures) => {
    lostAt = 0;
    if ("ready" in figures) {
      if (!last) performance.mark("figures");
      last = figures;
      show();
    }
    if (figures.failed) state("troubled", `the pool does not answer: ${figures.failed}`);
    else if (!figures.ready) state("troubled", figures.refusing);
    else state("live", "live");
  });
  source.addEventListener("error", lost);
}

makeOverview();
makeEvents();
makeKeys();
makeChanges();
addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => {
  listen();
  go();
});
go();
listen();
