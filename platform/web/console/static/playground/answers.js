/**
 * One answer as a card: its text and calls while they stream, then what it took and cost, and how to find it again.
 *
 * @typedef {import("./stream.js").Answer} Answer
 * @typedef {import("./stream.js").Call} Call
 */
import { byId, indented, made, parsed, slot } from "./elements.js";
import { amountPico, exactMoney, money } from "./stream.js";

/** Make the card of an answer. @param {Answer} answer @param {number} column */
export function newCard(answer, column) {
  const card = made("t-answer", { model: answer.model });
  card.dataset.column = String(column);
  card.setAttribute("aria-label", answer.model);
  /** @type {SVGElement} */ (card.querySelector(".key svg")).classList.add(`f${column + 1}`);
  return card;
}

/** Whether the arguments of a call were not cut off. @param {Call} call */
export function isWhole(call) {
  return parsed(call.arguments).ok;
}

/** @param {HTMLElement} card @param {Answer} answer @param {boolean} isRunning */
export function draw(card, answer, isRunning) {
  slot(card, "state").replaceChildren(...chips(answer, isRunning));
  slot(card, "thinking").hidden = !answer.thought;
  slot(card, "thought").textContent = answer.thought;
  slot(card, "thought-tokens").textContent = answer.usage ? `${answer.usage.reasoning.toLocaleString("en")} tokens` : "";
  slot(card, "text").textContent = answer.isFormed && !isRunning && parsed(answer.text).ok ? indented(answer.text) : answer.text;
  slot(card, "text").hidden = !answer.text && !isRunning;
  if (isRunning) slot(card, "text").append(made("t-caret"));
  slot(card, "calls").replaceChildren(...answer.calls.map((call) => callLine(call, isRunning)));
  slot(card, "failure").replaceChildren(...(answer.failure ? [failureNote(answer)] : []));
  drawFigures(card, answer, isRunning);
}

/** @param {Answer} answer @param {boolean} isRunning */
function chips(answer, isRunning) {
  if (isRunning) return [chip("busy", "answering")];
  if (answer.failure) return [chip("bad", "failed")];
  if (answer.stopped) return [chip("off", "stopped")];
  const ended = answer.finish === "length" ? [chip("warn", "cut off at max_tokens")] : [];
  // Tools have schemas too, which a text that calls none of them does not meet.
  if (!answer.isFormed && !answer.calls.length) return ended;
  if (answer.enforcement === "full") ended.push(chip("ok", "schema enforced in full"));
  if (answer.enforcement === "validated") ended.push(chip("ok", "schema validated at the end"));
  return ended;
}

/** @param {string} kind @param {string} text */
function chip(kind, text) {
  const element = document.createElement("span");
  element.className = `chip ${kind}`;
  element.textContent = text;
  return element;
}

/** @param {Call} call @param {boolean} isRunning */
function callLine(call, isRunning) {
  const line = made("t-call", { text: `${call.name}(${call.arguments}` + (isWhole(call) ? ")" : "") });
  if (!isRunning && !isWhole(call)) line.append(chip("warn", "arguments cut off"));
  return line;
}

/** @param {Answer} answer */
export function failureNote(answer) {
  const { status, code, message, retryAfterS } = /** @type {NonNullable<Answer["failure"]>} */ (answer.failure);
  const head = [status, code].filter(Boolean).join(" ");
  const when = retryAfterS === null ? "" : ` Again in ${retryAfterS} s, at ${new Date(Date.now() + retryAfterS * 1000).toISOString().slice(11, 19)} UTC.`;
  const note = made("t-failure", { head, message: message + when });
  const why = /** @type {HTMLAnchorElement} */ (slot(note, "why"));
  if (status === 429 && answer.requestId) why.href = `${why.dataset.path}?request=${encodeURIComponent(answer.requestId)}`;
  else why.remove();
  const signIn = slot(note, "sign-in");
  if (status !== 401) signIn.remove();
  return note;
}

/** @param {HTMLElement} card @param {Answer} answer @param {boolean} isRunning */
function drawFigures(card, answer, isRunning) {
  const { usage, firstTokenMs, tokensPerS } = answer;
  /** @type {[string, string | null][]} */
  const figures = [
    ["in", usage && usage.prompt.toLocaleString("en")],
    ["cached", usage && usage.cached.toLocaleString("en")],
    ["out", usage && usage.completion.toLocaleString("en")],
    ["first", firstTokenMs === null ? null : duration(firstTokenMs)],
    ["rate", tokensPerS === null ? null : tokensPerS.toFixed(1)],
  ];
  for (const [name, text] of figures) slot(card, name).textContent = text ?? "–";
  drawCost(slot(card, "cost"), answer, [answer.model]);
  if (!isRunning) drawIdentity(card, answer);
}

/** What has a price: an adapter under all its aliases and versions, or the base model. @param {string} model */
const adapterOf = (model) => model.split(/[:@]/)[0];

/** Show what an answer cost; nothing where its models have no price, or several. @param {HTMLElement} cell @param {Answer} answer @param {string[]} models */
export function drawCost(cell, { usage }, models) {
  const options = [.../** @type {NodeListOf<HTMLOptionElement>} */ (document.querySelectorAll("#models option"))];
  const prices = models.map((model) => ({ ...options.find((each) => adapterOf(each.value) === adapterOf(model))?.dataset }));
  const { prompt = "", cached = "", completion = "", reasoning = "" } = prices[0];
  const isPriced = usage && prompt && prices.every((each) => each.prompt === prompt && each.cached === cached);
  const amount = isPriced ? amountPico(usage, { prompt, cached, completion, reasoning }) : null;
  cell.textContent = amount === null ? "–" : money(amount, byId("playground").dataset.currency ?? "");
  cell.title = amount === null ? "" : exactMoney(amount, byId("playground").dataset.currency ?? "");
}

/** @param {HTMLElement} card @param {Answer} answer */
export function drawIdentity(card, answer) {
  const list = slot(card, "identity");
  if (!answer.requestId || list.childElementCount) return;
  const request = made("t-request", { id: `${answer.requestId.slice(0, 8)}…` });
  const link = /** @type {HTMLAnchorElement} */ (request.querySelector("a"));
  link.href = `${link.dataset.path}/${encodeURIComponent(answer.requestId)}`;
  copies(request, answer.requestId);
  list.append(request);
  const adapters = answer.adapter?.split(", ") ?? [];
  for (const [index, digest] of answer.digest?.split(", ").entries() ?? []) {
    const weights = made("t-digest", { adapter: adapters[index], digest: `${digest.slice(0, 12)}…` });
    copies(weights, digest);
    list.append(weights);
  }
}

/** @param {HTMLElement} element @param {string} text */
function copies(element, text) {
  /** @type {HTMLElement} */ (element.querySelector("[data-copy]")).dataset.copy = text;
}

/** @param {number} ms */
export function duration(ms) {
  if (ms < 99.95) return `${ms.toFixed(1)}\u00a0ms`;
  return ms < 999.5 ? `${ms.toFixed(0)}\u00a0ms` : `${(ms / 1000).toFixed(2)}\u00a0s`;
}
