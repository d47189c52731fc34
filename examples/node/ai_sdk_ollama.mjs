// The Vercel AI SDK over Ollama's API: text, a stream, an object, vectors, an error.
//
// npm ci
// OLLAMA_HOST=http://localhost:8080 node examples/node/ai_sdk_ollama.mjs

import assert from "node:assert/strict";
import { embed, generateText, Output, streamText } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const host = process.env.OLLAMA_HOST ?? "http://localhost:8080";
const { models } = await (await fetch(`${host}/api/tags`)).json();
const name = models[0].model;
const ollama = createOllama({ baseURL: `${host}/api` });
const model = ollama(name);
const asked = { model, prompt: "Say hello.", temperature: 0, maxOutputTokens: 24 };

const { text, usage } = await generateText(asked);
assert.ok(usage.inputTokens > 0);
let said = "";
for await (const piece of streamText(asked).textStream) said += piece;
assert.equal(said, text);
console.log("said", said);

const { output } = await generateText({
  ...asked,
  prompt: "Which colour has the sky?",
  output: Output.object({ schema: z.strictObject({ colour: z.enum(["red", "green", "blue"]) }) }),
});
assert.ok(["red", "green", "blue"].includes(output.colour));
console.log("chose", output.colour);

const { embedding } = await embed({ model: ollama.embedding(name), value: "one" });
assert.ok(embedding.length > 0);

await assert.rejects(generateText({ ...asked, model: ollama("no-such-model"), maxRetries: 0 }), {
  statusCode: 404,
});
