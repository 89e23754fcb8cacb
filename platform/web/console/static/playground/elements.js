/** Finding and making elements of the playground. Text that comes from a model or a reader becomes `textContent`, never markup. */

/** @param {string} id */
export function byId(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/** @param {string} id */
export function isChecked(id) {
  return /** @type {HTMLInputElement} */ (byId(id)).checked;
}

/** Clone a template and fill its slots with text. @param {string} id @param {Record<string, string>} texts */
export function made(id, texts = {}) {
  const content = /** @type {HTMLTemplateElement} */ (byId(id)).content.cloneNode(true);
  const element = /** @type {HTMLElement} */ (/** @type {DocumentFragment} */ (content).firstElementChild);
  for (const [name, text] of Object.entries(texts)) slot(element, name).textContent = text;
  return element;
}

/** @param {HTMLElement} element @param {string} name */
export function slot(element, name) {
  return /** @type {HTMLElement} */ (element.querySelector(`[data-slot="${name}"]`));
}

/** Show what is wrong with a field, below it; an empty message takes it away. @param {HTMLElement} field @param {string} message */
export function setError(field, message) {
  const error = byId(`${field.id}-error`);
  error.hidden = !message;
  slot(error, "message").textContent = message;
  if (message) field.setAttribute("aria-invalid", "true");
  else field.removeAttribute("aria-invalid");
}

/** Return the draft of this session in this tab. Those of earlier sessions may be another person's, and go. @param {string} name @returns {any} */
export function draftOf(name) {
  for (const each of Object.keys(sessionStorage)) {
    if (each.startsWith("playground:") && each.split(":")[1] !== name.split(":")[1]) sessionStorage.removeItem(each);
  }
  return JSON.parse(sessionStorage.getItem(name) ?? "null");
}

/** @param {string} name @param {any} draft */
export function keepDraft(name, draft) {
  try {
    sessionStorage.setItem(name, JSON.stringify(draft));
  } catch {
    // The storage is full: a draft that is too long is not kept.
    sessionStorage.removeItem(name);
  }
}

/** @param {string} text @returns {{ok: true, value: any} | {ok: false, reason: string}} */
export function parsed(text) {
  try {
    return { ok: true, value: JSON.parse(text) };
  } catch (error) {
    return { ok: false, reason: /** @type {Error} */ (error).message };
  }
}

/** Valid JSON on lines of its own, its numbers and strings as they were written. @param {string} json */
export function indented(json) {
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  return json.replace(/("(?:[^"\\]|\\.)*")|\s+|([{[])\s*([}\]])|([{[])|([}\]])|(,)|(:)/g, (_, text, ...marks) => {
    const [opens, closes, open, close, comma, colon] = marks;
    if (open) return depth++, open + line();
    if (close) return depth--, line() + close;
    return text ?? (opens ? opens + closes : comma ? comma + line() : colon ? ": " : "");
  });
}
