// Sizes, rates and moments in words.

const SPACE = "\u00a0";

function inUnits(value, step, units, exact = 9.95) {
  let at = 0;
  while (value >= 0.9995 * step && at < units.length - 1) {
    value /= step;
    at++;
  }
  const digits = at === 0 || value >= exact ? 0 : 1;
  return +value.toFixed(digits) + SPACE + units[at];
}

export const size = (bytes) =>
  inUnits(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 99.95);
export const rate = (bytes) => inUnits(bytes, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
export const short = (value) =>
  inUnits(value, 1000, ["", "k", "M", "G"]).replace(SPACE, "");
export const moment = (time_s) => new Date(1000 * time_s).toLocaleTimeString("en-GB");
export const filled = (used, all) => all ? used / all : 0;
