// Heat map: a text coloured by the tokens of a question that match it, and these tokens with their scores.

import { counted, element, figure, number, written } from "./elements.js";
import { labels } from "./pieces.js";

const FAINTEST = 0.12; // depth of the colour of a match that counts least

/** The nodes for `matches`, as the server answers them, in `text`. */
export function heatMap(matches, text) {
  const names = labels(matches.map((match) => match.token));
  const parts = segments(matches, text);
  const detail = element("p", { class: "match-detail soft", "aria-hidden": "true" }, "Point at a token, or at a coloured part of the document.");
  const tokens = matches.map((match, i) => token(match, names[i], i, matches));
  const marks = parts.map((part, place) => (part.matches.length ? mark(part, place, names, matches) : null));
  const tokenList = element("ol", { class: "match-tokens", "aria-label": "Tokens of the question" }, ...tokens.map((node) => element("li", {}, node)));
  const box = element("p", { class: "heat-text", dir: "auto" }, ...parts.map((part, place) => marks[place] ?? part.text));

  function choose(chosenTokens, chosenMarks, ...words) {
    tokens.forEach((node, i) => node.classList.toggle("chosen", chosenTokens.includes(i)));
    marks.forEach((node, place) => node?.classList.toggle("chosen", chosenMarks.includes(place)));
    detail.replaceChildren(...words);
  }
  walk(tokenList, tokens, (i) => {
    const places = parts.flatMap((part, place) => (part.matches.includes(i) ? [place] : []));
    choose([i], places, ...pairing(names[i], matches[i]));
    if (places.length) reveal(box, marks[places[0]]);
  });
  const marked = marks.filter(Boolean);
  walk(box, marked, (i) => {
    const place = marks.indexOf(marked[i]);
    const found = parts[place].matches;
    choose(found, [place], written(parts[place].text), " is matched by ", ...found.flatMap((match, n) => [n ? ", " : "", scored(names[match], matches[match])]));
  });
  const score = matches.reduce((sum, match) => sum + match.score, 0);
  return [
    element("p", { class: "soft" }, "MaxSim ", figure(score, 3), ` over ${counted(matches.length, "token")} of the question.`),
    tokenList,
    detail,
    box,
  ];
}

/**
 * The whole text in parts that the same matches lie in: [{text, matches, heat}].
 *
 * The offsets of `matches` count code points, as Python's do; a string here counts UTF-16 units.
 */
export function segments(matches, text) {
  const spans = unitSpans(matches, text);
  const edges = [...new Set([0, text.length, ...spans.flat()])].sort((a, b) => a - b);
  const places = new Map(edges.map((edge, place) => [edge, place]));
  const inside = edges.slice(1).map(() => []);
  spans.forEach(([start, end], i) => {
    for (let place = places.get(start); place < places.get(end); place++) inside[place].push(i);
  });
  const sums = inside.map((indices) => indices.reduce((sum, i) => sum + Math.max(matches[i].score, 0), 0));
  const most = sums.reduce((a, b) => Math.max(a, b), 0);
  return inside.map((indices, place) => ({
    text: text.slice(edges[place], edges[place + 1]),
    matches: indices,
    heat: most > 0 ? sums[place] / most : 0,
  }));
}

/** The spans in UTF-16 units, widened to whole characters as a reader sees them: no emoji is torn apart. */
function unitSpans(matches, text) {
  const units = [0];
  for (const sign of text) units.push(units.at(-1) + sign.length);
  const clusters = new Intl.Segmenter(undefined, { granularity: "grapheme" }).segment(text);
  const begin = (unit) => clusters.containing(unit)?.index ?? unit;
  const finish = (unit) => {
    const last = clusters.containing(unit - 1);
    return last ? last.index + last.segment.length : unit;
  };
  return matches.map(({ start, end }) => (start < end ? [begin(units[start]), finish(units[end])] : [0, 0]));
}

function token(match, name, i, matches) {
  const most = matches.reduce((a, b) => Math.max(a, b.score), 0);
  const found = match.start < match.end;
  const node = element(
    "button",
    { type: "button", class: found ? undefined : "blank", tabindex: i ? "-1" : "0", "aria-label": `${name}, ${number(match.score, 3)}, ${found ? `matches ${match.text}` : "no text"}` },
    written(name),
    figure(match.score, 3),
  );
  node.style.setProperty("--share", (most > 0 ? Math.max(match.score, 0) / most : 0).toFixed(3));
  return node;
}

function mark(part, place, names, matches) {
  const why = part.matches.map((i) => `${names[i]} ${number(matches[i].score, 3)}`).join(", ");
  const node = element("mark", { role: "button", tabindex: "-1", "aria-label": `${part.text}, matched by ${why}` }, part.text);
  node.style.setProperty("--depth", (FAINTEST + (1 - FAINTEST) * part.heat).toFixed(3));
  return node;
}

function pairing(name, match) {
  if (match.start === match.end) return [scored(name, match), " matches a token that stands for no text."];
  return [scored(name, match), " matches ", written(match.text), `, characters ${match.start} to ${match.end}.`];
}

function scored(name, match) {
  return element("span", {}, element("strong", {}, written(name)), " ", figure(match.score, 3));
}

/** Tell which of `nodes` is under the pointer or has the focus; they are one Tab stop, and arrow keys go between them. */
function walk(list, nodes, tell) {
  const at = (event) => nodes.findIndex((node) => node.contains(event.target));
  nodes[0]?.setAttribute("tabindex", "0");
  list.addEventListener("pointerover", (event) => at(event) >= 0 && tell(at(event)));
  list.addEventListener("focusin", (event) => {
    const i = at(event);
    if (i < 0) return;
    for (const node of nodes) node.tabIndex = node === nodes[i] ? 0 : -1;
    tell(i);
  });
  list.addEventListener("keydown", (event) => {
    const i = at(event);
    const ahead = getComputedStyle(list).direction === "rtl" ? -1 : 1;
    const to = { ArrowRight: i + ahead, ArrowLeft: i - ahead, ArrowDown: i + 1, ArrowUp: i - 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (i < 0 || to === undefined) return;
    event.preventDefault();
    nodes[to]?.focus();
  });
}

/** Scroll `box`, and nothing else, so that `node` can be seen in it. */
function reveal(box, node) {
  const [frame, place] = [box.getBoundingClientRect(), node.getBoundingClientRect()];
  if (place.top < frame.top) box.scrollTop -= frame.top - place.top + 16;
  else if (place.bottom > frame.bottom) box.scrollTop += place.bottom - frame.bottom + 16;
}
