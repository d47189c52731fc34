// Parses Markdown into tokens with markdown-it: raw HTML is off, formulas are separate tokens.
// It does not use the DOM, so that tests can run it.

import MarkdownIt from "./vendor-markdown-it.js";

// Quotes and lists that are nested deeper are shown as text.
const MAX_LEVEL = 24;

const SAFE_LINK = /^(?:https?:\/\/|mailto:)/i;

const parser = new MarkdownIt({ html: false, linkify: true });
parser.validateLink = (url) => SAFE_LINK.test(url);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.block.ruler.before("table", "too_deep", readDeepLines);
parser.block.ruler.before("fence", "math_block", readMathBlock, { alt: ["paragraph", "blockquote", "list"] });
parser.inline.ruler.before("escape", "math_inline", readInlineMath);

/** The blocks of the text: [{line, end, tokens}], with the lines at which each begins and ends. */
function parseBlocks(text, env) {
  const blocks = [];
  let open = 0;
  for (const token of parser.parse(text, env)) {
    if (open === 0) blocks.push({ line: token.map[0], end: token.map[1], tokens: [] });
    blocks.at(-1).tokens.push(token);
    open += token.nesting;
  }
  return blocks;
}

/** Parses a text that grows. A block is parsed again only until the next one has begun on a complete
 * line, because later lines cannot change it then. The exception is link definitions: the complete
 * text is parsed once more, with all of them. */
export class GrowingMarkdown {
  #done = ""; // the text of the blocks that cannot change
  #blocks = []; // of #done
  #complete = null; // the text, if it was parsed as complete

  /** The blocks of a text: [{source, tokens}]. A block that did not change is the same object. */
  parse(text, { complete }) {
    const whole = text.replace(/\r\n?/g, "\n");
    const isParsed = complete ? this.#complete === whole : this.#complete === null && whole.startsWith(this.#done);
    if (!isParsed) this.#reset();
    const env = {};
    const rest = whole.slice(this.#done.length);
    const starts = lineStarts(rest);
    const found = parseBlocks(rest, env).map(({ line, end, tokens }) => {
      const source = rest.slice(starts[line], starts[end] ?? rest.length);
      return { source, tokens, line, at: starts[line], isBegun: line + 1 < starts.length };
    });
    const all = [...this.#blocks, ...found];
    const last = found.findLastIndex((block) => block.isBegun && block.line < (env.openMath ?? Infinity));
    if (last > 0 && !complete) {
      this.#blocks.push(...found.slice(0, last));
      this.#done += rest.slice(0, found[last].at);
    }
    if (complete) {
      this.#complete = whole;
      this.#done = whole;
      this.#blocks = all;
    }
    return { blocks: all, hasReferences: Object.keys(env.references ?? {}).length > 0 };
  }

  #reset() {
    this.#done = "";
    this.#blocks = [];
    this.#complete = null;
  }
}

function lineStarts(text) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  return starts;
}

/** A block rule: the lines of a container that is nested too deep are one paragraph of text. */
function readDeepLines(state, startLine, endLine, silent) {
  if (state.level < MAX_LEVEL) return false;
  if (silent) return true;
  state.push("paragraph_open", "p", 1).map = [startLine, endLine];
  state.push("plain_text", "", 0).content = state.getLines(startLine, endLine, state.blkIndent, false);
  state.push("paragraph_close", "p", -1);
  state.line = endLine;
  return true;
}

// Formulas

const CLOSERS = { "$$": "$$", "\\[": "\\]", "\\(": "\\)" };

/** A block rule: $$ … $$ or \[ … \] on lines of their own. */
function readMathBlock(state, startLine, endLine, silent) {
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const lineOf = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  const first = lineOf(startLine);
  const closer = CLOSERS[first.slice(0, 2)];
  if (!closer || first.startsWith("\\(")) return false;
  // the lines of a search that failed are not searched again from each of them
  const key = `${closer}${state.blkIndent}`;
  const failed = (state.env.mathSearches ??= new Map());
  const before = failed.get(key);
  if (before && startLine >= before.from && startLine < before.to) return false;
  let line = startLine;
  for (; line < endLine; line += 1) {
    const text = line === startLine ? first.slice(2) : lineOf(line);
    if (text && state.sCount[line] < state.blkIndent) break; // the end of the container
    const at = text.indexOf(closer);
    if (at < 0) continue;
    if (text.slice(at + 2).trim()) return false; // text follows the formula
    if (state.eMarks[line] === state.src.length) markOpen(state.env, startLine);
    if (silent) return true;
    const token = state.push("math", "math", 0);
    token.map = [startLine, line + 1];
    token.meta = { display: true };
    const lines = [];
    for (let one = startLine; one <= line; one += 1) lines.push(lineOf(one));
    token.content = lines.join("\n").trimEnd();
    state.line = line + 1;
    return true;
  }
  failed.set(key, { from: startLine, to: line });
  markOpen(state.env, startLine);
  return false;
}

/** Notes that a formula from this line on could still begin or end differently. */
function markOpen(env, line) {
  env.openMath = Math.min(env.openMath ?? Infinity, line);
}

/** An inline rule: $ … $, $$ … $$, \( … \) and \[ … \]. A dollar sign opens a formula only before a
 * character that is not a space, and closes it only after one, and not before a digit: "$5 and $6". */
function readInlineMath(state, silent) {
  const { src, pos } = state;
  const opener = src[pos] === "$" ? (src[pos + 1] === "$" ? "$$" : "$") : src[pos] === "\\" ? src.slice(pos, pos + 2) : "";
  if (opener !== "$" && !CLOSERS[opener]) return false;
  if (opener === "$" && /\s/.test(src[pos + 1] ?? " ")) return false;
  const closer = CLOSERS[opener] ?? "$";
  const ends = (state.mathEnds ??= findMathEnds(src));
  const at = firstAfter(ends[closer], pos + opener.length);
  if (at === undefined || at >= state.posMax) return false;
  if (!silent) {
    const token = state.push("math", "math", 0);
    token.meta = { display: opener === "$$" || opener === "\\[" };
    token.content = src.slice(pos, at + closer.length);
  }
  state.pos = at + closer.length;
  return true;
}

/** The positions at which each kind of formula can end, in one pass. */
function findMathEnds(src) {
  const ends = { "$": [], "$$": [], "\\)": [], "\\]": [] };
  for (let at = 0; at < src.length; at += 1) {
    if (src[at] === "\\") {
      ends[src.slice(at, at + 2)]?.push(at);
      at += 1;
    } else if (src.startsWith("$$", at)) {
      ends["$$"].push(at);
      at += 1;
    } else if (src[at] === "$" && !/\s/.test(src[at - 1] ?? " ") && !/\d/.test(src[at + 1] ?? "")) {
      ends["$"].push(at);
    }
  }
  return ends;
}

/** The first of sorted positions that is greater than a position. */
function firstAfter(positions, after) {
  let low = 0;
  let high = positions.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (positions[middle] > after) high = middle;
    else low = middle + 1;
  }
  return positions[low];
}
