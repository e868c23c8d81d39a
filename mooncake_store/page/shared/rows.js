// Tables whose rows are made once and then changed where they differ, so that whoever reads them,
// selects or moves by keyboard is not disturbed every second. On a phone a row is a card.

import { element, mark, say } from "./parts.js";

export const cell = (kind, label, ...content) =>
  element("td", { class: kind, role: "cell", ...(label && { "data-label": label }) }, ...content);

export const withBar = (label, text, bar) =>
  element("div", { class: "with", "data-label": label }, text, bar);

// Names and what they are called by, in rows that stay; `whole` of them are of the full width.
export function define(into, facts, whole = 0) {
  while (into.children.length < facts.length)
    into.append(element("div", {}, element("dt"), element("dd")));
  while (into.children.length > facts.length) into.lastChild.remove();
  facts.forEach(([name, value], at) => {
    const [term, description] = into.children[at].children;
    say(term, name);
    say(description, value);
    mark(into.children[at], "class", at < whole ? "whole" : "");
  });
}

// What a row of one line is in: some have more lines.
export const body = (...cells) =>
  element("tbody", { role: "rowgroup" }, element("tr", { role: "row" }, ...cells));

export function table(into, caption, columns) {
  const head = columns.map(([name, kind]) =>
    element("th", { scope: "col", role: "columnheader", class: kind }, name));
  const made = element("table", { class: "cards", role: "table" },
    element("caption", { class: "unseen" }, caption),
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...head)));
  const empty = element("p", { class: "empty" }, "none yet");
  into.replaceChildren(made, empty);
  return { table: made, empty, rows: new Map() };
}

// Bring rows in step with what there is, by key and in order.
export function keep(view, found, key, make) {
  const kept = new Map();
  let before = view.table.tHead;
  for (const one of found) {
    const row = view.rows.get(key(one)) || make(one);
    kept.set(key(one), row);
    row.update(one);
    if (before.nextSibling !== row.body) before.after(row.body);
    before = row.body;
  }
  for (const [name, row] of view.rows) if (!kept.has(name)) row.body.remove();
  view.rows = kept;
  view.table.hidden = !found.length;
  view.empty.hidden = found.length > 0;
}
