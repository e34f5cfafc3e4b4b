/** Requests to the service that serves this page: JSON, files, streams of events, and errors in words. */

const REQUEST_TIMEOUT_MS = 60_000;

/** An error of a request, with the message for the reader and the seconds until a retry makes sense. */
export class RequestError extends Error {
  constructor(message, { code = "", status = 0, retryAfter = 0 } = {}) {
    super(message);
    this.code = code;
    this.status = status;
    this.retryAfter = retryAfter;
  }

  /** True if the same request can succeed later: a broken connection, an overload, or an error of the service. */
  get canRetry() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** Return the URL of a route. Routes are relative to the page, so that it works behind a prefix. */
export const routeUrl = path => new URL(`.${path}`, document.baseURI);

async function send(path, body, signal) {
  const timeout = AbortSignal.timeout(REQUEST_TIMEOUT_MS);
  const options = { signal: signal ? AbortSignal.any([signal, timeout]) : timeout };
  if (body !== undefined) options.method = "POST";
  if (body?.file) {
    options.body = new FormData();
    for (const [name, value] of Object.entries(body)) options.body.set(name, value);
  } else if (body !== undefined)
    Object.assign(options, { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(routeUrl(path), options);
  } catch (error) {
    throw failure(error);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Translate an exception of `fetch` or of a stream. */
function failure(error) {
  if (error.name === "AbortError" || error instanceof RequestError) return error;
  if (error.name === "TimeoutError")
    return new RequestError("The service did not respond within a minute. Try a shorter text, or retry.");
  return new RequestError(
    "The service cannot be reached. It may have stopped, or the network may be down. Start it again, then retry.",
  );
}

async function errorOf(response) {
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  let error = {};
  try {
    const body = await response.json();
    error = body.error ?? body; // DeepL's API has the message alone
  } catch {
    // A proxy may answer without JSON.
  }
  const message = error.message ?? `The service answered with the status ${response.status}.`;
  return new RequestError(message, { code: error.code, status: response.status, retryAfter });
}

/** Send a request and return the JSON or the file of its response. GET without a body, POST with one. */
export async function request(path, body, signal) {
  const response = await send(path, body, signal);
  try {
    return await (response.headers.get("Content-Type") === "application/json" ? response.json() : response.blob());
  } catch (error) {
    throw failure(error);
  }
}

/**
 * Send a request and yield the events of its response.
 *
 * A response without `[DONE]` at its end has broken off and is an error.
 */
export async function* stream(path, body, signal) {
  const response = await send(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw failure(error);
    }
    if (part.done) break;
    text += part.value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const lines = event.split("\n");
      const data = lines.find(line => line.startsWith("data: "))?.slice(6);
      if (data === "[DONE]") return;
      if (data === undefined) continue;
      const content = JSON.parse(data);
      if (lines.includes("event: error")) throw new RequestError(content.error.message, { code: content.error.code });
      yield content;
    }
  }
  throw new RequestError("The response broke off. The service may have stopped. Retry.");
}
