// Builds DOM nodes. Text is always a text node: no string is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an HTML element. attributes: `on…` are listeners, properties such as `value` are set as
 * properties, null and false are omitted. children: nodes, strings, null. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Creates an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "textContent"]);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Says a sentence to screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** A button that copies text and confirms it. getText: called on each click. */
export function copyButton(getText, label = "Copy") {
  const button = h("button", { type: "button", class: "small quiet" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(getText())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

/** The clipboard API exists only on https and on loopback; elsewhere a selection is copied. */
async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not permitted: try the selection
    }
  }
  const area = h("textarea", { class: "offscreen", value: text, "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

// A hidden tab gets no frames, but it still receives its answers.
const FRAME_MS = 16;

/** Returns a function that calls `draw` at most once per frame, and for at most a quarter of the time: a
 * long block of an answer takes long to draw. */
export function drawEachFrame(draw) {
  let timer = 0;
  let free = 0;
  const run = () => {
    timer = 0;
    const begun = performance.now();
    draw();
    free = begun + Math.max(FRAME_MS, 4 * (performance.now() - begun));
  };
  return () => (timer ||= setTimeout(run, Math.max(0, free - performance.now())));
}
