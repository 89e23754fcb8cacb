// @ts-check
/**
 * Calls the API as the person who is signed in, with a bearer of ten minutes. The element with `data-api` says where it is.
 */
const MARGIN_S = 60;
const root = /** @type {HTMLElement} */ (document.querySelector("[data-api]"));
const { api = "", token: tokenPath = "", csrf = "" } = root.dataset;

/** An answer of the API that is no success, in the API's words. */
export class Refused extends Error {
  /** @param {string} message @param {number} status */
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  /** Whether the same request may succeed later. */
  get passes() {
    return this.status === 429 || this.status >= 500;
  }
}

const bearer = { text: "", endsAt: 0 };

async function authorization() {
  if (performance.now() > bearer.endsAt) {
    const body = new URLSearchParams({ scope: "adapters:write" });
    const response = await fetch(tokenPath, { method: "POST", headers: { "x-csrf-token": csrf }, body });
    if (!response.ok) throw await failureOf(response);
    const { api_key, expires_in } = await response.json();
    Object.assign(bearer, { text: api_key, endsAt: performance.now() + (expires_in - MARGIN_S) * 1000 });
  }
  return `Bearer ${bearer.text}`;
}

/** @param {Response} response */
async function failureOf(response) {
  const { error } = await response.json().catch(() => ({ error: null }));
  const id = response.headers.get("x-request-id");
  const message = error?.message ?? `The server answered ${response.status}.`;
  return new Refused(id ? `${message} Request ${id}.` : message, response.status);
}

/**
 * @param {string} method @param {string} path @param {BodyInit | null} [body] @param {Record<string, string>} [headers]
 * @param {AbortSignal} [signal]
 */
export async function call(method, path, body = null, headers = {}, signal) {
  const authorized = { authorization: await authorization(), ...headers };
  const response = await fetch(api + path, { method, body, headers: authorized, signal });
  if (response.status === 401) bearer.endsAt = 0;
  if (!response.ok) throw await failureOf(response);
  return response.status === 204 ? null : response.json();
}
