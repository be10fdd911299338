// Elements made of plain text: strings become text nodes, so nothing that a user or a server wrote is ever markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; `undefined`, `null` and `false` leave an attribute or a child out. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same, of a drawing. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Somebody's text: its direction is its own, and reaches no neighbour. */
export function written(text, attributes = {}) {
  return element("bdi", { dir: "auto", ...attributes }, text);
}

/** A number to read, which carries all its digits for who copies or tests. */
export function figure(value, digits, attributes = {}) {
  return element("data", { class: "figure", value: String(value), ...attributes }, number(value, digits));
}

/** `value` with `digits` decimals, and a true minus sign. */
export function number(value, digits) {
  const rounded = value.toFixed(digits);
  const shown = Number(rounded) === 0 ? (0).toFixed(digits) : rounded; // no "-0.00"
  return shown.replace("-", "−");
}

/** A whole number with its noun. */
export function counted(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** Say something to who listens to the page instead of looking at it. */
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
