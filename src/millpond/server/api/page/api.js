// The page's HTTP client: one API key, error messages, and the time of every call.

import * as key from "./key.js";

const base = new URL(".", document.baseURI);

/** An error from the server or the network. */
export class ApiError extends Error {
  constructor(message, { status = 0, type = "", param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.type = type;
    this.param = param;
    this.retryAfter = retryAfter;
  }

  /** Whether a text is too long. */
  get tooLong() {
    return this.status === 400 && /\bcontext length\b|\btoo long\b|\bmore than .* tokens\b/i.test(this.message);
  }

  /** Index of the invalid text, if the message states it. */
  get index() {
    const found = /\bindex (\d+)/.exec(this.message);
    return found ? Number(found[1]) : null;
  }
}

/** The JSON from `path`; with `body` the request is a POST. */
export async function call(path, body, { signal } = {}) {
  const started = performance.now();
  const response = await sent(path, body, signal);
  const content = await parsed(response, signal);
  const milliseconds = performance.now() - started;
  if (!response.ok) throw refusal(response, content);
  return { content, milliseconds, inference: timing(response) };
}

/** The same request as a shell command, without the key. */
export function curl(path, body) {
  const lines = [`curl ${quoted(new URL(path, base).href)}`, `-H ${quoted("Content-Type: application/json")}`];
  if (key.get()) lines.push('-H "Authorization: Bearer $MILLPOND_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

async function sent(path, body, signal) {
  const headers = { Accept: "application/json" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    return await fetch(new URL(path, base), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. It may have been stopped, or the connection is down.");
  }
}

async function parsed(response, signal) {
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError" || signal?.aborted) throw error;
    return null;
  }
}

function refusal(response, content) {
  const error = content?.error ?? {};
  const detail = typeof content?.detail === "string" ? content.detail : "";
  const words = error.message || detail || `The server answered ${response.status} ${response.statusText}`.trim();
  const wait = Number(response.headers.get("Retry-After"));
  const retryAfter = response.headers.has("Retry-After") && Number.isFinite(wait) ? wait : null;
  return new ApiError(words, { status: response.status, type: error.type ?? "", param: error.param ?? null, retryAfter });
}

/** Whole milliseconds of the model's own time, if the server reports them. */
function timing(response) {
  const header = response.headers.get("X-Inference-Time");
  return header === null ? null : Number(header);
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
