// Server-sent events of a fetch response. EventSource cannot send a key or a body.

/** Yields {event, data, comment} for each block of the stream. `comment` is the text of a comment
 * line, which mlxrunner uses for progress. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield parseBlock(block);
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone
  }
}

function parseBlock(block) {
  const found = { event: "message", data: "", comment: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith(":")) found.comment = line.slice(1).trim();
    const [, name, value] = /^(event|data): ?(.*)$/.exec(line) ?? [];
    if (name) found[name] = value;
  }
  return found;
}
