// @ts-check
/** Decisions in the playground: questions about one input, each with a bar for each of its options. An edit takes old answers away. */
import { drawCost, drawIdentity, duration, failureNote } from "./playground/answers.js";
import { showCode } from "./playground/code.js";
import { byId, draftOf, keepDraft, made, setError, slot } from "./playground/elements.js";
import { decide, newAnswer, SessionToken } from "./playground/stream.js";

const STARTER = {
  input: "I was charged twice for my order, and nobody answers my mails.",
  questions: [
    { type: "predicate", name: "urgent", instructions: "Does this need a person today?" },
    { type: "choice", name: "team", instructions: "Which team is this for?", options: "billing: payments, refunds\ntechnical: bugs, outages\nother" },
    { type: "score", name: "anger", instructions: "How angry is the customer?", options: "calm\nannoyed\nfurious" },
  ],
};
/** Where a field of a question is typed; a question that is refused as a whole is too long. */
const PLACES = new Map([["choices", "options"], ["levels", "options"], ["", "instructions"]]);

const form = /** @type {HTMLFormElement} */ (byId("playground")), questions = byId("questions"), outcome = byId("outcome");
const [model, input] = /** @type {HTMLInputElement[]} */ ([byId("model"), byId("input")]);
const { token: path = "", csrf = "", session = "" } = form.dataset;
const token = new SessionToken(path, csrf), DRAFT = `playground:${session}:decision`;
/** @type {AbortController | null} */
let running = null;
let count = 0;

/** @param {number} share */
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
const boxes = () => /** @type {HTMLElement[]} */ ([...questions.children]);
/** @param {Element} box @returns {HTMLInputElement[]} */
const fieldsOf = (box) => [.../** @type {NodeListOf<HTMLInputElement>} */ (box.querySelectorAll("[name]"))];
/** @param {Element} box */
const valuesOf = (box) => Object.fromEntries(fieldsOf(box).map((field) => [field.name, field.value]));
const body = () => ({ model: model.value || model.placeholder, input: input.value, questions: boxes().map(question) });

/** @param {Element} box @returns {any} */
function question(box) {
  const { type, name, instructions, options, model } = valuesOf(box);
  const asked = { type, instructions, ...(name && { name }), ...(model && { model }) };
  if (type === "predicate") return asked;
  const [list, key] = type === "choice" ? ["choices", "value"] : ["levels", "label"];
  const lines = options.split("\n").map((line) => line.trim().match(/^(.+?)(?:: +(.+))?$/) ?? []).filter(([line]) => line);
  return { ...asked, [list]: lines.map(([, text, description]) => ({ [key]: text, ...(description && { description }) })) };
}

/** @param {Record<string, string>} values */
function add(values) {
  const box = made("t-question");
  // Ids of the template are those of one question.
  for (const each of [box, ...box.querySelectorAll("*")]) {
    for (const attribute of each.attributes) attribute.value = attribute.value.replace(/\bq-/g, `q${count}-`);
  }
  count++;
  for (const field of fieldsOf(box)) field.value = values[field.name] ?? field.value;
  questions.append(box);
  changed([box]);
  return box;
}

/** What was answered was asked otherwise. @param {HTMLElement[]} edited */
function changed(edited) {
  running?.abort();
  edited.forEach((box) => draw(box));
  boxes().forEach((box, index, { length }) => {
    /** @type {HTMLElement} */ (box.querySelector("h2")).textContent = `Question ${index + 1}`;
    /** @type {HTMLElement} */ (box.querySelector("button")).hidden = length === 1;
  });
  outcome.replaceChildren();
}

/** Draw the options of a question, with its answer where there is one. @param {HTMLElement} box @param {any} [answer] */
function draw(box, answer) {
  const { type, choices, levels } = question(box), isPredicate = type === "predicate";
  const options = isPredicate ? ["true", "false"] : (choices ?? levels).map((/** @type {any} */ each) => each.value ?? each.label);
  const shares = isPredicate ? [answer?.probability, 1 - answer?.probability] : answer?.probabilities.map((/** @type {any} */ each) => each.probability);
  const field = /** @type {HTMLInputElement} */ (fieldsOf(box).find((each) => each.name === "options"));
  /** @type {HTMLElement} */ (field.closest(".field")).hidden = field.disabled = isPredicate;
  const says = type === "choice" ? answer?.choice : `${answer?.score?.toFixed(2)} of ${options.length - 1}`;
  slot(box, "says").textContent = answer ? (isPredicate ? `${percent(shares[0])} true` : `${says}, confidence ${percent(answer.confidence)}`) : "";
  slot(box, "bars").replaceChildren(...options.map((/** @type {string} */ option, /** @type {number} */ index) => {
    const line = made("t-bar", { option, ...(answer && { share: percent(shares[index]) }) });
    Object.assign(/** @type {Element} */ (line.querySelector("progress")), { ariaLabel: option, value: answer ? shares[index] : 0 });
    return line;
  }));
}

