// Conversations, stored by this browser in IndexedDB. Without IndexedDB (some private windows), they
// are kept until the page closes.

const NAME = "mlxrunner";
const TABLE = "conversations";
const FORMAT = "mlxrunner-conversations";

let opening = null;
const inMemory = new Map();

function open() {
  opening ??= new Promise((resolve) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
  return opening;
}

/** Runs one request on the table. Resolves to undefined without a database. */
async function run(mode, start) {
  const database = await open();
  if (!database) return undefined;
  return new Promise((resolve, reject) => {
    const request = start(database.transaction(TABLE, mode).objectStore(TABLE));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** All conversations, the latest first. */
export async function listConversations() {
  const found = (await run("readonly", (table) => table.getAll())) ?? [...inMemory.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

export async function saveConversation(conversation) {
  inMemory.set(conversation.id, conversation);
  await run("readwrite", (table) => table.put(structuredClone(conversation)));
}

export async function deleteConversation(id) {
  inMemory.delete(id);
  await run("readwrite", (table) => table.delete(id));
}

export function newConversation() {
  const now = Date.now();
  return { id: randomId(), title: "", created: now, updated: now, messages: [] };
}

/** crypto.randomUUID exists only on https and on loopback. */
function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The file of an export. It has conversations and nothing else: no key, no settings. */
export function exportConversations(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/** The conversations of an export. Throws an Error with one sentence. */
export function importConversations(text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (content?.format !== FORMAT || !Array.isArray(content.conversations)) {
    throw new Error("The file is not an export of this page.");
  }
  return content.conversations.map(readConversation);
}

/** Copies the known fields of a conversation, with their types. A file may contain anything. */
function readConversation(found) {
  const messages = Array.isArray(found?.messages) ? found.messages : [];
  return {
    ...newConversation(),
    id: typeof found?.id === "string" ? found.id : randomId(),
    title: String(found?.title ?? ""),
    created: Number(found?.created) || Date.now(),
    updated: Number(found?.updated) || Date.now(),
    messages: messages.filter((one) => ROLES.has(one?.role)).map(readMessage),
  };
}

const ROLES = new Set(["user", "assistant", "tool"]);
const TEXTS = ["content", "reasoning", "model", "error", "tool_call_id", "finish"];

function readMessage(found) {
  const message = { role: found.role, content: "" };
  for (const name of TEXTS) if (typeof found[name] === "string") message[name] = found[name];
  if (Array.isArray(found.calls)) {
    message.calls = found.calls.map((call) => ({
      id: String(call?.id ?? ""),
      name: String(call?.name ?? ""),
      arguments: String(call?.arguments ?? ""),
    }));
  }
  if (found.figures && typeof found.figures === "object") {
    const numbers = Object.entries(found.figures).filter(([, value]) => typeof value === "number");
    message.figures = Object.fromEntries(numbers);
  }
  return message;
}
