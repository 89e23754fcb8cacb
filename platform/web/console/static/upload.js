// @ts-check
/**
 * The upload page: sends the two files of an adapter to the API in parts, with a bearer of ten minutes, then shows the report.
 * Nothing is kept in the browser. The server keeps the parts, and the same files continue where they stopped.
 *
 * @typedef {{name: string, size: number, sha256: string}} Declared
 * @typedef {{id: string, part_size: number, expires_at: string, files: (Declared & {parts: number})[],
 *   received: {file: string, number: number, sha256: string}[]}} Upload
 */
import { Refused, call } from "./upload/api.js";
import { Sha256 } from "./upload/sha256.js";

const CONFIG = "adapter_config.json";
const WEIGHTS = "adapter_model.safetensors";
const NAMES = [CONFIG, WEIGHTS];
const AT_ONCE = 3;
const TRIES = 3;
const BACKOFF_MS = 1000;
const SLICE = 4 << 20;

/** @param {string} id */
const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const root = byId("uploader");
const pauseButton = /** @type {HTMLButtonElement} */ (byId("pause"));
const { adapter = "", limits = "{}", report = "", free = "0" } = root.dataset;
/** @type {Record<string, number>} */
const maxBytes = JSON.parse(limits);

/* The files */

/** @param {File[]} files @returns {string | null} what is wrong with them */
function problemOf(files) {
  const foreign = files.find((file) => !NAMES.includes(file.name));
  if (foreign) return `${foreign.name} is none of the two files: ${NAMES.join(" and ")}.`;
  const missing = NAMES.find((name) => files.filter((file) => file.name === name).length !== 1);
  if (missing) return `Choose both files at once: ${missing} is missing or there twice.`;
  const large = files.find((file) => file.size > maxBytes[file.name]);
  if (large) return `${large.name} has ${large.size.toLocaleString("en")} bytes; at most ${maxBytes[large.name].toLocaleString("en")} are allowed.`;
  const empty = files.find((file) => !file.size);
  return empty ? `${empty.name} is empty.` : null;
}

/** @param {File} file @returns {Promise<string | null>} what is wrong with adapter_config.json */
async function configProblem(file) {
  let config;
  try {
    config = JSON.parse(await file.text());
  } catch {
    return `${CONFIG} is no JSON.`;
  }
  if (config === null || typeof config !== "object") return `${CONFIG} must be a JSON object.`;
  if (config.peft_type !== "LORA") return `peft_type of ${CONFIG} must be "LORA", not ${JSON.stringify(config.peft_type)}.`;
  if (config.use_dora) return `use_dora of ${CONFIG}: DoRA is not supported; save the adapter as plain LoRA.`;
  if (!Number.isInteger(config.r) || config.r < 1) return `r of ${CONFIG} must be a whole number from 1, not ${JSON.stringify(config.r)}.`;
  const targets = config.target_modules;
  const named = targets === "all-linear" || (Array.isArray(targets) && targets.length > 0);
  return named ? null : `target_modules of ${CONFIG} must list module names, or be "all-linear".`;
}

/** @param {File} file @param {Row} row @returns {Promise<Declared>} */
async function declared(file, row) {
  const digest = new Sha256();
  for (let start = 0; start < file.size; start += SLICE) {
    digest.update(new Uint8Array(await file.slice(start, start + SLICE).arrayBuffer()));
    row.show("hashing", start / file.size);
  }
  return { name: file.name, size: file.size, sha256: digest.hex() };
}

/* What is shown */

/** @param {number} bytes */
function size(bytes) {
  const [unit, scale] = bytes < 1e3 ? ["B", 1] : bytes < 1e6 ? ["kB", 1e3] : bytes < 1e9 ? ["MB", 1e6] : ["GB", 1e9];
  const number = bytes / scale;
  return `${scale === 1 ? number : number.toFixed(number < 10 ? 2 : number < 100 ? 1 : 0)}\u00a0${unit}`;
}

class Row {
  /** @param {File} file */
  constructor(file) {
    const template = /** @type {HTMLTemplateElement} */ (byId("file-row"));
    const copy = /** @type {DocumentFragment} */ (template.content.cloneNode(true));
    this.root = /** @type {HTMLElement} */ (copy.firstElementChild);
    this.file = file;
    this.bar = /** @type {HTMLProgressElement} */ (this.root.querySelector("progress"));
    this.bar.setAttribute("aria-label", `Upload of ${file.name}`);
    this.text(".name", file.name);
    byId("rows").append(copy);
  }

  /** @param {string} selector @param {string} text */
  text(selector, text) {
    const found = this.root.querySelector(selector);
    if (found) found.textContent = text;
  }

  /** @param {string} state @param {number} share */
  show(state, share) {
    this.text(".state", state);
    this.bar.value = share;
  }

  /** @param {() => void} again */
  offer(again) {
    const box = /** @type {HTMLElement} */ (this.root.querySelector(".again"));
    box.hidden = false;
    /** @type {HTMLButtonElement} */ (box.firstElementChild).onclick = again;
  }

