// The API reference: openapi.yaml as a page.

import { byId, copyButton, h } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { parseYaml } from "./yaml.js";

const MAX_DEPTH = 12; // of a schema, which may contain itself

// The fields that most requests use, after the required ones. The others are folded.
const COMMON = [
  "stream", "max_completion_tokens", "max_tokens", "max_output_tokens", "instructions", "system", "temperature", "top_p",
  "top_k", "stop", "stop_sequences", "seed", "tools", "tool_choice", "response_format", "text", "output_config",
  "reasoning_effort", "reasoning", "stream_options", "previous_response_id", "dimensions", "encoding_format", "keep_alive",
];
const COMMON_OF_OLLAMA = ["stream", "system", "format", "think", "tools", "options", "keep_alive"];
const COMMON_OF_ANTHROPIC = ["stream", "system", "temperature", "stop_sequences", "tools", "tool_choice", "thinking", "output_config"];
const MAX_FIELDS = 8; // of a request that is shown without a fold

let spec = null;
let model = null; // that this server has, for the examples

async function start() {
  const reference = byId("reference");
  try {
    const response = await fetch("/openapi.yaml", { credentials: "omit" });
    if (!response.ok) throw new Error(`the server returned HTTP ${response.status}`);
    spec = parseYaml(await response.text());
  } catch (error) {
    reference.replaceChildren(h("p", { class: "error" }, `openapi.yaml cannot be shown: ${error.message}`));
    return;
  }
  model = await findModel();
  reference.replaceChildren(
    h("section", { class: "operation", id: "introduction" }, h("h2", {}, "Introduction"), markdown(spec.info.description)),
    ...listOperations().map(renderOperation),
  );
  byId("operations").replaceChildren(h("a", { class: "whole", href: "#introduction" }, "Introduction"), ...spec.tags.flatMap(renderTag));
  byId("filter").addEventListener("input", filter);
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
}

/** The first model of this server, or null, for example if it requires a key. */
async function findModel() {
  try {
    const response = await fetch("/v1/models", { credentials: "omit" });
    return response.ok ? ((await response.json()).data[0]?.id ?? null) : null;
  } catch {
    return null;
  }
}

function listOperations() {
  return Object.entries(spec.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({
      ...operation, path, method, id: `${method}${path.replace(/[^\w]+/g, "-")}`,
    })),
  );
}

function renderTag({ name }) {
  const own = listOperations().filter((operation) => operation.tags?.includes(name));
  return [
    h("h2", {}, name),
    ...own.map(({ id, method, path }) => h("a", { href: `#${id}` }, h("span", { class: "method" }, method.toUpperCase()), h("span", {}, path))),
  ];
}

function renderOperation(operation) {
  const parts = [
    h("h2", {}, h("span", { class: "method" }, operation.method.toUpperCase()), " ", operation.path),
    renderCurl(operation),
    operation.summary ? h("p", {}, h("strong", {}, operation.summary)) : null,
    operation.description ? markdown(operation.description) : null,
  ];
  const parameters = (operation.parameters ?? []).map(resolve);
  if (parameters.length) {
    parts.push(h("h3", {}, "Parameters"), h("ul", { class: "schema" }, parameters.map((one) =>
      renderProperty(one.name, { description: one.description, ...one.schema }, one.required, 1))));
  }
  if (operation.requestBody) parts.push(h("h3", {}, "Request"), ...renderRequest(operation));
  parts.push(h("h3", {}, "Responses"), ...Object.entries(operation.responses).map(renderResponse));
  return h("section", { class: "operation", id: operation.id }, parts);
}

/** A command that sends the example of an operation to this server. */
function renderCurl({ method, path, parameters = [], requestBody }) {
  const given = parameters.map(resolve);
  const query = given.filter((one) => one.in === "query" && one.required).map(({ name }) => `${name}=${name.toUpperCase()}`);
  const named = path.replace(/\{(\w+)\}/g, (_, name) => name.toUpperCase());
  const [type, content] = Object.entries(requestBody ? resolve(requestBody).content : {}).at(-1) ?? [];
  let example = content?.example ?? (type === "application/json" ? {} : "");
  if (model && example.model) example = { ...example, model };
  const body = typeof example === "string" ? example : JSON.stringify(example);
  const lines = [
    ["curl", example?.stream ? "-N" : "", method === "get" ? "" : `-X ${method.toUpperCase()}`,
      quote(location.origin + named + (query.length ? `?${query.join("&")}` : ""))].filter(Boolean).join(" "),
    type ? `-H ${quote(`Content-Type: ${type.split(";")[0]}`)}` : "",
    body ? `-d ${quote(body)}` : "",
  ];
  const text = lines.filter(Boolean).join(" \\\n  ");
  return h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, "curl"), copyButton(() => text)),
    h("pre", { class: "curl", tabindex: 0, role: "group", "aria-label": "Example with curl" }, h("code", {}, text)));
}

