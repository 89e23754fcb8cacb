/**
 * The playground: turns that all models share, their answers side by side, and the results of the tools that they call.
 * The draft is in `sessionStorage` only, and belongs to one session.
 *
 * @typedef {import("./playground/stream.js").Answer} Answer
 * @typedef {{name: string, ids: (string | null)[], value: string}} Result
 * @typedef {{kind: "user", text: string}} UserTurn
 * @typedef {{kind: "answers", answers: (Answer | null)[]}} AnswersTurn
 * @typedef {{kind: "results", results: Result[]}} ResultsTurn
 * @typedef {UserTurn | AnswersTurn | ResultsTurn} Turn
 */
import { draw, isWhole, newCard } from "./playground/answers.js";
import { showCode } from "./playground/code.js";
import { byId, draftOf, isChecked, keepDraft, made } from "./playground/elements.js";
import { addTool, checkFields, markField, requestFields, setUsed, settingChanged, settingEdited, showFormat, showTools } from "./playground/settings.js";
import { ask, newAnswer, SessionToken } from "./playground/stream.js";

const root = byId("playground");
const { token: tokenPath = "", csrf = "", session = "" } = root.dataset;
const DRAFT = `playground:${session}`;
const token = new SessionToken(tokenPath, csrf);

/** @type {{turns: Turn[], running: AbortController | null, last: any}} */
const state = { turns: [], running: null, last: null };

const system = /** @type {HTMLTextAreaElement} */ (byId("system"));
const say = /** @type {HTMLTextAreaElement} */ (byId("say"));
const turns = byId("turns");
const models = [/** @type {HTMLInputElement} */ (byId("model-a")), /** @type {HTMLInputElement} */ (byId("model-b"))];
const compare = /** @type {HTMLInputElement} */ (byId("compare"));

function columns() {
  return compare.checked ? [0, 1] : [0];
}

/* Requests */

/** @param {number} column */
function messages(column) {
  /** @type {any[]} */
  const said = system.value.trim() ? [{ role: "system", content: system.value }] : [];
  for (const turn of state.turns) {
    if (turn.kind === "user") said.push({ role: "user", content: turn.text });
    else if (turn.kind === "answers") said.push(...answered(turn.answers[column]));
    else said.push(...returned(turn, column));
  }
  return said;
}

/** @param {Answer | null | undefined} answer */
function answered(answer) {
  if (!answer) return [];
  const calls = answer.calls.filter(isWhole).map(({ id, name, arguments: text }) => ({
    id,
    type: "function",
    function: { name, arguments: text },
  }));
  const thought = answer.thought ? { reasoning: answer.thought } : {};
  if (calls.length) return [{ role: "assistant", content: answer.text || null, ...thought, tool_calls: calls }];
  return answer.text ? [{ role: "assistant", content: answer.text, ...thought }] : [];
}

/** @param {ResultsTurn} turn @param {number} column */
function returned(turn, column) {
  const own = turn.results.filter((result) => result.ids[column]);
  return own.map((result) => ({ role: "tool", tool_call_id: result.ids[column], content: result.value }));
}

/** @param {number} column */
function body(column) {
  return { model: models[column].value || models[column].placeholder, messages: messages(column), ...requestFields() };
}

/* Sending */

async function send() {
  if (state.running || !checkFields()) return;
  const results = takeResults();
  const text = say.value.trim();
  if (!text && !results.length) return say.focus();
  if (results.length) add({ kind: "results", results });
  if (text) add({ kind: "user", text: say.value });
  say.value = "";
  const asked = text ? columns() : columns().filter((column) => results.some((result) => result.ids[column]));
  /** @type {AnswersTurn} */
  const turn = { kind: "answers", answers: asked.length > 1 || asked[0] === 0 ? [null] : [null, null] };
  const bodies = asked.map((column) => /** @type {[number, any]} */ ([column, body(column)]));
  for (const [column, request] of bodies) turn.answers[column] = newAnswer(request);
  const element = add(turn);
  await run(turn, element, bodies);
}

/** @param {AnswersTurn} turn @param {HTMLElement} element @param {[number, any][]} bodies */
async function run(turn, element, bodies) {
  state.running = new AbortController();
  state.last = bodies[0][1];
  const { signal } = state.running;
  running(true);
  element.setAttribute("aria-busy", "true");
  await Promise.all(bodies.map(([column, request]) => oneAnswer(turn, element, column, request, signal)));
  element.setAttribute("aria-busy", "false");
  state.running = null;
  running(false);
  // The conversation may have been cleared meanwhile.
  if (state.turns.at(-1) === turn) ended(turn);
  save();
}

