// Owns the conversations that this browser stores: IndexedDB for conversations, drafts in
// localStorage. Every change is one transaction that reads, changes and writes, so that changes of
// several tabs are all kept. Without IndexedDB (some private windows), conversations are kept until
// the page closes.

import { mergeConversations, readConversation } from "./conversation.js";

const NAME = "mlxrunner";
const TABLE = "conversations";
const DRAFT = "mlxrunner.draft.";
const READ = "mlxrunner.read";

/** Events: "changed" and "deleted" ({detail: {id}}) for a conversation, by this tab or another one;
 * "message" ({detail}), which another tab sent with `send`; "failed" ({detail: error}). */
class Store extends EventTarget {
  #opening = null;
  #inMemory = new Map();
  #channel = new BroadcastChannel("mlxrunner");

  constructor() {
    super();
    this.#channel.onmessage = ({ data }) => {
      if (data.kind === "changed" || data.kind === "deleted") this.#tell(data.kind, { id: data.id });
      else this.#tell("message", data);
    };
  }

  /** Whether conversations survive the page. */
  async isPersistent() {
    return (await this.#open()) !== null;
  }

  /** Sends a message to the other tabs. */
  send(message) {
    this.#channel.postMessage(message);
  }

  /** All conversations, the latest first. */
  async list() {
    const found = (await this.#run("readonly", (table) => table.getAll())) ?? [...this.#inMemory.values()];
    return found.map(readConversation).sort((a, b) => b.updated - a.updated);
  }

  /** A conversation, or null. */
  async get(id) {
    const found = (await this.#run("readonly", (table) => table.get(id))) ?? this.#inMemory.get(id);
    return found ? readConversation(found) : null;
  }

  /** Changes the stored conversation with `change`, and returns it. base: what is stored first if there
   * is none; without it, nothing is stored and the result is null. */
  async update(id, change, base = null) {
    const apply = (found) => {
      if (!found && !base) return null;
      const conversation = found ? readConversation(found) : structuredClone(base);
      change(conversation);
      return Object.assign(conversation, { updated: Date.now(), revision: conversation.revision + 1 });
    };
    return (await this.#change([[id, apply]]))[0];
  }

  /** Adds the conversations of a file, in one transaction. Those that exist are merged. */
  async import(conversations) {
    const merge = (imported) => (found) => {
      const own = found && readConversation(found);
      const merged = own ? mergeConversations(own, imported) : imported;
      return { ...merged, revision: Math.max(own?.revision ?? 0, imported.revision) + 1 };
    };
    await this.#change(conversations.map((one) => [one.id, merge(one)]));
  }

  async delete(id) {
    this.#inMemory.delete(id);
    await this.#run("readwrite", (table) => table.delete(id));
    for (const key of draftKeys(id)) removeDraft(key);
    this.#publish("deleted", id);
  }

  /** The id of the conversation that this tab showed last, or null. */
  get read() {
    return sessionStorage.getItem(READ);
  }

  set read(id) {
    sessionStorage.setItem(READ, id);
  }

  // Drafts: of the message field (`part` empty) and of a message that is edited (`part` its id). A tab
  // prefers its own, so that two tabs with the same conversation do not replace each other's.

  getDraft(id, part = "") {
    const key = DRAFT + id + (part && `.${part}`);
    return sessionStorage.getItem(key) ?? localStorage.getItem(key) ?? "";
  }

  setDraft(id, text, part = "") {
    const key = DRAFT + id + (part && `.${part}`);
    if (!text) return removeDraft(key);
    for (const storage of [sessionStorage, localStorage]) storage.setItem(key, text);
  }

  /** The drafts of message fields, by the ids of their conversations. */
  listDrafts() {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(DRAFT));
    const ids = keys.map((key) => key.slice(DRAFT.length)).filter((id) => !id.includes("."));
    return new Map(ids.map((id) => [id, localStorage.getItem(DRAFT + id)]));
  }

  // The database

  #open() {
    this.#opening ??= new Promise((resolve) => {
      let request;
      try {
        request = indexedDB.open(NAME, 1);
      } catch {
        return resolve(null);
      }
      request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
      request.onsuccess = () => {
        const database = request.result;
        database.onversionchange = () => database.close(); // a later version of the page opens it
        resolve(database);
      };
      request.onerror = () => resolve(null);
    });
    return this.#opening;
  }

  /** Runs one request on the table. Resolves to undefined without a database. */
  async #run(mode, start) {
    const database = await this.#open();
    if (!database) return undefined;
    return new Promise((resolve, reject) => {
      const request = start(database.transaction(TABLE, mode).objectStore(TABLE));
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
  }

  /** Reads, changes and writes conversations in one transaction. changes: [id, apply], where apply gets
   * the stored value and returns the new one, or null to store nothing. */
  async #change(changes) {
    const database = await this.#open();
    const results = [];
    if (!database) {
      changes.forEach(([id, apply], index) => {
        results[index] = apply(this.#inMemory.get(id));
        if (results[index]) this.#inMemory.set(id, structuredClone(results[index]));
      });
    } else {
      try {
        await transact(database, changes, results);
      } catch (error) {
        this.#tell("failed", error);
        throw error;
      }
    }
    for (const result of results) if (result) this.#publish("changed", result.id);
    return results;
  }

  #publish(kind, id) {
    this.send({ kind, id });
    this.#tell(kind, { id });
  }

  #tell(kind, detail) {
    this.dispatchEvent(new CustomEvent(kind, { detail }));
  }
}

function transact(database, changes, results) {
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(TABLE, "readwrite");
    const table = transaction.objectStore(TABLE);
    let failure = null;
    const fail = (error) => {
      failure = error;
      transaction.abort();
    };
    // one after the other, because a file may have a conversation twice
    const next = (index) => {
      if (index === changes.length) return;
      const [id, apply] = changes[index];
      table.get(id).onsuccess = (event) => {
        try {
          results[index] = apply(event.target.result);
          if (results[index]) table.put(results[index]);
          next(index + 1);
        } catch (error) {
          fail(error);
        }
      };
    };
    next(0);
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(failure ?? transaction.error ?? new Error("The browser refused to write."));
  });
}

function draftKeys(id) {
  return Object.keys(localStorage).filter((key) => key === DRAFT + id || key.startsWith(`${DRAFT + id}.`));
}

function removeDraft(key) {
  for (const storage of [sessionStorage, localStorage]) storage.removeItem(key);
}

export const store = new Store();
