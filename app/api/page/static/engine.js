// The Engine tab: the state of the server, live. It shows the same data as /v1/status for the same
// key.

import { api } from "./api.js";
import { h, svg } from "./dom.js";
import { PrefixTrees } from "./tree.js";

const HISTORY = 120; // seconds in the chart
const RECONNECT_MS = 2000;

const STATES = { 0: "ready", 3: "loading", 4: "not responding", 5: "failed" };

const MEMORY = [
  ["weights", "Weights"], ["kv", "KV caches of running requests"], ["prefix", "Cached prefixes"],
  ["working", "Working space"], ["free", "Free"],
];

export class EngineView {
  #abort = null;

  constructor(root) {
    this.root = root;
    this.rates = []; // generated tokens per second, one per event
    this.last = null;
    this.trees = new PrefixTrees();
    this.figures = h("dl", { class: "figures-grid" });
    this.chart = h("div", { class: "chart" });
    this.memory = h("div");
    this.models = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Models" });
    this.note = h("p", { class: "note" }, "Connecting…");
    this.detail = h(
      "div",
      { class: "panels", hidden: true },
      panel("Generated tokens per second", this.chart),
      panel("Memory", this.memory),
      panel("Prefix tree", this.trees.node),
      panel("Models", this.models),
    );
    root.append(h("h2", { class: "offscreen" }, "Engine"), this.note, this.figures, this.detail);
  }

  start() {
    if (!this.#abort) this.#run((this.#abort = new AbortController()));
  }

  stop() {
    this.#abort?.abort();
    this.#abort = null;
  }

  /** Reads events until `abort`; connects again when the connection is lost. */
  async #run(abort) {
    while (!abort.signal.aborted) {
      try {
        const events = api.stream("/v1/engine/events", { signal: abort.signal });
        for await (const { event, data } of events) {
          if (data) this.#show(event, JSON.parse(data));
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        this.note.textContent = error.message;
        this.note.hidden = false;
        this.last = null;
        if (error.status === 401) {
          this.#abort = null;
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
    }
  }

  #show(event, data) {
    if (event === "prefix") this.trees.set(data);
    else if (event === "status") this.#showStatus(data);
  }

  #showStatus(now) {
    const isAdmin = "Ledger" in now;
    this.detail.hidden = !isAdmin;
    this.note.hidden = isAdmin;
    this.note.textContent = "This key shows the state and the memory. An admin key shows everything.";
    const rate = isAdmin ? this.#measure(now) : null;
    this.figures.replaceChildren(...renderFigures(now, rate));
    if (isAdmin) {
      this.chart.replaceChildren(renderChart(this.rates, this.chart.clientWidth || 600));
      this.memory.replaceChildren(...renderMemory(now.Ledger));
      this.models.replaceChildren(renderModels(now.Models));
      this.trees.update(now);
    }
    this.last = now;
  }

  /** The rates since the event before. */
  #measure(now) {
    const { last } = this;
    const seconds = last?.Tokens ? now.Time - last.Time : 0;
    const per = (name) => (seconds > 0 ? Math.max(0, now.Tokens[name] - last.Tokens[name]) / seconds : 0);
    const rate = { generated: per("generated"), prefilled: per("prefilled") };
    this.rates.push(rate.generated);
    this.rates.splice(0, this.rates.length - HISTORY);
    return rate;
  }
}

function panel(title, ...children) {
  return h("section", { class: "panel", "aria-label": title }, h("h3", {}, title), children);
}

function renderFigures(now, rate) {
  const figures = [["State", STATES[now.Status] ?? "unknown", now.Error ?? ""]];
  if (rate) {
    const prompt = now.Tokens.cached + now.Tokens.prefilled;
    const hits = Object.entries(now.Hits).reduce((sum, [, count]) => sum + count, 0) - (now.Hits["0"] ?? 0);
    figures.push(
      ["Running", `${now.Running}`, `of ${now.Parallel}`],
      ["Waiting", `${now.Waiting}`, `of ${now.MaxQueue}`],
      ["Generating", number(rate.generated), "tokens/s"],
      ["Prefill", number(rate.prefilled), "tokens/s"],
      ["Cached", prompt ? `${Math.round((100 * now.Tokens.cached) / prompt)} %` : "–", "of all prompt tokens"],
      ["Cache hits", number(hits), `misses ${number(now.Hits["0"] ?? 0)}`],
      ["Evictions", number(now.Evictions), "prefixes"],
      ["Preemptions", number(now.Preemptions), "requests"],
    );
  }
  figures.push(["Memory", bytes(now.Memory), "allocated"], ["Context", number(now.ContextLength), "tokens"]);
  return figures.map(([name, value, unit]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, " ", h("small", {}, unit))),
  );
}

function renderChart(rates, width) {
  const height = 90;
  const top = Math.max(10, ...rates);
  const step = width / (HISTORY - 1);
  const points = rates.map((rate, index) => {
    const x = width - (rates.length - 1 - index) * step;
    return `${x.toFixed(1)},${(height - (height - 4) * (rate / top)).toFixed(1)}`;
  });
  return svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${height + 16}`, role: "img",
      "aria-label": `Generated tokens per second in the last two minutes: now ${number(rates.at(-1))}, at most ${number(Math.max(...rates))}`,
    },
    svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
    svg("line", { class: "axis faint", x1: 0, x2: width, y1: 4, y2: 4 }),
    svg("polyline", { class: "line", points: points.join(" ") }),
    svg("text", { x: 0, y: 14, class: "label" }, number(top)),
    svg("text", { x: 0, y: height + 13, class: "label" }, "2 min ago"),
    svg("text", { x: width, y: height + 13, class: "label end" }, "now"),
  );
}

function renderMemory(ledger) {
  const [width, height] = [600, 22];
  let x = 0;
  const parts = MEMORY.map(([name]) => {
    const share = ledger.budget ? (width * ledger[name]) / ledger.budget : 0;
    const size = ledger[name] ? Math.max(share, 2) : 0; // a small part stays visible
    const part = svg("rect", { class: `memory-${name}`, x, width: size, height });
    x += size;
    return part;
  });
  const bar = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "memory-bar", "aria-hidden": "true", preserveAspectRatio: "none" }, parts);
  const rows = MEMORY.map(([name, label]) =>
    h("li", {}, svg("svg", { width: 10, height: 10, "aria-hidden": "true" }, svg("rect", { class: `memory-${name}`, width: 10, height: 10, rx: 2 })), ` ${label} `, h("b", {}, bytes(ledger[name]))),
  );
  return [bar, h("ul", { class: "legend" }, rows), h("p", { class: "note" }, `Budget ${bytes(ledger.budget)}`)];
}

function renderModels(models) {
  const columns = ["Model", "State", "Running", "Waiting", "Memory", "Context", "Loads", "Restarts"];
  const row = (model) => [
    model.Name, model.Phase === "loading" ? `loading ${model.Progress} %` : model.Phase,
    model.Running, model.Waiting, bytes(model.Memory),
    model.ContextLength === null ? "–" : number(model.ContextLength), model.Loads, model.Restarts,
  ];
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, columns.map((name) => h("th", {}, name)))),
    h("tbody", {}, models.map((model) => h("tr", {}, row(model).map((cell) => h("td", {}, String(cell)))))),
  );
}

export function number(value) {
  return Math.round(value ?? 0).toLocaleString("en");
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let size = value ?? 0;
  while (size >= 1024 && at < units.length - 1) {
    size /= 1024;
    at += 1;
  }
  return `${size >= 100 || at === 0 ? Math.round(size) : size.toFixed(1)} ${units[at]}`;
}
