// Starts the page: tabs, the dialog for the key, the banner for a lost connection, keyboard
// shortcuts.

import { api } from "./api.js";
import { Chat } from "./chat.js";
import { followAddress, showSidebar, startConversations } from "./conversations.js";
import { announce, byId } from "./dom.js";
import { EngineView } from "./engine.js";
import { startModelManager } from "./model_manager.js";
import { refreshModels, startModels } from "./models.js";
import { renderSettings } from "./settings.js";
import { store } from "./store.js";

const RETRY_MS = 1000;

const engine = new EngineView(byId("engine"));

// Tabs

function showTab(name) {
  for (const tab of ["chat", "engine"]) {
    const shown = tab === name;
    byId(tab).hidden = !shown;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(shown));
    byId(`tab-${tab}`).tabIndex = shown ? 0 : -1;
  }
  byId("menu").classList.toggle("off", name !== "chat");
  engine.stop();
  if (name === "engine") engine.start();
}

function readTab() {
  return location.hash === "#engine" ? "engine" : "chat";
}

function openTab(name) {
  location.hash = name === "chat" ? `chat/${chat.conversation.id}` : name;
}

function startTabs() {
  for (const name of ["chat", "engine"]) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => openTab(name));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = name === "chat" ? "engine" : "chat";
      openTab(other);
      byId(`tab-${other}`).focus();
    });
  }
  addEventListener("hashchange", () => {
    showTab(readTab());
    followAddress();
  });
  document.addEventListener("visibilitychange", () => {
    if (readTab() !== "engine") return;
    if (document.hidden) engine.stop();
    else engine.start();
  });
  showTab(readTab());
}

// The key

let asking = null;

/** Asks for a key once, however many requests need it. Resolves to {key, keep}, or null. */
function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-reason").textContent = reason || "This server requires an API key.";
    byId("key").value = "";
    byId("keep-key").checked = api.keepsKey;
    dialog.returnValue = "";
    dialog.onclose = () => {
      asking = null;
      const key = byId("key").value.trim();
      byId("key").value = "";
      resolve(dialog.returnValue === "use" ? { key, keep: byId("keep-key").checked } : null);
    };
    dialog.showModal();
  });
  return asking;
}

function startKey() {
  api.askForKey = askForKey;
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    byId("key-dialog").close("use");
  });
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
  byId("key-button").addEventListener("click", async () => {
    const answer = await askForKey(api.key ? "A key is in use. Enter another one, or nothing to forget it." : "");
    if (!answer) return;
    api.setKey(answer.key, answer.keep);
    refreshModels();
    showTab(readTab()); // connects again if the Engine tab was refused
  });
}

// The connection

function startConnection() {
  const banner = byId("banner");
  api.addEventListener("offline", async () => {
    banner.textContent = "The server cannot be reached. Trying again…";
    banner.hidden = false;
    do await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    while (!(await api.probe()));
  });
  api.addEventListener("online", () => {
    banner.hidden = true;
    announce("The server can be reached again.");
    refreshModels();
  });
}

/** Escape stops the answer; otherwise it closes what is open. */
function startKeyboard(chat) {
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("key-dialog").open) return;
    if (chat.running) chat.stop();
    else if (document.body.classList.contains("menu")) {
      showSidebar(false);
      byId("menu").focus();
    } else if (!byId("settings").hidden) {
      showSettings(false);
      byId("settings-button").focus();
    }
  });
  byId("settings-button").addEventListener("click", () => showSettings(byId("settings").hidden));
}

function showSettings(shown) {
  byId("settings").hidden = !shown;
  byId("settings-button").setAttribute("aria-expanded", String(shown));
}

function startStore() {
  store.addEventListener("failed", ({ detail }) => {
    byId("store-banner").textContent = `This browser could not store the conversation: ${detail.message} Copy what you need, or delete other conversations.`;
    byId("store-banner").hidden = false;
  });
  store.addEventListener("changed", () => (byId("store-banner").hidden = true));
}

const chat = new Chat();
startTabs();
startKey();
startConnection();
startKeyboard(chat);
startModelManager(byId("key-button"));
startStore();
renderSettings((text) => chat.setSystem(text));
await startConversations(chat);
await startModels();
