// The model picker, and the state of the selected model.

import { api } from "./api.js";
import { byId, h } from "./dom.js";
import { getSetting, setSetting } from "./settings.js";

const LOADING = new Set(["loading", "queued"]);
const LABELS = {
  ready: "ready", unloaded: "not loaded", loading: "loading", queued: "waiting to load",
  stalled: "not responding", failed: "failed", unloading: "unloading", refused: "cannot be loaded",
};

let models = [];
let timer = 0;

export function selectedModel() {
  return byId("model").value;
}

/** Reads the models and their states; reads again soon while one is being loaded. */
export async function refreshModels() {
  clearTimeout(timer);
  try {
    models = (await api.json("/v1/models")).data;
  } catch (error) {
    byId("model-state").textContent = error.status ? error.message : "";
    return;
  }
  show();
  if (models.some((model) => LOADING.has(model.state))) timer = setTimeout(refreshModels, 500);
}

function show() {
  const picker = byId("model");
  const wanted = picker.value || getSetting("model");
  const ids = models.map((model) => model.id);
  if (ids.join("\n") !== Array.from(picker.options, (option) => option.value).join("\n")) {
    picker.replaceChildren(...ids.map((id) => h("option", { value: id }, id)));
    picker.value = ids.includes(wanted) ? wanted : (ids[0] ?? "");
  }
  showState();
}

function showState() {
  const model = models.find((one) => one.id === selectedModel());
  const state = byId("model-state");
  const percent = model?.state === "loading" ? ` ${model.progress} %` : "";
  state.textContent = model ? (LABELS[model.state] ?? model.state) + percent : "no model";
  state.dataset.state = model?.state ?? "none";
  state.title = model?.error ?? (model ? `context of ${model.context_length} tokens` : "");
}

export function startModels() {
  const picker = byId("model");
  picker.addEventListener("change", () => {
    setSetting("model", picker.value);
    showState();
  });
  picker.addEventListener("focus", refreshModels);
  document.addEventListener("visibilitychange", () => document.hidden || refreshModels());
  return refreshModels();
}

/** Shows how much of the model's context the conversation fills, as of the last answer. */
export function showContext(branch) {
  const figures = branch.findLast((message) => message.figures?.prompt)?.figures;
  const total = models.find((model) => model.id === selectedModel())?.context_length;
  const node = byId("context");
  node.hidden = !figures || !total;
  if (node.hidden) return;
  const used = figures.prompt + figures.completion;
  const text = `${used.toLocaleString("en")} of ${total.toLocaleString("en")} tokens`;
  const meter = h("meter", { min: 0, max: total, high: 0.85 * total, value: used, "aria-label": `Context: ${text}` });
  node.replaceChildren(meter, h("span", { "aria-hidden": "true" }, text));
}
