// The Chat tab: one branch of one conversation, the message field, and the answer to it.

import { requestMessages } from "./answer.js";
import { answers } from "./answers.js";
import {
  branchTo, findMessage, latestLeaf, mergeConversations, newConversation, newMessage, putMessages, versionsOf,
} from "./conversation.js";
import { announce, byId, drawEachFrame } from "./dom.js";
import { AttachedImages } from "./images.js";
import { MessageView, renderWelcome } from "./messages.js";
import { refreshModels, selectedModel, showContext } from "./models.js";
import { getSetting, requestFields, showSystem } from "./settings.js";
import { store } from "./store.js";

export class Chat {
  #views = new Map(); // by the id of the message
  #writes = 0; // that are not stored yet
  #unsaved = new Map(); // conversations that could not be stored, by id
  #draw = drawEachFrame(() => this.#drawAnswer());

  constructor() {
    this.log = byId("log");
    this.input = byId("input");
    this.images = new AttachedImages(this.input);
    this.conversation = newConversation();
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => this.#onKey(event));
    this.input.addEventListener("input", () => this.#keepDraft());
    byId("stop").addEventListener("click", () => this.stop());
    store.addEventListener("changed", ({ detail }) => this.#reload(detail.id));
    store.addEventListener("deleted", ({ detail }) => this.#onDeleted(detail.id));
    answers.addEventListener("progress", ({ detail }) => this.#onProgress(detail));
    answers.addEventListener("end", ({ detail }) => this.#onEnd(detail));
  }

  get running() {
    return answers.get(this.conversation.id) !== undefined;
  }

  /** Shows a conversation, which a running answer may be changing. */
  show(conversation) {
    this.conversation = this.#withUnsaved(conversation);
    this.#overlayRunning();
    this.#views.clear();
    this.log.replaceChildren();
    this.input.value = store.getDraft(conversation.id);
    this.images.set([]);
    this.#fitInput();
    showSystem(this.#system());
    this.#render();
    this.log.scrollTop = this.log.scrollHeight;
  }

  send() {
    const content = this.input.value;
    const images = this.images.urls;
    if (!(content.trim() || images.length) || this.running) return;
    this.input.value = "";
    this.images.set([]);
    this.#keepDraft();
    this.#add([newMessage("user", this.conversation.leaf, { content, ...withImages(images) })]);
    this.#answer();
  }

  stop() {
    answers.stop(this.conversation.id);
  }

  /** Sets the system prompt of the conversation. */
  setSystem(text) {
    if (this.conversation.messages.length) this.#change((conversation) => (conversation.system = text));
    else this.conversation.system = text;
  }

  #system() {
    return this.conversation.system ?? getSetting("system");
  }

  // Changes of the conversation

  /** Changes the conversation on the screen and the stored one. A user's change is stored even if
   * another tab has deleted the conversation. */
  async #change(change) {
    const { conversation } = this;
    const base = structuredClone(conversation);
    change(conversation);
    this.#render();
    const kept = this.#unsaved.get(conversation.id) && structuredClone(conversation);
    const write = kept ? (stored) => Object.assign(stored, mergeConversations(stored, kept), { leaf: kept.leaf }) : change;
    this.#writes += 1;
    try {
      await store.update(conversation.id, write, base);
      this.#unsaved.delete(conversation.id);
    } catch {
      this.#unsaved.set(conversation.id, conversation); // the banner says it
    } finally {
      this.#writes -= 1;
    }
    this.#reload(conversation.id);
  }

  /** Adds messages at the end of the branch. */
  #add(messages) {
    const system = this.#system();
    const written = this.#change((conversation) => {
      putMessages(conversation, structuredClone(messages));
      conversation.system ??= system;
      conversation.leaf = messages.at(-1).id;
    });
    this.log.scrollTop = this.log.scrollHeight;
    return written;
  }

  /** Adopts the changes that other tabs have stored. This tab stays on its branch, unless that has grown. */
  async #reload(id) {
    if (id !== this.conversation.id || this.#writes) return;
    const found = await store.get(id);
    const stored = found && this.#withUnsaved(found);
    if (!stored || id !== this.conversation.id || this.#writes) return;
    const { leaf } = this.conversation;
    stored.leaf = findMessage(stored, leaf) ? latestLeaf(stored, leaf) : stored.leaf;
    this.conversation = stored;
    this.#overlayRunning();
    if (document.activeElement?.id !== "setting-system") showSystem(this.#system());
    this.#render();
  }

  #withUnsaved(stored) {
    const unsaved = this.#unsaved.get(stored.id);
    return unsaved ? { ...mergeConversations(stored, unsaved), leaf: unsaved.leaf } : stored;
  }

  /** The message that this tab is receiving is newer than the stored one. */
  #overlayRunning() {
    const running = answers.get(this.conversation.id);
    if (running) putMessages(this.conversation, [running.message]);
  }

  #onDeleted(id) {
    if (id !== this.conversation.id) return;
    const draft = this.input.value;
    const next = newConversation();
    store.setDraft(next.id, draft);
    history.replaceState(null, "", `#chat/${next.id}`);
    this.show(next);
  }

