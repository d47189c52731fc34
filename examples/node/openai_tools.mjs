// OpenAI's library for JavaScript: its runner, which calls functions and sends back their results.
//
//     npm ci && OPENAI_BASE_URL=http://localhost:8080/v1 node openai_tools.mjs

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://localhost:8080/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "any", // required by the library, not by the server
});
const model = (await client.models.list()).data[0].id;
const cities = ["Paris", "Rome", "Oslo"];
const called = [];

const getWeather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Today's weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: cities } },
      required: ["city"],
      additionalProperties: false,
    },
    parse: JSON.parse,
    function: ({ city }) => {
      called.push(city);
      return `It is sunny in ${city}.`;
    },
  },
};
const asked = {
  model,
  messages: [{ role: "user", content: "What is the weather in Rome?" }],
  tools: [getWeather],
  temperature: 0,
  max_tokens: 200,
};

// With a required function, the run ends after the call.
const named = { type: "function", function: { name: "get_weather" } };
const once = client.chat.completions.runTools({ ...asked, tool_choice: named });
await once.done();
console.log("called with", called);
assert.equal(called.length, 1);
assert.ok(cities.includes(called[0]));

// The same as a stream, in which the arguments arrive in chunks.
const streamed = client.chat.completions.runTools({ ...asked, tool_choice: named, stream: true });
const results = [];
streamed.on("functionToolCallResult", (result) => results.push(result));
await streamed.done();
console.log("results:", results);
assert.deepEqual(results, [`It is sunny in ${called[0]}.`]);
assert.deepEqual(called, [called[0], called[0]]);

// By default (`auto`), the model may make several calls before it responds.
const free = client.chat.completions.runTools(asked, { maxChatCompletions: 3 });
const messages = [];
free.on("message", (message) => messages.push(message.role));
await free.done();
console.log("messages:", messages);
assert.equal(messages.at(-1) === "assistant" || messages.length > 3, true);
