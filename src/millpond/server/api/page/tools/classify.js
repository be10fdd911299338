// Classify: the probability of every class for each text.

import { bar, scale } from "./bars.js";
import { element, written } from "./elements.js";
import { locate } from "./similarity.js";
import { TextList } from "./text_list.js";
import { Tool, Unready } from "./tool.js";

const EXAMPLES = ["The pond froze over and nobody could work.", "What a lovely evening by the water!"];
const SHOWN = 6;

export function classify(panel) {
  const texts = new TextList(panel.querySelector(".texts"), EXAMPLES);
  let sent = [];
  return new Tool(panel, {
    verb: "Classify",
    rank: (card) => (card.score_type ? 1 : 0), // a reranker's single score is not a real class
    empty: "Classify the texts, and the share of every class is drawn here.",
    prepare() {
      sent = texts.filled;
      texts.unmark();
      if (!sent.length) {
        texts.mark("Write at least one text.", texts.fields[0]);
        texts.fields[0].focus();
        throw new Unready();
      }
      return [{ path: "classify", body: { input: sent.map((field) => field.value) } }];
    },
    draw([content], card) {
      const across = scale(content.data.flatMap((entry) => entry.probs));
      return content.data.map((entry) => classes(entry, sent[entry.index].value, card, across));
    },
    locate: (error) => locate(error, texts, sent),
  });
}

function classes({ probs, label }, text, card, across) {
  const best = probs.indexOf(Math.max(...probs));
  const name = (i) => card.labels?.[i] ?? (i === best && label ? label : `class ${i}`);
  const order = probs.map((_, i) => i).sort((a, b) => probs[b] - probs[a] || a - b);
  const row = (i) =>
    element(
      "li",
      { class: i === order[0] && probs.length > 1 ? "best" : null },
      element("span", { class: "bar-label" }, written(name(i))),
      element("div", { class: "bar-row" }, ...bar(probs[i], across)),
    );
  const list = element("ul", { class: "shares" }, ...order.slice(0, SHOWN).map(row));
  const rest = order.slice(SHOWN);
  const more = element("button", { type: "button", class: "quiet", click: unfold }, `Show ${rest.length} more`);
  function unfold() {
    more.remove();
    list.append(...rest.map(row));
  }
  return element(
    "article",
    { class: "classed" },
    element("h3", {}, written(text, { class: "clamp" })),
    list,
    rest.length ? more : null,
  );
}