  #edit(message, content) {
    this.stop();
    this.#add([newMessage("user", message.parent, { content, ...withImages(message.images) })]);
    this.#answer();
  }

  #regenerate(message) {
    this.stop();
    this.conversation.leaf = message.parent;
    this.#answer();
  }

  #answerCalls(message, results) {
    let parent = message.id;
    this.#add(message.calls.map((call, index) => {
      const added = newMessage("tool", parent, { tool_call_id: call.id, content: results[index] });
      parent = added.id;
      return added;
    }));
    this.#answer();
  }

  #showVersion(message) {
    this.#change((conversation) => (conversation.leaf = latestLeaf(conversation, message.id)));
  }

  // The answer

  #answer() {
    const { conversation } = this;
    const message = newMessage("assistant", conversation.leaf, { model: selectedModel() });
    const messages = requestMessages(branchTo(conversation, conversation.leaf), this.#system());
    this.#add([message]);
    this.#receive(findMessage(conversation, message.id), { messages });
  }

  /** Continues an answer that was cut off. */
  #continue(message) {
    const messages = requestMessages(branchTo(this.conversation, message.id), this.#system());
    delete message.finish;
    delete message.error;
    message.model = selectedModel();
    this.#receive(message, { messages, continue_final_message: true, add_generation_prompt: false });
  }

  async #receive(message, request) {
    const { conversation } = this;
    let body;
    try {
      body = { model: message.model, ...request, ...requestFields() };
    } catch (error) { // the settings cannot be read
      message.error = error.message;
      const failed = structuredClone(message);
      await this.#change((changed) => putMessages(changed, [failed]));
      return;
    }
    const ended = answers.start(conversation.id, message, body);
    this.#render();
    await ended;
    refreshModels();
  }

  #onProgress({ id, message }) {
    if (id !== this.conversation.id) return;
    if (message) this.#draw();
    else this.#render(); // another tab has begun or ended
  }

  #drawAnswer() {
    const running = answers.get(this.conversation.id);
    const view = running && this.#views.get(running.message.id);
    if (!view) return;
    const follow = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    view.update(running.message, { ...view.state, running: true, progress: running.progress });
    if (follow) this.log.scrollTop = this.log.scrollHeight;
  }

  #onEnd({ id, message, isSaved }) {
    if (id !== this.conversation.id) return;
    if (!isSaved) this.#unsaved.set(id, this.conversation);
    this.#render();
    announce(message.error ? `The answer failed: ${message.error}` : "The answer is complete.");
    if (this.#views.get(message.id)) this.log.scrollTop = this.log.scrollHeight;
  }

  // The screen

  /** Shows the branch as it is now. Messages that did not change keep their nodes. */
  #render() {
    const { conversation } = this;
    const branch = branchTo(conversation, conversation.leaf);
    const shown = new Set(branch.map((message) => message.id));
    for (const [id, view] of this.#views) {
      if (shown.has(id)) continue;
      view.node.remove();
      this.#views.delete(id);
    }
    this.log.classList.toggle("empty", !branch.length);
    if (!branch.length) this.log.replaceChildren(renderWelcome());
    else this.log.querySelector(".welcome")?.remove();
    const running = answers.get(conversation.id);
    branch.forEach((message, index) => {
      const view = this.#views.get(message.id) ?? this.#createView(message);
      if (this.log.children[index] !== view.node) this.log.insertBefore(view.node, this.log.children[index] ?? null);
      const isRunning = running?.message.id === message.id;
      view.update(message, {
        running: isRunning,
        progress: isRunning ? running.progress : "",
        elsewhere: answers.isElsewhere(message),
        isLast: index === branch.length - 1,
        versions: versionsOf(conversation, message),
      });
    });
    byId("send").hidden = Boolean(running);
    byId("stop").hidden = !running;
    showContext(branch);
  }

  #createView(message) {
    const { id } = this.conversation;
    const view = new MessageView(message, {
      edit: (one, text) => this.#edit(one, text),
      regenerate: (one) => this.#regenerate(one),
      continue: (one) => this.#continue(one),
      answerCalls: (one, results) => this.#answerCalls(one, results),
      showVersion: (one) => this.#showVersion(one),
      getDraft: (one) => store.getDraft(id, one.id),
      setDraft: (one, text) => store.setDraft(id, text, one.id),
    });
    this.#views.set(message.id, view);
    return view;
  }

  #onKey(event) {
    // a phone's keyboard has no other key for a new line
    const hasKeyboard = !matchMedia("(pointer: coarse)").matches;
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && hasKeyboard) {
      event.preventDefault();
      this.send();
    }
  }

  #keepDraft() {
    store.setDraft(this.conversation.id, this.input.value);
    this.#fitInput();
  }

  /** Makes the field as high as its text, up to ten lines. */
  #fitInput() {
    this.input.rows = Math.min(10, this.input.value.split("\n").length);
  }
}

function withImages(images) {
  return images?.length ? { images } : {};
}
