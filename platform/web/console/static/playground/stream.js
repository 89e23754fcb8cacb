/**
 * Requests of the playground: the token of the session, one answer of the API as it streams, and what it cost.
 * Nothing here touches the page.
 *
 * @typedef {{id: string, name: string, arguments: string}} Call
 * @typedef {{prompt: number, cached: number, completion: number, reasoning: number}} Usage
 * @typedef {{status: number | null, code: string, message: string, param: string | null, retryAfterS: number | null}} Failure
 * @typedef {object} Answer
 * @property {string} model the name that was asked for
 * @property {string} thought what the model wrote before its answer
 * @property {string} text
 * @property {Call[]} calls
 * @property {string | null} finish why it ended; null while it runs, or where it did not end by itself
 * @property {Usage | null} usage
 * @property {Failure | null} failure
 * @property {boolean} stopped whether the reader stopped it
 * @property {string | null} requestId
 * @property {string | null} adapter the version that answered
 * @property {string | null} digest
 * @property {boolean} isFormed whether the request asked for a form of its text
 * @property {string | null} enforcement `full` or `validated`, where a schema applies
 * @property {number | null} firstTokenMs
 * @property {number | null} tokensPerS
 *
 * @typedef {{answers: any[], tookMs: number, headers: Headers}} Decision
 */

/** A token that ends within so many seconds is replaced before it is used. */
const MARGIN_S = 30;

/** The API's answer to a request that has no valid key. */
const UNAUTHORIZED = 401;

/** Words for a failure that is no answer of the server. */
const UNREACHED = "The server did not answer. Check the connection, then try again.";

/** The bearer of this session, fetched when it is needed and kept in memory only. */
export class SessionToken {
  /** @param {string} url @param {string} csrf */
  constructor(url, csrf) {
    this.url = url;
    this.csrf = csrf;
    /** @type {Promise<string> | null} */
    this.issued = null;
    this.endsAt = 0;
  }

  /** Return the bearer. Rejects with `Refused` when the session has ended. @returns {Promise<string>} */
  get() {
    if (!this.issued || performance.now() > this.endsAt) {
      // Two answers that begin together share one.
      this.endsAt = Infinity;
      this.issued = this.issue();
      this.issued.catch(() => this.forget());
    }
    return this.issued;
  }

  forget() {
    this.issued = null;
  }

  async issue() {
    const response = await fetch(this.url, {
      method: "POST",
      headers: { "x-csrf-token": this.csrf },
      body: new URLSearchParams({ scope: "inference" }),
    });
    if (!response.ok) throw new Refused(await failureOf(response), response);
    const { api_key, expires_in } = await response.json();
    this.endsAt = performance.now() + (expires_in - MARGIN_S) * 1000;
    return api_key;
  }
}

/** A response that is an error. */
class Refused extends Error {
  /** @param {Failure} failure @param {Response} response */
  constructor(failure, response) {
    super(failure.message);
    this.failure = failure;
    this.response = response;
  }
}

/** Return the answer to a request, before it has begun. @param {any} body @returns {Answer} */
export function newAnswer(body) {
  return {
    model: body.model,
    isFormed: Boolean(body.response_format),
    thought: "",
    text: "",
    calls: [],
    finish: null,
    usage: null,
    failure: null,
    stopped: false,
    requestId: null,
    adapter: null,
    digest: null,
    enforcement: null,
    firstTokenMs: null,
    tokensPerS: null,
  };
}

/**
 * Send a request and fill in its answer; `changed` is called with each part of it. Failures are part of the answer.
 *
 * @param {SessionToken} token @param {any} body @param {Answer} answer @param {AbortSignal} signal @param {() => void} changed
 */
export async function ask(token, body, answer, signal, changed) {
  await fill(token, "chat/completions", body, answer, signal, async (response, clock) => {
    if (body.stream) await readStream(answer, response, clock, changed);
    else readWhole(answer, await response.json());
    clock.end();
  });
  changed();
}

