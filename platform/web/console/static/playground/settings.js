/**
 * The settings of the next request: parameters, tools, the form of the answer; how they are checked, and the body they make.
 *
 * @typedef {import("./stream.js").Failure} Failure
 */
import { byId, isChecked, made, parsed, setError } from "./elements.js";

const PARAMETERS = ".parameter";
const CHECKED = `${PARAMETERS}, #tools, #schema`;

const root = byId("playground");
const tools = /** @type {HTMLTextAreaElement} */ (byId("tools"));
const choice = /** @type {HTMLSelectElement} */ (byId("choice"));
const schema = /** @type {HTMLTextAreaElement} */ (byId("schema"));

/** The tokens that the conversation has used of the context. */
let used = 0;

/** @param {number} tokens */
export function setUsed(tokens) {
  used = tokens;
}

/** Return the settings as fields of a request. They have been checked. */
export function requestFields() {
  /** @type {any} */
  const request = {};
  for (const field of /** @type {NodeListOf<HTMLInputElement>} */ (root.querySelectorAll(PARAMETERS))) {
    if (field.value !== "") request[field.name] = Number(field.value);
  }
  const stop = /** @type {HTMLTextAreaElement} */ (byId("stop-strings")).value.split("\n").filter(Boolean);
  if (stop.length) request.stop = stop;
  addTools(request);
  addFormat(request);
  if (isChecked("stream")) Object.assign(request, { stream: true, stream_options: { include_usage: true } });
  return request;
}

/** @param {any} request */
function addTools(request) {
  if (!tools.value.trim()) return;
  request.tools = JSON.parse(tools.value);
  const chosen = choice.value;
  if (chosen.startsWith("tool:")) request.tool_choice = { type: "function", function: { name: chosen.slice("tool:".length) } };
  else if (chosen !== "auto") request.tool_choice = chosen;
}

/** @param {any} request */
function addFormat(request) {
  if (isChecked("form-object")) request.response_format = { type: "json_object" };
  if (!isChecked("form-schema")) return;
  const json_schema = { name: "answer", schema: JSON.parse(schema.value), strict: isChecked("strict") };
  request.response_format = { type: "json_schema", json_schema };
}

/** Take the error of a setting away as it is edited: later, the page would move under a click elsewhere. @param {HTMLInputElement} field */
export function settingEdited(field) {
  if (field.matches(CHECKED) && field.hasAttribute("aria-invalid")) setError(field, "");
}

/** Check a setting that was changed. @param {HTMLInputElement} field */
export function settingChanged(field) {
  if (field.matches(CHECKED)) checkField(field);
  if (field === /** @type {HTMLElement} */ (tools)) showTools();
  if (field.name === "form") showFormat();
}

/** Check all settings, and go to the first wrong one. */
export function checkFields() {
  const fields = /** @type {HTMLElement[]} */ ([...root.querySelectorAll(CHECKED)]);
  const wrong = fields.filter((field) => !checkField(/** @type {HTMLInputElement} */ (field)));
  for (const each of wrong) /** @type {HTMLDetailsElement} */ (each.closest("details")).open = true;
  wrong[0]?.focus();
  return wrong.length === 0;
}

/** @param {HTMLInputElement} field */
function checkField(field) {
  const problem = field.matches(PARAMETERS) ? numberProblem(field) : jsonProblem(field);
  setError(field, problem);
  return !problem;
}

/** @param {HTMLInputElement} field */
function numberProblem(field) {
  if (field.validity.badInput) return "Enter a number.";
  if (field.value === "") return "";
  const value = Number(field.value);
  if (field.dataset.whole && !Number.isSafeInteger(value)) return `“${field.value}” is no whole number.`;
  const high = field.name === "max_tokens" ? Math.min(Number(field.max), Number(root.dataset.context) - used) : Number(field.max);
  if (value > high) return `At most ${high.toLocaleString("en")}${field.name === "max_tokens" ? roomReason() : ""}.`;
  return value < Number(field.min) ? `At least ${Number(field.min).toLocaleString("en")}.` : "";
}

