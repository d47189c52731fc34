// Scenarios that use the model dialog in a real browser. driver.mjs runs them.

import { ask } from "./browser.mjs";

export const scenarios = {
  /** A model is checked, downloaded in two attempts, kept loaded, given defaults, and deleted. */
  async manage(browser) {
    const tab = await browser.openChat();
    await tab.click("#models-button");
    const dialog = tab.locator("#models-dialog");
    const model = (name) => dialog.locator("li").filter({ hasText: name });
    await model("builtin").waitFor();

    await tab.fill("#download-name", "org/new");
    await tab.click("#download-check");
    const facts = dialog.locator("#download-facts", { hasText: "It fits." });
    await facts.waitFor();
    const preview = await facts.textContent();
    const requested = await ask("requested weights");

    await ask("stall");
    await tab.click("#download-start");
    await ask("wait for a download");
    await tab.click("#download-cancel");
    await dialog.locator("#download-facts", { hasText: "cancelled" }).waitFor();
    await ask("resume");
    let downloaded = false;
    while (!downloaded) { // the server ends the first download in the background
      await tab.click("#download-check");
      await facts.waitFor();
      await tab.click("#download-start");
      const ended = dialog.locator("#download-facts", { hasText: "was downloaded" });
      const refused = dialog.locator("#models-status", { hasText: "another download" });
      await ended.or(refused).waitFor();
      downloaded = await ended.isVisible();
    }
    await model("org/new").waitFor();

    await model("org/new").getByText("Keep loaded").click();
    await dialog.locator("#models-status", { hasText: "configuration file contains" }).waitFor();
    await model("org/new").getByText("ready").waitFor();

    await model("org/new").getByText("Defaults").click();
    await model("org/new").locator("[name=system]").fill("Be brief.\nRhyme.");
    await model("org/new").locator("[name=temperature]").fill("0.5");
    await model("org/new").locator("[name=aliases]").fill("new, newer");
    await browser.screenshot(tab, "page-models");
    const findings = await browser.checkAccessibility(tab, "models");
    await tab.setViewportSize({ width: 320, height: 640 });
    const width = await dialog.evaluate((element) => element.scrollWidth - element.clientWidth);
    await tab.setViewportSize({ width: 1280, height: 800 });
    await model("org/new").locator("[name=temperature]").fill("9");
    await model("org/new").getByText("Save").click();
    const refusal = dialog.locator("#models-status", { hasText: "temperature must be" });
    await refusal.waitFor();
    await model("org/new").locator("[name=temperature]").fill("0.5");
    await model("org/new").getByText("Save").click();
    await model("org/new").locator("details:not([open])").waitFor();
    const config = await ask("configuration");

    await model("org/new").getByText("Unload").click();
    await model("org/new").getByText("unloaded").waitFor();
    await model("org/new").getByText("Delete").click();
    await model("org/new").getByText("Really delete?").click();
    await model("org/new").waitFor({ state: "detached" });
    const status = await dialog.locator("#models-status").textContent();
    await dialog.getByText("Close").click();
    return { preview, requested, findings, width, config, status };
  },

  /** A key that may not manage models, and then one that may. */
  async refuse(browser) {
    const tab = await browser.open();
    const statuses = [];
    tab.on("response", (response) => response.url().endsWith("/v1/status") && statuses.push(response));
    await tab.fill("#key", await ask("key"));
    await tab.keyboard.press("Enter");
    await tab.waitForSelector("#model option", { state: "attached" });
    while (!statuses.length) await new Promise((resolve) => setTimeout(resolve, 20));
    const shown = await tab.isVisible("#models-button");
    await tab.click("#key-button");
    await tab.fill("#key", await ask("admin key"));
    await tab.keyboard.press("Enter");
    await tab.waitForSelector("#models-button", { state: "visible" });
    return { shown };
  },
};