/** @param {AnswersTurn} turn @param {HTMLElement} element @param {number} column @param {any} request @param {AbortSignal} signal */
async function oneAnswer(turn, element, column, request, signal) {
  const answer = /** @type {Answer} */ (turn.answers[column]);
  const card = /** @type {HTMLElement} */ (element.querySelector(`[data-column="${column}"]`));
  let drawn = false;
  const changed = () => {
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      draw(card, answer, true);
    });
  };
  await ask(token, request, answer, signal, changed);
  requestAnimationFrame(() => draw(card, answer, false));
  if (answer.failure) markField(answer.failure);
}

/** Send the request of a failed answer again. @param {AnswersTurn} turn @param {HTMLElement} element @param {number} column */
async function again(turn, element, column) {
  if (state.running || state.turns.at(-1) !== turn || !checkFields()) return;
  turn.answers[column] = null;
  const request = body(column);
  turn.answers[column] = newAnswer(request);
  /** @type {HTMLElement} */ (element.querySelector(`[data-column="${column}"]`)).replaceWith(card(turn, element, column));
  await run(turn, element, [[column, request]]);
}

/** @param {boolean} isRunning */
function running(isRunning) {
  /** @type {HTMLButtonElement} */ (byId("stop")).disabled = !isRunning;
  /** @type {HTMLButtonElement} */ (byId("send")).disabled = isRunning;
}

/* The page */

/** @param {Turn} turn */
function add(turn) {
  // What has been followed by another turn is not asked again.
  for (const button of turns.querySelectorAll("[data-again]")) button.remove();
  state.turns.push(turn);
  return show(turn);
}

/** @param {Turn} turn @returns {HTMLElement} */
function show(turn) {
  byId("starters").hidden = true;
  const item = document.createElement("li");
  item.className = "turn";
  if (turn.kind === "user") item.append(made("t-user", { text: turn.text }));
  else if (turn.kind === "results") item.append(...turn.results.map((each) => made("t-returned", { name: each.name, text: each.value })));
  else {
    item.classList.toggle("pair", turn.answers.length > 1);
    turn.answers.forEach((answer, column) => answer && item.append(card(turn, item, column)));
    item.setAttribute("aria-live", "polite");
  }
  turns.append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
}

/** @param {AnswersTurn} turn @param {HTMLElement} item @param {number} column */
function card(turn, item, column) {
  const answer = /** @type {Answer} */ (turn.answers[column]);
  const made = newCard(answer, column);
  made.addEventListener("click", (event) => {
    if (/** @type {HTMLElement} */ (event.target).closest("[data-again]")) again(turn, item, column);
  });
  draw(made, answer, answer.finish === null && !answer.stopped && !answer.failure);
  return made;
}

/* Results of tools */

/** The last answers have ended: what they called wants results, and the rest of the context is for what follows. @param {AnswersTurn} turn */
function ended(turn) {
  const usages = turn.answers.map((answer) => answer?.usage);
  setUsed(Math.max(0, ...usages.map((usage) => (usage ? usage.prompt + usage.completion : 0))));
  offerResults(turn);
}

/** Offer a field for each call of the last answers: one for both where both call the same. @param {AnswersTurn} turn */
function offerResults(turn) {
  const fields = byId("results");
  fields.replaceChildren();
  const most = Math.max(0, ...turn.answers.map((answer) => answer?.calls.length ?? 0));
  for (let index = 0; index < most; index++) {
    const calls = [0, 1].map((column) => turn.answers[column]?.calls[index]).map((call) => (call && isWhole(call) ? call : undefined));
    const [first, second] = calls;
    if (first && second && first.name === second.name) fields.append(resultField(first.name, [first.id, second.id], ", for both"));
    else calls.forEach((call, column) => call && fields.append(resultField(call.name, [0, 1].map((each) => (each === column ? call.id : null)), whose(turn, column))));
  }
}

/** @param {AnswersTurn} turn @param {number} column */
function whose(turn, column) {
  return turn.answers.filter(Boolean).length > 1 ? `, for ${turn.answers[column]?.model}` : "";
}

