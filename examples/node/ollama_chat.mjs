// Ollama's library for Node: chats, streams, a schema, vectors, errors.
//
// npm ci
// OLLAMA_HOST=http://localhost:8080 node examples/node/ollama_chat.mjs

import assert from "node:assert/strict";
import { Ollama } from "ollama";

const ollama = new Ollama({ host: process.env.OLLAMA_HOST ?? "http://localhost:8080" });
const { models } = await ollama.list();
const model = models[0].model;
const shown = await ollama.show({ model });
assert.ok(Array.isArray(shown.capabilities));
const { version } = await ollama.version();
assert.match(version, /^\d+\.\d+\.\d+$/);

// Non-streamed and streamed: with a seed, both have the same text. The library needs the last line.
const messages = [{ role: "user", content: "Say hello." }];
const options = { seed: 7, num_predict: 24 };
const whole = await ollama.chat({ model, messages, options });
let said = "";
for await (const piece of await ollama.chat({ model, messages, options, stream: true })) {
  said += piece.message.content;
}
assert.equal(said, whole.message.content);
console.log("said", said);

const format = {
  type: "object",
  properties: { colour: { enum: ["red", "green", "blue"] } },
  required: ["colour"],
  additionalProperties: false,
};
const { response } = await ollama.generate({ model, prompt: "A colour:", format });
assert.ok(["red", "green", "blue"].includes(JSON.parse(response).colour));

const { embeddings } = await ollama.embed({ model, input: ["one", "two"] });
assert.equal(embeddings.length, 2);

await assert.rejects(ollama.chat({ model: "no-such-model", messages }), { status_code: 404 });

const running = await ollama.ps();
assert.ok(running.models.some((one) => one.model === model));
console.log("loaded", running.models.length);
