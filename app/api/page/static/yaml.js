// Reads the part of YAML that openapi.yaml uses: block mappings and lists, block and folded text, flow
// collections on one line or several, quoted and plain scalars, comments, anchors, aliases and merge
// keys. A test compares the result with PyYAML's. Anything else is an error.

/** The value of a document. Throws an Error that names the line. */
export function parseYaml(text) {
  return new Parser(text.split("\n")).parse();
}

const KEY = /^("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s#&*!|>'"%@`[\]{},-][^#]*?|-[^\s#][^#]*?|\$ref|\*[\w]+):(?=\s|$)/;

class Parser {
  constructor(lines) {
    this.lines = lines;
    this.at = 0;
    this.anchors = new Map();
  }

  parse() {
    return this.block(0);
  }

  fail(reason) {
    throw new Error(`line ${this.at + 1}: ${reason}`);
  }

  /** Moves to the next line with content, and returns its indentation; -1 at the end. */
  next() {
    while (this.at < this.lines.length && /^\s*(#.*)?$/.test(this.lines[this.at])) this.at += 1;
    return this.at < this.lines.length ? indentation(this.lines[this.at]) : -1;
  }

  /** Reads the block whose lines are indented by at least `least`. */
  block(least) {
    const indent = this.next();
    if (indent < least) return null;
    return /^\s*-(\s|$)/.test(this.lines[this.at]) ? this.list(indent) : this.mapping(indent);
  }

  list(indent) {
    const items = [];
    while (this.next() === indent && /^\s*-(\s|$)/.test(this.lines[this.at])) {
      const line = this.lines[this.at];
      const rest = line.slice(indent + 1);
      const inner = indent + 1 + indentation(rest);
      if (!rest.trim()) {
        this.at += 1;
        items.push(this.block(indent + 1));
      } else if (KEY.test(rest.trim())) {
        this.lines[this.at] = " ".repeat(inner) + rest.trim(); // a mapping that begins here
        items.push(this.mapping(inner));
      } else items.push(this.value(rest.trim(), indent));
    }
    return items;
  }

  mapping(indent) {
    const found = {};
    const merged = [];
    while (this.next() === indent) {
      const line = this.lines[this.at].slice(indent);
      const match = KEY.exec(line);
      if (!match) this.fail("a key was expected");
      const key = String(readScalar(match[1].trim()));
      const value = this.value(line.slice(match[0].length).trim(), indent);
      if (key === "<<") merged.push(...[value].flat());
      else define(found, key, value);
    }
    if (this.next() > indent) this.fail("unexpected indentation");
    return Object.assign({}, ...merged.reverse(), found);
  }

  /** Reads the value after a key or a dash; the position is its line. indent: of the parent. */
  value(text, indent) {
    const anchor = /^&(\w+)\s*/.exec(text);
    if (anchor) {
      const value = this.value(text.slice(anchor[0].length), indent);
      this.anchors.set(anchor[1], value);
      return value;
    }
    if (!text || text.startsWith("#")) {
      this.at += 1;
      const next = this.next();
      // a list may have the indentation of its key
      const isList = next === indent && /^\s*-(\s|$)/.test(this.lines[this.at]);
      return next > indent || isList ? this.block(next) : null;
    }
    if (/^[|>][+-]?$/.test(text)) return this.text(text, indent);
    if (/^[[{]/.test(text)) return this.flow(text);
    return this.scalar(text, indent);
  }

  /** A block of text: | keeps line ends, > folds them. */
  text(header, indent) {
    this.at += 1;
    const lines = [];
    let inner = -1;
    for (; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      if (line.trim() && indentation(line) <= indent) break;
      if (line.trim() && inner < 0) inner = indentation(line);
      lines.push(line.slice(Math.max(inner, 0)));
    }
    while (lines.length && !lines.at(-1).trim()) lines.pop();
    const end = header.endsWith("-") ? "" : "\n";
    return (header[0] === "|" ? lines.join("\n") : fold(lines)) + end;
  }

  /** A scalar, which may continue on lines that are indented further than its parent. */
  scalar(text, indent) {
    const quote = /^["']/.test(text) ? text[0] : "";
    const lines = [quote ? text : stripComment(text)];
    this.at += 1;
    while (this.at < this.lines.length) {
      const line = this.lines[this.at];
      if (quote ? isClosed(lines.join(" "), quote) : !line.trim() || indentation(line) <= indent) break;
      if (!quote && line.trim().startsWith("#")) break;
      lines.push(quote ? line.trim() : stripComment(line.trim()));
      this.at += 1;
    }
    return this.resolve(fold(lines));
  }

  resolve(text) {
    if (!/^\*\w+$/.test(text)) return readScalar(quotedPart(text));
    if (!this.anchors.has(text.slice(1))) this.fail(`unknown anchor ${text}`);
    return this.anchors.get(text.slice(1));
  }

  /** A flow collection, until its brackets are balanced. */
  flow(text) {
    let whole = stripComment(text);
    while (depthOf(whole) > 0) {
      this.at += 1;
      if (this.at >= this.lines.length) this.fail("a bracket is not closed");
      whole += ` ${stripComment(this.lines[this.at].trim())}`;
    }
    this.at += 1;
    const reader = new FlowReader(whole, (scalar) => this.resolve(scalar));
    const value = reader.value();
    return value;
  }
}

class FlowReader {
  constructor(text, resolve) {
    this.text = text;
    this.at = 0;
    this.resolve = resolve;
  }

  skip() {
    while (/\s/.test(this.text[this.at] ?? "")) this.at += 1;
    return this.text[this.at];
  }

  value() {
    const sign = this.skip();
    if (sign === "{") return this.collection("}", {});
    if (sign === "[") return this.collection("]", []);
    return this.resolve(this.token(/[,\]}]/));
  }

  collection(end, found) {
    this.at += 1;
    while (this.skip() !== end) {
      if (Array.isArray(found)) found.push(this.value());
      else {
        const key = String(readScalar(this.token(/:/)));
        this.at += 1;
        define(found, key, this.value());
      }
      if (this.skip() === ",") this.at += 1;
      else if (this.skip() !== end) throw new Error(`${end} was expected in ${this.text}`);
    }
    this.at += 1;
    return found;
  }

  /** The text up to a character that ends it; a colon ends a key only before a space. */
  token(stop) {
    const from = this.at;
    const quote = /["']/.test(this.skip()) ? this.text[this.at] : "";
    const start = this.at;
    if (quote) {
      do this.at += 1;
      while (this.at < this.text.length && !isClosed(this.text.slice(start, this.at), quote));
      const found = this.text.slice(start, this.at);
      this.skip();
      return found;
    }
    const ends = (at) => stop.test(this.text[at]) && (this.text[at] !== ":" || /\s/.test(this.text[at + 1] ?? " "));
    while (this.at < this.text.length && !ends(this.at)) this.at += 1;
    return this.text.slice(from, this.at).trim();
  }
}

function define(target, key, value) {
  Object.defineProperty(target, key, { value, enumerable: true, configurable: true, writable: true });
}

function indentation(line) {
  return line.length - line.trimStart().length;
}

function fold(lines) {
  let text = "";
  lines.forEach((line, index) => {
    const blank = !line.trim();
    if (index === 0) text = line;
    else if (blank) text += "\n";
    else text += text.endsWith("\n") ? line : ` ${line}`;
  });
  return text;
}

function isClosed(text, quote) {
  if (text.length < 2) return false;
  return quote === '"' ? /^"(?:[^"\\]|\\.)*"/s.test(text) : /^'(?:[^']|'')*'(?!')/s.test(text);
}

function quotedPart(text) {
  return /^("(?:[^"\\]|\\.)*"|'(?:[^']|'')*')/s.exec(text)?.[1] ?? text;
}

/** Removes a comment after a value that is not quoted. */
function stripComment(text) {
  let quote = "";
  for (let at = 0; at < text.length; at += 1) {
    const sign = text[at];
    if (quote) {
      if (sign === "\\" && quote === '"') at += 1;
      else if (sign === quote) quote = "";
    } else if (/["']/.test(sign) && (at === 0 || /[\s[{,:]/.test(text[at - 1]))) quote = sign;
    else if (sign === "#" && (at === 0 || /\s/.test(text[at - 1]))) return text.slice(0, at).trimEnd();
  }
  return text.trimEnd();
}

/** The number of brackets that are open at the end of the text. */
function depthOf(text) {
  let depth = 0;
  let quote = "";
  for (let at = 0; at < text.length; at += 1) {
    const sign = text[at];
    if (quote) {
      if (sign === "\\" && quote === '"') at += 1;
      else if (sign === quote) quote = "";
    } else if (/["']/.test(sign) && /[\s[{,:]/.test(text[at - 1] ?? " ")) quote = sign;
    else if (/[[{]/.test(sign)) depth += 1;
    else if (/[\]}]/.test(sign)) depth -= 1;
  }
  return depth;
}

const WORDS = { null: null, "~": null, "": null, true: true, false: false };

function readScalar(text) {
  if (text.startsWith('"')) return JSON.parse(text.replace(/\\x([0-9a-f]{2})/gi, "\\u00$1"));
  if (text.startsWith("'")) return text.slice(1, -1).replaceAll("''", "'");
  if (Object.hasOwn(WORDS, text)) return WORDS[text];
  // an integer beyond JavaScript's precision stays text, so that it is shown as it is written
  if (/^[-+]?\d+$/.test(text)) return Number.isSafeInteger(Number(text)) ? Number(text) : text;
  if (/^[-+]?\d[\d]*\.\d*([eE][-+]\d+)?$/.test(text)) return Number(text);
  return text;
}
