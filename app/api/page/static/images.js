// Images of messages, as data URLs: read from the clipboard, a drop or a file, and scaled down.

import { announce, byId, h } from "./dom.js";

// A larger image is scaled down before it is stored and sent. Models see at most about this much.
const MAX_SIDE = 2048;

// the formats that the server accepts
const SENT_AS_IS = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);
const MAX_BYTES_AS_IS = 4 << 20;

const JPEG_QUALITY = 0.9;

/** The images of the next message, shown above the message field. Events: "changed". */
export class AttachedImages extends EventTarget {
  #urls = [];

  constructor(field) {
    super();
    this.list = byId("images");
    const file = byId("image-file");
    byId("image-button").addEventListener("click", () => file.click());
    file.addEventListener("change", () => {
      this.#add([...file.files]);
      file.value = "";
    });
    field.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    const area = byId("chat");
    area.addEventListener("dragover", (event) => hasFiles(event.dataTransfer) && event.preventDefault());
    area.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
  }

  get urls() {
    return this.#urls;
  }

  set(urls) {
    this.#urls = urls;
    this.#render();
    this.dispatchEvent(new Event("changed"));
  }

  #take(event, transfer) {
    const files = [...(transfer?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
    if (!files.length) return;
    event.preventDefault();
    this.#add(files);
  }

  async #add(files) {
    for (const file of files) {
      try {
        this.set([...this.#urls, await readImage(file)]);
      } catch {
        alert(`${file.name || "The image"} cannot be read by this browser. Use PNG, JPEG, WebP or GIF.`);
      }
    }
    announce(`${this.#urls.length} images attached.`);
  }

  #render() {
    this.list.hidden = !this.#urls.length;
    this.list.replaceChildren(...this.#urls.map((url, index) => h("li", {},
      h("img", { src: url, alt: `Image ${index + 1}` }),
      h("button", {
        type: "button", class: "small quiet", "aria-label": `Remove image ${index + 1}`,
        onclick: () => this.set(this.#urls.filter((_, at) => at !== index)),
      }, "×"),
    )));
  }
}

function hasFiles(transfer) {
  return transfer?.types.includes("Files");
}

/** Returns an image file as a data URL, with the orientation that its metadata requests. */
async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && SENT_AS_IS.has(file.type) && file.size <= MAX_BYTES_AS_IS) return readUrl(file);
  const canvas = h("canvas", {
    width: Math.max(1, Math.round(bitmap.width * scale)),
    height: Math.max(1, Math.round(bitmap.height * scale)),
  });
  const context = canvas.getContext("2d");
  if (file.type !== "image/png") { // a JPEG has no transparency
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
  }
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/png" ? "image/png" : "image/jpeg", JPEG_QUALITY);
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
