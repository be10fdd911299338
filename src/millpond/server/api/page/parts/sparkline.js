// A small line chart of recent values.

import { drawn } from "./elements.js";

const WIDTH = 120;
const HEIGHT = 28;

/** `values`, newest last, on a chart for `length` of them; `label` is its text alternative. */
export function sparkline(values, length, label) {
  const most = Math.max(...values, 1e-9);
  const x = (i) => ((i + length - values.length) / (length - 1)) * WIDTH;
  const y = (value) => HEIGHT - 1.5 - (value / most) * (HEIGHT - 4);
  const points = values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
  const area = points.length ? [`${x(0).toFixed(1)},${HEIGHT}`, ...points, `${WIDTH},${HEIGHT}`] : [];
  return drawn(
    "svg",
    { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    drawn("polygon", { points: area.join(" ") }),
    drawn("polyline", { points: points.join(" "), "vector-effect": "non-scaling-stroke" }),
  );
}
