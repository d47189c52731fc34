// The worker of highlight.js: gets {language, text}, and sends [scope, text] in sequence.

import hljs from "./vendor-highlight.js";

// names that models write after ```
const ALIASES = {
  sh: "bash", shell: "bash", zsh: "bash", console: "bash", h: "c", "c++": "cpp", cc: "cpp", hpp: "cpp", cs: "csharp",
  "c#": "csharp", scss: "css", patch: "diff", golang: "go", toml: "ini", js: "javascript", jsx: "javascript",
  mjs: "javascript", node: "javascript", jsonc: "json", json5: "json", md: "markdown", py: "python", python3: "python",
  rb: "ruby", rs: "rust", ts: "typescript", tsx: "typescript", html: "xml", svg: "xml", yml: "yaml",
};
const LANGUAGES = new Set([
  "bash", "c", "cpp", "csharp", "css", "diff", "go", "ini", "java", "javascript", "json", "markdown", "php",
  "python", "ruby", "rust", "sql", "typescript", "xml", "yaml",
]);
// the parts of a grammar that belong to other languages
const EMBEDDED = { xml: ["javascript", "css"], markdown: ["xml"], php: ["xml"], javascript: ["xml"], typescript: ["xml"] };

/** Collects the parts instead of HTML: an emitter of highlight.js, which calls these methods. */
class Parts {
  constructor() {
    this.parts = [];
    this.scopes = [];
  }

  addText(text) {
    if (text) this.parts.push([this.scopes.at(-1) ?? "", text]);
  }

  startScope(scope) {
    this.scopes.push(scope.split(".")[0]);
  }

  endScope() {
    this.scopes.pop();
  }

  openNode(scope) {
    this.startScope(scope);
  }

  closeNode() {
    this.endScope();
  }

  __addSublanguage(emitter) {
    this.parts.push(...emitter.parts);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

hljs.configure({ __emitter: Parts });

async function load(language) {
  if (!LANGUAGES.has(language) || hljs.getLanguage(language)) return;
  const grammar = await import(`./vendor-highlight-${language}.js`);
  hljs.registerLanguage(language, grammar.default);
  for (const embedded of EMBEDDED[language] ?? []) await load(embedded);
}

async function highlight({ language, text }) {
  const lower = language.toLowerCase();
  const known = ALIASES[lower] ?? lower;
  await load(known);
  if (!hljs.getLanguage(known)) return [["", text]];
  return hljs.highlight(text, { language: known, ignoreIllegals: true })._emitter.parts;
}

onmessage = async (event) => {
  postMessage(await highlight(event.data).catch(() => [["", event.data.text]]));
};
