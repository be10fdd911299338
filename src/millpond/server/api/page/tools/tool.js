// One tool of the page: a form, its calls, and the answer next to it.

import { ApiError, call, curl } from "./api.js";
import { copyable } from "./copyable.js";
import { announce, counted, element, number } from "./elements.js";

const CUT = "Cut texts that are too long";
const CUTTING = { truncate_prompt_tokens: -1 };

/** The form cannot be sent; the reason is shown next to the field. */
export class Unready extends Error {}

export class Tool {
  #running = null;

  /**
   * @param panel Element of the tool; its data-serves is the task that a model needs.
   * @param prepare Takes a model card; returns the calls as [{path, body}], or throws Unready. A body gets the model
   *   and what cuts its texts, unless the call has `whole: true`.
   * @param draw Takes the calls' answers and the card; returns the nodes to show.
   * @param serves Takes a model card: whether the model is suitable; by default, whether it has the task.
   * @param rank Takes a model card: its position among the offered models.
   * @param locate Takes an ApiError; marks the invalid field.
   * @param offered Takes the indexes of the server, when models are offered.
   * @param cutting Fields that cut texts that are too long.
   * @param empty Text shown before the first answer.
   */
  constructor(panel, { prepare, draw, serves, rank = () => 0, locate = () => {}, offered = () => {}, cutting = CUTTING, empty, verb }) {
    Object.assign(this, { panel, prepare, draw, rank, locate, offered, cutting, empty, verb });
    this.serves = serves ?? ((card) => card.tasks.includes(this.task));
    this.form = panel.querySelector("form");
    this.select = panel.querySelector("select.model");
    this.answer = panel.querySelector(".answer");
    this.cut = element("input", { type: "checkbox", id: `${panel.id}-cut` });
    this.run = element("button", { type: "submit", class: "primary" }, verb);
    this.stop = element("button", { type: "button", hidden: true, click: () => this.#running?.abort() }, "Stop");
    this.panel.querySelector(".actions").append(
      element("label", { class: "check", for: this.cut.id }, this.cut, CUT),
      element("span", { class: "buttons" }, this.stop, this.run),
    );
    this.form.addEventListener("submit", (event) => this.#submitted(event));
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
      else if (event.key === "Escape") this.#running?.abort();
    });
    this.lock("Waiting for the server to name its models.");
  }

  get task() {
    return this.panel.dataset.serves;
  }

  get card() {
    return this.cards?.find((card) => card.id === this.select.value);
  }

  /** Disable the form until models are offered; `words` tell what it waits for. */
  lock(words) {
    this.cards = [];
    this.select.replaceChildren(element("option", { value: "" }, "–"));
    this.select.disabled = true;
    this.run.disabled = true;
    this.#rest(words);
  }

  /** Offer the models that serve the task, and the indexes of the server. */
  offer(cards, indexes = []) {
    const before = this.select.value;
    this.cards = cards.filter((card) => this.serves(card)).sort((a, b) => this.rank(a) - this.rank(b));
    this.select.replaceChildren(...this.cards.map((card) => element("option", { value: card.id }, card.id)));
    if (this.cards.some((card) => card.id === before)) this.select.value = before;
    const none = !this.cards.length;
    if (none) this.select.append(element("option", { value: "" }, "none"));
    this.select.disabled = none;
    this.run.disabled = none;
    if (none) this.#refuse();
    else if (this.answer.dataset.state === "none" || this.answer.dataset.state === "empty") this.#rest();
    this.offered(indexes);
    this.select.dispatchEvent(new Event("change"));
  }

  async #submitted(event) {
    event.preventDefault();
    const { card } = this;
    if (!card) return;
    let calls;
    try {
      calls = this.prepare(card);
    } catch (error) {
      if (error instanceof Unready) return; // shown next to the field
      throw error;
    }
    await this.ask(calls, (contents) => this.draw(contents, card));
  }

