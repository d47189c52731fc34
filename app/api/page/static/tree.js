// The drawing of a prefix tree. Each bar is a part of cached prompts: its width is its length in
// tokens, its height the number of prompts that share it, its color its age. The server sends no
// text and no token IDs.

import { h, svg } from "./dom.js";

const ROW = 14;
const GAP = 2;
const AXIS = 18;
const MAX_ROWS = 60;

// upper bounds of the ages in seconds, and their names; the last one has no bound
const AGES = [[10, "10 s"], [60, "1 min"], [600, "10 min"], [3600, "1 h"], [Infinity, "older"]];

/** The trees of all loaded models. */
export class PrefixTrees {
  constructor() {
    this.node = h("div");
    this.snapshots = new Map();
    this.drawn = "";
  }

  set(snapshot) {
    this.snapshots.set(snapshot.Model, snapshot);
  }

  /** Draws again if anything visible has changed. status: the status of the server. */
  update(status) {
    const loaded = status.Models.filter((model) => model.Phase === "ready").map((model) => model.Name);
    for (const name of this.snapshots.keys()) if (!loaded.includes(name)) this.snapshots.delete(name);
    const shown = [...this.snapshots.values()];
    const key = JSON.stringify(shown.map((one) => [one.Model, describeNodes(one.Nodes, status.Time)]));
    if (key === this.drawn) return;
    this.drawn = key;
    const open = this.node.querySelector("details")?.open ?? false;
    const view = { now: status.Time, named: shown.length > 1, open, width: this.node.clientWidth || 600 };
    this.node.replaceChildren(...shown.flatMap((one) => renderTree(one, view)));
    if (!shown.length) this.node.append(h("p", { class: "note" }, "No model is loaded."));
  }
}

function describeNodes(nodes, now) {
  return nodes.map((node) => [node.Parent, node.Start, node.Tokens, node.Running, ageOf(node, now)]);
}

/** The index in AGES. */
function ageOf(node, now) {
  return AGES.findIndex(([bound]) => now - node.LastUsed < bound);
}

/** view: the server's time, whether several models are shown, whether the table is open, the width. */
function renderTree({ Model: model, Total: total, Nodes: nodes }, { now, named, open, width }) {
  const title = named ? [h("h4", {}, model)] : [];
  if (!nodes.length) return [...title, h("p", { class: "note" }, "No prefix is cached.")];
  const places = layOut(nodes);
  const rows = Math.max(...places.map((place) => place.row + place.rows));
  const omitted = total > nodes.length ? ` The ${nodes.length} most recently used of ${total} parts are shown.` : "";
  const hidden = rows > MAX_ROWS ? ` ${rows - MAX_ROWS} rows are not drawn.` : "";
  return [
    ...title,
    drawTree(nodes, places, { rows: Math.min(rows, MAX_ROWS), now, width }),
    renderLegend(),
    h("p", { class: "note" }, `Several prompts share a bar that spans several rows.${omitted}${hidden}`),
    renderTable(nodes, now, open),
  ];
}

/** Gives each node its rows: a leaf has one row, other nodes those of their children. */
export function layOut(nodes) {
  const children = nodes.map(() => []);
  const roots = [];
  nodes.forEach((node, index) => (node.Parent === null ? roots : children[node.Parent]).push(index));
  const places = nodes.map(() => ({ row: 0, rows: 1 }));
  for (let index = nodes.length - 1; index >= 0; index -= 1) { // parents precede their children
    const sum = children[index].reduce((rows, child) => rows + places[child].rows, 0);
    places[index].rows = Math.max(1, sum);
  }
  const stack = (siblings, first) => {
    let row = first;
    for (const index of siblings) {
      places[index].row = row;
      row += places[index].rows;
    }
  };
  stack(roots, 0);
  nodes.forEach((_, index) => stack(children[index], places[index].row));
  return places;
}

function drawTree(nodes, places, { rows, now, width }) {
  const end = Math.max(...nodes.map((node) => node.Start + node.Tokens));
  const x = (position) => (width * position) / end;
  const bars = nodes.map((node, index) => {
    const { row, rows: height } = places[index];
    if (row >= rows) return null;
    const state = node.Running ? "running" : `age-${ageOf(node, now)}`;
    return svg(
      "rect",
      {
        class: `bar ${state}`, x: x(node.Start), y: row * ROW, rx: 2,
        width: Math.max(1.5, x(node.Tokens) - 1), height: Math.min(height, rows - row) * ROW - GAP,
      },
      svg("title", {}, describe(node, now)),
    );
  });
  const height = rows * ROW;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) =>
    svg("text", { class: part === 1 ? "label end" : part ? "label middle" : "label", x: width * part, y: height + 13 }, Math.round(end * part).toLocaleString("en")),
  );
  const label = `Prefix tree with ${nodes.length} parts, up to ${end} tokens deep. The table below has the same data.`;
  return svg("svg", { viewBox: `0 0 ${width} ${height + AXIS}`, role: "img", "aria-label": label, class: "tree" }, bars, ticks);
}

function describe(node, now) {
  const shared = node.Branches > 1 ? `, shared by ${node.Branches} continuations` : "";
  const running = node.Running ? `, used by ${node.Running} running` : "";
  return `tokens ${node.Start} to ${node.Start + node.Tokens} (${node.Tokens}), ${formatAge(now - node.LastUsed)}${shared}${running}`;
}

function formatAge(seconds) {
  if (seconds < 1) return "used now";
  if (seconds < 60) return `used ${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `used ${Math.round(seconds / 60)} min ago`;
  return `used ${Math.round(seconds / 3600)} h ago`;
}

function renderLegend() {
  const entries = [["running", "in a running request"], ...AGES.map(([, name], index) => [`age-${index}`, index < AGES.length - 1 ? `used within ${name}` : name])];
  return h("ul", { class: "legend" }, entries.map(([state, label]) =>
    h("li", {}, svg("svg", { width: 10, height: 10, "aria-hidden": "true" }, svg("rect", { class: `bar ${state}`, width: 10, height: 10, rx: 2 })), ` ${label}`),
  ));
}

function renderTable(nodes, now, open) {
  const columns = ["From", "Tokens", "Continuations", "Running", "Last use"];
  const row = (node) => [node.Start, node.Tokens, node.Branches, node.Running, formatAge(now - node.LastUsed)];
  return h(
    "details",
    { class: "fold", open },
    h("summary", {}, "As a table"),
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Prefix tree" },
      h("table", {},
        h("thead", {}, h("tr", {}, columns.map((name) => h("th", {}, name)))),
        h("tbody", {}, nodes.map((node) => h("tr", {}, row(node).map((cell) => h("td", {}, String(cell)))))))),
  );
}
