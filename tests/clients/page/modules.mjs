// Runs modules of the page without a browser: reads a line of JSON for each check, and prints its result.
//
//     node modules.mjs <folder of the page> <check> [seed]

import path from "node:path";
import { pathToFileURL } from "node:url";

const [folder, name, seed = "1"] = process.argv.slice(2);
const load = (file) => import(pathToFileURL(path.join(folder, file)));

let state = Number(seed) || 1;

/** A number below `limit`, the same sequence for each seed. */
function random(limit) {
  state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff;
  return Math.floor((state / 0x80000000) * limit);
}

function pick(list) {
  return list[random(list.length)];
}

const MARKUP = [
  "a", "b c", "- ", "1. ", "1", "\n", "\n", "\n\n", "> ", "```", "`", "# ", "|", "|-|", "$", "$$", "\\[", "\\]", "  ",
  "    ", "*", "**", "---", "===", "[x](y)", "http://a.b", "\\", "\t", "- [ ] ", "\r\n",
];

// input that makes patterns repeat a search from each position: unclosed openers, runs, empty lines
const HOSTILE = [
  " ", "\t", "\n", " \n", "|", "|\n", "| ", "|-", "|-\n", "|a|\n|-|\n", ":-", "*", "_", "**a ", "*a_", "*a **a ", "***a", "`",
  "` ", "`a``", "~", "~~a", "[", "![", "](", "[a](", "[a](<b", "[a][", "[a]: ", "[a]: b\n", "\"", "> ", ">-", "- ", "- a\n",
  "1. ", "+\n", "=\n", "# ", "a\n", "a \n", "\\", "<", "<a ", "<!--", "&", "&amp", "http://", "http://a(", "http://a[",
  "http://a*", "www.", "a@", "a@a.", "mailto:", "$", "$a ", "$$", "$$\n", "$$a\n", "\\(", "\\[", "\\[\n", "- \\[\n", "> $$\n", "```\n",
];

