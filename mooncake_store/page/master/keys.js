// Objects by key, all that is known of one, and what is read most.

import { age, count, element, say } from "./parts.js";
import { body, cell, define, keep, table } from "./rows.js";
import { change } from "./changes.js";
import { eventsTable, listEvents } from "./events.js";
import { moment, size } from "./words.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 2000;
let wanted = null; // what was searched for last
let listed = [], after = "";
let found = null, hotKeys = null, hotPrefixes = null;
let described = null; // what is shown of one object
let timer = 0;

const linked = (key) => element("a", { href: "#keys/" + encodeURIComponent(key) }, key);

async function ask(path, fields) {
  const answer = await fetch(`page/${path}?${new URLSearchParams(fields)}`);
  const told = await answer.json();
  if (!answer.ok) throw new Error(`${told.error.message}; ${told.error.advice}`);
  return told;
}

export function makeKeys() {
  $("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const hash = "#keys/" + encodeURIComponent($("key").value);
    if (location.hash === hash) search(wanted);
    else location.hash = hash;
  });
  $("further").addEventListener("click", () => list(wanted));
  $("remove-prefix").addEventListener("click", () => change({
    title: `Remove all objects that begin with ${wanted}`,
    what: `Every object whose key begins with "${wanted}" is removed, also those that are not `
      + "listed here. Those that are read or written just now stay. This cannot be taken back.",
    name: "Remove them all", path: "v1/remove", body: { prefix: wanted },
    done: ({ removed }) => {
      search(wanted);
      return `${count(removed)} objects were removed.`;
    },
  }));
}

// Called whenever the view is shown, with what is behind its name in the address.
export function showKeys(key) {
  if (key !== wanted) search(key);
  refresh();
}

export const hideKeys = () => clearTimeout(timer);

// What changes by itself; lists change when they are asked for.
async function refresh() {
  clearTimeout(timer);
  await Promise.all([describe(wanted), heat()]);
  clearTimeout(timer); // of another call that was under way
  if (!$("view-keys").hidden && !document.hidden) timer = setTimeout(refresh, EVERY_MS);
}

async function search(key) {
  wanted = key;
  $("key").value = key;
  listed = [];
  after = "";
  say($("found-title"), key ? `Objects whose keys begin with ${key}` : "Objects");
  $("remove-prefix").hidden = !key;
  say($("remove-prefix"), "Remove all of these…");
  await Promise.all([describe(key), list(key)]);
}

async function list(key) {
  found ||= table($("found"), "Objects", [
    ["key", "left"], ["size", ""], ["since", ""], ["replicas", ""],
  ]);
  try {
    const told = await ask("objects", { prefix: key, after });
    if (key !== wanted) return;
    listed = [...listed, ...told.objects];
    after = told.after;
    keep(found, listed, (object) => object.key, makeObject);
    say(found.empty, "There is none.");
  } catch (error) {
    say(found.empty, error.message);
    found.empty.hidden = false;
  }
  $("further").hidden = !after;
}

function makeObject({ key, plain }) {
  const cells = [cell("left name long", "", plain ? linked(key) : key), cell("", "size"),
    cell("soft", "since"), cell("", "replicas")];
  return {
    body: body(...cells),
    update(object) {
      say(cells[1], size(object.size));
      say(cells[2], age(Math.max(0, Date.now() / 1000 - object.created_s)) + " ago");
      say(cells[3], object.replicas);
    },
  };
}

// All that is known of one, if there is one of this key, or was lately.
async function describe(key) {
  if (described?.key !== key) {
    described = null;
    $("object").hidden = true;
  }
  if (!key) return;
  let told = null;
  try {
    told = await ask("object", { key });
  } catch {
    return; // the list says what is wrong
  }
  if (key !== wanted || !(told.object || told.events.length)) return;
  described ||= makeDescription(key);
  described.update(told);
  $("object").hidden = false;
}

function makeDescription(key) {
  const remove = element("button", { type: "button" }, "Remove…");
  const facts = element("dl", { class: "facts" }), events = element("div");
  const gone = element("p", { class: "empty" }, "There is no such object now.");
  remove.addEventListener("click", () => change({
    title: `Remove ${key}`,
    what: `The object "${key}" and all its replicas are removed. This cannot be taken back.`,
    name: "Remove the object", path: "v1/remove", body: { keys: [key] },
    done: ({ stay = [] }) => {
      search(key);
      return stay.length ? `${key} stays: ${stay[0].message}` : `${key} was removed.`;
    },
  }));
  const view = eventsTable(events, `Events of ${key}`);
  $("object").replaceChildren(
    element("div", { class: "line" }, element("h2", {}, key), remove), gone, facts,
    element("h2", {}, "What happened to it lately"), events);
  return {
    key,
    update({ object, events: found }) {
      remove.hidden = facts.hidden = !object;
      gone.hidden = Boolean(object);
      if (object) showFacts(facts, object);
      listEvents(view, found);
    },
  };
}

function showFacts(into, object) {
  const soft = object.soft_pin_s > 0 && `soft, for ${age(object.soft_pin_s)}`;
  const pins = [object.hard_pin && "hard", soft];
  const facts = [
    ["state", object.state], ["size", size(object.size)], ["generation", object.generation],
    ["since", `${moment(Date.now() / 1000 - object.age_s)}, ${age(object.age_s)} ago`],
    ["lease", object.lease_s > 0 ? `for ${age(object.lease_s)}` : "none"],
    ["pins", pins.filter(Boolean).join(", ") || "none"], ["group", object.group || "none"],
    ["reads in its last ten seconds of reads", count(object.reads)], ["checksum", object.checksum],
    ...object.replicas.map((replica, at) => [`replica ${at + 1}, ${replica.tier}`,
      `${replica.segment} at ${count(replica.offset)}, host ${replica.host}`]),
  ];
  define(into, facts);
}

async function heat() {
  hotKeys ||= table($("hot-keys"), "Objects that are read most",
    [["object", "left"], ["reads", ""]]);
  hotPrefixes ||= table($("hot-prefixes"), "Beginnings of keys that are read most",
    [["beginning of keys", "left"], ["reads", ""], ["of objects", ""]]);
  try {
    const told = await ask("heat", {});
    const times = told.rounds === 1 ? "once" : `${told.rounds} times`;
    const round = told.rounds ? `, all of them ${times}` : "";
    say($("sample"), `A sample: while this view is open, 64 objects a second are looked at `
      + `(${count(told.seen)} so far${round}), and those that are read just now stay under watch. `
      + "Reads of ten seconds, as far as a master heard of them.");
    keep(hotKeys, told.objects, ({ key }) => key, ({ key }) => hot(key, 1));
    keep(hotPrefixes, told.prefixes, ({ prefix }) => prefix, ({ prefix }) => hot(prefix, 2));
  } catch (error) {
    say($("sample"), error.message);
  }
}

function hot(name, figures) {
  const cells = [cell("", "reads"), cell("", "of objects")].slice(0, figures);
  return {
    body: body(cell("left name long", "", linked(name)), ...cells),
    update(one) {
      const told = [one.reads, one.objects].slice(0, figures);
      told.forEach((value, at) => say(cells[at], count(value)));
    },
  };
}
