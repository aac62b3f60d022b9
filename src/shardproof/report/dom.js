"use strict";
// Everything on the page is built from text nodes: what a run wrote is never parsed as HTML.
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return node;
}
const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function format(value) {
  if (value === null || value === undefined) return value === null ? "not finite" : "-";
  const size = Math.abs(value);
  if (size >= 1e4) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 5 });
  return size && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(size < 1 ? 4 : 5)));
}
function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(seconds < 10 ? 2 : 3))} s`;
  const minutes = Math.floor(Math.round(seconds) / 60), rest = Math.round(seconds) % 60;
  if (minutes < 60) return `${minutes} min ${String(rest).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}
const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : word.endsWith("ch") ? "es" : "s"}`;

// What the reader chose. A live page draws its sections again and must come back as they were.
const state = {
  smooth: 0, log: false, logs: new Set(), x: "step", search: "", zoom: null, hover: null,
  open: new Map(), pages: new Map(), failedOnly: new Set(), sampleStep: null, sampleView: "step",
  sampleFilter: { text: "", author: "", ended: "", reward: "", failed: false },
};

// A <details> that is open or closed as the reader left it; what is inside is built when it is first opened.
function details(key, attributes, summary, build, openAtFirst = false) {
  const node = make("details", attributes, make("summary", {}, summary));
  let built = false;
  const open = () => { if (!built) { built = true; node.append(...[build()].flat(Infinity)); } };
  if (state.open.has(key) ? state.open.get(key) : openAtFirst) { node.open = true; open(); }
  node.addEventListener("toggle", () => { state.open.set(key, node.open); if (node.open) open(); });
  return node;
}
function table(attributes, heads, rows) {
  const head = make("thead", {}, make("tr", {}, heads.map(text => make("th", { scope: "col" }, text))));
  const body = make("tbody", {}, rows.map(row => make("tr", {}, row.map(cell => make("td", {}, cell)))));
  return make("div", { class: "scroll", tabindex: "0" }, make("table", attributes, head, body));
}
const badge = (passed, text) => make("span", { class: `badge ${passed ? "good" : "bad"}` },
  make("span", { "aria-hidden": "true" }, passed ? "✓" : "✗"), ` ${text}`);
const section = (id, title, ...children) => make("section", { id, "aria-label": title }, make("h2", {}, title), children);
