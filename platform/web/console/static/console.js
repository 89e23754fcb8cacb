// @ts-check
/** What every page does: copy, dialogs, toasts, relative times, one submit at a time that a lost network keeps, polls. */
const $ = document;
const toasts = /** @type {Element} */ ($.querySelector(".toasts"));

/** @param {Element} box Goes after 8 s, but not while it is read. */
function leave(box) {
  setTimeout(() => (box.matches(":hover, :focus-within") ? leave(box) : box.remove()), 8000);
}

/** @param {string} text */
function toast(text) {
  const box = $.createElement("div");
  box.className = "toast";
  box.append(text);
  toasts.append(box);
  if (toasts.childElementCount > 3) toasts.firstElementChild?.remove();
  leave(box);
}

$.addEventListener("click", async (event) => {
  const button = /** @type {Element} */ (event.target).closest("button");
  if (!button) return;
  if (button.ariaDisabled === "true") return event.preventDefault();
  const { copy, copyFrom, dialog, close, print } = button.dataset;
  if (copy ?? copyFrom) {
    try {
      await navigator.clipboard.writeText(copy ?? $.getElementById(copyFrom ?? "")?.textContent ?? "");
      toast("Copied");
    } catch {
      // Without TLS there is no clipboard, and a browser may refuse it.
      toast("Not copied: this browser refuses it here. Select the text instead.");
    }
  }
  if (dialog) /** @type {HTMLDialogElement} */ ($.getElementById(dialog)).showModal();
  if (print !== undefined) window.print();
  if (close !== undefined) button.closest("dialog")?.close();
});

/** Says in the dialog or above `main` that the server does not answer; "" once it does. @param {"unsent" | "stale"} id @param {string} text */
function away(id, text) {
  $.getElementById(id)?.remove();
  if (!text) return;
  const note = $.createElement("p");
  Object.assign(note, { id, className: "note bad", role: "alert", textContent: text });
  ($.querySelector("dialog[open]") ?? $.querySelector("main"))?.prepend(note);
}

/** @type {HTMLElement?} The button whose form is sent. */
let sending = null;
$.addEventListener("submit", async (event) => {
  const button = event.submitter, form = /** @type {HTMLFormElement} */ (event.target);
  if (!button || event.defaultPrevented || form.method === "dialog") return;
  if (form.method !== "post") return void (button.ariaBusy = "true");
  if (button === sending) return void (sending = null);
  event.preventDefault();
  if (button.ariaBusy) return;
  button.ariaBusy = "true";
  try {
    await fetch("/livez", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    away("unsent", "");
    form.requestSubmit((sending = button));
  } catch {
    button.ariaBusy = null;
    away("unsent", "The server does not answer. Nothing was sent, and what you typed is still here: send it again once the network is back.");
  }
});

// A page that Back brings out of memory was left while its form was sent.
addEventListener("pageshow", ({ persisted }) => {
  if (persisted) for (const button of $.querySelectorAll("button[aria-busy]")) button.ariaBusy = null;
});

$.addEventListener("change", ({ target }) => {
  const box = /** @type {HTMLInputElement} */ (target);
  $.getElementById(box.dataset.enables ?? "")?.toggleAttribute("disabled", !box.checked);
});

/** @param {ParentNode} root Opens the dialogs that came with it, and goes to the first wrong field. */
function show(root) {
  for (const dialog of root.querySelectorAll("dialog[data-open]")) {
    dialog.removeAttribute("data-open");
    /** @type {HTMLDialogElement} */ (dialog).showModal();
  }
  /** @type {HTMLElement?} */ (root.querySelector("[aria-invalid=true]"))?.focus();
}
$.addEventListener("htmx:afterSwap", ({ target }) => show(/** @type {Element} */ (target)));
$.addEventListener("cancel", (event) => {
  if (/** @type {Element} */ (event.target).matches("[closedby=none]")) event.preventDefault();
}, true);

/** @type {Set<Element>} */
const late = new Set();
$.addEventListener("htmx:beforeRequest", (event) => {
  const part = /** @type {Element} */ (event.target);
  if ($.hidden && part.matches("[hx-trigger^=load]")) event.preventDefault(), late.add(part);
});
/** @param {Element} part A poll that its answer would have gone on with. */
const ask = (part) => {
  // @ts-ignore htmx is a script of its own.
  if (part.isConnected) htmx.ajax("GET", part.getAttribute("hx-get"), { source: part });
};
$.addEventListener("visibilitychange", () => {
  late.forEach(ask);
  late.clear();
});
$.addEventListener("htmx:sendError", ({ target }) => {
  const part = /** @type {Element} */ (target);
  away("stale", "The server does not answer. What stands here may have changed since.");
  if (part.matches("[hx-trigger^=load]")) setTimeout(ask, 5000, part);
});
$.addEventListener("htmx:afterOnLoad", () => away("stale", ""));

// The page of a store that does not answer asks again by itself, until that is stopped.
const retry = /** @type {HTMLElement?} */ ($.querySelector("[data-retry]"));
if (retry) {
  let left = Number(retry.dataset.retry);
  retry.hidden = false;
  const timer = setInterval(() => {
    if ($.hidden) return;
    if (--left < 0) return location.reload();
    /** @type {Element} */ (retry.querySelector("[data-left]")).textContent = `${left}\u00a0s`;
  }, 1000);
  retry.querySelector("button")?.addEventListener("click", () => { clearInterval(timer); retry.hidden = true; });
}

setInterval(() => {
  for (const time of /** @type {NodeListOf<HTMLTimeElement>} */ ($.querySelectorAll("time[data-ago]"))) {
    const past = (Date.now() - Date.parse(time.dateTime)) / 1000, s = Math.abs(past);
    const [size, unit] = s < 60 ? [1, "s"] : s < 3600 ? [60, "min"] : s < 86400 ? [3600, "h"] : [86400, "d"];
    const text = `${Math.floor(s / size)}\u00a0${unit}`;
    if (s < 604800) time.textContent = past < 0 ? `in ${text}` : `${text} ago`;
  }
}, 30000);
show($);
for (const box of toasts.children) leave(box);
