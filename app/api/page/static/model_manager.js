// The dialog for models: download, load, unload, keep loaded, delete, and the defaults of each.
// The server allows this only for admin keys, and downloads only with --installed; its errors
// explain this.

import { api, ApiError } from "./api.js";
import { announce, byId, h } from "./dom.js";
import { refreshModels } from "./models.js";

const LOADED = new Set(["ready", "stalled", "loading", "queued"]);
const REFRESH_MS = 1000;

// name, label, kind
const FIELDS = [
  ["aliases", "Additional names, separated by commas", "list"],
  ["system", "System prompt", "text"],
  ["context", "Context, in tokens", "number"],
  ["max_tokens", "Maximum number of output tokens", "number"],
  ["temperature", "Temperature", "number"],
  ["top_p", "top_p", "number"],
  ["top_k", "top_k", "number"],
  ["min_p", "min_p", "number"],
  ["repetition_penalty", "Repetition penalty", "number"],
];

export function formatBytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}

/** Adds the button that opens the dialog, for keys that may manage models. before: the element that
 * follows it. */
export function startModelManager(before) {
  const manager = new ModelManager();
  const button = h("button", {
    type: "button", id: "models-button", class: "quiet", hidden: true, onclick: () => manager.open(),
  }, "Models");
  before.before(button);
  const show = async () => {
    button.hidden = !(await mayManage());
  };
  api.addEventListener("key", show);
  api.addEventListener("online", show);
  return show();
}

/** Whether the key may manage models: only then does the server describe them in its status. */
async function mayManage() {
  try {
    return "Models" in (await api.json("/v1/status"));
  } catch {
    return false;
  }
}

class ModelManager {
  #timer = 0;
  #download = null; // an AbortController
  #shown = "";

  constructor() {
    this.status = h("p", { class: "note", role: "status", id: "models-status" });
    this.list = h("ul", { id: "models-list", "aria-label": "Models of this server" });
    this.dialog = h("dialog", { id: "models-dialog", "aria-labelledby": "models-title" },
      h("h2", { id: "models-title" }, "Models"),
      this.#buildDownload(),
      this.list,
      this.status,
      h("div", { class: "row right" },
        h("button", { type: "button", onclick: () => this.dialog.close() }, "Close")));
    this.dialog.addEventListener("close", () => clearTimeout(this.#timer));
    this.dialog.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation(); // closes the dialog, not an answer
    });
    document.body.append(this.dialog);
  }

  open() {
    this.status.textContent = "";
    this.#shown = "";
    this.dialog.showModal();
    return this.#refresh();
  }

  /** Shows the models, and refreshes them while the dialog is open. */
  async #refresh() {
    clearTimeout(this.#timer);
    try {
      const { data } = await api.json("/v1/models");
      const shown = data.map((model) => [model.id, model.state, model.progress, model.error].join()).join("\n");
      // an open form of defaults stays as it is
      if (shown !== this.#shown && !this.list.querySelector("details[open]")) {
        this.#shown = shown;
        const focused = document.activeElement?.dataset?.action;
        this.list.replaceChildren(...data.map((model) => this.#buildModel(model)));
        if (focused) this.list.querySelector(`[data-action="${CSS.escape(focused)}"]`)?.focus();
      }
    } catch (error) {
      this.#say(error.message);
    }
    if (this.dialog.open) this.#timer = setTimeout(() => this.#refresh(), REFRESH_MS);
  }

  #buildModel(model) {
    const loaded = LOADED.has(model.state);
    const button = (label, run) => h("button", {
      type: "button", class: "small", "data-action": `${label} ${model.id}`,
      "aria-label": `${label} ${model.id}`, onclick: () => this.#act(run),
    }, label);
    const percent = model.state === "loading" ? ` ${model.progress} %` : "";
    const erase = button("Delete", async () => {
      if (erase.textContent === "Delete") erase.textContent = "Really delete?";
      else await this.#delete(model.id);
    });
    return h("li", {},
      h("strong", {}, model.id),
      " ",
      h("span", { class: "state", "data-state": model.state }, ` ${model.state}${percent}`),
      model.error ? h("p", { class: "note" }, model.error) : null,
      h("div", { class: "row" },
        loaded
          ? button("Unload", () => api.json("/v1/models/unload", { body: { model: model.id } }))
          : button("Load", () => api.json("/v1/models/load", { body: { model: model.id } })),
        button("Keep loaded", () => this.#keepLoaded(model.id)),
        erase),
      this.#buildDefaults(model.id));
  }

  /** Runs an action, and shows its error. Nothing else changes if it fails. */
  async #act(run) {
    this.#say("");
    try {
      await run();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#say(error.message);
    }
    await Promise.all([this.#refresh(), refreshModels()]);
  }

  #say(text) {
    this.status.textContent = text;
    if (text) announce(text);
  }

  async #keepLoaded(model) {
    await this.#changeDefaults(model, (defaults) => ({ ...defaults, keep_alive: -1 }));
    await api.json("/v1/models/load", { body: { model, keep_alive: -1 } });
  }

  async #delete(model) {
    // the API helpers support only GET and POST
    const headers = { "Content-Type": "application/json" };
    if (api.key) headers.Authorization = `Bearer ${api.key}`;
    const response = await fetch("/api/delete", {
      method: "DELETE", headers, body: JSON.stringify({ model }), credentials: "omit",
    });
    if (!response.ok) throw new ApiError((await response.json()).error?.message ?? "The model was not deleted.", response.status);
    this.#say(`${model} was deleted.`);
  }

  // Defaults

  #buildDefaults(model) {
    const form = h("form", { class: "defaults" });
    const details = h("details", {}, h("summary", {}, "Defaults"), form);
    details.addEventListener("toggle", () => {
      if (details.open) this.#act(() => this.#fillDefaults(model, form, details));
    });
    return details;
  }

