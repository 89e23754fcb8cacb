// @ts-check
/** The page of a new suite: a file, or a text that is larger than a form may be, is sent to the API. */
import { call } from "./upload/api.js";

const MAX_FORM = 16_000;

/** @param {string} id */
const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const form = /** @type {HTMLFormElement} */ (byId("suite"));
const input = /** @type {HTMLInputElement} */ (byId("file"));
byId("file-field").hidden = false;

// Before what every page does with a form that is sent.
form.addEventListener("submit", async (event) => {
  const fields = new FormData(form);
  const content = input.files?.[0] ?? String(fields.get("cases"));
  if (typeof content === "string" && content.length <= MAX_FORM) return;
  event.preventDefault();
  const button = /** @type {HTMLButtonElement} */ (event.submitter);
  button.disabled = true;
  const problem = byId("problem");
  problem.replaceChildren();
  try {
    const query = new URLSearchParams({ name: String(fields.get("name")).trim() });
    await call("POST", `/suites?${query}`, content, { "content-type": "application/jsonl" });
    location.assign("/console/suites");
  } catch (error) {
    const note = Object.assign(document.createElement("div"), { className: "note bad" });
    const text = error instanceof Error ? error.message : String(error);
    note.append(Object.assign(document.createElement("p"), { textContent: text }));
    problem.append(note);
    button.disabled = false;
  }
});
