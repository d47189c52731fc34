// Scenarios that use the page in a real browser, and return their observations. driver.mjs runs
// them.

import { readFile } from "node:fs/promises";

import { answer, ask, begin, ended, figures, lastError, openNewChat, say, until } from "./browser.mjs";

const WIDTHS = [1280, 390, 320];
const SCHEMES = ["light", "dark"];

// the views that docs/page.md shows
const IMAGES = { "chat-1280-light": "page-chat", "chat-390-dark": "page-phone" };

/** The controls that are too small for touch: less than 44 px wide or high. */
function findSmallTargets() {
  const isShown = (node) => node.checkVisibility({ visibilityProperty: true }) && node.getBoundingClientRect().right > 0;
  return Array.from(document.querySelectorAll("button, select, summary, a, input, textarea"))
    .filter((node) => isShown(node) && !node.closest(".text, .offscreen") && !node.matches(".skip, label input"))
    .filter((node) => {
      const { width, height } = node.getBoundingClientRect();
      return height < 43.5 || width < 43.5 && !node.matches(".bar a");
    })
    .map((node) => node.outerHTML.slice(0, 120));
}

export const scenarios = {
  /** Paints of the page, in ms after the start of the navigation. */
  async paint(browser) {
    const paints = [];
    for (let load = 0; load < 3; load += 1) {
      const tab = await browser.open();
      await tab.waitForFunction(() => performance.getEntriesByName("first-contentful-paint").length);
      paints.push(await tab.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0].startTime));
      await tab.close();
    }
    return { paints };
  },

  /** What the content security policy prevents, even if a script of an attacker ran in the page. */
  async policy(browser) {
    const tab = await browser.open();
    const attempt = (act) => tab.evaluate(act);
    await attempt(() => {
      const script = document.createElement("script");
      script.textContent = "window.ran = true";
      document.head.append(script);
      document.body.setAttribute("style", "display: none");
      document.body.append(Object.assign(new Image(), { src: "http://127.0.0.1:9/leak.png" }));
    });
    const sent = await attempt(() => fetch("http://127.0.0.1:9/leak").then(() => true, () => false));
    await until(() => browser.errors.some((error) => error.includes("img-src")));
    const state = await attempt(() => ({ ran: window.ran ?? false, display: getComputedStyle(document.body).display }));
    return { ...state, sent };
  },

  /** An answer of a slow engine grows while it is received; a reload keeps the received part. */
  async streaming(browser) {
    const tab = await browser.openChat();
    await ask("throttle");
    await begin(tab, "What is mlxrunner?");
    await tab.evaluate(() => {
      window.seen = [];
      const log = document.getElementById("log");
      new MutationObserver(() => {
        const text = log.querySelector(".message.assistant > .text").textContent;
        if (text !== window.seen.at(-1)) window.seen.push(text);
      }).observe(log, { childList: true, subtree: true, characterData: true });
    });
    const busy = await tab.locator(".message.assistant").getAttribute("aria-busy");
    await until(async () => (await answer(tab)).split(" ").length > 4);
    // the page stores an unfinished answer once per second
    await until(() => tab.evaluate(() => new Promise((resolve) => {
      const opening = indexedDB.open("mlxrunner");
      opening.onsuccess = () => {
        const all = opening.result.transaction("conversations").objectStore("conversations").getAll();
        all.onsuccess = () => resolve(Boolean(all.result[0]?.messages[1]?.content));
      };
    })));
    const seen = await tab.evaluate("window.seen");
    await tab.reload();
    await tab.locator(".message.assistant").waitFor();
    const partial = await answer(tab);
    const note = await tab.locator(".message.assistant .progress").textContent();
    await until(async () => (await browser.running()) === 0);
    await ask("full speed");
    await tab.getByRole("button", { name: "Continue" }).click();
    await ended(tab);
    const continued = await answer(tab);
    await tab.getByRole("button", { name: "Regenerate" }).click();
    await ended(tab);
    const whole = await answer(tab);
    await tab.reload();
    await tab.locator(".message.assistant").waitFor();
    const kept = await answer(tab);
    const shown = await figures(tab);
    await tab.getByRole("button", { name: "Previous version" }).click();
    await tab.locator(".versions span", { hasText: "1 / 2" }).waitFor();
    return { busy, seen, partial, note, continued, whole, kept, figures: shown, earlier: await answer(tab) };
  },

  /** Two and three tabs that write to one conversation: one after the other in each sequence, and all at
   * once. Nothing is lost, and all tabs show the same. */
  async tabs(browser) {
    const tabs = [await browser.openChat()];
    const { id } = await tabs[0].evaluate(async () => (await import("/page/conversation.js")).newConversation());
    const address = `/#chat/${id}`;
    await tabs[0].goto(browser.server + address);
    for (let tab = 1; tab < 3; tab += 1) tabs.push(await browser.open(address));
    for (const tab of tabs) await tab.waitForSelector("#model option", { state: "attached" });
    const write = (tab, text, wait = true) => tab.evaluate(async ([id, text, wait]) => {
      const { store } = await import("/page/store.js");
      const { newConversation, newMessage, putMessages } = await import("/page/conversation.js");
      const stored = await store.get(id);
      const message = newMessage("user", stored?.leaf ?? null, { content: text });
      const written = store.update(id, (conversation) => {
        putMessages(conversation, [message]);
        conversation.leaf = message.id;
      }, newConversation(id));
      if (wait) await written;
    }, [id, text, wait]);
    const orders = [[0, 1], [1, 0], [0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    const expected = [];
    for (const order of orders) {
      for (const at of order) {
        const text = `${order.join("")} by ${at}`;
        expected.push(text);
        await write(tabs[at], text);
      }
      await Promise.all(order.map((at) => {
        const text = `${order.join("")} at once by ${at}`;
        expected.push(text);
        return write(tabs[at], text, false);
      }));
    }
    const read = (tab) => tab.evaluate(async (id) => {
      const { store } = await import("/page/store.js");
      return (await store.get(id)).messages.map((message) => message.content);
    }, id);
    await until(async () => (await read(tabs[0])).length === expected.length);
    const stored = await read(tabs[2]);
    // each tab shows the end of a branch, and follows its growth
    await write(tabs[0], "the last one");
    for (const tab of tabs) await tab.locator(".message.user", { hasText: "the last one" }).waitFor({ timeout: 5000 }).catch(() => {});
    const revision = await tabs[1].evaluate(async (id) => (await (await import("/page/store.js")).store.get(id)).revision, id);
    // a title by one tab, a deletion by another one while a draft is typed
    tabs[1].on("dialog", (dialog) => dialog.accept());
    await tabs[0].getByRole("button", { name: /^Rename/ }).click();
    await tabs[0].getByLabel("Title").fill("A title");
    await tabs[0].keyboard.press("Enter");
    await tabs[1].getByRole("button", { name: "A title", exact: true }).waitFor();
    await tabs[2].fill("#input", "typed meanwhile");
    await tabs[1].getByRole("button", { name: "Delete A title" }).click();
    await tabs[2].waitForFunction((id) => !location.hash.includes(id), id);
    const moved = await tabs[2].inputValue("#input");
    await tabs[2].reload();
    await tabs[2].waitForFunction(() => document.getElementById("input").value);
    return { stored: stored.sort(), expected: expected.sort(), revision, moved, reloaded: await tabs[2].inputValue("#input") };
  },

  /** Answers continue while other conversations and tabs are shown; drafts, the system prompt, the
   * search and the address of each conversation. */
  async switching(browser) {
    const tab = await browser.openChat();
    await tab.click("#settings-button");
    await tab.getByLabel("System prompt of this conversation").fill("You are brief.");
    await tab.route("**/v1/chat/completions", (route) => {
      const body = { ...route.request().postDataJSON(), ignore_eos: true, max_tokens: 600 };
      return route.continue({ postData: JSON.stringify(body) });
    });
    await ask("throttle");
    await begin(tab, "What is mlxrunner?");
    const first = new URL(tab.url()).hash;
    await until(async () => (await answer(tab)).length > 5);
    await openNewChat(tab);
    const runs = await browser.running();
    await tab.getByLabel("System prompt of this conversation").fill("You are verbose.");
    await tab.fill("#input", "a draft");
    const second = new URL(tab.url()).hash;
    const other = await browser.open(`/${first}`);
    await other.locator(".progress", { hasText: "Another tab is receiving this answer." }).waitFor();
    await tab.goBack();
    await tab.locator(".message.assistant").waitFor();
    const busy = await tab.locator(".message.assistant").getAttribute("aria-busy");
    const systemOfFirst = await tab.getByLabel("System prompt of this conversation").inputValue();
    const typed = await tab.inputValue("#input");
    await ask("full speed");
    await ended(tab);
    await other.locator(".message.assistant .figures").waitFor(); // the other tab also has the end
    const equal = (await answer(tab)) === (await answer(other));
    await other.close();
    await tab.goForward();
    await until(async () => (await tab.inputValue("#input")) === "a draft");
    await tab.reload();
    await until(async () => (await tab.inputValue("#input").catch(() => "")) === "a draft");
    const reloaded = new URL(tab.url()).hash;
    await tab.click("#tab-engine");
    await tab.reload();
    await tab.waitForSelector("#model option", { state: "attached" });
    await tab.click("#tab-chat");
    const afterEngine = new URL(tab.url()).hash;
    const listed = await tab.locator("#conversations .title").allTextContents();
    await tab.getByLabel("Search conversations").fill("MLXRUNNER");
    await until(async () => (await tab.locator("#conversations li").count()) === 1);
    await tab.getByLabel("Search conversations").fill("no such text");
    await tab.locator("#no-results").waitFor();
    const meter = await (async () => {
      await tab.getByLabel("Search conversations").fill("");
      await tab.getByRole("button", { name: "What is mlxrunner?", exact: true }).click();
      return tab.locator("#context meter").getAttribute("aria-label");
    })();
    // an edit that is not sent survives a reload
    await tab.getByRole("button", { name: "Edit" }).click();
    await tab.getByLabel("Edit the message").fill("half an edit");
    await tab.reload();
    await tab.getByLabel("Edit the message").waitFor();
    const edit = await tab.getByLabel("Edit the message").inputValue();
    const exported = await tab.evaluate(async () => {
      const { store } = await import("/page/store.js");
      return (await store.list()).map(({ system }) => system);
    });
    return { runs, busy, systemOfFirst, typed, equal, same: reloaded === second && afterEngine === second, listed, meter, edit, exported };
  },

  /** Stop and Escape end an answer that would take minutes, and free the engine. */
  async stop(browser) {
    const tab = await browser.openChat();
    await ask("throttle");
    await tab.route("**/v1/chat/completions", (route) => {
      const body = { ...route.request().postDataJSON(), ignore_eos: true };
      return route.continue({ postData: JSON.stringify(body) });
    });
    const stops = [() => tab.click("#stop"), () => tab.keyboard.press("Escape")];
    const results = [];
    for (const stop of stops) {
      await begin(tab, "Count.");
      await until(async () => (await answer(tab)).length > 5);
      const before = await browser.running();
      await stop();
      await ended(tab);
      await until(async () => (await browser.running()) === 0);
      const length = (await answer(tab)).length;
      results.push({ before, kept: length > 5, error: await tab.locator(".error:visible").count() });
    }
    const shown = await figures(tab);
    // an edit ends the running answer; the next one can also be stopped
    await begin(tab, "Count.");
    await until(async () => (await answer(tab)).length > 5);
    await tab.getByRole("button", { name: "Edit" }).last().click();
    await tab.getByLabel("Edit the message").fill("Count again.");
    await tab.locator(".edit").getByRole("button", { name: "Send" }).click();
    await tab.locator(".message.user", { hasText: "Count again." }).waitFor();
    await until(async () => (await answer(tab)).length > 5);
    await until(async () => (await browser.running()) === 1);
    await tab.click("#stop");
    await ended(tab);
    await until(async () => (await browser.running()) === 0);
    return { results, figures: shown };
  },

  /** Regenerate and edit reuse the cached prompt, and the figures show it. */
  async cache(browser) {
    const tab = await browser.openChat();
    await tab.click("#settings-button");
    await tab.fill("#setting-temperature", "0");
    await say(tab, "What is mlxrunner?");
    await say(tab, "How do I start the server?");
    const before = await figures(tab);
    await tab.getByRole("button", { name: "Regenerate" }).last().click();
    await ended(tab);
    const regenerated = await figures(tab);
    await tab.getByRole("button", { name: "Edit" }).last().click();
    await tab.getByLabel("Edit the message").fill("How do I stop the server?");
    await tab.locator(".edit").getByRole("button", { name: "Send" }).click();
    await ended(tab);
    const messages = await tab.locator(".message.user > .text").allTextContents();
    return { before, regenerated, edited: await figures(tab), messages };
  },

  /** The server dies during an answer, and returns. */
  async death(browser) {
    const tab = await browser.openChat();
    await ask("throttle");
    await begin(tab, "What is mlxrunner?");
    await until(async () => (await answer(tab)).length > 5);
    await ask("kill the server");
    await ended(tab);
    const error = await lastError(tab);
    await tab.waitForSelector("#banner", { state: "visible" });
    const banner = await tab.locator("#banner").textContent();
    await say(tab, "Are you there?");
    const unreachable = await lastError(tab);
    await ask("start the server");
    await tab.waitForSelector("#banner", { state: "hidden" });
    await tab.getByRole("button", { name: "Try again" }).last().click();
    await ended(tab);
    return { error, banner, unreachable, answer: await answer(tab) };
  },

  async missingModel(browser) {
    const tab = await browser.openChat();
    await tab.evaluate(() => {
      const picker = document.getElementById("model");
      picker.append(new Option("gone/model"));
      picker.value = "gone/model";
    });
    await say(tab, "Hello?");
    return { error: await lastError(tab) };
  },

  /** A server that needs a key: a wrong one, a user's, an administrator's. */
  async key(browser) {
    const { user, admin } = await ask("keys");
    const tab = await browser.open("/");
    const dialog = tab.getByRole("dialog", { name: "API key" });
    await dialog.waitFor();
    const findings = await browser.checkAccessibility(tab, "key dialog");
    const enter = async (key) => {
      await tab.getByLabel("Key", { exact: true }).fill(key);
      await tab.getByRole("button", { name: "Use the key" }).click();
    };
    await enter("wrong");
    await tab.waitForFunction(() => /invalid/.test(document.getElementById("key-reason").textContent));
    await dialog.waitFor();
    await enter(user);
    await tab.waitForSelector("#model option", { state: "attached" });
    await say(tab, "What is mlxrunner?");
    const text = await answer(tab);
    const stored = await tab.evaluate(() => JSON.stringify({ ...localStorage }));
    const download = tab.waitForEvent("download");
    await tab.getByRole("button", { name: "Export" }).click();
    const exported = await readFile(await (await download).path(), "utf8");
    await tab.click("#tab-engine");
    await tab.waitForSelector(".figures-grid dt");
    const userFigures = await tab.locator(".figures-grid dt").allTextContents();
    await tab.reload(); // the key was in memory only
    await dialog.waitFor();
    await tab.getByLabel("Keep the key in this browser").check();
    await enter(admin);
    await tab.waitForSelector(".figures-grid :text('Running')");
    const adminFigures = await tab.locator(".figures-grid dt").allTextContents();
    await tab.reload();
    await tab.waitForSelector(".figures-grid :text('Running')");
    const asksAgain = await dialog.isVisible();
    await tab.click("#key-button");
    await enter("");
    await tab.waitForFunction(() => localStorage.getItem("mlxrunner.key") === null);
    return { text, stored, exported, userFigures, adminFigures, asksAgain, findings, keys: [user, admin] };
  },

  /** A large image is pasted and scaled down, one is dropped and removed; a model that reads text
   * only refuses the question with the image, and answers the next one. */
  async images(browser) {
    const tab = await browser.openChat();
    const give = (kind, width) => tab.evaluate(async ([name, side]) => {
      const canvas = Object.assign(document.createElement("canvas"), { width: side, height: side / 2 });
      const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
      const data = new DataTransfer();
      data.items.add(new File([blob], "a.png", { type: "image/png" }));
      const options = { bubbles: true, cancelable: true };
      const event = name === "paste"
        ? new ClipboardEvent("paste", { ...options, clipboardData: data })
        : new DragEvent("drop", { ...options, dataTransfer: data });
      document.getElementById("input").dispatchEvent(event);
    }, [kind, width]);
    const attached = tab.locator("#images img");
    await give("paste", 4096);
    await attached.waitFor();
    await give("drop", 100);
    await attached.nth(1).waitFor();
    await tab.getByRole("button", { name: "Remove image 2" }).click();
    await say(tab, "What is this?");
    const error = await lastError(tab);
    await tab.reload();
    const image = tab.locator(".message.user .images img");
    await image.waitFor();
    const size = await image.evaluate(async (node) => {
      await node.decode();
      return [node.naturalWidth, node.naturalHeight];
    });
    await say(tab, "And now?");
    return { left: await attached.count(), error, size, answered: Boolean(await answer(tab)) };
  },

  /** Reasoning, tool calls and Markdown of a scripted engine. */
  async output(browser) {
    const tab = await browser.openChat();
    await say(tab, "MARKDOWN");
    const shown = tab.locator(".message.assistant").last();
    await shown.locator("pre .hl-string").waitFor(); // the worker is done
    await shown.locator("math munderover").waitFor({ state: "attached" });
    const html = await shown.locator(":scope > .text").evaluate((node) => {
      const links = Array.from(node.querySelectorAll("a"), (a) => [a.getAttribute("href"), a.rel]);
      const count = (selector) => node.querySelectorAll(selector).length;
      return {
        links, text: node.textContent, code: node.querySelector("pre code")?.textContent,
        images: count("img"), scripts: count("script"), cells: count("td"), items: count("li"),
        highlighted: Array.from(node.querySelectorAll("pre code span"), (span) => [span.className, span.textContent]),
        tasks: Array.from(node.querySelectorAll("li.task input"), (box) => box.checked),
        formulas: ["msubsup", "munderover"].filter(count), nested: count("li li"), headings: count("h3, h4"), quotes: count("blockquote"), strong: count("strong"),
      };
    });
    await tab.getByRole("button", { name: "Copy" }).nth(1).click();
    await say(tab, "REASONING");
    const thought = tab.locator(".message.assistant").last().locator("details.fold");
    const reasoning = { open: await thought.evaluate((node) => node.open), text: await thought.textContent(), content: await answer(tab) };
    await tab.click("#settings-button");
    await tab.getByLabel("Offer tools").check();
    await tab.getByLabel("Tools, as in the API").fill(JSON.stringify([{
      type: "function",
      function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
    }]));
    await say(tab, "TOOLS");
    const call = await tab.locator(".message.assistant").last().locator("details.call").textContent();
    await tab.getByLabel("Result of get_weather").fill("Sunny, 21 degrees");
    await tab.getByRole("button", { name: "Send results" }).click();
    await until(async () => (await answer(tab)).includes("sunny"));
    await ended(tab);
    const hostile = await tab.evaluate(async () => {
      const { renderMarkdown } = await import("/page/markdown.js");
      const show = (text) => {
        const node = document.createElement("div");
        renderMarkdown(node, text);
        document.querySelector(".message").append(node);
        return node;
      };
      const table = show(`a|b\n${" ".repeat(50_000)}x`);
      const bomb = show("$\\def\\a{xx}\\def\\b{\\a\\a}\\b$");
      const slow = show(`\`\`\`md\n${"[a](".repeat(20_000)}\n\`\`\``); // minutes for its grammar
      const next = show("```py\n'text'\n```");
      while (!next.querySelector("code span")) await new Promise((resolve) => setTimeout(resolve, 50));
      return { table: table.textContent.length, bomb: bomb.textContent, slow: slow.querySelector("code").textContent.length };
    });
    return { html, reasoning, call, hostile, final: await answer(tab) };
  },

  async schema(browser) {
    const tab = await browser.openChat();
    await tab.click("#settings-button");
    await tab.getByLabel("Answer as JSON").check();
    const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
    await tab.getByLabel("Schema (empty: any JSON object)").fill("{");
    await say(tab, "Is it?");
    const invalid = await lastError(tab);
    await tab.getByLabel("Schema (empty: any JSON object)").fill(JSON.stringify(schema));
    await say(tab, "Is it?");
    return { invalid, answer: await answer(tab) };
  },

  /** An export, and its import into an empty browser; a file of a different kind. */
  async transfer(browser) {
    const tab = await browser.openChat();
    await say(tab, "What is mlxrunner?");
    const text = await answer(tab);
    const download = tab.waitForEvent("download");
    await tab.getByRole("button", { name: "Export" }).click();
    const file = await (await download).path();
    const dialogs = [];
    tab.on("dialog", (dialog) => {
      dialogs.push(dialog.message());
      dialog.accept();
    });
    await tab.getByRole("button", { name: "Delete What is mlxrunner?" }).click();
    await tab.waitForSelector("#conversations li", { state: "detached" });
    const importFile = (payload) => tab.setInputFiles("#import-file", payload);
    await importFile({ name: "x.json", mimeType: "application/json", buffer: Buffer.from("[]") });
    await until(() => dialogs.length === 2);
    await importFile({ name: "x.json", mimeType: "application/json", buffer: await readFile(file) });
    await tab.getByRole("button", { name: "What is mlxrunner?", exact: true }).click();
    await tab.locator(".message.assistant").waitFor();
    const imported = await answer(tab);
    // the conversation grows; the older file does not replace it, and a newer file adds its
    // messages
    await say(tab, "How do I start the server?");
    await importFile({ name: "x.json", mimeType: "application/json", buffer: await readFile(file) });
    await tab.locator("#announcer", { hasText: "Imported" }).waitFor({ state: "attached" });
    const afterOlder = await tab.locator(".message.user > .text").allTextContents();
    const newer = await tab.evaluate(async () => {
      const { exportConversations, newMessage, putMessages } = await import("/page/conversation.js");
      const { store } = await import("/page/store.js");
      const [conversation] = await store.list();
      putMessages(conversation, [newMessage("user", conversation.leaf, { content: "from another browser" })]);
      conversation.leaf = conversation.messages.at(-1).id;
      conversation.updated += 1000;
      return exportConversations([conversation]);
    });
    await importFile({ name: "x.json", mimeType: "application/json", buffer: Buffer.from(newer) });
    await tab.locator(".message.user", { hasText: "from another browser" }).waitFor();
    const future = JSON.stringify({ ...JSON.parse(newer), version: 3 });
    await importFile({ name: "x.json", mimeType: "application/json", buffer: Buffer.from(future) });
    await until(() => dialogs.length === 3);
    const old = { format: "mlxrunner-conversations", version: 1, conversations: [{ id: "old", title: "Of version 1", messages: [{ role: "user", content: "Hello" }, { role: "assistant", content: "Hi" }] }] };
    await importFile({ name: "x.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(old)) });
    await tab.getByRole("button", { name: "Of version 1", exact: true }).click();
    await tab.locator(".message.user", { hasText: "Hello" }).waitFor();
    const oldAnswer = await answer(tab);
    // the disk is full for a while
    await tab.evaluate(() => {
      window.put = IDBObjectStore.prototype.put;
      IDBObjectStore.prototype.put = () => {
        throw new DOMException("The disk is full.", "QuotaExceededError");
      };
    });
    await say(tab, "What is mlxrunner?");
    const warning = await tab.locator("#store-banner").textContent();
    const unsaved = await tab.locator(".message > .text").allTextContents();
    await tab.evaluate(() => (IDBObjectStore.prototype.put = window.put));
    await say(tab, "How do I start the server?");
    await tab.locator("#store-banner").waitFor({ state: "hidden" });
    await tab.reload();
    await tab.locator(".message.user", { hasText: "How do I start" }).waitFor();
    const recovered = await tab.locator(".message > .text").allTextContents();
    return { text, imported, dialogs, afterOlder, oldAnswer, warning, unsaved, recovered };
  },

  /** The Engine tab while a request runs; afterwards, what the tree shows of two conversations. */
  async engine(browser) {
    const tab = await browser.openChat();
    for (const second of ["How do I start the server?", "How do I pull a model?", "Which models can it run?"]) {
      await openNewChat(tab);
      await say(tab, "What is mlxrunner?");
      await say(tab, second);
      await say(tab, "Does it need the internet?");
    }
    await ask("throttle");
    await begin(tab, "What is a prefix cache?");
    await tab.click("#tab-engine");
    await tab.waitForSelector("svg.tree rect.bar.running"); // the legend has such a bar too
    await tab.waitForSelector(".figures-grid div:has(dt:text-is('Running')) dd:has-text('1 of')");
    await browser.screenshot(tab, "page-engine");
    const shown = await tab.locator("#engine").textContent();
    const bars = await tab.locator("svg.tree rect.bar").count();
    await ask("full speed");
    await tab.waitForSelector(".figures-grid div:has(dt:text-is('Running')) dd:has-text('0 of')");
    const rows = await tab.locator("svg.tree rect.bar").evaluateAll((rects) => new Set(rects.map((rect) => rect.getAttribute("y"))).size);
    await tab.click("#tab-chat");
    return { shown, bars, rows, panels: await tab.locator("#engine h3").allTextContents() };
  },

  /** Each view in each width and colour: findings of axe, and elements that do not fit. */
  async looks(browser) {
    const tab = await browser.openChat();
    for (const text of ["What is mlxrunner?", "How do I start the server?", "Which models can it run?"]) await say(tab, text);
    const docs = await browser.open("/docs");
    await docs.waitForSelector(".operation h3");
    const findings = [];
    const wide = [];
    const small = [];
    for (const width of WIDTHS) {
      for (const scheme of width === 320 ? ["light"] : SCHEMES) {
        const name = `${width}-${scheme}`;
        for (const one of [tab, docs]) {
          await one.setViewportSize({ width, height: 800 });
          await one.emulateMedia({ colorScheme: scheme, reducedMotion: "reduce" });
        }
        const check = async (view, page) => {
          // a check takes seconds: each width but the last one, and each scheme, once
          const isChecked = view === "docs" ? name === "390-dark" : WIDTHS.indexOf(width) === SCHEMES.indexOf(scheme);
          if (isChecked) findings.push(...(await browser.checkAccessibility(page, `${view} ${name}`)));
          if (await page.evaluate(() => document.documentElement.scrollWidth > innerWidth)) wide.push(`${view} ${name}`);
          if (width < 720 && view !== "docs") small.push(...(await page.evaluate(findSmallTargets)).map((one) => `${view} ${name}: ${one}`));
          const image = IMAGES[`${view}-${name}`];
          if (image) await browser.screenshot(page, image);
        };
        await tab.evaluate(() => document.getElementById("log").scrollTo(0, 1e6));
        await check("chat", tab);
        if (width < 720) {
          await tab.click("#menu");
          await check("menu", tab);
          await tab.keyboard.press("Escape");
        }
        await tab.click("#settings-button");
        await check("settings", tab);
        await tab.keyboard.press("Escape");
        await tab.waitForSelector("#settings", { state: "hidden" });
        await tab.click("#tab-engine");
        await tab.waitForSelector("svg.tree");
        await check("engine", tab);
        await tab.click("#tab-chat");
        await check("docs", docs);
      }
    }
    const operations = await docs.locator(".operation h2").allTextContents();
    return { findings, wide, small, operations };
  },

  /** The API reference: which fields are first, what the filter finds, and the commands. */
  async reference(browser) {
    const tab = await browser.open("/docs");
    await tab.waitForSelector(".operation h3");
    const chat = tab.locator("#post-v1-chat-completions");
    const names = await chat.locator(":scope > .schema > li").evaluateAll((rows) => rows.map((row) => row.querySelector("code").textContent));
    const folded = await chat.locator(".more").evaluate((node) => ({ open: node.open, count: node.querySelectorAll(":scope > .schema > li").length }));
    const commands = await tab.locator(".operation").evaluateAll((sections) =>
      sections.filter((one) => one.id !== "introduction").map((one) => one.querySelector("h2 + .code .curl")?.textContent));
    const found = {};
    for (const text of ["EMBEDDINGS", "min_p", "nothing at all"]) {
      await tab.fill("#filter", text);
      found[text] = await tab.locator("section.operation:visible h2").allTextContents();
    }
    await tab.fill("#filter", "min_p");
    const rows = await chat.locator(".schema > li:visible code").allTextContents();
    return { names, folded, commands, found, rows };
  },

  /** The page with the keyboard only. */
  async keyboard(browser) {
    const tab = await browser.openChat();
    const focused = () => tab.evaluate(() => document.activeElement.id || document.activeElement.textContent.trim());
    const order = [];
    for (let step = 0; step < 8; step += 1) {
      await tab.keyboard.press("Tab");
      order.push(await focused());
    }
    await tab.focus("#tab-chat");
    await tab.keyboard.press("ArrowRight");
    await tab.locator("#engine").waitFor(); // its first event has arrived
    const afterArrow = await focused();
    await tab.keyboard.press("ArrowLeft");
    await tab.locator("#input").waitFor();
    await tab.focus("#input");
    await tab.keyboard.type("What is");
    await tab.keyboard.press("Shift+Enter");
    await tab.keyboard.type("mlxrunner?");
    const draft = await tab.inputValue("#input");
    await tab.keyboard.press("Enter");
    await tab.locator(".message.assistant[aria-busy=false]").waitFor();
    await tab.locator("#announcer", { hasText: "complete" }).waitFor({ state: "attached" });
    await tab.click("#theme");
    const theme = await tab.evaluate(() => [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]);
    await tab.click("#theme");
    const dark = await tab.evaluate(() => [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]);
    await tab.reload();
    const kept = await tab.evaluate(() => document.documentElement.dataset.theme);
    return { order, afterArrow, draft, theme, dark, kept };
  },
};
