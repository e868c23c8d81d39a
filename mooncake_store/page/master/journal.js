// Shards with what keeps their contents, and who stands by.

import { age, count, element, mark, say } from "./parts.js";
import { body, cell, keep, table } from "./rows.js";
import { size } from "./words.js";

const $ = (id) => document.getElementById(id);
const KEPT = {
  none: "lost with the process", written: "outlive the process", synced: "outlive the host",
  replicated: "a standby has them, too",
};
const LOSES = {
  nothing: "nothing lost", "the last changes": "maybe not the last changes", unknown: "or not all",
};
let shards = null, standbys = null;

export function showJournal(stats) {
  shards ||= table($("shards"), "Shards and their journals", [
    ["shard at", "left"], ["journal", "left"], ["contents", "left"], ["written", ""],
    ["objects", ""], ["clients", ""], ["copies under way", ""], ["memory", ""],
  ]);
  standbys ||= table($("standbys"), "Standbys", [
    ["standby", "left"], ["at", "left"], ["state", "left"], ["words behind", ""], ["silent", ""],
    ["a promotion restores", "left"],
  ]);
  keep(shards, stats.shards, ({ address }) => address, () => row(
    ["left name", ""], ["left", "journal"], ["left", "contents"], ["", "written"], ["", "objects"],
    ["", "clients"], ["", "copies"], ["", "memory"])((shard) => [
    shard.address, shard.journal, KEPT[shard.journal] || "–",
    shard.journal === "none" ? "–" : size(shard.journal_bytes), count(shard.objects),
    count(shard.clients), count(shard.copies), size(shard.rss_bytes)]));
  keep(standbys, stats.standbys, ({ number }) => number, () => row(
    ["left name", ""], ["left name", "at"], ["left", "state"], ["", "words behind"],
    ["", "silent"], ["left", "a promotion restores"])((standby) => [
    standby.number, standby.address || "–",
    (standby.counts ? "counts" : "a copy") + (standby.follows ? "" : ", does not follow"),
    standby.behind_words < 0 ? "–" : count(standby.behind_words),
    standby.silent_s < 2 ? "no" : age(standby.silent_s),
    `${count(standby.promotion.objects)} objects, ${LOSES[standby.promotion.loses]}`],
  (cells, standby) => mark(cells[2], "class", "left " + (standby.follows ? "good" : "bad"))));
}

// A row whose cells are texts.
const row = (...kinds) => (texts, after = () => {}) => {
  const cells = kinds.map(([kind, label]) => cell(kind, label));
  return {
    body: body(...cells),
    update(one) {
      texts(one).forEach((text, at) => say(cells[at], text));
      after(cells, one);
    },
  };
};