  async #fillDefaults(model, form, details) {
    const { defaults } = await api.json("/v1/models/defaults", { body: { model } });
    const inputs = new Map(FIELDS.map(([name, , kind]) => {
      const given = defaults[name];
      const value = given === undefined ? "" : kind === "list" ? given.join(", ") : String(given);
      const tag = kind === "text" ? "textarea" : "input";
      const type = kind === "text" ? {} : { type: kind === "number" ? "number" : "text", step: "any" };
      return [name, h(tag, { ...type, value, name, autocomplete: "off" })];
    }));
    form.replaceChildren(
      ...FIELDS.map(([name, label]) => h("label", {}, label, inputs.get(name))),
      h("div", { class: "row right" }, h("button", { type: "submit", class: "primary" }, "Save")));
    form.onsubmit = (event) => {
      event.preventDefault();
      this.#act(async () => {
        await this.#changeDefaults(model, (known) => readForm(known, inputs));
        details.open = false;
        this.#shown = "";
      });
    };
  }

  async #changeDefaults(model, change) {
    const known = (await api.json("/v1/models/defaults", { body: { model } })).defaults;
    const { saved } = await api.json("/v1/models/defaults", { body: { model, defaults: change(known) } });
    this.#say(saved
      ? "Saved. The configuration file contains the defaults."
      : "Saved until the server ends. To keep defaults, start it with --config FILE.");
  }

  // Downloads

  #buildDownload() {
    const name = h("input", { id: "download-name", type: "text", placeholder: "org/name", autocomplete: "off", spellcheck: "false" });
    const facts = h("p", { class: "note", id: "download-facts", role: "status" });
    const progress = h("progress", { id: "download-progress", max: "1", hidden: true, "aria-label": "Download" });
    const start = h("button", { type: "button", id: "download-start", class: "primary", hidden: true }, "Download");
    const cancel = h("button", { type: "button", id: "download-cancel", hidden: true }, "Cancel");
    const check = h("button", { type: "submit", id: "download-check" }, "Check");
    const show = (running) => {
      progress.hidden = cancel.hidden = !running;
      check.disabled = name.disabled = running;
    };
    name.addEventListener("input", () => {
      start.hidden = true;
      facts.textContent = "";
    });
    start.addEventListener("click", () => this.#act(async () => {
      start.hidden = true;
      show(true);
      try {
        facts.textContent = await this.#pull(name.value.trim(), progress);
      } finally {
        show(false);
      }
    }));
    cancel.addEventListener("click", () => this.#download?.abort());
    const form = h("form", {
      onsubmit: (event) => {
        event.preventDefault();
        this.#act(async () => {
          start.hidden = true;
          facts.textContent = "Checking…";
          check.disabled = true;
          try {
            facts.textContent = describePreview(await api.json("/v1/models/preview", { body: { model: name.value.trim() } }));
            start.hidden = false;
          } catch (error) {
            facts.textContent = "";
            throw error;
          } finally {
            check.disabled = false;
          }
        });
      },
    },
    h("label", { for: "download-name" }, "Download a model from the Hugging Face hub"),
    h("div", { class: "row" }, name, check, start, cancel), progress, facts);
    return form;
  }

  /** Downloads a model, and returns the final message. The received part is kept, and the next
   * attempt continues from it. */
  async #pull(model, progress) {
    this.#download = new AbortController();
    const files = new Map();
    try {
      const response = await api.fetch("/api/pull", { body: { model }, signal: this.#download.signal });
      for await (const line of readLines(response)) {
        const step = JSON.parse(line);
        if (step.error) throw new ApiError(step.error.message ?? step.error, 502);
        if (!step.digest) continue;
        files.set(step.digest, step);
        const sum = (key) => [...files.values()].reduce((total, one) => total + one[key], 0);
        progress.value = sum("completed") / Math.max(sum("total"), 1);
      }
      return `${model} was downloaded.`;
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      return "The download was cancelled. The next one continues from here.";
    } finally {
      this.#download = null;
    }
  }
}

/** The values of a form. Values without a field stay as they are. */
function readForm(known, inputs) {
  const defaults = { ...known };
  for (const [name, , kind] of FIELDS) {
    const text = inputs.get(name).value.trim();
    if (!text) delete defaults[name];
    else if (kind === "list") defaults[name] = text.split(",").map((one) => one.trim()).filter(Boolean);
    else defaults[name] = kind === "number" ? Number(text) : text;
  }
  return defaults;
}

function describePreview(preview) {
  const missing = preview.missing
    ? `${formatBytes(preview.missing)} of ${formatBytes(preview.size)} to download.`
    : "Already downloaded.";
  const memory = `It needs ${formatBytes(preview.memory.needed)} of memory; ${formatBytes(preview.memory.available)} is available.`;
  return `${preview.id}: ${missing} ${memory} ${preview.fits ? "It fits." : `It does not fit: ${preview.problem}.`}`;
}

/** Yields the lines of a response. */
async function* readLines(response) {
  let rest = "";
  const decoder = new TextDecoder();
  for await (const chunk of response.body) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop();
    yield* lines.filter(Boolean);
  }
  if (rest) yield rest;
}
