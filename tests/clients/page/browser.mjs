// A headless browser for the scenarios of page.mjs and models.mjs: opens the page, records
// forbidden events, and communicates with the tests.

import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import path from "node:path";
import { createInterface } from "node:readline";

const require = createRequire(new URL("../../../examples/node/", import.meta.url));
const { chromium } = require("playwright-core");
const axeSource = await readFile(require.resolve("axe-core/axe.min.js"), "utf8");

/** Milliseconds until a condition must hold, on a machine that other programs use. */
const LIMIT = 120_000;

const messages = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** Asks the test to do something, such as to stop the server, and waits until it is done. */
export async function ask(action) {
  console.log(JSON.stringify({ ask: action }));
  return JSON.parse((await messages.next()).value);
}

/** Runs each scenario that a line of stdin names, and prints its observations as a line of JSON. One
 * browser runs them all, because its start takes longer than most of them. */
export async function serve(executablePath, images, scenarios) {
  const chrome = await chromium.launch({
    executablePath,
    headless: true,
    chromiumSandbox: false, // which root cannot have
    args: [
      "--disable-background-networking", "--disable-component-update", "--disable-gpu",
      "--disable-quic", "--disable-sync", "--no-first-run",
    ],
  });
  for (let next = await messages.next(); !next.done; next = await messages.next()) {
    const { scenario, server } = JSON.parse(next.value);
    const browser = await Browser.open(chrome, server, images);
    try {
      const result = await scenarios[scenario](browser);
      console.log(JSON.stringify({ result: { ...result, errors: browser.errors } }));
    } catch (error) {
      const text = await browser.context.pages().at(-1)?.locator("body").innerText().catch(() => "");
      console.log(JSON.stringify({ failed: `${error.stack}\n--- errors ---\n${browser.errors.join("\n")}\n--- page ---\n${text}` }));
    }
    await browser.context.close();
  }
  await chrome.close();
}

/** A context without data of others. */
class Browser {
  errors = []; // exceptions, and violations of the content security policy

  static async open(chrome, server, images) {
    const self = new Browser();
    self.server = server;
    self.images = images;
    self.context = await chrome.newContext({
      viewport: { width: 1280, height: 800 },
      colorScheme: "light",
      reducedMotion: "reduce",
    });
    await self.context.addInitScript(() => {
      addEventListener("securitypolicyviolation", (event) =>
        console.error(`CSP: ${event.violatedDirective} ${event.blockedURI}`));
    });
    return self;
  }

  /** A tab that shows a path of the server. */
  async open(where = "/") {
    const tab = await this.context.newPage();
    tab.setDefaultTimeout(LIMIT);
    tab.on("pageerror", (error) => this.errors.push(String(error.stack)));
    tab.on("console", (message) => {
      // the browser itself reports each failed request
      if (message.type() === "error" && !message.text().startsWith("Failed to load resource")) {
        this.errors.push(message.text());
      }
    });
    await tab.goto(this.server + where);
    return tab;
  }

  /** A tab with the chat, once its models are known. */
  async openChat() {
    const tab = await this.open();
    await tab.waitForSelector("#model option", { state: "attached" });
    return tab;
  }

  async running() {
    return (await (await fetch(`${this.server}/v1/status`)).json()).Running;
  }

  async screenshot(tab, name) {
    if (this.images) await tab.screenshot({ path: path.join(this.images, `${name}.png`) });
  }

  /** The serious findings of axe, each with its first element. */
  async checkAccessibility(tab, where) {
    await tab.evaluate(axeSource);
    // for other results, axe would compute a selector of each element
    const { violations } = await tab.evaluate(() => globalThis.axe.run({ resultTypes: ["violations"] }));
    return violations
      .filter(({ impact }) => impact === "serious" || impact === "critical")
      .map(({ id, nodes }) => `${where}: ${id} ${nodes[0].html}`);
  }
}

/** Opens a new conversation, and returns when it is shown. */
export async function openNewChat(tab) {
  const { hash } = new URL(tab.url());
  await tab.click("#new-chat");
  await tab.waitForFunction((before) => location.hash !== before, hash);
  await until(async () => (await tab.inputValue("#input")) === "" && (await tab.locator(".message").count()) === 0);
}

/** Sends a message, and returns when there is an answer, which may already be complete. */
export async function begin(tab, text) {
  const before = await tab.locator(".message.assistant").count();
  await tab.fill("#input", text);
  await tab.keyboard.press("Enter");
  await tab.locator(".message.assistant").nth(before).waitFor();
}

/** Returns when the last answer is complete. */
export async function ended(tab) {
  await until(() => tab.evaluate(() =>
    Array.from(document.querySelectorAll(".message")).at(-1).getAttribute("aria-busy") === "false"));
  await tab.waitForSelector("#send", { state: "visible" });
}

export async function say(tab, text) {
  await begin(tab, text);
  await ended(tab);
}

/** The text of the last answer, without the reasoning. */
export function answer(tab) {
  return tab.locator(".message.assistant").last().locator(":scope > .text").textContent();
}

export function lastError(tab) {
  return tab.locator(".message.assistant").last().locator(".error").textContent();
}

/** The figures under each answer. */
export function figures(tab) {
  return tab.locator(".figures").evaluateAll((lists) =>
    lists.map((list) => Array.from(list.children, (item) => item.textContent).filter(Boolean)));
}

/** Waits until an asynchronous condition holds. */
export async function until(condition) {
  const begun = performance.now();
  while (!(await condition())) {
    if (performance.now() - begun > LIMIT) throw new Error(`never: ${condition}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}
