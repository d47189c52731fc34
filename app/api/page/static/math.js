// Formulas as MathML, made by Temml, which is loaded with the first formula. A formula that cannot be
// shown is shown as its source.

import { h } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";

const MAX_CHARS = 8000;
const MAX_DEPTH = 100;

// A formula that defines commands could expand to any length.
const DEFINES = /\\(?:[egx]?def|let|futurelet|global|long|(?:re|provide)?newcommand|renewcommand|providecommand)(?![a-zA-Z])/;

const ELEMENTS = new Set([
  "math", "maction", "menclose", "merror", "mfrac", "mi", "mlabeledtr", "mmultiscripts", "mn", "mo", "mover",
  "mpadded", "mphantom", "mprescripts", "mroot", "mrow", "ms", "mspace", "msqrt", "mstyle", "msub", "msubsup",
  "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover", "none", "semantics",
]);
const REFUSED = /^(?:on|style$|href$|src$|id$|data-|xlink)/i;

let loading = null;

/** Loads Temml, a classic script, once. */
function loadTemml() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "/page/vendor-temml.js", onload: () => resolve(globalThis.temml), onerror: reject });
    document.head.append(script);
  });
  return loading;
}

/** The node of a formula with its delimiters. It shows the source until Temml is loaded. */
export function renderMath(source, { display }) {
  const node = h("span", { class: display ? "math display" : "math", tabindex: display ? 0 : null, role: display ? "group" : null, "aria-label": display ? "Formula" : null }, source);
  const width = source.startsWith("$") && !display ? 1 : 2;
  const formula = source.slice(width, -width);
  if (formula.length <= MAX_CHARS && !DEFINES.test(formula)) {
    loadTemml().then((temml) => node.replaceChildren(build(temml, formula, display) ?? source), () => {});
  }
  return node;
}

function build(temml, formula, displayMode) {
  try {
    const options = { displayMode, throwOnError: true, trust: false, strict: false };
    return convert(temml.__renderToMathMLTree(formula, options), 0);
  } catch {
    return null; // Temml's errors, and nesting beyond the stack
  }
}

/** A node of Temml's tree as a DOM node. Only elements of MathML and harmless attributes pass. */
function convert(tree, depth) {
  if (depth > MAX_DEPTH) throw new Error("too deep");
  if (tree.text !== undefined && !tree.children) return document.createTextNode(tree.text);
  const isElement = ELEMENTS.has(tree.type);
  const node = isElement ? document.createElementNS(MATHML, tree.type) : document.createDocumentFragment();
  if (isElement) {
    for (const [name, value] of Object.entries(tree.attributes ?? {})) {
      if (!REFUSED.test(name)) node.setAttribute(name, value);
    }
    const names = (tree.classes ?? []).filter(Boolean).join(" ");
    if (names) node.setAttribute("class", names);
    // through the object model, because the content security policy forbids style attributes
    for (const [name, value] of Object.entries(tree.style ?? {})) node.style[name] = value;
  }
  for (const child of tree.children ?? []) node.append(convert(child, depth + 1));
  return node;
}
