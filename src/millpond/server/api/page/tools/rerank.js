// Rerank: documents ranked by relevance to a query.

import { bar, scale } from "./bars.js";
import { element, written } from "./elements.js";
import { locate } from "./similarity.js";
import { TextList } from "./text_list.js";
import { Tool, Unready } from "./tool.js";

const QUERY = "How is the wheel driven?";
const DOCUMENTS = [
  "The miller sells flour on Saturdays.",
  "Water from the pond falls on the paddles and turns the wheel.",
  "The heron stands in the reeds until dusk.",
  "A sluice lets in as much water as the mill needs.",
];
const SCORES = ["cross-encoder", "listwise", "late-interaction", "bi-encoder"]; // rerankers first

export function rerank(panel) {
  const query = panel.querySelector("#rerank-query");
  const top = panel.querySelector("#rerank-top");
  const documents = new TextList(panel.querySelector(".texts"), DOCUMENTS, "document");
  let sent = [];
  query.value = QUERY;
  query.addEventListener("input", () => query.removeAttribute("aria-invalid"));
  return new Tool(panel, {
    verb: "Rerank",
    serves: (card) => Boolean(card.score_type), // embedders score by comparing vectors
    rank: (card) => SCORES.indexOf(card.score_type),
    empty: "Rerank the documents, and their scores are drawn here.",
    prepare() {
      sent = documents.filled;
      documents.unmark();
      if (!query.value.trim()) {
        query.setAttribute("aria-invalid", "true");
        query.focus();
        documents.mark("Write a query first.");
        throw new Unready();
      }
      if (!sent.length) {
        documents.mark("Write at least one document.", documents.fields[0]);
        documents.fields[0].focus();
        throw new Unready();
      }
      const best = Math.floor(Number(top.value));
      const body = { query: query.value, documents: sent.map((field) => field.value), top_n: best > 0 ? best : undefined };
      return [{ path: "rerank", body }];
    },
    draw: ([content]) => ranking(content, sent.map((field) => field.value)),
    locate: (error) => locate(error, documents, sent),
  });
}

const NAMES = { "cross-encoder": "the cross-encoder's own", cosine: "cosines, -1 to 1", maxsim: "MaxSim, a sum over the query's tokens" };

function ranking({ results, method }, documents) {
  const across = scale(results.map((result) => result.relevance_score));
  const rows = results.map((result) =>
    element(
      "li",
      {},
      element("div", { class: "bar-row" }, ...bar(result.relevance_score, across)),
      element("p", { class: "bar-text" }, written(documents[result.index])),
      element("p", { class: "soft from" }, `document ${result.index + 1}`),
    ),
  );
  const left = documents.length - results.length;
  return [
    element("ol", { class: "ranking" }, ...rows),
    element("p", { class: "soft" }, `Scores: ${NAMES[method]}.`),
    left > 0 && element("p", { class: "soft" }, `${left} more scored lower.`),
  ].filter(Boolean);
}
