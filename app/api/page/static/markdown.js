// Markdown to DOM nodes, for the output of models: headings, lists, tables, quotes, fenced code,
// emphasis, inline code, links. HTML in the text stays text, images stay links: the page loads
// nothing that a model names.

import { copyButton, h } from "./dom.js";

// Bounds, so that no output makes the page slow: markup nested deeper, or in a paragraph that is
// longer, is shown as text.
const MAX_DEPTH = 12;
const MAX_INLINE_CHARS = 20_000;

/** Shows a text in `container`. Blocks that did not change keep their nodes, so that a streamed
 * answer costs only its last block, and a selection survives. */
export function renderMarkdown(container, text) {
  const blocks = splitBlocks(text);
  const shown = container.renderedBlocks ?? [];
  const places = container.children;
  blocks.forEach((block, index) => {
    const key = JSON.stringify(block);
    if (shown[index] === key) return;
    const node = renderBlock(block);
    if (index < places.length) places[index].replaceWith(node);
    else container.append(node);
    shown[index] = key;
  });
  while (places.length > blocks.length) places[places.length - 1].remove();
  container.renderedBlocks = shown.slice(0, blocks.length);
}

// Blocks

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Splits a text into blocks: {kind, …}. */
export function splitBlocks(text, depth = 0) {
  if (depth > MAX_DEPTH) return [{ kind: "paragraph", text }];
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) at += 1;
    else at = readBlock(lines, at, blocks, depth);
  }
  return blocks;
}

/** Reads the block at a line, and returns the line after it. */
function readBlock(lines, at, blocks, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readFence(lines, at, fence, blocks);
  const heading = HEADING.exec(line);
  if (heading) {
    blocks.push({ kind: "heading", level: heading[1].length, text: heading[2] });
    return at + 1;
  }
  if (RULE.test(line)) {
    blocks.push({ kind: "rule" });
    return at + 1;
  }
  if (isTable(lines, at)) return readTable(lines, at, blocks);
  if (QUOTE.test(line)) return readQuote(lines, at, blocks, depth);
  if (ITEM.test(line)) return readList(lines, at, blocks, depth);
  return readParagraph(lines, at, blocks);
}

function readFence(lines, at, [, indent, mark, language], blocks) {
  const code = [];
  let end = at + 1;
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  while (end < lines.length && !closing.test(lines[end])) {
    code.push(lines[end].startsWith(indent) ? lines[end].slice(indent.length) : lines[end]);
    end += 1;
  }
  blocks.push({ kind: "code", language, text: code.join("\n") });
  return end + 1;
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && DIVIDER.test(lines[at + 1]) &&
    lines[at + 1].includes("-") && splitRow(lines[at]).length === splitRow(lines[at + 1]).length;
}

function readTable(lines, at, blocks) {
  const align = splitRow(lines[at + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left",
  );
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) rows.push(splitRow(lines[end++]));
  blocks.push({ kind: "table", head: splitRow(lines[at]), align, rows });
  return end;
}

function splitRow(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function readQuote(lines, at, blocks, depth) {
  const inner = [];
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) inner.push(QUOTE.exec(lines[end++])[1]);
  blocks.push({ kind: "quote", blocks: splitBlocks(inner.join("\n"), depth + 1) });
  return end;
}

/** Reads a list. A line that is indented at least as far as the text of an item belongs to it. */
function readList(lines, at, blocks, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  let current = null;
  let inset = 0;
  while (end < lines.length) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const margin = line.length - line.trimStart().length;
    const blankBefore = end > 0 && !lines[end - 1].trim();
    if (item && margin < indent.length + 2 && /\d/.test(item[2]) === ordered) {
      current = [item[3]];
      items.push(current);
      inset = line.length - item[3].length;
    } else if (!line.trim()) current.push("");
    else if (margin >= Math.min(inset, indent.length + 2)) current.push(line.slice(Math.min(margin, inset)));
    else if (blankBefore || startsBlock(lines, end)) break;
    else current.push(line);
    end += 1;
  }
  blocks.push({
    kind: "list",
    start: ordered ? Number.parseInt(mark, 10) : null,
    items: items.map((item) => splitBlocks(item.join("\n"), depth + 1)),
  });
  return end;
}

