// @ts-check
/** What every page does: copies, opens dialogs, takes toasts away, keeps relative times true, drops polls while hidden. */

const status = /** @type {HTMLElement} */ (document.querySelector(".toasts"));

/** @param {string} text */
function toast(text) {
  const box = document.createElement("div");
  box.className = "toast";
  box.append(Object.assign(document.createElement("p"), { textContent: text }));
  status.append(box);
  while (status.childElementCount > 3) status.firstElementChild?.remove();
  leave(box);
}

/** @param {Element} box */
function leave(box) {
  setTimeout(() => (box.matches(":hover, :focus-within") ? leave(box) : box.remove()), 8000);
}

document.addEventListener("click", async (event) => {
  const button = event.target instanceof Element ? event.target.closest("button") : null;
  if (!button) return;
  if (button.getAttribute("aria-disabled") === "true") return event.preventDefault();
  const { copy, copyFrom, dialog } = button.dataset;
  if (copy !== undefined || copyFrom) {
    await navigator.clipboard.writeText(copy ?? document.getElementById(copyFrom ?? "")?.textContent ?? "");
    toast("Copied");
  } else if (dialog) {
    /** @type {HTMLDialogElement | null} */ (document.getElementById(dialog))?.showModal();
  } else if (button.dataset.close !== undefined) button.closest("dialog")?.close();
});

// A second submit of the same form waits for the answer to the first.
document.addEventListener("submit", (event) => {
  const button = event.submitter;
  if (!button || event.defaultPrevented) return;
  if (button.getAttribute("aria-busy") === "true") event.preventDefault();
  button.setAttribute("aria-busy", "true");
});

document.addEventListener("change", (event) => {
  const box = /** @type {HTMLInputElement} */ (event.target);
  const next = box.dataset?.enables && document.getElementById(box.dataset.enables);
  if (next) next.toggleAttribute("disabled", !box.checked);
});

/** @param {ParentNode} root */
function open(root) {
  for (const dialog of root.querySelectorAll("dialog[data-open]")) {
    dialog.removeAttribute("data-open");
    /** @type {HTMLDialogElement} */ (dialog).showModal();
  }
  /** @type {HTMLElement | null} */ (root.querySelector("[aria-invalid=true]"))?.focus();
}
document.addEventListener("cancel", (event) => {
  if (event.target instanceof Element && event.target.getAttribute("closedby") === "none") event.preventDefault();
}, true);
document.addEventListener("htmx:afterSwap", (event) => open(/** @type {Element} */ (event.target)));
document.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden && /** @type {CustomEvent} */ (event).detail.requestConfig.triggeringEvent?.type === "load") event.preventDefault();
});

const units = /** @type {const} */ ([["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]);
function refresh() {
  for (const time of document.querySelectorAll("time[data-ago]")) {
    const seconds = (Date.now() - Date.parse(/** @type {HTMLTimeElement} */ (time).dateTime)) / 1000;
    const [unit, size] = units.find(([, size]) => Math.abs(seconds) >= size) ?? ["s", 1];
    if (Math.abs(seconds) >= 604800) continue;
    const text = `${Math.floor(Math.abs(seconds) / size)}\u00a0${unit}`;
    time.textContent = seconds < 0 ? `in ${text}` : `${text} ago`;
  }
}
setInterval(refresh, 30000);
open(document);
for (const box of status.children) leave(box);
