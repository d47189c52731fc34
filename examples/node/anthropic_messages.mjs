// Anthropic's library for JavaScript: messages, streams, tools, schemas, lists, errors.
//
//     npm ci && ANTHROPIC_BASE_URL=http://localhost:8080 node anthropic_messages.mjs

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({
  baseURL: process.env.ANTHROPIC_BASE_URL ?? "http://localhost:8080",
  apiKey: process.env.ANTHROPIC_API_KEY ?? "any", // required by the library, not by the server
});

const found = [];
for await (const model of client.models.list()) found.push(model.id);
const [model] = found;
assert.equal((await client.models.retrieve(model)).type, "model");

const messages = [{ role: "user", content: "Hello!" }];
// This server supports `seed`: the same request gets the same response.
const asked = { model, max_tokens: 100, seed: 1 };

// Non-streamed, streamed with the helper of the library, and streamed as events.
const { input_tokens: counted } = await client.messages.countTokens({ model, messages });
const whole = await client.messages.create({ ...asked, messages });
assert.equal(whole.stop_reason, "end_turn");
const [{ text: said }] = whole.content;
console.log("answer:", said);
const countPrompt = ({ input_tokens, cache_read_input_tokens, cache_creation_input_tokens }) =>
  input_tokens + cache_read_input_tokens + cache_creation_input_tokens;
assert.equal(countPrompt(whole.usage), counted);
let streamed = "";
const stream = client.messages.stream({ ...asked, messages }).on("text", (text) => (streamed += text));
assert.equal((await stream.finalMessage()).content[0].text, said);
assert.equal(streamed, said);
const types = new Set();
for await (const event of await client.messages.create({ ...asked, messages, stream: true })) {
  types.add(event.type);
}
assert.ok(types.has("message_delta") && types.has("message_stop"));

// A required call, non-streamed and streamed, and the response to its result.
const tools = [
  {
    name: "get_weather",
    description: "Today's weather in a city.",
    input_schema: {
      type: "object",
      properties: { city: { enum: ["Rome", "Oslo"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
];
const question = { role: "user", content: "What is the weather in Oslo?" };
const required = {
  ...asked,
  tools,
  tool_choice: { type: "any", disable_parallel_tool_use: true },
  messages: [question],
};
const turn = await client.messages.create(required);
assert.equal(turn.stop_reason, "tool_use");
const [call] = turn.content.filter((block) => block.type === "tool_use");
console.log("call:", call.name, JSON.stringify(call.input));
assert.ok(["Rome", "Oslo"].includes(call.input.city));
const final = await client.messages.stream(required).finalMessage();
assert.deepEqual(final.content.filter((block) => block.type === "tool_use")[0].input, call.input);
const answer = await client.messages.create({
  ...asked,
  tools,
  tool_choice: { type: "none" },
  messages: [
    question,
    { role: "assistant", content: turn.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "21 °C" }] },
  ],
});
assert.ok(answer.content.every((block) => block.type === "text"));

// A schema for the response.
const schema = {
  type: "object",
  properties: { color: { enum: ["red", "green", "blue"] } },
  required: ["color"],
  additionalProperties: false,
};
const structured = await client.messages.create({
  ...asked,
  messages: [{ role: "user", content: "Which color has the sky?" }],
  output_config: { format: { type: "json_schema", schema } },
});
console.log("structured:", structured.content[0].text);
assert.ok(["red", "green", "blue"].includes(JSON.parse(structured.content[0].text).color));

// Errors: an unknown model, and a prompt longer than the context.
await assert.rejects(
  client.messages.create({ ...asked, model: "claude-nothing", messages }),
  (error) => error instanceof Anthropic.NotFoundError && Boolean(error.requestID),
);
const long = [{ role: "user", content: "word ".repeat(20000) }];
await assert.rejects(
  client.messages.stream({ ...asked, messages: long }).finalMessage(),
  (error) => error instanceof Anthropic.BadRequestError && /prompt is too long: /.test(error.message),
);
