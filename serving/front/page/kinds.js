// What the charts of this page show, and the words for stages and sources.

import { count, exact, percent, seconds, sum, words } from "./parts.js";

export const STAGES = ["queue", "load", "prefill", "transfer", "decode"];
export const SOURCES = ["own", "worker", "pool", "computed"];
export const SOURCE_NAMES = {
  own: "own memory", worker: "another worker", pool: "pool", computed: "computed",
};

export const KINDS = [
  {
    title: "Time to the first token (TTFT)", style: "lines", scale: "log", say: seconds,
    axis: exact, rows: (span) => times(span.ttft_s), slo: (stats) => stats.slo.ttft_s,
  },
  {
    title: "Time between tokens (TBT)", style: "lines", scale: "log", say: seconds,
    axis: exact, rows: (span) => times(span.tbt_s), slo: (stats) => stats.slo.tbt_s,
  },
  {
    title: "Prompt tokens by source", style: "bars", scale: "share", say: percent,
    rows: (span) => SOURCES.map((source) => {
      const all = sum(span.sources);
      return [SOURCE_NAMES[source], source, all ? (span.sources[source] || 0) / all : null];
    }),
  },
  {
    title: "Time of a request by stage, mean", style: "bars", scale: "linear", say: seconds,
    axis: exact,
    rows: (span) => STAGES.map((stage) => {
      const all = sum(span.ended.answered);
      return [stage, stage, all ? (span.stage_s[stage] || 0) / all : null];
    }),
  },
  {
    title: "Refused and failed, by reason", style: "bars", scale: "count", say: count,
    rows: (span, stats) => reasons(stats).map(([kind, reason, hue]) =>
      [words(reason), hue, span.ended[kind][reason] || 0]),
  },
  {
    title: "Load of prefill and decode", style: "lines", scale: "linear",
    say: (value) => value.toFixed(2), slo: () => 1,
    rows: (span) => ["prefill", "decode"].map((role) => [role, role, span.loads[role]]),
  },
];
const HUES = {
  refused: ["transfer", "load", "worker", "own", "queue"], failed: ["bad", "prefill", "computed"],
};

const times = (found) => [
  ["median", "prefill", found ? found.median : null],
  ["p99", "transfer", found ? found.p99 : null],
];

// Those that there were in these minutes, refusals first, each with its colour.
function reasons(stats) {
  return Object.entries(HUES).flatMap(([kind, hues]) => {
    const found = new Set(stats.history.flatMap((span) => Object.keys(span.ended[kind])));
    return [...found].map((reason, at) => [kind, reason, hues[at % hues.length]]);
  });
}
