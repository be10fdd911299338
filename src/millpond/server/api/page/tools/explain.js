// Explain: where a document matches a question; the document is written here, or found in an index.

import { counted, element, figure, written } from "./elements.js";
import { heatMap } from "./heat_map.js";
import { Tool, Unready } from "./tool.js";

const QUESTION = "How is the wheel driven?";
const DOCUMENT = "Water from the pond falls on the paddles and turns the wheel. The heron stands in the reeds.";
const HITS = 10;

export function explain(panel) {
  const question = panel.querySelector("#explain-question");
  const text = panel.querySelector("#explain-text");
  const source = panel.querySelector("#explain-source");
  const error = panel.querySelector(".field-error");
  let sent = "", asked = "", index = "";
  question.value = QUESTION;
  text.value = DOCUMENT;

  function unmark() {
    error.textContent = "";
    for (const field of [question, text]) field.removeAttribute("aria-invalid");
  }
  function refuse(field, words) {
    error.textContent = words;
    field.setAttribute("aria-invalid", "true");
    field.focus();
    throw new Unready();
  }
  const tool = new Tool(panel, {
    verb: "Explain",
    cutting: { truncate: "end" },
    empty: "Explain the document, and the parts that match the question are coloured here.",
    prepare() {
      unmark();
      if (!question.value.trim()) refuse(question, "Write a question first.");
      const query = question.value;
      index = source.value;
      if (index) {
        asked = query;
        return [{ path: route(index, "search"), body: { query, k: HITS }, whole: true }];
      }
      sent = text.value;
      if (!sent.trim()) refuse(text, "Write a document first.");
      return [{ path: "explain", body: { query, document: sent } }];
    },
    draw: ([content]) => (content.results ? found(tool, index, asked, content.results) : own(content, sent)),
    offered: (indexes) => offerSources(source, indexes),
    locate({ status, param }) {
      if (status === 400 && param === "query") question.setAttribute("aria-invalid", "true");
      if (status === 400 && param === "document") text.setAttribute("aria-invalid", "true");
    },
  });
  for (const field of [question, text]) field.addEventListener("input", unmark);
  source.addEventListener("change", () => {
    const own = !source.value;
    unmark();
    text.closest(".field").hidden = !own;
    tool.select.closest(".choice").hidden = !own; // an index has its model
    tool.cut.closest("label").hidden = !own;
    tool.verb = own ? "Explain" : "Search";
    tool.run.textContent = tool.verb;
  });
  return tool;
}

/** Offer the user's own text and the indexes; without an index there is nothing to choose. */
function offerSources(select, indexes) {
  const before = select.value;
  select.closest(".choice").hidden = !indexes.length;
  select.replaceChildren(
    element("option", { value: "" }, "no index, the document below"),
    ...indexes.map(({ name, documents }) => element("option", { value: name }, `${name} (${counted(documents, "document")})`)),
  );
  if (indexes.some(({ name }) => name === before)) select.value = before;
  select.dispatchEvent(new Event("change"));
}

function own({ matches, truncated }, text) {
  const [summary, ...map] = heatMap(matches, text);
  return [summary, truncated && element("p", { class: "soft cut" }, "A text is longer than the model reads, and its end was cut off."), ...map].filter(Boolean);
}

/** The documents that were found, as buttons that explain them; `chosen` is the id of the one that is explained. */
function found(tool, index, query, hits, chosen = null) {
  if (!hits.length) return [element("p", { class: "soft" }, `The index ${index} has no document that matches.`)];
  async function choose(id) {
    const call = { path: route(index, "explain"), body: { query, id }, whole: true };
    await tool.ask([call], ([content]) => [...found(tool, index, query, hits, id), ...heatMap(content.matches, content.text)]);
    tool.answer.querySelector(".hits [aria-pressed=true]")?.focus({ preventScroll: true });
  }
  return [
    element("p", { class: "soft" }, chosen === null ? "Choose a document to see where it matches." : "The document that is shown is marked."),
    element(
      "ol",
      { class: "hits", "aria-label": "Documents that were found" },
      ...hits.map((hit) => element("li", {}, element(
        "button",
        { type: "button", "aria-pressed": String(hit.id === chosen), click: () => choose(hit.id) },
        figure(hit.score, 2),
        written(hit.text, { class: "clamp" }),
        written(hit.id, { class: "soft id" }),
      ))),
    ),
  ];
}

function route(index, action) {
  return `v1/indexes/${encodeURIComponent(index)}/${action}`;
}
