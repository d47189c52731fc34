// The Vercel AI SDK over Ollama's API: thinking, with tool calls that the SDK runs. Needs a model
// that thinks.
//
// npm ci
// OLLAMA_HOST=http://localhost:8080 node examples/node/ai_sdk_ollama_thinking.mjs

import assert from "node:assert/strict";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

// The provider does not send the thinking back, and prints a warning. The server restores it.
globalThis.AI_SDK_LOG_WARNINGS = false;

const host = process.env.OLLAMA_HOST ?? "http://localhost:8080";
const { models } = await (await fetch(`${host}/api/tags`)).json();
const ollama = createOllama({ baseURL: `${host}/api` });
const cities = [];
const asked = {
  model: ollama(models[0].model),
  prompt: "What is the weather in Rome? Use the tool.",
  providerOptions: { ollama: { think: true } },
  stopWhen: stepCountIs(3),
  tools: {
    get_weather: tool({
      description: "Today's weather in a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: ({ city }) => {
        cities.push(city);
        return `It is sunny in ${city}.`;
      },
    }),
  },
};

const { steps, text } = await generateText(asked);
assert.equal(steps.length, 2);
const [{ reasoningText, toolCalls }] = steps;
console.log("thinking:", reasoningText);
console.log("call:", toolCalls[0].toolName, JSON.stringify(toolCalls[0].input));
console.log("answer:", text);

const streamed = streamText(asked);
const thoughts = [];
for await (const part of streamed.fullStream) {
  if (part.type === "reasoning-delta") thoughts.push(part.text);
}
assert.ok(thoughts.length > 2);
assert.equal((await streamed.steps)[0].reasoningText, reasoningText);
assert.equal(await streamed.text, text);
assert.equal(cities.length, 2);
