// OpenAI's library for JavaScript: conversations, streams, schemas, and the Responses API.
//
//     npm ci && OPENAI_BASE_URL=http://localhost:8080/v1 node openai_chat.mjs

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://localhost:8080/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "any", // required by the library, not by the server
});
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Hello!" }];
const asked = { model, messages, temperature: 0, max_tokens: 200 };

// A non-streamed response, then the same response as a stream.
const whole = await client.chat.completions.create(asked);
const said = whole.choices[0].message.content;
console.log("whole:", said);
assert.ok(said);
const pieces = [];
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  pieces.push(chunk.choices[0]?.delta?.content ?? "");
}
console.log("pieces:", pieces);
assert.equal(pieces.join(""), said);

// The library's stream helper, with events.
let heard = "";
const runner = client.chat.completions.stream(asked).on("content", (delta) => (heard += delta));
assert.equal((await runner.finalChatCompletion()).choices[0].message.content, said);
assert.equal(heard, said);

// A schema for the response.
const Mood = z.object({ mood: z.enum(["glad", "sad"]), strength: z.number().int().min(1).max(10) });
const parsed = await client.chat.completions.parse({
  ...asked,
  response_format: zodResponseFormat(Mood, "mood"),
});
console.log("parsed:", parsed.choices[0].message.parsed);
Mood.parse(parsed.choices[0].message.parsed);

// The Responses API, streamed.
const stream = client.responses.stream({ model, input: "Hello!", temperature: 0 });
let text = "";
stream.on("response.output_text.delta", (event) => (text += event.delta));
const response = await stream.finalResponse();
console.log("response:", response.output_text);
assert.equal(text, response.output_text);

// Cancellation: the server stops generating when the client disconnects.
const long = await client.chat.completions.create({ ...asked, stream: true });
for await (const _ of long) break;
assert.ok(long.controller.signal.aborted);

// Embeddings, which the library requests in base64 and decodes.
const vectors = await client.embeddings.create({ model, input: ["a text", "another"] });
console.log("vectors:", vectors.data.length, "of", vectors.data[0].embedding.length);
assert.equal(vectors.data.length, 2);
