// Label tokens: a text with its tokens coloured by their most probable labels.

import { counted, element, figure, written } from "./elements.js";
import { pieces } from "./pieces.js";
import { Tool, Unready } from "./tool.js";

const EXAMPLE = "Hanna Jørgensen built the mill at Kalvø in 1871 for the Northern Flour Company.";
const HUES = 6;
const OUTSIDE = "O"; // the taggers' label of tokens outside of any entity

export function tokens(panel) {
  const text = panel.querySelector("#tokens-text");
  let sent = "";
  text.value = EXAMPLE;
  text.addEventListener("input", () => text.removeAttribute("aria-invalid"));
  return new Tool(panel, {
    verb: "Label",
    // Text classifiers and reward models serve this task too, mostly without useful labels.
    serves: ({ tasks }) => tasks.includes("token_classify") && !tasks.includes("classify") && !tasks.includes("reward"),
    empty: "Label the text, and it is drawn here with the labels of its tokens.",
    prepare() {
      sent = text.value;
      if (!sent.trim()) {
        text.setAttribute("aria-invalid", "true");
        text.focus();
        throw new Unready();
      }
      return [
        { path: "pooling", body: { task: "token_classify", input: sent } },
        { path: "tokenize", body: { prompt: sent, return_token_strs: true } },
        { path: "tokenize", body: { prompt: sent, return_token_strs: true, add_special_tokens: false } },
      ];
    },
    draw([pooled, whole, bare], card) {
      const rows = pooled.data[0].data; // [tokens, labels]
      const first = begin(whole.tokens, bare.tokens);
      const special = whole.tokens.length - bare.tokens.length;
      const inner = rows.slice(first, first + rows.length - special);
      return labelled(pieces(bare.token_strs.slice(0, inner.length), sent), inner, card.labels ?? []);
    },
    locate(error) {
      if (error.status === 400) text.setAttribute("aria-invalid", "true");
    },
  });
}

/** Index of the text's first token among tokens that include special ones. */
function begin(whole, bare) {
  for (let at = 0; at <= whole.length - bare.length; at++) {
    if (bare.every((id, i) => id === whole[at + i])) return at;
  }
  return 0;
}

function labelled(words, rows, labels) {
  const runs = [];
  rows.forEach((row, i) => {
    const best = row.indexOf(Math.max(...row));
    const full = labels[best] ?? `class ${best}`;
    const label = full.replace(/^[BIES]-/, "");
    const last = runs.at(-1);
    if (last && last.label === label && !full.startsWith("B-")) {
      last.word += words[i].gap + words[i].word;
      last.probs.push(row[best]);
    } else runs.push({ label, ...words[i], hue: best % HUES, probs: [row[best]] });
  });
  const kinds = [...new Set(runs.map((run) => run.label))].filter((label) => label !== OUTSIDE);
  runs.forEach((run) => (run.hue = kinds.indexOf(run.label) % HUES));
  const found = runs.filter((run) => run.label !== OUTSIDE).length;
  return [
    element("p", { class: "soft" }, `${counted(rows.length, "token")}, ${counted(found, "labelled span")}.`),
    element("p", { class: "labelled", dir: "auto" }, ...runs.flatMap((run) => [run.gap, run.label === OUTSIDE ? run.word : span(run)])),
  ];
}

function span({ word, label, hue, probs }) {
  const mean = probs.reduce((sum, prob) => sum + prob, 0) / probs.length;
  return element("mark", { class: `hue-${hue}` }, written(word), element("span", { class: "tag" }, written(label), " ", figure(mean, 2)));
}
