/**
 * A request of the playground as a program: curl and Python. The key is the variable `KEY`, never its value.
 */
import { byId } from "./elements.js";

const INDENT = "    ";

/** Parameters that the official Python client knows; it takes others in `extra_body`. */
const KNOWN = new Set([
  ...["model", "messages", "temperature", "top_p", "max_tokens", "seed", "stop", "presence_penalty", "frequency_penalty"],
  ...["input", "questions", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stream", "stream_options"],
]);

/** Show a request in the dialog of the page. @param {string} path @param {any} body */
export function showCode(path, body) {
  const base = byId("playground").dataset.base ?? "";
  byId("as-curl").textContent = asCurl(base, path, body);
  byId("as-python").textContent = asPython(base, path, body);
  /** @type {HTMLDialogElement} */ (byId("as-code")).showModal();
}

/** The body is quoted as a here-document, in which a shell replaces nothing. @param {string} baseUrl @param {string} path @param {any} body */
function asCurl(baseUrl, path, body) {
  return [
    `curl -sS ${body.stream ? "-N " : ""}${baseUrl}/${path} \\`,
    '  -H "Authorization: Bearer $KEY" \\',
    "  -H 'Content-Type: application/json' \\",
    "  -d @- <<'JSON'",
    JSON.stringify(body, null, 2),
    "JSON",
  ].join("\n");
}

/** @param {string} baseUrl @param {string} path @param {any} body */
function asPython(baseUrl, path, body) {
  const entries = Object.entries(body);
  const further = Object.fromEntries(entries.filter(([name]) => !KNOWN.has(name)));
  const named = entries.filter(([name]) => KNOWN.has(name));
  if (Object.keys(further).length) named.push(["extra_body", further]);
  return [
    "import os",
    "",
    "from openai import OpenAI  # pip install openai",
    "",
    `client = OpenAI(base_url=${literal(baseUrl)}, api_key=os.environ["KEY"])`,
    `answer = client.${path.replace("/", ".")}.create(`,
    ...named.map(([name, value]) => `${INDENT}${name}=${literal(value, INDENT)},`),
    ")",
    ...(body.stream ? printedStream() : [`print(answer.${body.questions ? "answers" : "choices[0].message"})`]),
  ].join("\n");
}

function printedStream() {
  return ["for chunk in answer:", `${INDENT}if chunk.choices:`, `${INDENT.repeat(2)}print(chunk.choices[0].delta)`];
}

/** Write a JSON value as a literal of Python. @param {any} value @param {string} indent @returns {string} */
function literal(value, indent = "") {
  const inner = indent + INDENT;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  // A string of JSON is one of Python, too.
  if (typeof value !== "object") return JSON.stringify(value);
  const items = Array.isArray(value)
    ? value.map((item) => literal(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = open + items.join(", ") + close;
  if (indent.length + line.length < 88 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}
