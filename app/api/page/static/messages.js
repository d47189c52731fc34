// Shows one message: its text, reasoning, tool calls, error, and the figures of an answer.

import { isIncomplete } from "./conversation.js";
import { copyButton, h, svg } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

/** The view of a message. actions: {edit(message, text), regenerate(message), continue(message),
 * answerCalls(message, results), showVersion(message), getDraft(message), setDraft(message, text)}. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.text = h("div", { class: "text" });
    this.images = h("div", { class: "images", hidden: true });
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
      this.thought, this.images, this.text, this.calls, this.progress, this.error, this.foot,
    );
    if (message.role === "user" && actions.getDraft(message)) this.#edit();
  }

  /** Shows the message. state: running, whether its answer is being received by this tab, and elsewhere,
   * by another one; progress, what the server does before the first token; isLast; versions, all
   * messages after the same one. */
  update(message, state) {
    const shown = JSON.stringify([message, { ...state, versions: state.versions.map(({ id }) => id) }]);
    const isSame = shown === this.shown;
    Object.assign(this, { message, state, shown });
    if (isSame) return; // keeps a selection
    const { running, elsewhere, progress } = state;
    // screen readers read an answer once it is complete, not token by token
    this.node.setAttribute("aria-busy", String(running));
    const complete = !running && !elsewhere;
    if (message.role === "assistant") renderMarkdown(this.text, message.content, { complete });
    else this.text.textContent = message.content;
    this.text.classList.toggle("plain", message.role !== "assistant");
    this.text.hidden = !message.content;
    const images = message.images ?? [];
    this.images.hidden = !images.length;
    this.images.replaceChildren(...images.map((src, index) => h("img", { src, alt: `Image ${index + 1}` })));
    if (message.reasoning) renderMarkdown(this.reasoning, message.reasoning, { complete });
    this.thought.hidden = !message.reasoning;
    this.reasoningLabel.textContent = running && !message.content ? "Reasoning…" : "Reasoning";
    const note = describeState(message, state);
    this.progress.textContent = running ? progress : note;
    this.progress.hidden = !this.progress.textContent;
    this.error.textContent = message.error ?? "";
    this.error.hidden = !message.error;
    this.#updateCalls(running);
    this.foot.replaceChildren(...(running ? [] : this.#footer()));
  }

  #updateCalls(running) {
    const calls = this.message.calls ?? [];
    const wantsResults = calls.length > 0 && !running && this.state.isLast;
    const shown = JSON.stringify([calls, wantsResults]);
    if (shown === this.shownCalls) return; // keeps the parts that the user has opened or typed
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
          this.actions.answerCalls(this.message, areas.map(({ area }) => area.value));
        },
      },
      areas.map(({ node }) => node),
      h("button", { type: "submit", class: "small" }, "Send results"),
    );
  }

  #footer() {
    const { message, actions, state } = this;
    const buttons = [];
    if (message.content) buttons.push(copyButton(() => this.message.content));
    if (message.role === "user") buttons.push(button("Edit", () => this.#edit()));
    if (message.role === "assistant" && !state.elsewhere) {
      if (canContinue(message)) buttons.push(button("Continue", () => actions.continue(this.message)));
      const label = message.error || isIncomplete(message) ? "Try again" : "Regenerate";
      buttons.push(button(label, () => actions.regenerate(this.message)));
    }
    const versions = state.versions.length > 1 ? this.#versionSwitch() : null;
    return [h("div", { class: "buttons" }, buttons), versions, renderFigures(message)].filter(Boolean);
  }

  /** Buttons to the earlier and later versions of the message. */
  #versionSwitch() {
    const { versions } = this.state;
    const at = versions.findIndex(({ id }) => id === this.message.id);
    const to = (label, sign, other) =>
      h("button", {
        type: "button", class: "small quiet", "aria-label": label, disabled: !other,
        onclick: () => this.actions.showVersion(other),
      }, sign);
    return h("div", { class: "versions", role: "group", "aria-label": "Versions" },
      to("Previous version", "‹", versions[at - 1]),
      h("span", {}, `${at + 1} / ${versions.length}`),
      to("Next version", "›", versions[at + 1]),
    );
  }

  /** Replaces the text by a field. Typed text is a draft until it is sent or cancelled. */
  #edit() {
    const { actions } = this;
    if (this.form) return;
    const area = h("textarea", {
      rows: 3, value: actions.getDraft(this.message) || this.message.content, "aria-label": "Edit the message",
      oninput: () => actions.setDraft(this.message, area.value),
    });
    const close = () => {
      actions.setDraft(this.message, "");
      this.form.replaceWith(this.text);
      this.form = null;
    };
    this.form = h(
      "form",
      {
        class: "edit",
        onsubmit: (event) => {
          event.preventDefault();
          close();
          if (area.value.trim() || this.message.images?.length) actions.edit(this.message, area.value);
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
    this.text.replaceWith(this.form);
    area.focus();
  }
}

/** Whether an answer was cut off within its text, so that the model can continue it. */
function canContinue(message) {
  const isCut = ["length", "stopped"].includes(message.finish) || message.error || isIncomplete(message);
  return Boolean(isCut && message.content && !message.calls?.length);
}

function describeState(message, { elsewhere }) {
  if (elsewhere) return "Another tab is receiving this answer.";
  return isIncomplete(message) ? "Incomplete: the page was closed during this answer." : "";
}

/** What an empty conversation shows. */
export function renderWelcome() {
  return h("div", { class: "welcome" },
    h("p", {}, "Ask the model something."),
    h("p", { class: "note" }, "Under each answer: how much of the prompt was cached, and how fast it was."),
  );
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
