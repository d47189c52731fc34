// Uses the page in a real browser, and prints what it saw as JSON.
//
//     node page.mjs <browser> <server> <scenario> <folder of screenshots, or "">

import { readFile } from "node:fs/promises";

import { answer, ask, begin, Browser, ended, figures, lastError, say, until } from "./browser.mjs";

const WIDTHS = [1280, 390];
const SCHEMES = ["light", "dark"];

// the views that docs/page.md shows
const IMAGES = { "chat-1280-light": "page-chat", "chat-390-dark": "page-phone" };

const scenarios = {
  /** Paints of the page, in ms after the start of the navigation. */
  async paint(browser) {
    const paints = [];
    for (let load = 0; load < 5; load += 1) {
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

  /** An answer of a slow engine grows while it is received; a reload keeps what there is. */
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
    const partial = await answer(tab);
    await until(async () => (await browser.running()) === 0);
    await ask("full speed");
    await tab.getByRole("button", { name: "Regenerate" }).click();
    await ended(tab);
    const whole = await answer(tab);
    await tab.reload();
    const kept = await answer(tab);
    return { busy, seen, partial, whole, kept, figures: await figures(tab) };
  },

  /** Stop and Escape end an answer that would never end, and free the engine. */
  async stop(browser) {
    const tab = await browser.openChat();
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
    return { results, figures: await figures(tab) };
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
    await browser.screenshot(tab, "page-markdown");
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

  /** An export, and its import into an empty browser; a file of something else. */
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
    return { text, imported: await answer(tab), dialogs };
  },

  /** The Engine tab while a request runs; afterwards, what the tree shows of two conversations. */
  async engine(browser) {
    const tab = await browser.openChat();
    for (const second of ["How do I start the server?", "How do I pull a model?", "Which models can it run?"]) {
      await tab.click("#new-chat");
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

  /** Each view in each width and colour: findings of axe, and what does not fit. */
  async looks(browser) {
    const tab = await browser.openChat();
    for (const text of ["What is mlxrunner?", "How do I start the server?", "Which models can it run?"]) await say(tab, text);
    const docs = await browser.open("/docs");
    await docs.waitForSelector(".operation h3");
    const findings = [];
    const wide = [];
    for (const width of WIDTHS) {
      for (const scheme of SCHEMES) {
        const name = `${width}-${scheme}`;
        for (const one of [tab, docs]) {
          await one.setViewportSize({ width, height: 800 });
          await one.emulateMedia({ colorScheme: scheme, reducedMotion: "reduce" });
        }
        const check = async (view, page) => {
          // The check of all operations takes ten seconds: each width and each scheme once.
          const skipped = view === "docs" && WIDTHS.indexOf(width) !== SCHEMES.indexOf(scheme);
          if (!skipped) findings.push(...(await browser.checkAccessibility(page, `${view} ${name}`)));
          if (await page.evaluate(() => document.documentElement.scrollWidth > innerWidth)) wide.push(`${view} ${name}`);
          const image = IMAGES[`${view}-${name}`];
          if (image) await browser.screenshot(page, image);
        };
        await tab.evaluate(() => document.getElementById("log").scrollTo(0, 1e6));
        await check("chat", tab);
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
    return { findings, wide, operations };
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

const [executablePath, server, name, images] = process.argv.slice(2);
const browser = await Browser.launch(executablePath, server, images);
try {
  const result = await scenarios[name](browser);
  console.log(JSON.stringify({ result: { ...result, errors: browser.errors } }));
} catch (error) {
  const text = await browser.context.pages().at(-1)?.locator("body").innerText().catch(() => "");
  console.log(JSON.stringify({ failed: `${error.stack}\n--- errors ---\n${browser.errors.join("\n")}\n--- page ---\n${text}` }));
} finally {
  await browser.close();
  process.exit(0);
}
