// An editable list of texts: Enter adds a field, Backspace in an empty field removes it.

import { announce, element } from "./elements.js";

const MOST = 64;

export class TextList {
  /** Fields in `fieldset`, the first ones filled with `texts`; `noun` names one field. */
  constructor(fieldset, texts, noun = "text") {
    this.noun = noun;
    this.list = element("ol", { class: "rows" });
    this.error = element("p", { class: "field-error", role: "alert" });
    this.add = element("button", { type: "button", class: "quiet add", click: () => this.insert().focus() }, `Add ${noun}`);
    this.clear = element("button", { type: "button", class: "quiet", click: () => this.empty() }, "Clear");
    fieldset.append(this.list, this.error, element("div", { class: "list-actions" }, this.add, this.clear));
    for (const text of texts) this.insert(null, text);
  }

  get fields() {
    return [...this.list.querySelectorAll("textarea")];
  }

  /** The fields that are not empty. */
  get filled() {
    return this.fields.filter((field) => field.value.trim());
  }

  /** Add a field after `after`, or at the end. */
  insert(after = null, text = "") {
    const field = element("textarea", { dir: "auto", rows: 1, keydown: (event) => this.#typed(event) });
    field.value = text;
    field.addEventListener("paste", (event) => this.#pasted(event));
    field.addEventListener("input", () => this.unmark());
    const remove = element("button", { type: "button", class: "icon", click: () => this.remove(field) }, "×");
    const row = element("li", {}, field, remove);
    if (after) after.closest("li").after(row);
    else this.list.append(row);
    this.#number();
    return field;
  }

  /** Remove `field`; the last one is only cleared. */
  remove(field) {
    const fields = this.fields;
    const neighbour = fields[fields.indexOf(field) - 1] ?? fields[fields.indexOf(field) + 1];
    this.unmark();
    if (!neighbour) field.value = "";
    else field.closest("li").remove();
    this.#number();
    (neighbour ?? field).focus();
  }

  empty() {
    this.list.replaceChildren();
    this.unmark();
    this.insert().focus();
  }

  /** Show an error, next to the invalid field if there is one. */
  mark(words, field = null) {
    this.unmark();
    this.error.textContent = words;
    field?.setAttribute("aria-invalid", "true");
  }

  unmark() {
    this.error.textContent = "";
    for (const field of this.fields) field.removeAttribute("aria-invalid");
  }

  #typed(event) {
    if (event.isComposing || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const field = event.currentTarget;
    if (event.key === "Enter") {
      event.preventDefault();
      if (this.fields.length < MOST) this.insert(field).focus();
    } else if (event.key === "Backspace" && !field.value && this.fields.length > 1) {
      event.preventDefault();
      this.remove(field);
    }
  }

  /** Lines pasted into an empty field become one text each. */
  #pasted(event) {
    let field = event.currentTarget;
    const pasted = event.clipboardData?.getData("text/plain") ?? "";
    const lines = pasted.split(/\r?\n/).filter((line) => line.trim());
    if (field.value || lines.length < 2) return;
    event.preventDefault();
    const fit = lines.slice(0, MOST - this.fields.length + 1);
    field.value = fit[0];
    for (const line of fit.slice(1)) field = this.insert(field, line);
    field.focus();
    this.unmark();
    const left = lines.length - fit.length;
    if (left) this.mark(`Only ${MOST} fit here: the last ${left} of the pasted lines were left out.`);
    announce(`Pasted ${fit.length} ${this.noun}s, one for each line.`);
  }

  #number() {
    const fields = this.fields;
    const noun = this.noun[0].toUpperCase() + this.noun.slice(1);
    fields.forEach((field, i) => {
      field.setAttribute("aria-label", `${noun} ${i + 1}`);
      field.placeholder = i ? "" : `Type or paste; Enter adds another ${this.noun}`;
      field.nextElementSibling.setAttribute("aria-label", `Remove ${this.noun} ${i + 1}`);
    });
    this.add.disabled = fields.length >= MOST;
  }
}
