// The server's answers: whole, or as they come. The key is kept in memory alone, and sent nowhere else.

let key = "";

export function useKey(value) {
  key = value.trim();
}

// What a reader can do something about; `status` is that of HTTP, 0 where no answer came.
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function send(path, body, signal) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  const asked = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" };
  const answer = await fetch(path, asked).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is it still running?", 0);
  });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new Refusal(said?.error?.message ?? `The server answered with status ${answer.status}.`, answer.status);
}

export async function ask(path, body, signal) {
  return (await send(path, body, signal)).json();
}

// The events of a streamed answer. One that breaks off without its end is an error, not an answer.
export async function* stream(path, body, signal) {
  const answer = await send(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Refusal("The connection broke before the answer was complete.", 0);
    });
    if (done) throw new Refusal("The server ended the answer before it was complete.", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(event.error.message, 0);
      yield event;
    }
  }
}