const checks = {
  /** A message with an image in a request, and after an export. */
  async images() {
    const { exportConversations, importConversations, newConversation, newMessage, putMessages } = await load("conversation.js");
    globalThis.localStorage = { getItem: () => null }; // of the API key
    const { requestMessages } = await load("answer.js");
    const conversation = newConversation();
    const images = ["data:image/png;base64,AAAA", "https://a.b/c.png", 5];
    putMessages(conversation, [newMessage("user", null, { content: "What is this?", images })]);
    const [{ messages }] = importConversations(exportConversations([conversation]));
    return { kept: messages[0].images, sent: requestMessages(messages, "") };
  },

  /** Whether text that grows by one character at a time has the same blocks as the complete text. */
  async growing() {
    const { GrowingMarkdown } = await load("markdown_blocks.js");
    const describe = ({ blocks }) => JSON.stringify(blocks.map(({ source, tokens }) =>
      [source, tokens.map((token) => [token.type, token.content, token.tag, token.hidden, token.children?.map((child) => [child.type, child.content])])]));
    for (let example = 0; example < 500; example += 1) {
      const text = Array.from({ length: 2 + random(25) }, () => pick(MARKUP)).join("");
      const growing = new GrowingMarkdown();
      for (let end = 1; end <= text.length; end += 1) {
        const part = text.slice(0, end);
        const grown = describe(growing.parse(part, { complete: false }));
        const whole = describe(new GrowingMarkdown().parse(part, { complete: true }));
        if (grown !== whole) return { part, grown, whole };
      }
      if (describe(growing.parse(text, { complete: true })) !== describe(new GrowingMarkdown().parse(text, { complete: true }))) return { text };
    }
    return null;
  },

  /** The content of all tokens of the text, and the nesting depth of its elements. */
  async depth() {
    const { GrowingMarkdown } = await load("markdown_blocks.js");
    const text = `${"> ".repeat(500)}the end\n\n${Array.from({ length: 200 }, (_, level) => `${"  ".repeat(level)}- item${level}`).join("\n")}`;
    const { blocks } = new GrowingMarkdown().parse(text, { complete: true });
    let open = 0;
    let deepest = 0;
    const contents = [];
    for (const token of blocks.flatMap((block) => block.tokens)) {
      open += token.nesting;
      deepest = Math.max(deepest, open);
      contents.push(token.content);
    }
    const shown = contents.join("\n");
    const lost = ["the end", ...Array.from({ length: 200 }, (_, level) => `item${level}`)].filter((one) => !shown.includes(one));
    return { deepest, lost };
  },

  /** Copies of a conversation that grew apart, merged in each sequence: what is lost, and whether a
   * second merge adds anything. */
  async merging() {
    const { exportConversations, importConversations, mergeConversations, newConversation, newMessage, putMessages } = await load("conversation.js");
    const copyOf = (one) => importConversations(exportConversations([one]))[0];
    const write = (conversation) => {
      const parent = conversation.messages.length && random(4) ? pick(conversation.messages).id : null;
      const growing = conversation.messages.filter((one) => one.role === "assistant" && !one.finish);
      if (growing.length && random(2)) {
        const message = pick(growing);
        putMessages(conversation, [{ ...message, content: message.content + pick(["a", "b"]), ...(random(2) ? { finish: "stop" } : {}) }]);
      } else putMessages(conversation, [newMessage(pick(["user", "assistant"]), parent, { content: pick(["a", "b", "ab"]) })]);
      conversation.leaf = conversation.messages.at(-1).id;
      conversation.updated += random(5);
    };
    const find = (conversation, id) => conversation.messages.find((one) => one.id === id);
    // whether `kept` is `message`, or a later state of it, after the same messages
    const covers = (merged, kept, copy, message) =>
      kept.role === message.role && kept.content.startsWith(message.content) && (message.parent === null
        ? kept.parent === null
        : kept.parent !== null && covers(merged, find(merged, kept.parent), copy, find(copy, message.parent)));
    for (let example = 0; example < 400; example += 1) {
      const base = newConversation();
      for (let step = random(5); step > 0; step -= 1) write(base);
      const copies = [copyOf(base), copyOf(base), copyOf(base)];
      for (const copy of copies) for (let step = random(5); step > 0; step -= 1) write(copy);
      for (const [first, second, third] of [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]) {
        const merged = mergeConversations(mergeConversations(copies[first], copies[second]), copies[third]);
        const lost = copies.flatMap((copy) => copy.messages.filter((message) =>
          !merged.messages.some((kept) => covers(merged, kept, copy, message))));
        const again = mergeConversations(merged, copies[third]).messages.length;
        const order = new Set([null]);
        const misplaced = merged.messages.filter(({ id, parent }) => !order.add(id) || !order.has(parent));
        if (lost.length || again !== merged.messages.length || misplaced.length) return { copies, merged, lost, again, misplaced };
      }
    }
    return null;
  },

  /** An export of version 1, read twice, with one truncated and one complete answer. */
  async versions() {
    const { branchTo, importConversations, isIncomplete, mergeConversations } = await load("conversation.js");
    const write = (answers) => JSON.stringify({
      format: "mlxrunner-conversations", version: 1,
      conversations: [{ id: "x", title: "T", updated: answers.length, messages: answers.flatMap((content) => [{ role: "user", content: "Q" }, { role: "assistant", content, finish: "stop" }]) }],
    });
    const [older] = importConversations(write(["A"]));
    const [newer] = importConversations(write(["A", "B"]));
    const [other] = importConversations(write(["C"]));
    const merged = mergeConversations(mergeConversations(older, newer), older);
    const all = mergeConversations(merged, other);
    const contents = (conversation) => branchTo(conversation, conversation.leaf).map(({ content }) => content);
    return { merged: contents(merged), count: merged.messages.length, all: all.messages.map(({ content }) => content), shown: contents(all), incomplete: all.messages.filter(isIncomplete).length };
  },

  /** The milliseconds for each hostile text with 5,000 and with 40,000 characters. */
  async times() {
    const { GrowingMarkdown } = await load("markdown_blocks.js");
    const { readEvents } = await load("sse.js");
    const parse = async (text) => {
      new GrowingMarkdown().parse(text, { complete: true });
      for await (const _ of readEvents(new Response(text))) continue;
    };
    const measure = async (text) => {
      const begun = performance.now();
      await parse(text);
      return performance.now() - begun;
    };
    const texts = HOSTILE.flatMap((unit) => ["", "a|b\n"].map((start) => (length) => start + unit.repeat(length / unit.length)));
    for (const text of texts) await measure(text(1000)); // compiles the code
    const found = [];
    for (const text of texts) {
      const small = Math.min(await measure(text(5000)), await measure(text(5000)));
      let large = await measure(text(40_000));
      if (large > 16 * small) large = Math.min(large, await measure(text(40_000)));
      found.push([text(24), small, large]);
    }
    return found;
  },
};

console.log(JSON.stringify(await checks[name]()));
process.exit(0);
