// Drives examples/browser/index.html in a real browser, and prints what it saw as JSON.
//
//     node browser.mjs <browser> <page> <server>
//
// page: the URL of the page, on another port than the server's, as anybody's would be.

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
    window.seen = []; // the answer's length after each change, and when that was
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

// One that is stopped in the middle, and how long the server went on with it. The page clicks by
// itself, and the log-probabilities make it long: the whole of it takes little more than a second,
// which a browser may take for a click that it is told from outside.
async function stopped() {
  const tab = await opened({ ignore_eos: true, logprobs: true, top_logprobs: 20 });
  await tab.evaluate(() =>
    new MutationObserver(() => {
      if (window.seen.length > 5) document.getElementById("stop").click();
    }).observe(document.getElementById("answer"), { childList: true }),
  );
  let over = false;
  const most = (async () => {
    let found = 0;
    while (!over) found = Math.max(found, await running());
    return found;
  })();
  await tab.click("#send");
  await state(tab, "stopped");
  over = true;
  const before = await most;
  const begun = performance.now();
  while ((await running()) > 0 && performance.now() - begun < 10_000);
  return { before, after: await running(), milliseconds: performance.now() - begun };
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
