// What happened lately, to the pool and to objects.

import { element, mark, say } from "./parts.js";
import { body, cell, keep, table } from "./rows.js";
import { moment } from "./words.js";

const $ = (id) => document.getElementById(id);
const KEPT = { pool: 200, objects: 300 }, SHOWN = 100;
const OF_OBJECTS = new Set(["stored", "removed", "cleared", "objects"]);
const KIND_CLASS = { stored: "good", removed: "soft", cleared: "warn", objects: "soft" };
const lists = { pool: [], objects: [] }; // the newest first
let view = null;

export function makeEvents() {
  $("which").addEventListener("change", showEvents);
}

export function takeEvents(fresh, anew) {
  fresh.reverse();
  for (const [of, list] of Object.entries(lists)) {
    const mine = fresh.filter(({ kind }) => OF_OBJECTS.has(kind) === (of === "objects"));
    lists[of] = [...mine, ...(anew ? [] : list)].slice(0, KEPT[of]);
  }
}

export function showEvents() {
  if ($("view-events").hidden) return;
  view ||= eventsTable($("events"), "Recent events, newest first");
  const which = $("which").value;
  const both = [...lists.pool, ...lists.objects].sort((one, other) => other.number - one.number);
  listEvents(view, which ? lists[which] : both);
}

export const eventsTable = (into, caption) => table(into, caption, [
  ["when", "left"], ["what", "left"], ["of", "left"], ["tier", "left minor"],
]);

export const listEvents = (into, events) =>
  keep(into, events.slice(0, SHOWN), ({ number }) => number, makeEvent);

function makeEvent() {
  const kind = element("span", { class: "pill" }), of = element("span");
  const cells = [cell("left soft"), cell("left", "", kind), cell("left name long", "", of),
    cell("left minor")];
  return {
    body: body(...cells),
    update(event) {
      say(cells[0], moment(event.time_s));
      say(kind, event.kind);
      mark(kind, "class", "pill " + (KIND_CLASS[event.kind] || "warn"));
      const name = event.what || `digest ${event.digest}`;
      const named = event.what && event.kind === "stored";
      const node = named ? element("a", { href: "#keys/" + encodeURIComponent(name) }, name) : name;
      if (of.textContent !== name) of.replaceChildren(node);
      mark(of, "title", name);
      say(cells[3], event.tier || "");
    },
  };
}