function quote(text) {
  return /^[\w:/.-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** The fields of a request: the model, required ones, common ones, and the others in a fold. */
function renderRequest({ path, requestBody }) {
  const common = path.startsWith("/api/") ? COMMON_OF_OLLAMA : path.startsWith("/v1/messages") ? COMMON_OF_ANTHROPIC : COMMON;
  return Object.entries(resolve(requestBody).content).flatMap(([type, { schema: reference }]) => {
    const schema = resolve(reference);
    const names = Object.keys(schema?.properties ?? {});
    if (names.length <= MAX_FIELDS) return renderContent({ [type]: { schema: reference } });
    const required = schema.required ?? [];
    const first = [...new Set(["model", ...required, ...common])].filter((name) => names.includes(name));
    const others = names.filter((name) => !first.includes(name)).sort();
    const list = (some) => h("ul", { class: "schema" }, some.map((name) =>
      renderProperty(name, schema.properties[name], required.includes(name), 1)));
    return [
      h("p", { class: "note" }, type),
      list(first),
      others.length ? h("details", { class: "fold more" }, h("summary", {}, `${others.length} more fields`), list(others)) : null,
    ].filter(Boolean);
  });
}

/** Shows the operations whose path, summary or fields have the text of the filter. */
function filter() {
  const text = byId("filter").value.trim().toLowerCase();
  const has = (node) => node.textContent.toLowerCase().includes(text);
  for (const section of document.querySelectorAll("section.operation")) {
    const heads = Array.from(section.querySelectorAll(":scope > h2, :scope > p"));
    const isNamed = heads.some(has);
    const fields = Array.from(section.querySelectorAll(":scope > .schema > li, .more > .schema > li"));
    const found = fields.filter((field) => has(field.querySelector("code") ?? field));
    section.hidden = !isNamed && !found.length;
    for (const field of fields) field.hidden = !isNamed && !found.includes(field);
    const more = section.querySelector(".more");
    if (more) more.open = Boolean(text) && !isNamed && Array.from(more.querySelectorAll("li")).some((field) => found.includes(field));
    const link = document.querySelector(`#operations a[href="#${CSS.escape(section.id)}"]`);
    if (link) link.hidden = section.hidden;
  }
  byId("no-match").hidden = Boolean(document.querySelector("section.operation:not([hidden])"));
}

function renderResponse([status, reference]) {
  const response = resolve(reference);
  return h(
    "details",
    { class: "fold" },
    h("summary", {}, h("code", {}, status), ` ${firstSentence(response.description)}`),
    h("div", { class: "text" }, markdown(response.description ?? ""), response.content ? renderContent(response.content) : null),
  );
}

function renderContent(content) {
  return Object.entries(content ?? {}).flatMap(([type, { schema, example }]) => [
    h("p", { class: "note" }, type),
    schema ? renderSchema(schema, 1) : null,
    example === undefined ? null : h("pre", { tabindex: 0, role: "group", "aria-label": "Example" },
      typeof example === "string" ? example : JSON.stringify(example, null, 2)),
  ]);
}

/** A schema: its properties, items and alternatives. Parts are built when they are opened, because
 * schemas are large and may contain themselves. */
function renderSchema(reference, depth) {
  const schema = resolve(reference);
  const required = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {}).map(([name, one]) =>
    renderProperty(name, one, required.includes(name), depth));
  for (const kind of ["allOf", "anyOf", "oneOf"]) {
    for (const one of schema[kind] ?? []) rows.push(renderProperty(LABELS[kind], one, false, depth));
  }
  if (schema.items) rows.push(renderProperty("each item", schema.items, false, depth));
  if (!rows.length) rows.push(h("li", {}, h("span", { class: "type" }, typeOf(schema))));
  return h("ul", { class: "schema" }, rows);
}

const LABELS = { allOf: "and", anyOf: "any of", oneOf: "one of" };

function renderProperty(name, reference, isRequired, depth) {
  const schema = resolve(reference);
  const head = [h("code", {}, name), " ", h("span", { class: "type" }, `${typeOf(schema)}${isRequired ? ", required" : ""}`)];
  const description = schema.description ? [markdown(schema.description)] : [];
  const isDeep = schema.properties || schema.items || schema.anyOf || schema.oneOf || schema.allOf;
  if (!isDeep || depth > MAX_DEPTH) return h("li", {}, head, description);
  const fold = h("details", { class: "fold" }, h("summary", {}, head));
  fold.addEventListener("toggle", () => fold.append(renderSchema(schema, depth + 1)), { once: true });
  return h("li", {}, fold, description);
}

function typeOf(schema) {
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  const type = [schema.type ?? []].flat().join(" | ");
  const bounds = [
    schema.minimum === undefined ? "" : `≥ ${schema.minimum}`,
    schema.maximum === undefined ? "" : `≤ ${schema.maximum}`,
  ].filter(Boolean);
  return [type, ...bounds].filter(Boolean).join(", ");
}

function resolve(value) {
  if (!value?.$ref) return value;
  const found = value.$ref.slice(2).split("/").reduce((node, key) => node[key], spec);
  const { $ref, ...own } = value;
  return { ...resolve(found), ...own };
}

function firstSentence(text = "") {
  return text.trim().split(/(?<=\.)\s/)[0];
}

function markdown(text) {
  const node = h("div", { class: "text" });
  renderMarkdown(node, text);
  return node;
}

await start();