function readParagraph(lines, at, blocks) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end += 1;
  blocks.push({ kind: "paragraph", text: lines.slice(at, end).join("\n") });
  return end;
}

function startsBlock(lines, at) {
  const line = lines[at];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((block) => block.test(line)) || isTable(lines, at);
}

function renderBlock(block) {
  switch (block.kind) {
    case "heading": // the page has its own h1 and h2
      return h(`h${Math.min(block.level + 2, 6)}`, {}, renderInline(block.text));
    case "rule":
      return h("hr");
    case "code":
      return renderCode(block);
    case "table":
      return renderTable(block);
    case "quote":
      return h("blockquote", {}, block.blocks.map(renderBlock));
    case "list":
      return renderList(block);
    default:
      return h("p", {}, renderInline(block.text));
  }
}

function renderCode({ language, text }) {
  const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), copyButton(() => text));
  const label = language ? `Code in ${language}` : "Code";
  const pre = h("pre", { tabindex: 0, role: "group", "aria-label": label }, h("code", {}, text));
  return h("div", { class: "code" }, head, pre);
}

function renderTable({ head, align, rows }) {
  const cells = (tag, row) =>
    head.map((_, index) => h(tag, { class: align[index] }, renderInline(row[index] ?? "")));
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, cells("th", head))),
      h("tbody", {}, rows.map((row) => h("tr", {}, cells("td", row)))),
    ),
  );
}

function renderList({ start, items }) {
  const tight = (blocks) =>
    blocks[0]?.kind === "paragraph"
      ? [...renderInline(blocks[0].text), ...blocks.slice(1).map(renderBlock)]
      : blocks.map(renderBlock);
  const attributes = start === null ? {} : { start };
  return h(start === null ? "ul" : "ol", attributes, items.map((item) => h("li", {}, tight(item))));
}

// Text within a block

const INLINE = new RegExp(
  [
    "(?<tick>`+)(?<code>[^`]|[^`].*?[^`])\\k<tick>(?!`)",
    "!?\\[(?<label>[^\\]]*)\\]\\((?<url>[^()\\s]+(?:\\([^()\\s]*\\)[^()\\s]*)*)(?:\\s+\"[^\"]*\")?\\)",
    "(?<bare>https?://[^\\s<>()]*[^\\s<>().,;:!?'\"*_`])",
    "(?<!\\w)(?<star>\\*\\*|__)(?<strong>\\S|\\S.*?\\S)\\k<star>(?!\\w)",
    "\\*(?<em>[^\\s*]|[^\\s*][^*]*?[^\\s*])\\*",
    "(?<!\\w)_(?<em2>[^\\s_]|[^\\s_][^_]*?[^\\s_])_(?!\\w)",
    "~~(?<struck>\\S|\\S.*?\\S)~~",
    "\\\\(?<escaped>[\\\\`*_{}\\[\\]()#+.!|~>-])",
    "(?<break> {2,}\\n|\\\\\\n)",
  ].join("|"),
  "gs",
);

/** The nodes of a text with inline markup. */
export function renderInline(text, depth = 0) {
  if (depth > MAX_DEPTH || text.length > MAX_INLINE_CHARS) return [text];
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    nodes.push(renderMatch(match.groups, match[0], depth + 1));
    at = match.index + match[0].length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function renderMatch(found, whole, depth) {
  if (found.code !== undefined) return h("code", {}, found.code.replace(/^ (.*) $/s, "$1"));
  if (found.url !== undefined) return renderLink(found.url, found.label, whole);
  if (found.bare !== undefined) return renderLink(found.bare, found.bare, whole);
  if (found.strong !== undefined) return h("strong", {}, renderInline(found.strong, depth));
  if (found.struck !== undefined) return h("del", {}, renderInline(found.struck, depth));
  if (found.escaped !== undefined) return found.escaped;
  if (found.break !== undefined) return h("br");
  return h("em", {}, renderInline(found.em ?? found.em2, depth));
}

/** A link, if its scheme is harmless; otherwise its text. */
function renderLink(url, label, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return whole;
  const attributes = { href: url, target: "_blank", rel: "noopener noreferrer nofollow" };
  return h("a", attributes, label || url);
}
