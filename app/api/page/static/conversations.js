// The list of conversations: open, search, rename, delete, export, import. Each one has an address,
// #chat/<id>.

import { answers } from "./answers.js";
import { exportConversations, importConversations, newConversation } from "./conversation.js";
import { announce, byId, drawEachFrame, h } from "./dom.js";
import { store } from "./store.js";

let chat = null;
let found = null; // the ids of the conversations that contain the search text; null for all
let renaming = null; // the id
const entries = new Map(); // {id, title, updated} by id

export async function startConversations(shownChat) {
  chat = shownChat;
  byId("new-chat").addEventListener("click", () => openConversation(newConversation().id));
  byId("export").addEventListener("click", exportAll);
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFile);
  byId("menu").addEventListener("click", () => showSidebar(!document.body.classList.contains("menu")));
  byId("search").addEventListener("input", search);
  byId("input").addEventListener("input", render);
  for (const kind of ["changed", "deleted"]) store.addEventListener(kind, ({ detail }) => refresh(detail.id));
  for (const kind of ["progress", "end"]) answers.addEventListener(kind, () => render());
  const all = await store.list();
  for (const conversation of all) remember(conversation);
  byId("storage-note").hidden = await store.isPersistent();
  const id = readAddress() ?? store.read ?? all[0]?.id ?? newConversation().id;
  if (location.hash !== "#engine") history.replaceState(null, "", `#chat/${id}`);
  await showConversation(id);
}

/** The id in the address, or null. */
function readAddress() {
  return /^#chat\/([\w-]+)$/.exec(location.hash)?.[1] ?? null;
}

/** Shows the conversation of the address. */
export async function followAddress() {
  const id = readAddress();
  if (id && id !== chat.conversation.id) await showConversation(id);
}

function openConversation(id) {
  showSidebar(false);
  location.hash = `chat/${id}`;
  byId("input").focus();
}

async function showConversation(id) {
  const conversation = (await store.get(id)) ?? newConversation(id);
  const wanted = readAddress();
  if (wanted && wanted !== id) return; // another one was opened meanwhile
  chat.show(conversation);
  store.read = id; // for a reload of the Engine tab
  render();
}

/** Shows or hides the list on narrow screens. */
export function showSidebar(shown) {
  document.body.classList.toggle("menu", shown);
  byId("menu").setAttribute("aria-expanded", String(shown));
  if (shown) byId("new-chat").focus();
}

// The list

function remember({ id, title, updated }) {
  entries.set(id, { id, title, updated });
}

async function refresh(id) {
  const conversation = await store.get(id);
  if (conversation) remember(conversation);
  else entries.delete(id);
  render();
}

const render = drawEachFrame(() => {
  const drafts = store.listDrafts();
  const listed = [...entries.values()].sort((a, b) => b.updated - a.updated);
  // a draft without a conversation is listed, so that it can be found
  for (const [id, text] of drafts) {
    if (!entries.has(id)) listed.unshift({ id, title: `Draft: ${text.trim().slice(0, 60)}` });
  }
  if (renaming && byId("conversations").querySelector("form")) return; // keeps what is typed
  const shown = listed.filter(({ id }) => !found || found.has(id));
  byId("conversations").replaceChildren(...shown.map((entry) => renderEntry(entry)));
  byId("no-results").hidden = !found || shown.length > 0;
});

function renderEntry({ id, title: named }) {
  const title = named || "Untitled";
  const shown = id === chat.conversation.id;
  if (id === renaming) return h("li", {}, renameForm(id, named));
  const running = answers.get(id) ? h("span", { class: "running", role: "img", "aria-label": "is being answered" }) : null;
  return h(
    "li",
    { class: shown ? "shown" : null },
    h("button", { type: "button", class: "title", "aria-current": shown ? "true" : null, onclick: () => openConversation(id) }, title),
    running,
    h("button", { type: "button", class: "small quiet", "aria-label": `Rename ${title}`, onclick: () => rename(id) }, "✎"),
    h("button", { type: "button", class: "small quiet", "aria-label": `Delete ${title}`, onclick: () => remove(id, title) }, "×"),
  );
}

function rename(id) {
  renaming = id;
  render();
}

function renameForm(id, title) {
  const field = h("input", { type: "text", value: title, "aria-label": "Title", maxlength: 200 });
  const close = () => {
    renaming = null;
    form.remove();
    render();
  };
  const form = h("form", {
    onsubmit: (event) => {
      event.preventDefault();
      const text = field.value.trim();
      close();
      if (text) store.update(id, (conversation) => (conversation.title = text), newConversation(id)).catch(() => {});
    },
    onkeydown: (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    },
  }, field);
  queueMicrotask(() => field.select());
  return form;
}

async function remove(id, title) {
  if (!confirm(`Delete “${title}”?`)) return;
  await store.delete(id);
}

async function search() {
  const text = byId("search").value.trim().toLowerCase();
  if (!text) found = null;
  else {
    const has = (value) => (value ?? "").toLowerCase().includes(text);
    const all = await store.list();
    if (byId("search").value.trim().toLowerCase() !== text) return; // more was typed
    found = new Set(all
      .filter(({ title, system, messages }) => has(title) || has(system) || messages.some(({ content }) => has(content)))
      .map(({ id }) => id));
  }
  render();
}

// Files

async function exportAll() {
  const text = exportConversations(await store.list());
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const date = new Date().toISOString().slice(0, 10);
  h("a", { href: url, download: `mlxrunner-conversations-${date}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function importFile() {
  const field = byId("import-file");
  const [file] = field.files;
  field.value = "";
  if (!file) return;
  try {
    const conversations = importConversations(await file.text());
    await store.import(conversations);
    announce(`Imported ${conversations.length} conversations.`);
  } catch (error) {
    alert(`Nothing was imported. ${error.message}`);
  }
}
