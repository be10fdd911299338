// A command to copy.

import { announce, element } from "./elements.js";

/** `text` in a collapsible block with a copy button. */
export function copyable(text) {
  const shown = element("code", {}, text);
  const button = element("button", { type: "button", class: "quiet copy", click: () => copied(text, shown, button) }, "Copy");
  return element(
    "details",
    { class: "command" },
    element("summary", {}, "curl"),
    element("div", { class: "command-text" }, element("pre", { tabindex: 0, "aria-label": "Command" }, shown), button),
  );
}

async function copied(text, shown, button) {
  let words = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Over plain HTTP from another machine there is no clipboard API; select the text and let the browser try to copy.
    getSelection().selectAllChildren(shown);
    if (!document.execCommand("copy")) words = "Selected";
  }
  button.textContent = words;
  announce(words);
  setTimeout(() => (button.textContent = "Copy"), 2000);
}
