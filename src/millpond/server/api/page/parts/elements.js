// Elements from plain text: strings become text nodes, so text from a user or a server is never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; `undefined`, `null` and `false` are skipped. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** A user's text: isolated, so that its writing direction does not affect its neighbours. */
export function written(text, attributes = {}) {
  return element("bdi", { dir: "auto", ...attributes }, text);
}

/** A rounded number that keeps all its digits for copying and tests. */
export function figure(value, digits, attributes = {}) {
  return element("data", { class: "figure", value: String(value), ...attributes }, number(value, digits));
}

/** `value` with `digits` decimals and a typographic minus sign. */
export function number(value, digits) {
  const rounded = value.toFixed(digits);
  const shown = Number(rounded) === 0 ? (0).toFixed(digits) : rounded; // no "-0.00"
  return shown.replace("-", "−");
}

/** An integer with its noun. */
export function counted(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** Announce a message to screen readers. */
export function announce(words) {
  document.getElementById("announcer").textContent = words;
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}
