// Anthropic's library for JavaScript: thinking, with a tool call in between. Needs a model that
// thinks.
//
//     npm ci && ANTHROPIC_BASE_URL=http://localhost:8080 node anthropic_thinking.mjs

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({
  baseURL: process.env.ANTHROPIC_BASE_URL ?? "http://localhost:8080",
  apiKey: process.env.ANTHROPIC_API_KEY ?? "any", // required by the library, not by the server
});
const model = (await client.models.list()).data[0].id;
const question = { role: "user", content: "What is the weather in Rome? Use the tool." };
const asked = {
  model,
  max_tokens: 4000,
  thinking: { type: "enabled", budget_tokens: 2000 },
  tools: [
    {
      name: "get_weather",
      description: "Today's weather in a city.",
      input_schema: {
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      },
    },
  ],
};

// The thinking is a separate block before the call.
const turn = await client.messages.create({ ...asked, messages: [question] });
const [thought, call] = turn.content;
assert.deepEqual([thought.type, call.type], ["thinking", "tool_use"]);
assert.ok(thought.signature);
console.log("thinking:", thought.thinking);
console.log("call:", call.name, JSON.stringify(call.input));

// The same request as a stream.
const pieces = [];
const stream = client.messages
  .stream({ ...asked, messages: [question] })
  .on("thinking", (piece) => pieces.push(piece));
const final = await stream.finalMessage();
assert.ok(pieces.length > 1);
assert.equal(pieces.join(""), thought.thinking);
assert.equal(final.content[0].signature, thought.signature);
assert.deepEqual(final.content[1].input, call.input);

// The next request contains the thinking: send the blocks back unchanged.
const answer = await client.messages.create({
  ...asked,
  messages: [
    question,
    { role: "assistant", content: turn.content },
    {
      role: "user",
      content: [{ type: "tool_result", tool_use_id: call.id, content: "It is sunny." }],
    },
  ],
});
assert.deepEqual(
  answer.content.map((block) => block.type),
  ["thinking", "text"],
);
console.log("answer:", answer.content[1].text);
