// Shows one message: its text, reasoning, tool calls, error, and the figures of an answer.

import { copyButton, h, svg } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

/** The view of a message. actions: {edit(text), regenerate(), answerCalls(results), isLast()}. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.text = h("div", { class: "text" });
    this.reasoning = h("div", { class: "text" });
    this.reasoningLabel = h("summary", {}, "Reasoning");
    this.thought = h("details", { class: "fold", hidden: true }, this.reasoningLabel, this.reasoning);
    this.calls = h("div");
    this.progress = h("p", { class: "progress", hidden: true });
    this.error = h("p", { class: "error", hidden: true });
    this.foot = h("div", { class: "foot" });
    this.node = h(
      "article",
      { class: `message ${message.role}`, "aria-label": NAMES[message.role] },
      h("h2", { class: "role" }, NAMES[message.role]),
      this.thought, this.text, this.calls, this.progress, this.error, this.foot,
    );
    this.update();
  }

  /** Shows the message as it is now. running: whether its answer is still being received. progress:
   * what the server does before the first token. */
  update({ running = false, progress = "" } = {}) {
    const { message } = this;
    // screen readers read an answer once it is complete, not token by token
    this.node.setAttribute("aria-busy", String(running));
    if (message.role === "assistant") renderMarkdown(this.text, message.content, { complete: !running });
    else this.text.textContent = message.content;
    this.text.classList.toggle("plain", message.role !== "assistant");
    this.text.hidden = !message.content;
    if (message.reasoning) renderMarkdown(this.reasoning, message.reasoning, { complete: !running });
    this.thought.hidden = !message.reasoning;
    this.reasoningLabel.textContent = running && !message.content ? "Reasoning…" : "Reasoning";
    this.progress.textContent = progress;
    this.progress.hidden = !running || !progress;
    this.error.textContent = message.error ?? "";
    this.error.hidden = !message.error;
    this.#updateCalls(running);
    this.foot.replaceChildren(...(running ? [] : this.#footer()));
  }

  #updateCalls(running) {
    const calls = this.message.calls ?? [];
    const wantsResults = calls.length > 0 && !running && this.actions.isLast();
    const shown = JSON.stringify([calls, wantsResults]);
    if (shown === this.shownCalls) return; // keeps what the user has opened or typed
    this.shownCalls = shown;
    this.calls.replaceChildren(...calls.map((call) => renderCall(call)));
    if (wantsResults) this.calls.append(this.#resultForm(calls));
  }

  /** A field for the result of each call. */
  #resultForm(calls) {
    const areas = calls.map((call, index) => {
      const id = `result-${index}`;
      const area = h("textarea", { id, rows: 2, spellcheck: "false" });
      return { area, node: h("div", {}, h("label", { for: id }, `Result of ${call.name}`), area) };
    });
    return h(
      "form",
      {
        class: "results",
        onsubmit: (event) => {
          event.preventDefault();
          this.actions.answerCalls(areas.map(({ area }) => area.value));
        },
      },
      areas.map(({ node }) => node),
      h("button", { type: "submit", class: "small" }, "Send results"),
    );
  }

  #footer() {
    const { message, actions } = this;
    const buttons = [];
    if (message.content) buttons.push(copyButton(() => message.content));
    if (message.role === "user") buttons.push(button("Edit", () => this.#edit()));
    if (message.role === "assistant") {
      buttons.push(button(message.error ? "Try again" : "Regenerate", actions.regenerate));
    }
    return [h("div", { class: "buttons" }, buttons), renderFigures(message)].filter(Boolean);
  }

  #edit() {
    const area = h("textarea", { rows: 3, value: this.message.content, "aria-label": "Edit the message" });
    const close = () => form.replaceWith(this.text);
    const form = h(
      "form",
      {
        class: "edit",
        onsubmit: (event) => {
          event.preventDefault();
          close();
          if (area.value.trim()) this.actions.edit(area.value);
        },
        onkeydown: (event) => {
          if (event.key !== "Escape") return;
          event.stopPropagation();
          close();
        },
      },
      area,
      h("div", { class: "row right" }, button("Cancel", close), h("button", { type: "submit", class: "small primary" }, "Send")),
    );
    this.text.replaceWith(form);
    area.focus();
  }
}

function button(label, onclick) {
  return h("button", { type: "button", class: "small quiet", onclick }, label);
}

function renderCall(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    // not complete yet
  }
  return h(
    "details",
    { class: "fold call" },
    h("summary", {}, "Tool call ", h("code", {}, call.name)),
    h("pre", { tabindex: 0, role: "group", "aria-label": "Arguments" }, shown),
  );
}

/** The figures of an answer: how much of the prompt was cached, and the speed. */
function renderFigures({ figures, model, finish }) {
  if (!figures) return null;
  const known = figures.prompt > 0; // not for an answer that was cut off
  const parts = [
    known ? `prompt ${count(figures.prompt)}` : null,
    known ? `${count(figures.cached)} cached` : null,
    `first token ${formatMs(figures.ttft)}`,
    figures.rate ? `${figures.rate.toFixed(figures.rate < 10 ? 1 : 0)} tok/s` : null,
    `${count(figures.completion)} ${figures.completion === 1 ? "token" : "tokens"}`,
    finish === "length" ? "cut at the maximum" : null,
    finish === "stopped" ? "stopped" : null,
    model,
  ];
  const items = parts.filter(Boolean).map((part) => h("li", {}, part));
  return h("ul", { class: "figures", "aria-label": "Figures" }, known ? h("li", {}, cachedBar(figures)) : null, items);
}

function cachedBar({ prompt, cached }) {
  const width = 48;
  return svg(
    "svg",
    { class: "cached", width, height: 6, "aria-hidden": "true" },
    svg("rect", { class: "all", width, height: 6, rx: 3 }),
    svg("rect", { class: "part", width: prompt ? (width * cached) / prompt : 0, height: 6, rx: 3 }),
  );
}

function count(tokens) {
  return tokens.toLocaleString("en");
}

function formatMs(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
