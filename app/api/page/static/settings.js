// The settings of requests: the system prompt, sampling, reasoning, tools, the JSON schema. They are
// stored in this browser. An empty field is not sent, so the model's own default applies.

import { byId, h } from "./dom.js";

const STORED = "mlxrunner.settings";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.05, max: 10, step: 0.05 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["max_tokens", "Maximum tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
];

const EFFORTS = ["", "none", "minimal", "low", "medium", "high", "xhigh", "max"];

const SCHEMA_EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}}';
const TOOLS_EXAMPLE = '[{"type": "function", "function": {"name": "get_time", "parameters": {}}}]';

function load() {
  try {
    return JSON.parse(localStorage.getItem(STORED)) ?? {};
  } catch {
    return {};
  }
}

const values = load();

export function getSetting(name) {
  return values[name] ?? "";
}

export function setSetting(name, value) {
  if (value === "") delete values[name];
  else values[name] = value;
  localStorage.setItem(STORED, JSON.stringify(values));
}

/** The request fields. Throws an Error with one sentence if a field cannot be read. */
export function requestFields() {
  const fields = {};
  for (const [name, label] of NUMBERS) {
    const text = getSetting(name);
    if (text === "") continue;
    fields[name] = Number(text);
    if (Number.isNaN(fields[name])) throw new Error(`${label} must be a number.`);
  }
  const stop = getSetting("stop").split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  if (getSetting("reasoning_effort")) fields.reasoning_effort = getSetting("reasoning_effort");
  if (getSetting("use_tools") && getSetting("tools").trim()) fields.tools = readJson("tools", "The tools");
  if (getSetting("use_schema")) {
    fields.response_format = getSetting("schema").trim()
      ? { type: "json_schema", json_schema: { name: "answer", strict: true, schema: readJson("schema", "The schema") } }
      : { type: "json_object" };
  }
  return fields;
}

function readJson(name, label) {
  try {
    return JSON.parse(getSetting(name));
  } catch (error) {
    throw new Error(`${label} in the settings cannot be read as JSON: ${error.message}`);
  }
}

let onSystem = () => {};

/** Shows the system prompt of a conversation. */
export function showSystem(text) {
  const area = byId("setting-system");
  if (area && area.value !== text) area.value = text;
}

/** Fills the panel. onSystemChanged(text): called when the system prompt is changed. */
export function renderSettings(onSystemChanged = onSystem) {
  onSystem = onSystemChanged;
  byId("settings").replaceChildren(
    h("h2", {}, "Settings"),
    systemField(),
    h("div", { class: "numbers" }, NUMBERS.map(numberField)),
    textArea("stop", "Stop at (one text per line)", 2),
    effortField(),
    jsonField("schema", "Answer as JSON", "Schema (empty: any JSON object)", SCHEMA_EXAMPLE),
    jsonField("tools", "Offer tools", "Tools, as in the API", TOOLS_EXAMPLE),
    h("button", { type: "button", class: "quiet", onclick: reset }, "Reset"),
    h("p", { class: "note" }, "An empty field means the model's own default."),
  );
}

function reset() {
  for (const name of Object.keys(values)) if (name !== "model") setSetting(name, "");
  renderSettings();
  onSystem("");
}

/** The system prompt of the conversation, and of new ones. */
function systemField() {
  const field = textArea("system", "System prompt of this conversation", 3);
  const area = field.lastChild;
  area.addEventListener("input", () => onSystem(area.value));
  return field;
}

function numberField([name, label, bounds]) {
  const id = `setting-${name}`;
  const input = h("input", {
    type: "number", id, ...bounds, value: getSetting(name), placeholder: "default",
    oninput: () => setSetting(name, input.value),
  });
  return h("div", {}, h("label", { for: id }, label), input);
}

function textArea(name, label, rows, placeholder = "") {
  const id = `setting-${name}`;
  const area = h("textarea", {
    id, rows, placeholder, spellcheck: "false", value: getSetting(name),
    oninput: () => setSetting(name, area.value),
  });
  return h("div", {}, h("label", { for: id }, label), area);
}

function effortField() {
  const id = "setting-reasoning";
  const options = EFFORTS.map((effort) => h("option", { value: effort }, effort || "default"));
  const select = h("select", { id, onchange: () => setSetting("reasoning_effort", select.value) }, options);
  select.value = getSetting("reasoning_effort");
  return h("div", {}, h("label", { for: id }, "Reasoning effort"), select);
}

function jsonField(name, switchLabel, label, example) {
  const area = textArea(name, label, 5, example);
  area.hidden = !getSetting(`use_${name}`);
  const box = h("input", {
    type: "checkbox", checked: Boolean(getSetting(`use_${name}`)),
    onchange: () => {
      setSetting(`use_${name}`, box.checked ? "yes" : "");
      area.hidden = !box.checked;
    },
  });
  return h("div", {}, h("label", { class: "check" }, box, ` ${switchLabel}`), area);
}
