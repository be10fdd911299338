// Numbers as bars on a common scale that includes zero.

import { element, figure } from "./elements.js";

/** The scale of `values`: 0 to 1, extended if values lie outside. */
export function scale(values) {
  return { low: Math.min(0, ...values), high: Math.max(1, ...values) };
}

/** A bar from zero to `value`, with the number next to it. */
export function bar(value, { low, high }, digits = 4) {
  const share = (at) => ((at - low) / (high - low)) * 100;
  const fill = element("span", { class: value < 0 ? "fill below" : "fill" });
  fill.style.setProperty("--from", `${share(Math.min(value, 0))}%`);
  fill.style.setProperty("--width", `${Math.abs(share(value) - share(0))}%`);
  const track = element("span", { class: low < 0 ? "track signed" : "track", "aria-hidden": "true" }, fill);
  track.style.setProperty("--zero", `${share(0)}%`);
  return [track, figure(value, digits)];
}
