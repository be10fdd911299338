// Tabs as in the ARIA practices: one Tab stop, arrow keys between tabs; the address names the open tab.
// The fragment is #/name, which is not an element's id: the browser would scroll to that.

export class Tabs {
  constructor(list) {
    this.list = list;
    list.addEventListener("click", (event) => this.open(event.target.closest("[role=tab]")));
    list.addEventListener("keydown", (event) => this.#move(event));
    addEventListener("hashchange", () => this.open(this.named(this.address)));
  }

  get shown() {
    return [...this.list.querySelectorAll("[role=tab]")].filter((tab) => !tab.hidden);
  }

  /** The tab with this name. */
  named(name) {
    return this.shown.find((tab) => tab.getAttribute("aria-controls") === name);
  }

  /** The name in the address. */
  get address() {
    return location.hash.replace(/^#\//, "");
  }

  open(tab) {
    if (!tab) return;
    for (const each of this.list.querySelectorAll("[role=tab]")) {
      const chosen = each === tab;
      each.setAttribute("aria-selected", String(chosen));
      each.tabIndex = chosen ? 0 : -1;
      document.getElementById(each.getAttribute("aria-controls")).hidden = !chosen;
    }
    // Replaced, so that Back leaves the page instead of stepping through the tabs.
    history.replaceState(null, "", `#/${tab.getAttribute("aria-controls")}`);
  }

  #move(event) {
    const tabs = this.shown;
    const at = tabs.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const tab = tabs.at(to % tabs.length);
    this.open(tab);
    tab.focus();
  }
}
