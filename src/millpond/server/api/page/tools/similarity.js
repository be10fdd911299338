// Similarity: embeds texts and compares every pair.

import { element, figure, number, written } from "./elements.js";
import { TextList } from "./text_list.js";
import { Tool, Unready } from "./tool.js";

const EXAMPLES = [
  "Water from the pond turns the wheel of the mill.",
  "Bread is baked from flour and salt.",
  "The mill is driven by water.",
  "At night a heron sleeps in the reeds.",
];

export function similarity(panel) {
  const texts = new TextList(panel.querySelector(".texts"), EXAMPLES);
  const width = panel.querySelector(".width select");
  let sent = [];
  const tool = new Tool(panel, {
    verb: "Compare",
    empty: "Compare the texts, and their cosines are drawn here.",
    prepare() {
      sent = texts.filled;
      texts.unmark();
      if (sent.length < 2) {
        texts.mark("Write at least two texts to compare.", texts.fields.find((field) => !field.value.trim()));
        texts.fields.find((field) => !field.value.trim())?.focus();
        throw new Unready();
      }
      const dimensions = Number(width.value) || undefined;
      const input = sent.map((field) => field.value);
      return [{ path: "v1/embeddings", body: { input, encoding_format: "float", dimensions } }];
    },
    draw([content]) {
      const vectors = [...content.data].sort((a, b) => a.index - b.index).map((entry) => entry.embedding);
      return matrix(sent.map((field) => field.value), cosines(vectors), vectors[0].length);
    },
    locate: (error) => locate(error, texts, sent),
  });
  tool.select.addEventListener("change", () => offerWidths(width, tool.card));
  return tool;
}

/** Mark the text that an error refers to. */
export function locate(error, texts, sent) {
  const field = error.index === null ? (sent.length === 1 ? sent[0] : null) : sent[error.index];
  if (error.status === 400 && field) field.setAttribute("aria-invalid", "true");
  if (error.status === 400 && field && error.index !== null) {
    texts.error.textContent = `The server refused ${texts.noun} ${texts.fields.indexOf(field) + 1}.`;
  }
}

/** Cosine similarities, `[n][n]`. */
export function cosines(vectors) {
  const lengths = vectors.map((vector) => Math.hypot(...vector) || 1);
  return vectors.map((a, i) => vectors.map((b, j) => a.reduce((sum, value, k) => sum + value * b[k], 0) / (lengths[i] * lengths[j])));
}

/** Selectable widths: those of the checkpoint, or its own width halved repeatedly. */
function offerWidths(select, card) {
  const halves = [2, 4, 8, 16].map((part) => card?.dimensions / part).filter(Number.isInteger);
  const widths = card?.matryoshka ? (card.matryoshka_dimensions ?? halves) : [];
  const smaller = widths.filter((width) => width < card.dimensions).sort((a, b) => b - a);
  select.closest(".width").hidden = !smaller.length;
  select.replaceChildren(
    element("option", { value: "" }, `${card?.dimensions ?? "all"}`),
    ...smaller.map((width) => element("option", { value: width }, `${width}`)),
  );
}

function matrix(texts, values, dimensions) {
  const detail = element("div", { class: "detail" });
  const cells = values.map((row, i) => row.map((value, j) => cell(value, i, j)));
  const table = element(
    "table",
    { class: texts.length > 8 ? "matrix dense" : "matrix", role: "grid", "aria-label": "Cosine of every two texts" },
    element("thead", {}, element("tr", {}, element("td"), ...texts.map((text, j) => element("th", { scope: "col", title: text }, `${j + 1}`)))),
    element("tbody", {}, ...cells.map((row, i) => element("tr", {}, heading(texts[i], i), ...row))),
  );

  function tell(i, j) {
    for (const marked of table.querySelectorAll(".chosen")) marked.classList.remove("chosen");
    cells[i][j].classList.add("chosen");
    detail.replaceChildren(...pair(texts, values[i][j], i, j));
  }
  function move(i, j) {
    table.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
    cells[i][j].setAttribute("tabindex", "0");
    cells[i][j].focus();
  }
  table.addEventListener("pointerover", (event) => place(event, cells, tell));
  table.addEventListener("focusin", (event) => place(event, cells, tell));
  table.addEventListener("click", (event) => place(event, cells, move));
  table.addEventListener("keydown", (event) => place(event, cells, (i, j) => step(event, i, j, texts.length, move)));

  const [i, j] = closest(values);
  cells[i][j].setAttribute("tabindex", "0");
  tell(i, j);
  colour(cells, values, false);
  const stretch = element("input", { type: "checkbox", change: () => colour(cells, values, stretch.checked) });
  return [
    element("p", { class: "soft" }, `${texts.length} texts, ${dimensions} dimensions. The closest two are marked.`),
    element("div", { class: "scroll" }, table),
    detail,
    element("label", { class: "check" }, stretch, "Stretch the colours over these values"),
  ];
}

function cell(value, i, j) {
  return element(
    "td",
    {
      role: "gridcell", tabindex: "-1", "data-i": i, "data-j": j,
      "aria-label": `${number(value, 3)}, text ${i + 1} and text ${j + 1}`,
    },
    figure(value, 2),
  );
}

function heading(text, i) {
  return element("th", { scope: "row", title: text }, element("span", { class: "place" }, `${i + 1}`), written(text, { class: "clip" }));
}

function pair(texts, value, i, j) {
  return [
    element("p", { class: "detail-value" }, figure(value, 4), element("span", { class: "soft" }, i === j ? "a text and itself" : `text ${i + 1} and text ${j + 1}`)),
    element("blockquote", {}, written(texts[i])),
    i !== j && element("blockquote", {}, written(texts[j])),
  ].filter(Boolean);
}

function place(event, cells, use) {
  const at = event.target.closest("td[data-i]");
  if (at) use(Number(at.dataset.i), Number(at.dataset.j));
}

function step(event, i, j, count, move) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -count], End: [0, count] };
  const by = steps[event.key];
  if (!by) return;
  event.preventDefault();
  const within = (at) => Math.min(Math.max(at, 0), count - 1);
  move(within(i + by[0]), within(j + by[1]));
}

function closest(values) {
  let best = [0, 1];
  values.forEach((row, i) => row.forEach((value, j) => {
    if (i < j && value > values[best[0]][best[1]]) best = [i, j];
  }));
  return best;
}

/** Colours of the cells: by value from 0 to 1, or from the minimum to the maximum outside the diagonal. */
function colour(cells, values, stretched) {
  const others = values.flatMap((row, i) => row.filter((_, j) => i !== j));
  const [low, high] = stretched ? [Math.min(...others), Math.max(...others)] : [0, 1];
  cells.forEach((row, i) => row.forEach((node, j) => {
    const share = (values[i][j] - low) / (high - low || 1);
    const depth = Math.min(Math.abs(share), 1);
    node.style.setProperty("--depth", depth.toFixed(3));
    node.classList.toggle("below", share < 0);
  }));
}