/** @param {"true" | null} ariaBusy */
const busy = (ariaBusy) => void (Object.assign(byId("run"), { ariaBusy }), Object.assign(byId("stop"), { disabled: !ariaBusy }));

async function run() {
  if (running) return;
  const request = body(), answer = newAnswer(request);
  running = new AbortController();
  busy("true");
  const decision = await decide(token, request, answer, running.signal);
  busy((running = null));
  if (answer.stopped) outcome.textContent = "Stopped.";
  if (answer.failure) failed(answer, answer.failure);
  if (!decision) return;
  boxes().forEach((box, index) => draw(box, decision.answers[index]));
  const { prompt = 0, cached = 0 } = answer.usage ?? {}, mass = Number(decision.headers.get("x-loraplex-label-mass-min"));
  const card = made("t-outcome", { in: prompt.toLocaleString("en"), cached: cached.toLocaleString("en"), took: duration(decision.tookMs), "label-mass-min": percent(mass) });
  for (const name of ["decision-calibration", "decision-format"]) slot(card, name).textContent = decision.headers.get(`x-loraplex-${name}`);
  if (mass < 0.5) slot(card, "warning").textContent = `The options held ${percent(mass)} of the model's probability: it would rather say something else.`;
  drawCost(slot(card, "cost"), answer, [request.model, ...request.questions.map((each) => each.model ?? request.model)]);
  drawIdentity(card, answer);
  outcome.replaceChildren(card);
}

/** @param {import("./playground/stream.js").Answer} answer @param {import("./playground/stream.js").Failure} failure */
function failed(answer, { param, message }) {
  outcome.replaceChildren(failureNote(answer));
  const [, index, name = ""] = param?.match(/^(?:questions\[(\d+)\]\.?)?(\w*)/) ?? [];
  const field = fieldsOf(index ? boxes()[Number(index)] : byId("shared")).find((each) => each.name === (index ? PLACES.get(name) ?? name : name));
  if (!field) return;
  setError(field, message);
  field.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
form.addEventListener("input", ({ target }) => {
  const field = /** @type {HTMLElement} */ (target), box = field.closest("fieldset");
  if (field.hasAttribute("aria-invalid")) setError(field, "");
  changed(box ? [box] : boxes());
});
questions.addEventListener("click", ({ target }) => {
  const box = /** @type {HTMLElement} */ (target).closest("button")?.closest("fieldset");
  if (!box) return;
  const next = box.nextElementSibling ?? box.previousElementSibling;
  box.remove();
  changed([]);
  /** @type {HTMLElement} */ (next?.querySelector("select")).focus();
});
outcome.addEventListener("click", ({ target }) => /** @type {HTMLElement} */ (target).closest("[data-again]") && form.requestSubmit());
byId("add").addEventListener("click", () => /** @type {HTMLElement} */ (add({}).querySelector("select")).focus());
byId("stop").addEventListener("click", () => running?.abort());
byId("show-code").addEventListener("click", () => form.reportValidity() && showCode("decisions", body()));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.contains(/** @type {Node} */ (event.target))) form.requestSubmit();
});
addEventListener("pagehide", () => keepDraft(DRAFT, { model: model.value, input: input.value, questions: boxes().map(valuesOf) }));

const draft = draftOf(DRAFT) ?? STARTER;
// A model that the address names wins.
model.value ||= draft.model ?? "";
input.value = draft.input;
draft.questions.forEach(add);
history.replaceState(null, "", location.pathname);
for (const button of /** @type {NodeListOf<HTMLButtonElement>} */ (document.querySelectorAll("[data-scripted]"))) button.disabled = false;