function roomReason() {
  const context = Number(root.dataset.context).toLocaleString("en");
  const said = used ? `, the conversation so far ${used.toLocaleString("en")}` : "";
  return `: the context has ${context} tokens${said}`;
}

/** @param {HTMLInputElement} field */
function jsonProblem(field) {
  const isNeeded = field.id === "schema" && isChecked("form-schema");
  if (!isNeeded && (field.id === "schema" || !field.value.trim())) return "";
  const found = parsed(field.value);
  if (!found.ok) return `This is not JSON: ${found.reason}`;
  if (field.id === "tools") return Array.isArray(found.value) ? "" : "Tools are a JSON array.";
  return found.value !== null && typeof found.value === "object" && !Array.isArray(found.value) ? "" : "A schema is a JSON object.";
}

/** Show the server's refusal at the setting that it names, too. @param {Failure} failure */
export function markField({ param, message }) {
  const name = param?.match(/^[a-z_]+/)?.[0];
  const id = { tools: "tools", tool_choice: "tools", response_format: "schema" }[name ?? ""] ?? `p-${name}`;
  const field = document.getElementById(id);
  if (!field) return;
  /** @type {HTMLDetailsElement} */ (field.closest("details")).open = true;
  setError(field, message);
}

export function showTools() {
  const found = parsed(tools.value || "[]");
  const names = found.ok && Array.isArray(found.value) ? found.value.map((tool) => tool?.function?.name).filter((name) => typeof name === "string") : [];
  byId("tool-count").textContent = names.length ? String(names.length) : "";
  const chosen = choice.value;
  for (const option of [...choice.options].filter((each) => each.value.startsWith("tool:"))) option.remove();
  choice.append(...names.map((name) => new Option(name, `tool:${name}`)));
  choice.value = [...choice.options].some((option) => option.value === chosen) ? chosen : "auto";
}

/** Show the field of the schema where one is wanted, and have the server check it. */
export function showFormat() {
  byId("schema-field").hidden = !isChecked("form-schema");
  if (isChecked("form-schema")) schema.dispatchEvent(new Event("input", { bubbles: true }));
}

/** Add the tool of the form to the JSON. */
export function addTool() {
  const found = parsed(tools.value || "[]");
  const name = /** @type {HTMLInputElement} */ (byId("tool-name"));
  setError(name, /^[A-Za-z0-9_-]{1,64}$/.test(name.value) ? "" : "1 to 64 characters of a-z, A-Z, 0-9, _ and -.");
  if (name.hasAttribute("aria-invalid")) return name.focus();
  if (!found.ok || !Array.isArray(found.value)) return void checkFields();
  found.value.push({ type: "function", function: toolOfForm(name.value) });
  tools.value = JSON.stringify(found.value, null, 1);
  for (const field of /** @type {NodeListOf<HTMLInputElement>} */ (byId("tool-form").querySelectorAll("input"))) field.value = "";
  byId("tool-arguments").replaceChildren(made("t-argument"));
  showTools();
}

/** @param {string} name */
function toolOfForm(name) {
  /** @type {Record<string, {type: string}>} */
  const properties = {};
  const required = [];
  for (const row of byId("tool-arguments").children) {
    const [argument, type] = /** @type {HTMLInputElement[]} */ ([...row.querySelectorAll("input[type=text], select")]);
    if (!argument.value) continue;
    properties[argument.value] = { type: type.value };
    if (/** @type {HTMLInputElement} */ (row.querySelector("[type=checkbox]")).checked) required.push(argument.value);
  }
  const description = /** @type {HTMLInputElement} */ (byId("tool-description")).value;
  const parameters = { type: "object", properties, required, additionalProperties: false };
  return { name, ...(description && { description }), parameters };
}