  /** Send the calls, and show what `draw` makes of their answers; a call that is under way is stopped. */
  async ask(prepared, draw) {
    const calls = prepared.map(({ path, body, whole }) => ({ path, body: whole ? body : this.#complete(body) }));
    this.#running?.abort();
    const running = new AbortController();
    this.#running = running;
    this.#busy(true);
    try {
      const answers = await Promise.all(calls.map(({ path, body }) => call(path, body, { signal: running.signal })));
      if (this.#running !== running) return;
      const drawing = draw(answers.map((answer) => answer.content));
      this.#show("done", drawing, this.#receipt(calls, answers));
      announce(`${this.verb}: done.`);
    } catch (error) {
      if (this.#running !== running) return;
      if (error.name === "AbortError") this.#rest("Stopped. Nothing more is computed for it.");
      else this.#fail(error, calls);
    } finally {
      if (this.#running === running) {
        this.#running = null;
        this.#busy(false);
      }
    }
  }

  #complete(body) {
    const limit = this.cut.checked ? this.cutting : {};
    return { model: this.card.id, ...body, ...limit };
  }

  #busy(busy) {
    this.answer.setAttribute("aria-busy", String(busy));
    this.stop.hidden = !busy;
    this.run.textContent = busy ? "Working…" : this.verb;
    this.run.classList.toggle("busy", busy);
  }

  #show(state, ...nodes) {
    this.answer.dataset.state = state;
    this.answer.replaceChildren(...nodes.flat());
  }

  #rest(words = this.empty) {
    this.#show("empty", element("div", { class: "still" }, ripples(), element("p", {}, words)));
  }

  #refuse() {
    this.#show(
      "none",
      element(
        "div",
        { class: "still" },
        ripples(),
        element("p", {}, "No model of this server does this."),
        element("p", { class: "soft" }, "It needs one with the task ", element("code", {}, this.task), "."),
      ),
    );
  }

  #fail(error, calls) {
    if (!(error instanceof ApiError)) console.error(error);
    const words = error instanceof ApiError ? error.message : "The answer could not be drawn; the console says why.";
    const wait = error.retryAfter ? ` Try again in ${counted(error.retryAfter, "second")}.` : "";
    this.#show(
      "error",
      element(
        "div",
        { class: "failure", role: "alert" },
        element("h3", {}, title(error)),
        element("p", { dir: "auto" }, words + wait),
        error.tooLong && !this.cut.checked && element("p", {}, `To send it all the same, tick “${CUT}”.`),
        error.status ? element("p", { class: "soft" }, `${error.status} ${error.type}`.trim()) : null,
      ),
      this.#commands(calls),
    );
    this.locate(error);
    if (error.status === 401) this.panel.dispatchEvent(new CustomEvent("millpond:locked", { bubbles: true }));
  }

  #receipt(calls, answers) {
    const milliseconds = Math.max(...answers.map((answer) => answer.milliseconds));
    const counts = answers.map(({ content }) => content.usage?.prompt_tokens).filter((count) => count !== undefined);
    const tokens = counts.reduce((sum, count) => sum + count, 0);
    const inference = answers.map((answer) => answer.inference).find((value) => value !== null);
    return [
      element(
        "p",
        { class: "receipt" },
        element("span", { class: "took" }, `${number(milliseconds, milliseconds < 10 ? 1 : 0)} ms`),
        inference !== undefined && element("span", {}, `${inference || "less than 1"} ms of it in the model`),
        counts.length > 0 && element("span", { class: "tokens" }, counted(tokens, "token")),
      ),
      this.#commands(calls),
    ];
  }

  #commands(calls) {
    return copyable(calls.map(({ path, body }) => curl(path, body)).join("\n\n"));
  }
}

function title({ status }) {
  if (!status) return "No answer";
  if (status === 401) return "The server needs an API key";
  if (status === 429 || status === 503) return "The server is busy";
  if (status >= 500 && status !== 501) return "The server failed";
  return "The server refused this";
}

function ripples() {
  return element("span", { class: "ripples", "aria-hidden": "true" }, element("i"), element("i"), element("i"));
}
