// Colors code with highlight.js, in a worker that ends when it takes too long: some patterns of its
// grammars need quadratic time.

const LIMIT_MS = 2000;
const MAX_CHARS = 100_000;

let worker = null;
let timer = 0;
let queue = []; // [{code, language, text}]; the first one is with the worker

/** Colors a <code> element with data-language, once it can. The text stays the same. */
export function highlightCode(code) {
  const { language } = code.dataset;
  const text = code.textContent;
  delete code.dataset.language;
  if (text.length > MAX_CHARS) return;
  queue.push({ code, language, text });
  if (queue.length === 1) sendFirst();
}

function sendFirst() {
  const [first] = queue;
  if (!first) return;
  worker ??= startWorker();
  timer = setTimeout(() => endFirst(null), LIMIT_MS);
  worker.postMessage({ language: first.language, text: first.text });
}

function startWorker() {
  const started = new Worker("/page/highlight_worker.js", { type: "module" });
  started.onmessage = (event) => endFirst(event.data);
  started.onerror = () => endFirst(null);
  return started;
}

/** parts: [scope, text] in sequence, which together are the text; null without a result. */
function endFirst(parts) {
  clearTimeout(timer);
  const { code, text } = queue.shift();
  if (!parts) {
    worker?.terminate();
    worker = null;
  } else if (parts.map(([, part]) => part).join("") === text) code.replaceChildren(...parts.map(renderPart));
  sendFirst();
}

function renderPart([scope, text]) {
  if (!scope) return text;
  const span = document.createElement("span");
  span.className = `hl-${scope}`;
  span.textContent = text;
  return span;
}
