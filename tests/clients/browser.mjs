// Drives examples/browser/index.html in a real browser, and prints its observations as JSON.
//
//     node browser.mjs <browser> <page> <server>
//
// page: the URL of the page, on a different port than the server's, like any other page.

import { mkdtemp, rm } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import path from "node:path";

const require = createRequire(new URL("../../examples/node/", import.meta.url));
const { chromium } = require("playwright-core");
const [executablePath, page, server] = process.argv.slice(2);

const profile = await mkdtemp(path.join(tmpdir(), "browser-"));
const browser = await chromium.launchPersistentContext(profile, {
  executablePath,
  headless: true,
  chromiumSandbox: false, // which root cannot have
  args: [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
  ],
});
const state = (tab, wanted) =>
  tab.waitForFunction((text) => document.getElementById("state").textContent.startsWith(text), wanted);
const text = (tab) => tab.locator("#answer").textContent();
const running = async () => (await (await fetch(`${server}/v1/status`)).json()).Running;

async function opened(fields) {
  const tab = await browser.newPage();
  tab.on("pageerror", (error) => errors.push(String(error)));
  await tab.goto(`${page}?${new URLSearchParams({ api: `${server}/v1`, fields: JSON.stringify(fields) })}`);
  await tab.evaluate(() => {
    window.seen = []; // the answer's length after each change, and the time of the change
    const answer = document.getElementById("answer");
    new MutationObserver(() =>
      window.seen.push([performance.now(), answer.textContent.length]),
    ).observe(answer, { childList: true });
  });
  return tab;
}

// An answer that comes to its end.
async function whole() {
  const tab = await opened({ temperature: 0 });
  await tab.click("#send");
  await state(tab, "done");
  return { text: await text(tab), seen: await tab.evaluate("window.seen") };
}

// One that is stopped in the middle. It never ends by itself: the server shifts its context.
async function stopped() {
  const tab = await opened({ ignore_eos: true });
  await tab.click("#send");
  await tab.waitForFunction(() => window.seen.length > 5);
  const before = await running();
  await tab.click("#stop");
  await state(tab, "stopped");
  const begun = performance.now();
  while ((await running()) > 0 && performance.now() - begun < 60_000);
  return { before, after: await running() };
}

// One that the server refuses.
async function refused() {
  const tab = await opened({ temperature: -1 });
  await tab.click("#send");
  await state(tab, "failed");
  return { state: await tab.locator("#state").textContent() };
}

const errors = [];
try {
  console.log(
    JSON.stringify({ whole: await whole(), stopped: await stopped(), refused: await refused(), errors }),
  );
} finally {
  await browser.close();
  await rm(profile, { recursive: true, force: true, maxRetries: 5 });
}