/**
 * Send the questions of a decision and fill in what it cost; return what was decided, or null for one that failed.
 *
 * @param {SessionToken} token @param {any} body @param {Answer} answer @param {AbortSignal} signal @returns {Promise<Decision | null>}
 */
export async function decide(token, body, answer, signal) {
  /** @type {Decision | null} */
  let decision = null;
  await fill(token, "decisions", body, answer, signal, async (response, clock) => {
    const { answers, usage } = await response.json();
    answer.usage = usageOf(usage);
    decision = { answers, tookMs: performance.now() - clock.begun, headers: response.headers };
  });
  return decision;
}

/**
 * Send a request and have its response read; failures become part of its answer.
 *
 * @param {SessionToken} token @param {string} path @param {any} body @param {Answer} answer @param {AbortSignal} signal
 * @param {(response: Response, clock: Clock) => Promise<void>} read
 */
async function fill(token, path, body, answer, signal, read) {
  try {
    await token.get();
    const clock = new Clock(answer);
    const response = await send(token, path, body, signal);
    readHeaders(answer, response);
    await read(response, clock);
  } catch (error) {
    if (signal.aborted) answer.stopped = true;
    else answer.failure = error instanceof Refused ? error.failure : unreached();
    if (error instanceof Refused) readHeaders(answer, error.response);
  }
}

/** @param {SessionToken} token @param {string} path @param {any} body @param {AbortSignal} signal */
async function send(token, path, body, signal) {
  const response = await post(await token.get(), path, body, signal);
  if (response.status !== UNAUTHORIZED) return accepted(response);
  // The token was revoked, or the clock stood still while the machine slept.
  token.forget();
  return accepted(await post(await token.get(), path, body, signal));
}