  /** Offer nothing any more. */
  withdraw() {
    /** @type {HTMLElement} */ (this.root.querySelector(".again")).hidden = true;
  }
}

/** @param {string} text */
function complain(text) {
  const box = byId("problem");
  box.replaceChildren();
  if (!text) return;
  const note = Object.assign(document.createElement("div"), { className: "note bad" });
  note.append(Object.assign(document.createElement("p"), { textContent: text }));
  box.append(note);
}

/** @param {string} text */
const say = (text) => void (byId("said").textContent = text);

/* One upload */

class Sending {
  /** @param {Upload} upload @param {Row[]} rows */
  constructor(upload, rows) {
    this.upload = upload;
    this.rows = rows;
    this.abort = new AbortController();
    this.paused = false;
    this.began = performance.now();
    this.sent = 0;
    /** @type {Map<string, Set<number>>} */
    this.stored = new Map(rows.map((row) => [row.file.name, new Set()]));
    for (const part of upload.received) this.stored.get(part.file)?.add(part.number);
    const until = new Date(upload.expires_at);
    byId("kept").textContent = `You may close this page: the parts stay until ${until.toLocaleString("en", { timeZone: "UTC", dateStyle: "medium", timeStyle: "short" })} UTC, and choosing the same files goes on from here.`;
  }

  /** @param {boolean} paused */
  pause(paused) {
    this.paused = paused;
    pauseButton.textContent = paused ? "Go on" : "Pause";
    pauseButton.disabled = false;
    say(paused ? "Paused" : "Sending the files");
    if (paused) this.abort.abort();
  }

  /** @param {Row} row */
  missing(row) {
    const parts = this.upload.files.find((file) => file.name === row.file.name)?.parts ?? 0;
    const stored = this.stored.get(row.file.name) ?? new Set();
    return Array.from({ length: parts }, (_, index) => index + 1).filter((number) => !stored.has(number));
  }

  async run() {
    // A run that still goes on, as beside a file that failed, is replaced: two would complete the upload twice.
    this.abort.abort();
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.pause(false);
    for (const row of this.rows) row.withdraw();
    for (const row of this.rows) {
      await this.send(row, signal);
      if (signal.aborted || this.missing(row).length) return;
    }
    const made = await call("POST", `/uploads/${this.upload.id}/complete`);
    finished(made.version);
  }

  /** Send the missing parts of one file, three at once. @param {Row} row @param {AbortSignal} signal */
  async send(row, signal) {
    const waiting = this.missing(row);
    this.began = performance.now();
    this.sent = 0;
    this.draw(row);
    const work = async () => {
      for (let number = waiting.shift(); number !== undefined; number = waiting.shift()) await this.sendPart(row, number, signal);
    };
    const ended = await Promise.allSettled(Array.from({ length: AT_ONCE }, work));
    const failed = ended.find((each) => each.status === "rejected");
    if (!failed || signal.aborted) return;
    const { reason } = /** @type {PromiseRejectedResult} */ (failed);
    row.text(".state", "stopped");
    row.text(".detail", reason.message);
    say(`${row.file.name}: ${reason.message}`);
    row.offer(() => guarded(() => this.run()));
  }

  /** @param {Row} row @param {number} number @param {AbortSignal} signal */
  async sendPart(row, number, signal) {
    const { id, part_size } = this.upload;
    const bytes = await row.file.slice((number - 1) * part_size, number * part_size).arrayBuffer();
    const headers = { "content-type": "application/octet-stream", ...(await contentDigest(bytes)) };
    for (let attempt = 1; ; attempt += 1) {
      try {
        await call("PUT", `/uploads/${id}/${row.file.name}/parts/${number}`, bytes, headers, signal);
        break;
      } catch (error) {
        const passes = !(error instanceof Refused) || error.passes || error.status === 401;
        if (signal.aborted || !passes || attempt === TRIES) {
          throw new Error(`Part ${number}: ${error instanceof Error ? error.message : error}`);
        }
        await new Promise((resolve) => setTimeout(resolve, BACKOFF_MS * 2 ** (attempt - 1)));
      }
    }
    this.stored.get(row.file.name)?.add(number);
    this.sent += bytes.byteLength;
    this.draw(row);
  }

  /** @param {Row} row */
  draw(row) {
    const { part_size } = this.upload;
    const total = this.upload.files.find((file) => file.name === row.file.name)?.parts ?? 1;
    const done = total - this.missing(row).length;
    const bytes = Math.min(done * part_size, row.file.size);
    if (done === total) {
      row.show(`${size(row.file.size)}, sent`, 1);
      row.text(".detail", "");
      return;
    }
    const seconds = (performance.now() - this.began) / 1000;
    const left = this.sent ? ` · ${Math.ceil(((row.file.size - bytes) * seconds) / this.sent)} s left` : "";
    row.show(`${size(bytes)} of ${size(row.file.size)}${left}`, bytes / row.file.size);
    row.text(".detail", `${done} of ${total} parts.`);
  }
}

