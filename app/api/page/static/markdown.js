// Markdown to DOM nodes, for the output of models. No string is parsed as HTML: the nodes are built
// from markdown-it's tokens. Images stay links: the page loads nothing that a model names.

import { copyButton, h } from "./dom.js";
import { highlightCode } from "./highlight.js";
import { GrowingMarkdown } from "./markdown_blocks.js";
import { renderMath } from "./math.js";

/** Shows a text in `container`. Blocks that did not change keep their nodes, so that a streamed
 * answer costs only its last block, and a selection survives. complete: the text no longer grows;
 * only then is its code highlighted. */
export function renderMarkdown(container, text, { complete = true } = {}) {
  const shown = (container.markdown ??= { growing: new GrowingMarkdown(), blocks: [], complete });
  const { blocks, hasReferences } = shown.growing.parse(text, { complete });
  const isReusable = (block, index) =>
    shown.blocks[index]?.source === block.source && !hasReferences && !shown.hasReferences;
  const places = container.children;
  blocks.forEach((block, index) => {
    if (shown.blocks[index] === block || isReusable(block, index)) return;
    const node = renderTokens(block.tokens).firstChild;
    if (index < places.length) places[index].replaceWith(node);
    else container.append(node);
  });
  while (places.length > blocks.length) places[places.length - 1].remove();
  Object.assign(shown, { blocks: [...blocks], hasReferences });
  if (complete) for (const code of container.querySelectorAll("code[data-language]")) highlightCode(code);
}

// Elements that have only the attributes of their tokens' tags
const PLAIN = {
  paragraph: "p", blockquote: "blockquote", bullet_list: "ul", thead: "thead", tbody: "tbody", tr: "tr",
  strong: "strong", em: "em", s: "del",
};

/** The nodes of tokens, as a fragment. */
function renderTokens(tokens) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) {
      const { outer, inner } = openElement(token);
      parent.append(outer);
      open.push(inner);
    } else parent.append(...renderLeaf(token));
  }
  for (const item of root.querySelectorAll("li")) markTask(item);
  return root;
}

/** The element of an opening token: `outer` is added to the parent, children are added to `inner`. */
function openElement(token) {
  const kind = token.type.replace(/_open$/, "");
  if (kind === "paragraph" && token.hidden) { // the text of a tight list
    const fragment = h("span");
    return { outer: fragment, inner: fragment };
  }
  if (kind === "table") {
    const inner = h("table");
    return { outer: h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, inner), inner };
  }
  const element = h(PLAIN[kind] ?? tagOf(token, kind), attributesOf(token, kind));
  return { outer: element, inner: element };
}

function tagOf(token, kind) {
  switch (kind) {
    case "heading": // the page has its own h1 and h2
      return `h${Math.min(Number(token.tag[1]) + 2, 6)}`;
    case "ordered_list":
      return "ol";
    case "list_item":
      return "li";
    case "th":
    case "td":
      return kind;
    case "link":
      return "a";
    default:
      return "span";
  }
}

function attributesOf(token, kind) {
  if (kind === "link") return linkTo(token.attrGet("href"));
  if (kind === "ordered_list") return { start: token.attrGet("start") };
  const align = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "");
  return align ? { class: align[1] } : {};
}

function linkTo(href) {
  return { href, target: "_blank", rel: "noopener noreferrer nofollow" };
}

function renderLeaf(token) {
  switch (token.type) {
    case "inline":
      return [renderTokens(token.children)];
    case "softbreak":
      return ["\n"];
    case "hardbreak":
      return [h("br")];
    case "hr":
      return [h("hr")];
    case "code_inline":
      return [h("code", {}, token.content)];
    case "fence":
    case "code_block":
      return [renderCode(token.info.trim().split(/\s/)[0], token.content.replace(/\n$/, ""))];
    case "image":
      return [h("a", linkTo(token.attrGet("src")), token.content || token.attrGet("src"))];
    case "math":
      return [renderMath(token.content, token.meta)];
    default:
      return [token.content];
  }
}

function renderCode(language, text) {
  const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), copyButton(() => text));
  const label = language ? `Code in ${language}` : "Code";
  const code = h("code", { "data-language": language || null }, text);
  return h("div", { class: "code" }, head, h("pre", { tabindex: 0, role: "group", "aria-label": label }, code));
}

/** Turns "[ ]" and "[x]" at the start of a list item into a box. */
function markTask(item) {
  const holder = item.firstElementChild;
  const text = item.firstChild === holder && holder?.firstChild;
  const match = text?.nodeType === Node.TEXT_NODE && /^\[([ xX])\] /.exec(text.data);
  if (!match) return;
  const checked = match[1] !== " ";
  text.data = text.data.slice(match[0].length);
  holder.prepend(h("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do" }), " ");
  item.classList.add("task");
}
