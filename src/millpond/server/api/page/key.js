// The API key: kept in memory and in sessionStorage, which end with the tab; never in a URL.

const NAME = "millpond-api-key";

let current = remembered();

/** The key, or an empty string. */
export function get() {
  return current;
}

/** Use `key` from now on; an empty one removes it. */
export function set(key) {
  current = key;
  try {
    if (key) sessionStorage.setItem(NAME, key);
    else sessionStorage.removeItem(NAME);
  } catch {
    // Without storage the key stays in the memory of the page.
  }
}

/** The problem with a typed key; an empty string if there is none. */
export function fault(key) {
  if (!key) return "Type the key that the server was started with.";
  // A header allows no other characters; fetch would throw its own error.
  return /^[\x21-\x7e]+$/.test(key) ? "" : "A key has letters, digits and signs of ASCII only, and no spaces.";
}

function remembered() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}
