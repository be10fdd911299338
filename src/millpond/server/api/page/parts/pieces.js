// Positions of tokens in their text, from the strings of the vocabulary.

const UNKNOWN = /^(\[UNK\]|<unk>)$/;
const WORD = /^\s*([\p{L}\p{M}\p{N}]+|\S)/u; // what becomes one unknown token

/** For each token in `strings`: its part of `text`, and the gap before it. */
export function pieces(strings, text) {
  const folded = fold(text);
  const written = strings.some((string) => /^[ĠĊ]/.test(string)) ? decoded(strings) : strings.map(plain);
  let cursor = 0;
  return written.map((word) => {
    const unknown = UNKNOWN.test(word) && WORD.exec(text.slice(cursor));
    const wanted = unknown ? unknown[1] : word;
    const at = folded.indexOf(fold(wanted), cursor);
    // A normalized token is not in the text: it is shown as the vocabulary writes it.
    if (at < 0 || text.slice(cursor, at).trim()) return { gap: "", word };
    const piece = { gap: text.slice(cursor, at), word: text.slice(at, at + wanted.length) };
    cursor = at + wanted.length;
    return piece;
  });
}

/** Tokens as a reader would write them: without the vocabulary's marks of words and bytes. */
export function labels(strings) {
  return strings.map((string) => (inBytes(string) && decoded([string])) || plain(string) || "␣");
}

function inBytes(string) {
  return /[^!-~]/.test(string) && Array.from(string).every((sign) => BYTES.has(sign));
}

function plain(string) {
  return string.replace(/^(##|▁+)/u, "");
}

/** `text` without case and accents at the same length: some tokenizers remove them. */
function fold(text) {
  return Array.from(text, (sign) => {
    const bare = sign.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase();
    return bare.length === sign.length ? bare : sign;
  }).join("");
}

/** Byte tokens as texts; a character of several tokens belongs to the last one. */
function decoded(strings) {
  let bytes = [];
  return strings.map((string) => {
    for (const sign of string) {
      const byte = BYTES.get(sign);
      if (byte === undefined) bytes.push(...new TextEncoder().encode(sign));
      else bytes.push(byte);
    }
    try {
      const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
      bytes = [];
      return text.trim();
    } catch {
      return "";
    }
  });
}

/** The bytes by the characters that GPT-2's vocabulary and its successors use for them. */
const BYTES = new Map();
for (let byte = 0, next = 256; byte < 256; byte++) {
  const shown = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  BYTES.set(String.fromCodePoint(shown ? byte : next++), byte);
}