/** @param {string} key @param {string} path @param {any} body @param {AbortSignal} signal */
function post(key, path, body, signal) {
  return fetch(`/v1/${path}`, {
    method: "POST",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

/** @param {Response} response */
async function accepted(response) {
  if (!response.ok) throw new Refused(await failureOf(response), response);
  return response;
}

/** @param {Answer} answer @param {Response} response */
function readHeaders(answer, response) {
  answer.requestId = response.headers.get("x-request-id");
  answer.adapter = response.headers.get("x-loraplex-adapter");
  answer.digest = response.headers.get("x-loraplex-adapter-digest");
  answer.enforcement = response.headers.get("x-loraplex-schema-enforcement")?.split(";")[0] ?? null;
}

/** Measures an answer. It is made when the request is sent. */
class Clock {
  /** @param {Answer} answer */
  constructor(answer) {
    this.answer = answer;
    this.begun = performance.now();
    this.first = 0;
    this.last = 0;
  }

  tick() {
    this.last = performance.now();
    if (this.first) return;
    this.first = this.last;
    this.answer.firstTokenMs = this.first - this.begun;
  }

  /** Tokens per second are those after the first one, in the time since it came. */
  end() {
    const usage = this.answer.usage;
    const seconds = (this.last - this.first) / 1000;
    if (usage && usage.completion > 1 && seconds > 0) this.answer.tokensPerS = (usage.completion - 1) / seconds;
  }
}

/** @param {Answer} answer @param {Response} response @param {Clock} clock @param {() => void} changed */
async function readStream(answer, response, clock, changed) {
  for await (const event of events(/** @type {ReadableStream<Uint8Array>} */ (response.body))) {
    if (event.data === "[DONE]") return;
    const chunk = JSON.parse(event.data);
    if (event.name === "error") throw new Refused(failureIn(chunk, null, null), response);
    const delta = chunk.choices[0]?.delta ?? {};
    if (delta.content || delta.reasoning || delta.tool_calls) clock.tick();
    addDelta(answer, delta);
    answer.finish = chunk.choices[0]?.finish_reason ?? answer.finish;
    if (chunk.usage) answer.usage = usageOf(chunk.usage);
    changed();
  }
}

/** @param {Answer} answer @param {any} delta */
function addDelta(answer, delta) {
  answer.thought += delta.reasoning ?? "";
  answer.text += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

/** @param {Answer} answer @param {any} whole */
function readWhole(answer, whole) {
  const { message, finish_reason } = whole.choices[0];
  const calls = (message.tool_calls ?? []).map((/** @type {any} */ call, /** @type {number} */ index) => ({ ...call, index }));
  addDelta(answer, { ...message, tool_calls: calls });
  answer.finish = finish_reason;
  answer.usage = usageOf(whole.usage);
}

/** @param {any} usage @returns {Usage} */
function usageOf(usage) {
  return {
    prompt: usage.prompt_tokens ?? usage.input_tokens,
    cached: (usage.prompt_tokens_details ?? usage.input_tokens_details)?.cached_tokens ?? 0,
    completion: usage.completion_tokens ?? usage.output_tokens,
    reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}

/**
 * Yield the events of a stream. A line ends with a line feed, and an event with an empty line; that is how the server writes them.
 *
 * @param {ReadableStream<Uint8Array>} stream @returns {AsyncGenerator<{name: string, data: string}>}
 */
async function* events(stream) {
  let rest = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = /** @type {string} */ (parts.pop());
    for (const part of parts) yield eventOf(part);
  }
}

/** @param {string} text */
function eventOf(text) {
  const event = { name: "", data: "" };
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice("event: ".length);
    if (line.startsWith("data: ")) event.data += line.slice("data: ".length);
  }
  return event;
}

/** @param {Response} response @returns {Promise<Failure>} */
async function failureOf(response) {
  const isJson = response.headers.get("content-type")?.startsWith("application/json");
  const retryAfter = response.headers.get("retry-after");
  return failureIn(isJson ? await response.json() : {}, response.status, retryAfter === null ? null : Number(retryAfter));
}

/** @param {any} body @param {number | null} status @param {number | null} retryAfterS @returns {Failure} */
function failureIn(body, status, retryAfterS) {
  const { code = "", message = UNREACHED, param = null } = body.error ?? {};
  return { status, code, message, param, retryAfterS };
}

/** @returns {Failure} */
function unreached() {
  return { status: null, code: "", message: UNREACHED, param: null, retryAfterS: null };
}

/**
 * Return what an answer costs in pico-units, exactly: prices are whole micro-units per million tokens.
 *
 * @param {Usage} usage @param {{prompt: string, cached: string, completion: string, reasoning: string}} price
 */
export function amountPico(usage, price) {
  const uncached = BigInt(usage.prompt - usage.cached);
  const prompt = uncached * BigInt(price.prompt) + BigInt(usage.cached) * BigInt(price.cached);
  const answer = BigInt(usage.completion - usage.reasoning) * BigInt(price.completion);
  return prompt + answer + BigInt(usage.reasoning) * BigInt(price.reasoning);
}

/** Write an amount as the request list does, with six decimals. @param {bigint} pico @param {string} currency */
export function money(pico, currency) {
  const micro = (2n * pico + 1_000_000n) / 2_000_000n;
  if (pico > 0n && micro === 0n) return `<${withCurrency("0.000001", currency)}`;
  return withCurrency(`${micro / 1_000_000n}.${String(micro % 1_000_000n).padStart(6, "0")}`, currency);
}

/** Write an amount without rounding. @param {bigint} pico @param {string} currency */
export function exactMoney(pico, currency) {
  const unit = 10n ** 12n;
  const fraction = String(pico % unit).padStart(12, "0").replace(/0+$/, "").padEnd(2, "0");
  return withCurrency(`${pico / unit}.${fraction}`, currency);
}

/** @param {string} text @param {string} currency */
function withCurrency(text, currency) {
  const symbol = { USD: "$", EUR: "€", GBP: "£" }[currency];
  return symbol ? symbol + text : `${currency}\u00a0${text}`;
}
