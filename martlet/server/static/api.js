// @ts-check
/** The server's API: requests with the user's key, the server's errors, streams of events. */

import { session } from "./dom.js";

const KEY = "martlet.key"; // kept for this tab only

export class ServerError extends Error {
  /**
   * @param {string} message
   * @param {number} status
   * @param {string | null} [param]
   */
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** @type {(wrong: boolean) => Promise<string | null>} */
let askForKey = async () => null;

/**
 * Set the function that asks the user for a key; `wrong`: the server refused the last one. It
 * returns null if the user gives none.
 * @param {(wrong: boolean) => Promise<string | null>} ask
 */
export function onKeyWanted(ask) {
  askForKey = ask;
}

/**
 * Send a request; ask the user for a key if the server requires one.
 * @param {string} path
 * @param {{ body?: unknown, signal?: AbortSignal }} [options]
 * @returns {Promise<Response>}
 */
async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = session.get(KEY);
    /** @type {Record<string, string>} */
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (response.ok) return response;
    if (response.status === 401) {
      const given = await askForKey(key !== null);
      if (given !== null) {
        session.set(KEY, given);
        continue;
      }
    }
    throw await errorOf(response);
  }
}

/** @param {Response} response */
async function errorOf(response) {
  let said = `The server answered ${response.status}.`;
  let param = null;
  try {
    const { error } = await response.json();
    said = error.message;
    param = error.param ?? null;
  } catch {
    // not the API's format: perhaps a proxy's page
  }
  const after = response.headers.get("Retry-After");
  if (after && (response.status === 429 || response.status === 503)) said += ` Try again in ${after} s.`;
  return new ServerError(said, response.status, param);
}

/**
 * The JSON reply to a request; ServerError if the server refuses it.
 * @param {string} path
 * @param {unknown} [body]
 * @returns {Promise<any>}
 */
export async function call(path, body) {
  const response = await request(path, { body });
  return response.json();
}

/**
 * The events of a stream with their names and JSON data, up to its end or OpenAI's [DONE].
 * @param {string} path
 * @param {{ body?: unknown, signal?: AbortSignal }} options
 * @returns {AsyncGenerator<{ name: string, data: any }>}
 */
export async function* stream(path, options) {
  const response = await request(path, options);
  if (response.body === null) throw new ServerError("The server's answer has no body.", response.status);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split(/\r?\n\r?\n/);
      text = parts.pop() ?? "";
      for (const part of parts) {
        const found = parseEvent(part);
        if (found === null) continue;
        if (found.data === "[DONE]") return;
        yield { name: found.name, data: JSON.parse(found.data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * One event of https://html.spec.whatwg.org/multipage/server-sent-events.html; null: a comment.
 * @param {string} part
 */
function parseEvent(part) {
  let name = "message";
  const data = [];
  for (const line of part.split(/\r?\n/)) {
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line) ?? [];
    if (field === "data") data.push(value);
    else if (field === "event") name = value;
  }
  return data.length ? { name, data: data.join("\n") } : null;
}