/** @param {ArrayBuffer} bytes @returns {Promise<Record<string, string>>} empty where the browser has no WebCrypto: without TLS */
async function contentDigest(bytes) {
  if (!crypto.subtle) return {};
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return { "content-digest": `sha-256=:${btoa(String.fromCharCode(...digest))}:` };
}

/* The page */

/** @type {Sending | null} */
let sending = null;
let isBusy = false;

/** Show an error where the person acted. @param {() => Promise<void>} work */
async function guarded(work) {
  try {
    await work();
  } catch (error) {
    complain(error instanceof Error ? error.message : String(error));
  }
}

/** @param {File[]} files */
async function begin(files) {
  const chosen = NAMES.flatMap((name) => files.filter((file) => file.name === name));
  const problem = problemOf(files) ?? (await configProblem(chosen[0]));
  complain(problem ?? "");
  if (problem) return;
  sending?.abort.abort();
  // Until the new files are sent, it would go on with those before.
  pauseButton.disabled = true;
  byId("rows").replaceChildren();
  byId("progress").hidden = false;
  say("Hashing the files");
  const rows = chosen.map((file) => new Row(file));
  /** @type {Declared[]} */
  const all = [];
  for (const row of rows) all.push(await declared(row.file, row));
  const upload = (await begun(all)) ?? (await open(all));
  sending = new Sending(upload, rows);
  await sending.run();
}

/** The upload of the same files that was begun before. @param {Declared[]} files @returns {Promise<Upload | null>} */
async function begun(files) {
  /** @type {[string | undefined, [string, number, string][]][]} */
  const open = [...document.querySelectorAll("[data-upload]")].map((item) => {
    const { upload, files: known = "[]" } = /** @type {HTMLElement} */ (item).dataset;
    return [upload, JSON.parse(known)];
  });
  if (sending) open.push([sending.upload.id, sending.upload.files.map(({ name, size, sha256 }) => [name, size, sha256])]);
  const same = open.find(([, known]) =>
    known.every(([name, bytes, sha256]) =>
      files.some((file) => file.name === name && file.size === bytes && file.sha256 === sha256),
    ),
  );
  return same ? call("GET", `/uploads/${same[0]}`) : null;
}

/** @param {Declared[]} files @returns {Promise<Upload>} */
async function open(files) {
  const needed = files.reduce((sum, file) => sum + file.size, 0);
  if (needed > Number(free)) {
    throw new Error(`${size(needed - Number(free))} of space are missing. Delete versions that no alias uses, then try again.`);
  }
  const headers = { "content-type": "application/json" };
  return call("POST", `/adapters/${encodeURIComponent(adapter)}/uploads`, JSON.stringify({ files }), headers);
}

/** @param {number} version */
function finished(version) {
  sending = null;
  byId("progress").hidden = true;
  byId("drop").hidden = true;
  say(`Version ${version} is being checked`);
  // The fragment asks for itself again until the report is whole.
  /** @type {any} */ (window).htmx.ajax("GET", `${report}${version}/report`, { target: "#report", swap: "outerHTML" });
}

/** @param {File[]} files */
async function choose(files) {
  if (isBusy || !files.length) return;
  isBusy = true;
  await guarded(() => begin(files));
  isBusy = false;
}

const drop = byId("drop");
drop.addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.dataset.over = "";
});
drop.addEventListener("dragleave", () => delete drop.dataset.over);
drop.addEventListener("drop", (event) => {
  event.preventDefault();
  delete drop.dataset.over;
  choose([...(event.dataTransfer?.files ?? [])]);
});
const input = /** @type {HTMLInputElement} */ (byId("files"));
function take() {
  const files = [...(input.files ?? [])];
  // Choosing the same files again is a change, too.
  input.value = "";
  choose(files);
}
input.addEventListener("change", take);

pauseButton.addEventListener("click", () => {
  const current = sending;
  if (current?.paused) guarded(() => current.run());
  else current?.pause(true);
});

let discarded = "";
const dialog = /** @type {HTMLDialogElement} */ (byId("discard-dialog"));
/** @param {string} id */
function askToDiscard(id) {
  discarded = id;
  dialog.showModal();
}
byId("discard").addEventListener("click", () => sending && askToDiscard(sending.upload.id));
for (const button of document.querySelectorAll("[data-discard]")) {
  button.addEventListener("click", () => askToDiscard(/** @type {HTMLElement} */ (button).dataset.discard ?? ""));
}
byId("discard-now").addEventListener("click", () =>
  guarded(async () => {
    dialog.close();
    if (sending?.upload.id === discarded) sending.abort.abort();
    await call("DELETE", `/uploads/${discarded}`);
    location.reload();
  }),
);
// Files may have been chosen before this module was there.
take();
