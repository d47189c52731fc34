// Calls this server's API: the key, errors, the state of the connection.

import { readEvents } from "./sse.js";

const KEY = "mlxrunner.key";

/** An error response, or a connection that failed (status 0). */
export class ApiError extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The API with the user's key. The key is kept only in memory, unless the user asks to store it.
 * Events: "offline" and "online", when the connection is lost and restored; "key", when the key has
 * changed. */
class Api extends EventTarget {
  #key = localStorage.getItem(KEY) ?? "";
  #offline = false;
  askForKey = async () => null; // set by app.js: resolves to {key, keep}, or null

  get key() {
    return this.#key;
  }

  get keepsKey() {
    return localStorage.getItem(KEY) !== null;
  }

  setKey(key, keep) {
    this.#key = key;
    if (key && keep) localStorage.setItem(KEY, key);
    else localStorage.removeItem(KEY);
    this.dispatchEvent(new Event("key"));
  }

  /** Sends a request, and asks for a key when one is needed. Throws ApiError, and AbortError. */
  async fetch(path, { body, signal } = {}) {
    while (true) {
      const response = await this.#send(path, body, signal);
      if (response.ok) return response;
      const error = await readError(response);
      if (error.status !== 401) throw error;
      const answer = await this.askForKey(this.#key ? error.message : "");
      if (!answer) throw error;
      this.setKey(answer.key, answer.keep);
    }
  }

  async json(path, options) {
    return (await this.fetch(path, options)).json();
  }

  /** Yields the events of a stream. Throws ApiError if the connection ends before `isLast`. */
  async *stream(path, { body, signal, isLast = () => false }) {
    const response = await this.fetch(path, { body, signal });
    try {
      for await (const event of readEvents(response)) {
        yield event;
        if (isLast(event)) return;
      }
    } catch (error) {
      if (error.name === "AbortError") throw error;
    }
    this.#setOffline(true);
    throw new ApiError("The connection to the server was lost.", 0);
  }

  /** Whether the server answers at all. */
  async probe() {
    try {
      await this.#send("/health");
      return true;
    } catch {
      return false;
    }
  }

  async #send(path, body, signal) {
    const headers = this.#key ? { Authorization: `Bearer ${this.#key}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    try {
      const response = await fetch(path, {
        method: body ? "POST" : "GET",
        headers,
        body: body && JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
      });
      this.#setOffline(false);
      return response;
    } catch (error) {
      if (error.name === "AbortError") throw error;
      this.#setOffline(true);
      throw new ApiError("The server cannot be reached.", 0);
    }
  }

  #setOffline(offline) {
    if (offline === this.#offline) return;
    this.#offline = offline;
    this.dispatchEvent(new Event(offline ? "offline" : "online"));
  }
}

async function readError(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // not JSON: a proxy's page
  }
  const message = typeof error === "string" ? error : error?.message;
  return new ApiError(
    message ?? `The server returned HTTP ${response.status}.`,
    response.status,
    error?.code ?? null,
  );
}

export const api = new Api();
