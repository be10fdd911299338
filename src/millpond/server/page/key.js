// The API key: in this tab's memory and its sessionStorage, which end with the tab; never in an address.

const NAME = "millpond-api-key";

let current = remembered();

/** The key, or an empty string. */
export function get() {
  return current;
}

/** Use `key` from now on; an empty one forgets it. */
export function set(key) {
  current = key;
  try {
    if (key) sessionStorage.setItem(NAME, key);
    else sessionStorage.removeItem(NAME);
  } catch {
    // A browser that stores nothing still has the memory of this page.
  }
}

/** What is wrong with a key as typed, in words; an empty string where nothing is. */
export function fault(key) {
  if (!key) return "Type the key that the server was started with.";
  // A header holds no other characters; fetch would refuse it with words of its own.
  return /^[\x21-\x7e]+$/.test(key) ? "" : "A key has letters, digits and signs of ASCII only, and no spaces.";
}

function remembered() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}
