// Small things that the other files share: elements, numbers in words, colours by meaning.
// Text goes into the page as text only, never as HTML: names of workers and models are anybody's.

// element("td", {class: "left", title: "x"}, "text", node, ...)
export function element(name, attributes = {}, ...content) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}

// Writes only what differs, so that a selection and the focus stay where they are.
export function say(node, text) {
  text = String(text);
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, key, value) {
  if (node.getAttribute(key) !== value) node.setAttribute(key, value);
}

const SPACE = "\u00a0"; // a number and its unit stay on one line

const inUnit = (value) => value < 0.001 ? [1e6 * value, "µs"]
  : value < 1 ? [1000 * value, "ms"] : [value, "s"];

export function seconds(value) {
  if (!value) return "–";
  const [number, unit] = inUnit(value);
  const digits = { "µs": 0, ms: number < 99.5 ? 1 : 0, s: number < 9.95 ? 2 : 1 }[unit];
  return number.toFixed(digits) + SPACE + unit;
}

// The same of what somebody chose: without zeros at its end.
export function exact(value) {
  const [number, unit] = inUnit(value);
  return value ? +number.toFixed(2) + SPACE + unit : "0";
}

export function age(value) {
  if (value < 90) return Math.floor(value) + " s";
  if (value < 5400) return Math.round(value / 60) + " min";
  return value < 129600 ? Math.round(value / 3600) + " h" : Math.round(value / 86400) + " days";
}

export const count = (value) => value.toLocaleString("en");
export const percent = (share) => Math.round(100 * share) + SPACE + "%";
export const sum = (values) => Object.values(values).reduce((all, one) => all + one, 0);
export const words = (code) => code.replaceAll("_", " ");

// What tells ids apart is at their end.
export const tail = (id) => id.length > 18 ? "…" + id.slice(-6) : id;

// A bar of parts, [class, share of the whole]; the text says the same.
export function fill(bar, parts, text) {
  while (bar.children.length < parts.length) bar.append(element("i"));
  while (bar.children.length > parts.length) bar.lastChild.remove();
  parts.forEach(([kind, share], at) => {
    mark(bar.children[at], "class", "c-" + kind);
    bar.children[at].style.width = 100 * Math.min(1, share) + "%";
  });
  mark(bar, "aria-label", text);
  mark(bar, "title", text);
}

export const bar = () => element("span", { class: "bar", role: "img" });

export function legend(list, names) {
  list.replaceChildren(...Object.entries(names).map(([kind, name]) =>
    element("li", {}, element("i", { class: "swatch c-" + kind }), name)));
}
