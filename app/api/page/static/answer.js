// One answer: sends the conversation, and adds the content of the stream to a message.

import { api } from "./api.js";

/** Streams an answer into `message`. onChange(progress): called after each change. Throws ApiError,
 * and AbortError after `signal`. */
export async function streamAnswer({ message, body, signal, onChange }) {
  const clock = new Clock();
  const stream = api.stream("/v1/chat/completions", {
    body: { ...body, stream: true, stream_options: { include_usage: true } },
    signal,
    isLast: (event) => event.data === "[DONE]",
  });
  try {
    for await (const { data, comment } of stream) {
      if (comment) onChange(describeProgress(comment));
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw Object.assign(new Error(chunk.error.message), { status: 500 });
      addChunk(message, chunk, clock);
      onChange("");
    }
  } finally {
    if (clock.started) message.figures ??= clock.figures();
  }
}

/** Measures an answer as the user sees it. */
class Clock {
  sent = performance.now();
  first = 0;
  chunks = 0;

  get started() {
    return this.chunks > 0;
  }

  tick() {
    this.first ||= performance.now();
    this.chunks += 1;
  }

  /** Figures of an answer that was cut off, whose token counts are unknown. */
  figures() {
    const seconds = (performance.now() - this.first) / 1000;
    const rate = this.chunks > 1 ? (this.chunks - 1) / seconds : 0;
    return { prompt: 0, cached: 0, completion: this.chunks, ttft: this.first - this.sent, rate };
  }
}

function addChunk(message, chunk, clock) {
  const [choice] = chunk.choices ?? [];
  const { content, tool_calls: calls, ...rest } = choice?.delta ?? {};
  const reasoning = rest.reasoning_content ?? rest.reasoning;
  if (content || reasoning || calls) clock.tick();
  if (content) message.content += content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const call of calls ?? []) addCall(message, call);
  if (choice?.finish_reason) message.finish = choice.finish_reason;
  if (chunk.timings?.predicted_per_second) clock.rate = chunk.timings.predicted_per_second;
  if (chunk.usage) message.figures = readUsage(chunk.usage, clock);
}

function addCall(message, { index, id, function: called }) {
  message.calls ??= [];
  const call = (message.calls[index] ??= { id: "", name: "", arguments: "" });
  if (id) call.id = id;
  if (called?.name) call.name = called.name;
  call.arguments += called?.arguments ?? "";
}

function readUsage(usage, clock) {
  return {
    prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    completion: usage.completion_tokens,
    ttft: (clock.first || performance.now()) - clock.sent,
    rate: clock.rate ?? clock.figures().rate,
  };
}

/** The comments of a stream: "loading 40 %", "waiting to load", "prefill 512/2048". */
function describeProgress(comment) {
  const prefill = /^prefill (\d+)\/(\d+)$/.exec(comment);
  if (prefill) return `Reading the prompt: ${prefill[1]} of ${prefill[2]} tokens`;
  const loading = /^loading (\d+ %)$/.exec(comment);
  if (loading) return `Loading the model: ${loading[1]}`;
  if (comment === "waiting to load") return "Waiting until the model can be loaded";
  return "Waiting";
}

/** The messages of a request. An answer that failed without any output is omitted. */
export function requestMessages(messages, system) {
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "assistant") {
      const calls = message.calls ?? [];
      if (!message.content && !calls.length) continue;
      sent.push({
        role: "assistant",
        content: message.content,
        ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
        ...(calls.length ? { tool_calls: calls.map(renderCall) } : {}),
      });
    } else if (message.role === "tool") {
      sent.push({ role: "tool", tool_call_id: message.tool_call_id, content: message.content });
    } else sent.push({ role: "user", content: renderContent(message) });
  }
  return sent;
}

/** The images come before the text. */
function renderContent({ content, images }) {
  if (!images?.length) return content;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

function renderCall(call) {
  return { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } };
}
