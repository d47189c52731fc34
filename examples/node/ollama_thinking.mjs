// Ollama's library for Node: thinking, with a tool call in between. Needs a model that thinks.
//
// npm ci
// OLLAMA_HOST=http://localhost:8080 node examples/node/ollama_thinking.mjs

import assert from "node:assert/strict";
import { Ollama } from "ollama";

const ollama = new Ollama({ host: process.env.OLLAMA_HOST ?? "http://localhost:8080" });
const { models } = await ollama.list();
const model = models[0].model;
const { capabilities } = await ollama.show({ model });
assert.ok(capabilities.includes("thinking") && capabilities.includes("tools"));
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Today's weather in a city.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      },
    },
  },
];
const messages = [{ role: "user", content: "What is the weather in Rome? Use the tool." }];
const asked = { model, tools, messages, think: true };

// The thinking has its own field, `thinking`.
const { message: turn } = await ollama.chat(asked);
const [call] = turn.tool_calls;
console.log("thinking:", turn.thinking);
console.log("call:", call.function.name, JSON.stringify(call.function.arguments));

// The same request as a stream.
const thoughts = [];
const calls = [];
for await (const { message } of await ollama.chat({ ...asked, stream: true })) {
  if (message.thinking) thoughts.push(message.thinking);
  calls.push(...(message.tool_calls ?? []));
}
assert.ok(thoughts.length > 1);
assert.equal(thoughts.join(""), turn.thinking);
assert.deepEqual(
  calls.map((streamed) => streamed.function.arguments),
  [call.function.arguments],
);

// The next request contains the thinking: send the message back unchanged.
const result = { role: "tool", tool_name: call.function.name, content: "It is sunny." };
const { message: answer } = await ollama.chat({ ...asked, messages: [...messages, turn, result] });
assert.ok(answer.thinking);
console.log("answer:", answer.content);
