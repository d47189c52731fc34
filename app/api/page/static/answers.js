// The answers that this tab is receiving, one per conversation at most. They continue when
// another conversation is opened, and are stored while they grow.

import { streamAnswer } from "./answer.js";
import { putMessages } from "./conversation.js";
import { store } from "./store.js";

// An unfinished answer is stored this often, so that little is lost if the browser crashes.
const SAVE_INTERVAL_MS = 1000;

/** Events: "progress" and "end" ({detail: {id, message, isSaved}}), with the id of the conversation. */
class Answers extends EventTarget {
  #running = new Map(); // by conversation: {id, message, abort, progress, timer}
  #elsewhere = new Set(); // ids of messages that other tabs are receiving

  constructor() {
    super();
    store.addEventListener("message", ({ detail }) => this.#onMessage(detail));
    store.addEventListener("deleted", ({ detail }) => this.stop(detail.id));
    addEventListener("pagehide", () => this.#leave());
    document.addEventListener("visibilitychange", () => document.hidden && this.#saveAll());
    store.send({ kind: "ask" });
  }

  /** The answer to a conversation that is being received: {message, progress}. */
  get(id) {
    return this.#running.get(id);
  }

  isElsewhere(message) {
    return this.#elsewhere.has(message.id);
  }

  /** Receives an answer into `message`. body: of the request. Resolves when it has ended. */
  async start(id, message, body) {
    const running = { id, message, abort: new AbortController(), progress: "Waiting for the server", timer: 0 };
    this.#running.set(id, running);
    this.#announce(running, "running");
    try {
      await streamAnswer({
        message, body, signal: running.abort.signal,
        onChange: (progress) => {
          running.progress = progress;
          running.timer ||= setTimeout(() => this.#save(running), SAVE_INTERVAL_MS);
          this.#tell("progress", running);
        },
      });
      message.finish ??= "stop";
    } catch (error) {
      describeFailure(message, error);
    }
    if (this.#running.get(id) === running) this.#running.delete(id); // an edit may have begun another
    running.isSaved = await this.#save(running);
    this.#announce(running, "ended");
    this.#tell("end", running);
  }

  /** Ends the answer to a conversation. The server notices the closed connection and frees the engine. */
  stop(id) {
    this.#running.get(id)?.abort.abort();
  }

  async #save(running) {
    clearTimeout(running.timer);
    running.timer = 0;
    const message = structuredClone(running.message);
    const saving = store.update(running.id, (conversation) => putMessages(conversation, [message]));
    return saving.then(() => true, () => false); // the store says why
  }

  #saveAll() {
    for (const running of this.#running.values()) this.#save(running);
  }

  #leave() {
    for (const running of this.#running.values()) this.#announce(running, "ended");
    this.#saveAll();
  }

  #announce({ id, message }, kind) {
    store.send({ kind, id, message: message.id });
  }

  #onMessage({ kind, id, message }) {
    if (kind === "ask") for (const running of this.#running.values()) this.#announce(running, "running");
    if (kind === "running") this.#elsewhere.add(message);
    if (kind === "ended") this.#elsewhere.delete(message);
    if (kind === "running" || kind === "ended") this.#tell("progress", { id, message: null });
  }

  #tell(kind, { id, message, isSaved }) {
    this.dispatchEvent(new CustomEvent(kind, { detail: { id, message, isSaved } }));
  }
}

function describeFailure(message, error) {
  if (error.name === "AbortError") {
    message.finish = "stopped";
    return;
  }
  const begun = message.content || message.reasoning;
  message.error = error.status === 0 && begun ? `${error.message} The answer is incomplete.` : error.message;
}

export const answers = new Answers();
