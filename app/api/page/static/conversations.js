// The list of conversations: open, delete, export, import.

import { announce, byId, h } from "./dom.js";
import {
  deleteConversation, exportConversations, importConversations, listConversations, newConversation,
  saveConversation,
} from "./store.js";

let chat = null;

export async function startConversations(shownChat) {
  chat = shownChat;
  byId("new-chat").addEventListener("click", () => open(newConversation()));
  byId("export").addEventListener("click", exportAll);
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFile);
  byId("menu").addEventListener("click", () => showSidebar(!document.body.classList.contains("menu")));
  const [latest] = await listConversations();
  if (latest) chat.show(latest);
  await renderConversations();
}

/** Shows or hides the list on narrow screens. */
export function showSidebar(shown) {
  document.body.classList.toggle("menu", shown);
  byId("menu").setAttribute("aria-expanded", String(shown));
  if (shown) byId("new-chat").focus();
}

export async function renderConversations() {
  const found = await listConversations();
  byId("conversations").replaceChildren(...found.map(renderEntry));
}

function renderEntry(conversation) {
  const title = conversation.title || "Untitled";
  const shown = conversation.id === chat.conversation.id;
  return h(
    "li",
    { class: shown ? "shown" : null },
    h("button", { type: "button", class: "title", "aria-current": shown ? "true" : null, onclick: () => open(conversation) }, title),
    h("button", { type: "button", class: "small quiet", "aria-label": `Delete ${title}`, onclick: () => remove(conversation) }, "×"),
  );
}

function open(conversation) {
  chat.show(conversation);
  showSidebar(false);
  renderConversations();
  byId("input").focus();
}

async function remove(conversation) {
  if (!confirm(`Delete “${conversation.title || "Untitled"}”?`)) return;
  if (conversation.id === chat.conversation.id) chat.show(newConversation());
  await deleteConversation(conversation.id);
  await renderConversations();
}

async function exportAll() {
  const text = exportConversations(await listConversations());
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
    const found = importConversations(await file.text());
    for (const conversation of found) await saveConversation(conversation);
    announce(`Imported ${found.length} conversations.`);
    await renderConversations();
  } catch (error) {
    alert(`Nothing was imported. ${error.message}`);
  }
}
