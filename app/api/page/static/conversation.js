// Conversations as data. The messages of a conversation form a tree: another answer to the same
// message, and an edited message, are branches next to the earlier ones. Knows no storage and no
// DOM.
//
//     {id, title, created, updated, revision, system, leaf, messages: [{id, parent, role, …}]}
//
// A parent precedes its children in the list. `leaf` is the last message of the branch that was
// read. `system` is missing until the conversation has its own system prompt.

const FORMAT = "mlxrunner-conversations";
const VERSION = 2; // 1: a list of messages without ids

const TITLE_CHARS = 60;

const ROLES = new Set(["user", "assistant", "tool"]);
const TEXTS = ["content", "reasoning", "model", "error", "tool_call_id", "finish"];

export function newConversation(id = randomId()) {
  const now = Date.now();
  return { id, title: "", created: now, updated: now, revision: 0, leaf: null, messages: [] };
}

export function newMessage(role, parent, fields) {
  return { id: randomId(), parent, role, content: "", ...fields };
}

/** crypto.randomUUID exists only on https and on loopback. */
export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// The tree

export function findMessage(conversation, id) {
  return conversation.messages.find((message) => message.id === id);
}

/** The messages from the first one to `leaf`. */
export function branchTo(conversation, leaf) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const branch = [];
  for (let message = byId.get(leaf); message; message = byId.get(message.parent)) branch.push(message);
  return branch.reverse();
}

/** The versions of a message: all answers to, or all edits after, the same message. */
export function versionsOf(conversation, message) {
  return conversation.messages.filter((one) => one.parent === message.parent);
}

/** The end of the branch that continues a message; the latest one if there are several. */
export function latestLeaf(conversation, id) {
  const latest = new Map(conversation.messages.map((message) => [message.parent, message.id]));
  let leaf = id;
  while (latest.has(leaf)) leaf = latest.get(leaf);
  return leaf;
}

/** Adds messages, or replaces those with the same id. */
export function putMessages(conversation, messages) {
  for (const message of messages) {
    const at = conversation.messages.findIndex((one) => one.id === message.id);
    if (at < 0) conversation.messages.push(message);
    else conversation.messages[at] = message;
  }
  conversation.title ||= makeTitle(conversation.messages);
}

/** Whether an answer ended without its last event: the page or the browser was closed. */
export function isIncomplete(message) {
  return message.role === "assistant" && !message.finish && !message.error;
}

function makeTitle(messages) {
  const text = messages.find((message) => message.role === "user")?.content.trim() ?? "";
  const [line] = text.slice(0, 1000).split("\n");
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS)}…` : line;
}

// Files

/** The file of an export. It contains only conversations: no key, no settings. */
export function exportConversations(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
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
  if (content.version > VERSION) {
    throw new Error("The file was written by a newer version of mlxrunner: update this server, or export with this version.");
  }
  return content.conversations.map(readConversation);
}

/** Copies the known fields of a conversation of any version, with their types. */
export function readConversation(found) {
  const conversation = {
    ...newConversation(typeof found?.id === "string" && found.id ? found.id : undefined),
    title: String(found?.title ?? ""),
    created: Number(found?.created) || Date.now(),
    updated: Number(found?.updated) || Date.now(),
    revision: Number(found?.revision) || 0,
  };
  if (typeof found?.system === "string") conversation.system = found.system;
  const known = new Set([null]);
  let last = null;
  for (const one of Array.isArray(found?.messages) ? found.messages : []) {
    if (!ROLES.has(one?.role)) continue;
    const message = readMessage(one, last);
    if (known.has(message.id)) continue;
    if (!known.has(message.parent)) message.parent = last;
    conversation.messages.push(message);
    known.add(message.id);
    last = message.id;
  }
  conversation.leaf = found?.leaf && known.has(found.leaf) ? found.leaf : last;
  return conversation;
}

function readMessage(found, last) {
  const message = { id: "", parent: last, role: found.role, content: "" };
  for (const name of TEXTS) if (typeof found[name] === "string") message[name] = found[name];
  if (Array.isArray(found.calls)) {
    message.calls = found.calls.map((call) => ({
      id: String(call?.id ?? ""),
      name: String(call?.name ?? ""),
      arguments: String(call?.arguments ?? ""),
    }));
  }
  if (Array.isArray(found.images)) {
    const images = found.images.filter(isImage);
    if (images.length) message.images = images;
  }
  if (found.figures && typeof found.figures === "object") {
    const numbers = Object.entries(found.figures).filter(([, value]) => typeof value === "number");
    message.figures = Object.fromEntries(numbers);
  }
  const hasId = typeof found.id === "string" && found.id;
  message.id = hasId ? found.id : hashMessage(message);
  if (hasId) message.parent = typeof found.parent === "string" ? found.parent : null;
  return message;
}

/** Whether a value is an image that the page may store and show. */
function isImage(url) {
  return typeof url === "string" && /^data:image\/(png|jpeg|webp|gif);base64,/.test(url);
}

/** An id derived from the parent and the content, so that equal messages in two files are merged. */
function hashMessage({ parent, role, content, reasoning, calls, tool_call_id: call, images }) {
  const parts = [parent, role, content, reasoning, calls, call];
  const text = JSON.stringify(images ? [...parts, images] : parts);
  let high = 0xdeadbeef;
  let low = 0x41c6ce57;
  for (let at = 0; at < text.length; at += 1) {
    high = Math.imul(high ^ text.charCodeAt(at), 2654435761);
    low = Math.imul(low ^ text.charCodeAt(at), 1597334677);
  }
  return `${(high >>> 0).toString(16)}-${(low >>> 0).toString(16)}-${text.length.toString(16)}`;
}

// Two copies of a conversation

/** Adds the messages of another copy of a conversation. No message of either is lost: one that was continued
 * replaces its earlier state, and one that differs otherwise becomes a branch. The title, the system
 * prompt and the branch that was read are those of the copy that was changed last. */
export function mergeConversations(ours, theirs) {
  const merged = { ...ours, messages: [...ours.messages] };
  const renamed = new Map();
  for (const found of theirs.messages) {
    const message = { ...found, parent: renamed.get(found.parent) ?? found.parent };
    const own = findMessage(merged, message.id);
    if (own && own.parent === message.parent && isEarlier(own, message)) putMessages(merged, [message]);
    else if (own && (own.parent !== message.parent || !isEarlier(message, own))) {
      const id = hashMessage(message);
      renamed.set(message.id, id);
      if (!findMessage(merged, id)) merged.messages.push({ ...message, id });
    } else if (!own) merged.messages.push(message);
  }
  const newer = theirs.updated > ours.updated ? theirs : ours;
  merged.title = newer.title || ours.title || theirs.title;
  if (newer.system !== undefined) merged.system = newer.system;
  merged.leaf = renamed.get(newer.leaf) ?? newer.leaf ?? merged.messages.at(-1)?.id ?? null;
  merged.updated = newer.updated;
  merged.created = Math.min(ours.created, theirs.created);
  return merged;
}

/** Whether `before` is `after`, or its state at an earlier time. */
function isEarlier(before, after) {
  const isPart = (name) => (after[name] ?? "").startsWith(before[name] ?? "");
  const grew = before.role === after.role && isPart("content") && isPart("reasoning");
  const sameCalls = !before.calls?.length || JSON.stringify(before.calls) === JSON.stringify(after.calls);
  const length = (message) => message.content.length + (message.reasoning ?? "").length;
  return grew && sameCalls && (length(after) > length(before) || Boolean(after.finish) || !before.finish);
}
