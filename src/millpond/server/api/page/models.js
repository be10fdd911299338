// The models: their properties and their load.

import { counted, element, number, written } from "./elements.js";
import { sparkline } from "./sparkline.js";

const REMEMBERED = 60;

export class Models {
  #rows = new Map();

  /** Renders into `list`, and their number into a note. */
  constructor(list, note) {
    this.list = list;
    this.note = note;
  }

  /** Show the cards of /v1/models. */
  show(cards) {
    this.#rows.clear();
    this.list.replaceChildren(...cards.map((card) => this.#row(card)));
    this.note.textContent = counted(cards.length, "model");
  }

  /** Show a sample of /stats. */
  sample(models) {
    this.#fold(new Set(models.map((model) => model.name)));
    for (const model of models) {
      const row = this.#rows.get(model.name);
      if (!row) continue;
      row.history.push(model.tokens_per_second);
      if (row.history.length > REMEMBERED) row.history.shift();
      row.busy.textContent = busy(model);
      row.busy.classList.toggle("waiting", model.waiting_texts > 0);
      row.rate.replaceChildren(
        element("strong", { class: "tokens-rate" }, rate(model.tokens_per_second)), " tokens/s · ",
        element("span", { class: "texts-rate" }, rate(model.texts_per_second)), " texts/s",
      );
      const words = `Tokens per second: now ${rate(model.tokens_per_second)}, at most ${rate(Math.max(...row.history))} lately`;
      row.line.replaceChildren(sparkline(row.history, REMEMBERED, words));
      row.cache.textContent = cached(model.cache);
    }
  }

  /** Statistics use a model's first name; its other names follow in the list and get no card. */
  #fold(first) {
    let last = null;
    for (const [name, row] of this.#rows) {
      if (first.has(name)) {
        last = row;
        last.aliases = [];
      } else if (last) {
        row.node.hidden = true;
        last.aliases.push(name);
        last.called.replaceChildren("also called ", ...last.aliases.flatMap((alias, i) => [i ? ", " : "", written(alias)]));
        last.called.hidden = false;
      }
    }
    this.note.textContent = counted([...this.#rows.values()].filter((row) => !row.node.hidden).length, "model");
  }

  #row(card) {
    const row = {
      called: element("p", { class: "soft", hidden: true }),
      aliases: [],
      history: [],
      busy: element("span", { class: "busyness" }, "–"),
      rate: element("span", { class: "rate" }),
      line: element("div", { class: "line" }),
      cache: element("span", { class: "soft cache" }),
    };
    this.#rows.set(card.id, row);
    const facts = [
      card.max_model_len && counted(card.max_model_len, "token") + " long",
      card.dimensions && counted(card.dimensions, "dimension"),
      card.labels?.length && counted(card.labels.length, "label"),
    ].filter(Boolean);
    row.node = element(
      "li",
      { class: "model-card", "data-model": card.id },
      element(
        "div",
        { class: "model-name" },
        element("h3", {}, written(card.id)),
        row.called,
        card.root && card.root !== card.id && element("p", { class: "soft root", title: card.root }, written(card.root)),
        element("p", { class: "soft" }, facts.join(" · ")),
        element("ul", { class: "tasks", "aria-label": "Tasks" }, ...card.tasks.map((task) => element("li", {}, task))),
      ),
      element("div", { class: "model-live" }, row.line, element("p", {}, row.rate), element("p", {}, row.busy, row.cache)),
    );
    return row.node;
  }
}

function busy({ waiting_texts: waiting, running_calls: running }) {
  if (!waiting && !running) return "idle";
  return `${counted(waiting, "text")} in ${counted(running, "call")} under way`;
}

function rate(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : number(value, value >= 10 || value === 0 ? 0 : 1);
}

function cached(cache) {
  if (!cache || typeof cache !== "object") return "";
  const { hits = 0, misses = 0 } = cache;
  return hits + misses ? ` · cache ${Math.round((100 * hits) / (hits + misses))} % hits` : "";
}
