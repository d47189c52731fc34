// The Vercel AI SDK: text, streams, tools and objects through its OpenAI-compatible provider.
//
//     npm ci && OPENAI_BASE_URL=http://localhost:8080/v1 node ai_sdk.mjs

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL ?? "http://localhost:8080/v1";
const served = (await (await fetch(`${baseURL}/models`)).json()).data[0].id;
const provider = createOpenAICompatible({
  name: "local",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(served);
const asked = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

// Non-streamed, then the same request as a stream.
const whole = await generateText({ ...asked, prompt: "Hello!" });
console.log("whole:", whole.text, whole.usage);
assert.ok(whole.text);
assert.ok(whole.usage.outputTokens > 0);
const stream = streamText({ ...asked, prompt: "Hello!" });
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);
console.log("pieces:", pieces);
assert.equal(pieces.join(""), whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

// A required tool call, non-streamed and streamed.
const cities = ["Paris", "Rome", "Oslo"];
const tools = {
  getWeather: tool({
    description: "Today's weather in a city.",
    inputSchema: z.object({ city: z.enum(cities) }),
    execute: async ({ city }) => `It is sunny in ${city}.`,
  }),
};
const prompt = "What is the weather in Oslo?";
// fields that the SDK does not support are passed through unchanged
const providerOptions = { local: { parallel_tool_calls: false } };
const forced = { ...asked, prompt, tools, toolChoice: "required", providerOptions };
const turn = await generateText(forced);
console.log("results:", turn.toolResults.map((result) => result.output));
assert.equal(turn.toolResults.length, 1);
const calling = streamText(forced);
const kinds = [];
for await (const part of calling.fullStream) kinds.push(part.type);
assert.ok(kinds.includes("tool-input-delta"));
assert.deepEqual(
  (await calling.toolCalls).map((call) => call.input),
  turn.toolCalls.map((call) => call.input),
);

// An object that follows a schema.
const schema = z.object({ genre: z.enum(["novel", "poetry"]), pages: z.number().int().max(999) });
const output = Output.object({ schema });
const book = await generateText({ ...asked, prompt: "Recommend a book.", output });
console.log("object:", book.output);
schema.parse(book.output);

// Embeddings.
const { embeddings } = await embedMany({
  model: provider.embeddingModel(served),
  values: ["a text", "another"],
});
console.log("vectors:", embeddings.length);
assert.equal(embeddings.length, 2);
