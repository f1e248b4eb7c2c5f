// Talks to the server. The key is kept for this tab only and goes nowhere but into the Authorization header of requests to
// the origin that the page came from. Knows no element.

const ROOT = new URL("../../", import.meta.url);
const KEY = "tieredkv.admin-key";
// The engine answers between two steps, which take seconds where a long prompt meets a slow machine.
const TIMEOUT_MS = 20000;

/** The server answered, and the answer was no. `body` is the JSON of the answer, or null. */
export class Refused extends Error {
  constructor(message, status, body) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

/** No answer came: the server is down, the network is, or it took too long. */
export class Unreachable extends Error {}

export function savedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function saveKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function send(method, path, { query = {}, body, timeoutMs = TIMEOUT_MS } = {}) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, String(value));
  }
  const headers = {};
  if (savedKey()) headers.Authorization = `Bearer ${savedKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    return await fetch(url, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      signal: AbortSignal.timeout(timeoutMs),
    });
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new Unreachable(late ? "The server did not answer in time." : "The server does not answer.");
  }
}

async function json(response) {
  try {
    return await response.json();
  } catch {
    return null;
  }
}

/** The JSON of a successful answer. Throws `Refused` or `Unreachable`. */
async function ask(method, path, options) {
  const response = await send(method, path, options);
  const body = await json(response);
  if (response.ok) return body ?? {};
  const said = body?.error?.message ?? body?.detail;
  throw new Refused(said ?? `The server answered ${response.status}.`, response.status, body);
}

export function get(path, query) {
  return ask("GET", path, { query });
}

export function post(path, body, timeoutMs) {
  return ask("POST", path, { body, timeoutMs });
}

export function remove(path) {
  return ask("DELETE", path);
}

/** An answer as text. */
export async function text(path) {
  const response = await send("GET", path);
  if (!response.ok) throw new Refused(`The server answered ${response.status}.`, response.status, null);
  return response.text();
}

/** What went wrong, as a sentence for the person at the page. */
export function explain(error) {
  if (error instanceof Unreachable) return error.message;
  if (!(error instanceof Refused)) return `This page failed: ${error.message}`;
  if (error.status === 401) return `${error.message} Enter a valid key with “Key” at the top of the page.`;
  if (error.status === 403) return `${error.message} An admin key may be needed: “Key” at the top of the page.`;
  return error.message;
}
