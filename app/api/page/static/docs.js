// The API reference: openapi.yaml as a page.

import { byId, h } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { parseYaml } from "./yaml.js";

const MAX_DEPTH = 12; // of a schema, which may contain itself

let spec = null;

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
  reference.replaceChildren(
    h("section", { class: "operation", id: "introduction" }, h("h2", {}, "Introduction"), markdown(spec.info.description)),
    ...listOperations().map(renderOperation),
  );
  byId("operations").replaceChildren(h("a", { class: "whole", href: "#introduction" }, "Introduction"), ...spec.tags.flatMap(renderTag));
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
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
    operation.summary ? h("p", {}, h("strong", {}, operation.summary)) : null,
    operation.description ? markdown(operation.description) : null,
  ];
  const parameters = (operation.parameters ?? []).map(resolve);
  if (parameters.length) {
    parts.push(h("h3", {}, "Parameters"), h("ul", { class: "schema" }, parameters.map((one) =>
      renderProperty(one.name, { description: one.description, ...one.schema }, one.required, 1))));
  }
  if (operation.requestBody) parts.push(h("h3", {}, "Request"), ...renderContent(resolve(operation.requestBody).content));
  parts.push(h("h3", {}, "Responses"), ...Object.entries(operation.responses).map(renderResponse));
  return h("section", { class: "operation", id: operation.id }, parts);
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