/** @param {string} name @param {(string | null)[]} ids @param {string} suffix */
function resultField(name, ids, suffix) {
  const field = made("t-result", { name, whose: suffix });
  const input = /** @type {HTMLTextAreaElement} */ (field.querySelector("textarea"));
  input.id = `result-${ids.join("-")}`;
  /** @type {HTMLLabelElement} */ (field.querySelector("label")).htmlFor = input.id;
  field.dataset.ids = JSON.stringify(ids);
  field.dataset.name = name;
  return field;
}

/** Take the results out of their fields. @returns {Result[]} */
function takeResults() {
  const fields = /** @type {HTMLElement[]} */ ([...byId("results").children]);
  byId("results").replaceChildren();
  return fields.map((field) => ({
    name: field.dataset.name ?? "",
    ids: JSON.parse(field.dataset.ids ?? "[]"),
    value: /** @type {HTMLTextAreaElement} */ (field.querySelector("textarea")).value,
  }));
}

/* Settings */

function showModels() {
  const isPair = compare.checked;
  byId("field-b").hidden = !isPair;
  models[1].disabled = !isPair;
  byId("send-label").textContent = isPair ? "Send to both" : "Send";
}

/** Fill in a starter: what to say, and with which tool or schema. @param {HTMLElement} starter */
function start({ dataset }) {
  say.value = dataset.say ?? "";
  fill("tools", dataset.tools ?? "");
  if (dataset.schema) fill("schema", dataset.schema);
  /** @type {HTMLInputElement} */ (byId(dataset.schema ? "form-schema" : "form-text")).checked = true;
  showAll();
  say.focus();
}

/** @param {string} id @param {string} text */
function fill(id, text) {
  const field = /** @type {HTMLTextAreaElement} */ (byId(id));
  field.value = text;
  /** @type {HTMLDetailsElement} */ (field.closest("details")).open ||= Boolean(text);
}

function showAll() {
  showModels();
  showTools();
  showFormat();
}

function clear() {
  state.running?.abort();
  state.turns = [];
  state.last = null;
  turns.replaceChildren();
  byId("results").replaceChildren();
  byId("starters").hidden = false;
  setUsed(0);
  save();
}

/* The draft */

function drafted() {
  return /** @type {HTMLInputElement[]} */ ([...document.querySelectorAll("[data-draft]")]);
}

function save() {
  // An answer that is still being written is not kept.
  const whole = state.running ? state.turns.slice(0, -1) : state.turns;
  const values = Object.fromEntries(drafted().map((field) => [field.id, isToggle(field) ? field.checked : field.value]));
  keepDraft(DRAFT, { values, turns: whole });
}

/** @param {HTMLInputElement} field */
function isToggle(field) {
  return field.type === "checkbox" || field.type === "radio";
}

function restore() {
  const kept = draftOf(DRAFT) ?? { values: {}, turns: [] };
  // The tools come before the choice among them, in the page and so in this order.
  for (const field of drafted()) {
    const value = kept.values[field.id];
    // A model that the address names wins.
    if (value === undefined || field.dataset.given !== undefined) continue;
    if (isToggle(field)) field.checked = value;
    else field.value = value;
    if (field.id === "tools") showTools();
  }
  for (const turn of kept.turns) add(turn);
  const last = state.turns.at(-1);
  if (last?.kind === "answers") ended(last);
}

/* Events */

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("clear").addEventListener("click", clear);
byId("stop").addEventListener("click", () => state.running?.abort());
byId("show-code").addEventListener("click", () => checkFields() && showCode("chat/completions", state.last ?? body(0)));
byId("add-argument").addEventListener("click", () => byId("tool-arguments").append(made("t-argument")));
byId("add-tool").addEventListener("click", () => {
  addTool();
  save();
});
byId("starters").addEventListener("click", (event) => {
  const starter = /** @type {HTMLElement} */ (event.target).closest("[data-say]");
  if (starter) start(/** @type {HTMLElement} */ (starter));
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) state.running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && root.contains(/** @type {Node} */ (event.target))) send();
});
document.addEventListener("input", (event) => settingEdited(/** @type {HTMLInputElement} */ (event.target)));
document.addEventListener("change", (event) => {
  settingChanged(/** @type {HTMLInputElement} */ (event.target));
  if (event.target === compare) showModels();
  save();
});
window.addEventListener("pagehide", save);

restore();
// From now on the draft says which models are chosen.
history.replaceState(null, "", location.pathname);
showAll();
// What does nothing without this script is disabled until here: no click is lost.
for (const control of document.querySelectorAll("[data-scripted]")) /** @type {HTMLButtonElement} */ (control).disabled = false;
running(false);
