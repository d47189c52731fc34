// The Chat tab: the messages of one conversation, and the answer that is being received.

import { requestMessages, streamAnswer } from "./answer.js";
import { announce, byId, h } from "./dom.js";
import { MessageView } from "./messages.js";
import { refreshModels, selectedModel } from "./models.js";
import { getSetting, requestFields } from "./settings.js";
import { newConversation, saveConversation } from "./store.js";

// The page saves an unfinished answer this often, so that a reload loses little.
const SAVE_INTERVAL_MS = 1000;

// A hidden tab gets no frames, but its answers go on.
const FRAME_MS = 16;

const TITLE_CHARS = 60;

/** The conversation on the screen. onSaved: called when a conversation was stored. */
export class Chat {
  #views = [];
  #abort = null; // of the running answer
  #saveTimer = 0;

  constructor(onSaved) {
    this.onSaved = onSaved;
    this.log = byId("log");
    this.input = byId("input");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => this.#onKey(event));
    this.input.addEventListener("input", () => this.#fitInput());
    byId("stop").addEventListener("click", () => this.stop());
    this.show(newConversation());
  }

  get running() {
    return this.#abort !== null;
  }

  show(conversation) {
    this.stop();
    this.conversation = conversation;
    this.#views = [];
    this.log.replaceChildren();
    conversation.messages.forEach((message) => this.#append(message));
    this.#showEmpty();
    this.log.scrollTop = this.log.scrollHeight;
  }

  send() {
    const content = this.input.value;
    if (!content.trim() || this.running) return;
    this.input.value = "";
    this.#fitInput();
    this.#add({ role: "user", content });
    this.#answer();
  }

  /** Ends the running answer. The server notices the closed connection and frees the engine. */
  stop() {
    this.#abort?.abort();
  }

  // Changes of the conversation

  #append(message) {
    const actions = {
      edit: (text) => this.#edit(message, text),
      regenerate: () => this.#regenerate(message),
      answerCalls: (results) => this.#answerCalls(message, results),
      isLast: () => this.conversation.messages.at(-1) === message,
    };
    const view = new MessageView(message, actions);
    this.#views.push(view);
    this.log.append(view.node);
    return view;
  }

  #add(message) {
    this.conversation.messages.push(message);
    this.#showEmpty();
    const before = this.#views.at(-1);
    const view = this.#append(message);
    before?.update(); // it is no longer the last message
    this.log.scrollTop = this.log.scrollHeight;
    return view;
  }

  #cutFrom(index) {
    this.stop();
    this.conversation.messages.splice(index);
    this.#views.splice(index).forEach((view) => view.node.remove());
  }

  #edit(message, text) {
    this.#cutFrom(this.conversation.messages.indexOf(message));
    this.#add({ role: "user", content: text });
    this.#answer();
  }

  #regenerate(message) {
    this.#cutFrom(this.conversation.messages.indexOf(message));
    this.#answer();
  }

  #answerCalls(message, results) {
    message.calls.forEach((call, index) =>
      this.#add({ role: "tool", tool_call_id: call.id, content: results[index] }),
    );
    this.#answer();
  }

  // The answer

  async #answer() {
    const { conversation } = this;
    const message = { role: "assistant", content: "", model: selectedModel() };
    const messages = requestMessages(conversation.messages, getSetting("system"));
    const view = this.#add(message);
    const abort = (this.#abort = new AbortController());
    this.#showRunning();
    const draw = drawEachFrame((progress) => {
      const follow = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
      view.update({ running: true, progress });
      if (follow) this.log.scrollTop = this.log.scrollHeight;
    });
    view.update({ running: true, progress: "Waiting for the server" });
    this.#save(conversation);
    try {
      const body = { model: message.model, messages, ...requestFields() };
      await streamAnswer({
        message, body, signal: abort.signal,
        onChange: (progress) => {
          draw.request(progress);
          this.#saveSoon(conversation);
        },
      });
    } catch (error) {
      describeFailure(message, error);
    }
    draw.stop();
    if (this.#abort === abort) {
      this.#abort = null;
      this.#showRunning();
    }
    view.update();
    announce(message.error ? `The answer failed: ${message.error}` : "The answer is complete.");
    if (this.conversation === conversation) this.log.scrollTop = this.log.scrollHeight;
    this.#save(conversation);
    refreshModels();
  }

  #saveSoon(conversation) {
    this.#saveTimer ||= setTimeout(() => this.#save(conversation), SAVE_INTERVAL_MS);
  }

  async #save(conversation) {
    clearTimeout(this.#saveTimer);
    this.#saveTimer = 0;
    conversation.updated = Date.now();
    conversation.title ||= makeTitle(conversation.messages);
    await saveConversation(conversation);
    this.onSaved(conversation);
  }

  // The screen

  #showRunning() {
    byId("send").hidden = this.running;
    byId("stop").hidden = !this.running;
  }

  #showEmpty() {
    const empty = this.conversation.messages.length === 0;
    this.log.classList.toggle("empty", empty);
    if (!empty) this.log.querySelector(".welcome")?.remove();
    else {
      this.log.replaceChildren(
        h("div", { class: "welcome" },
          h("p", {}, "Ask the model something."),
          h("p", { class: "note" }, "Under each answer: how much of the prompt was cached, and how fast it was."),
        ),
      );
    }
  }

  #onKey(event) {
    // a phone's keyboard has no other key for a new line
    const hasKeyboard = !matchMedia("(pointer: coarse)").matches;
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && hasKeyboard) {
      event.preventDefault();
      this.send();
    }
  }

  /** Makes the field as high as its text, up to ten lines. */
  #fitInput() {
    this.input.rows = Math.min(10, this.input.value.split("\n").length);
  }
}

function describeFailure(message, error) {
  if (error.name === "AbortError") {
    message.finish = "stopped";
    return;
  }
  const begun = message.content || message.reasoning;
  message.error = error.status === 0 && begun ? `${error.message} The answer is incomplete.` : error.message;
}

function makeTitle(messages) {
  const text = messages.find((message) => message.role === "user")?.content.trim() ?? "";
  const [line] = text.split("\n");
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS)}…` : line;
}

/** Calls `draw` with the latest argument, at most once per frame, and for at most a quarter of the
 * time: a long block of an answer takes long to draw. */
function drawEachFrame(draw) {
  let timer = 0;
  let free = 0;
  let latest;
  const run = () => {
    timer = 0;
    const begun = performance.now();
    draw(latest);
    const took = performance.now() - begun;
    free = begun + Math.max(FRAME_MS, 4 * took);
  };
  return {
    request(argument) {
      latest = argument;
      timer ||= setTimeout(run, Math.max(0, free - performance.now()));
    },
    stop() {
      clearTimeout(timer);
      timer = 0;
    },
  };
}
