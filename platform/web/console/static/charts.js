// @ts-check
/**
 * Draws each `figure[data-chart]` from the table it names, or the columns of it in `data-columns`, and again when its rows are
 * replaced. Numbers come from the page only: `th[data-t]` are seconds, `td[data-v]` values, a cell without one is a gap.
 */

/** @typedef {{ times: number[], columns: (number | null)[][], names: string[], labels: string[] }} Numbers */

const DAY = 86400;
/** Steps of an axis: whole numbers, for every value is one. */
const STEPS = [...Array(56)].map((_, place) => [1, 2, 2.5, 5][place % 4] * 10 ** Math.floor(place / 4)).filter(Number.isInteger);
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
/** @type {any} */
const Plot = /** @type {any} */ (window).uPlot;

/** @param {HTMLElement} figure @returns {Numbers} */
function read(figure) {
  const table = /** @type {HTMLTableElement} */ (document.getElementById(figure.dataset.table ?? ""));
  const heads = [...table.querySelectorAll("thead th")];
  const chosen = figure.dataset.columns?.split(" ").map(Number);
  const shown = chosen ?? heads.flatMap((head, place) => (place && !(/** @type {HTMLElement} */ (head).dataset.omit) ? [place] : []));
  const rows = [...table.querySelectorAll("tbody tr")].sort((one, other) => time(one) - time(other));
  return {
    times: rows.map(time),
    labels: rows.map((row) => text(row.cells[0])),
    names: shown.map((place) => text(heads[place])),
    columns: shown.map((place) => rows.map((row) => number(row.cells[place]))),
  };
}

/** @param {any} row */
const time = (row) => Number(row.cells[0].dataset.t);
/** @param {Element} cell */
const text = (cell) => (cell.textContent ?? "").replace(/\s+/g, " ").trim();
/** @param {HTMLElement} cell */
const number = (cell) => (cell.dataset.v === undefined ? null : Number(cell.dataset.v));

/** @param {string} name */
const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A colour that is not registered is resolved by an element. @param {string} name */
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Write a value; `digits` are those of an amount of money. @param {HTMLElement} figure @param {number} value @param {number} digits */
function write(figure, value, digits) {
  const { prefix = "", unit = "", scale = "1" } = figure.dataset;
  const shown = prefix || scale !== "1" ? digits : 0;
  const amount = (value / Number(scale)).toLocaleString("en", { minimumFractionDigits: shown, maximumFractionDigits: shown });
  return `${prefix}${amount}${unit && "\u00a0" + unit}`;
}

/** The labels of an axis, all with the digits that its step needs. @param {HTMLElement} figure @param {number[]} splits */
function axisLabels(figure, splits) {
  const step = (splits[1] - splits[0]) / Number(figure.dataset.scale ?? "1");
  const digits = step >= 1 ? 0 : step >= 0.01 ? 2 : step >= 0.0001 ? 4 : 6;
  return splits.map((value) => write(figure, value, value ? digits : 0));
}

/** @param {number} seconds @param {number} step */
function moment(seconds, step) {
  const at = new Date(seconds * 1000);
  const day = `${at.getUTCDate()}\u00a0${MONTHS[at.getUTCMonth()]}`;
  const hour = at.toISOString().slice(11, 16);
  return step >= DAY || (step > 3600 && hour === "00:00") ? day : hour;
}

/** Each series on top of those before it; what is 0 is not drawn, not even its edge. @param {(number | null)[][]} columns */
function stacked(columns) {
  const sums = columns[0].map(() => 0);
  return columns.map((column) => column.map((value, place) => (value ? (sums[place] += value) : null)));
}

/** The places of values without a neighbour, which no line would show. @param {(number | null)[]} column */
const alone = (column) => column.flatMap((value, place) => (value !== null && (column[place - 1] ?? column[place + 1] ?? null) === null ? [place] : []));

/** How wide the labels of an axis are, with the space beside them. @param {any} plot @param {string[] | null} texts @param {string} font */
function labelWidth(plot, texts, font) {
  plot.ctx.save();
  plot.ctx.font = font;
  const widest = Math.max(40, ...(texts ?? []).map((text) => plot.ctx.measureText(text).width));
  plot.ctx.restore();
  return Math.ceil(widest) + 16;
}

/** @param {HTMLElement} figure */
function draw(figure) {
  const canvas = /** @type {HTMLElement} */ (figure.querySelector(".canvas"));
  const readout = /** @type {HTMLElement} */ (figure.querySelector(".readout"));
  const { times, columns, names, labels } = read(figure);
  if (!times.length || !columns.length) return;
  const bars = figure.dataset.chart === "bars";
  const step = times.length > 1 ? Math.min(...times.slice(1).map((at, place) => at - times[place])) : DAY;
  const drawn = bars ? stacked(columns) : columns;
  const order = drawn.map((_, place) => place);
  if (bars) order.reverse();
  const [surface, faint, line, control] = ["--surface", "--faint", "--line", "--control"].map(colour);
  const font = `12px ${token("--sans")}`;
  const look = { stroke: faint, font, ticks: { show: false }, border: { show: true, stroke: control, width: 1 } };
  const plot = new Plot(
    {
      width: canvas.clientWidth,
      height: canvas.clientHeight,
      padding: [8, 24, 0, 0],
      legend: { show: false },
      tzDate: (/** @type {number} */ at) => Plot.tzDate(new Date(at * 1000), "Etc/UTC"),
      cursor: { y: false, drag: { setScale: false, x: false, y: false }, points: { show: !bars } },
      scales: {
        x: { range: () => [times[0] - step / 2, times[times.length - 1] + step / 2] },
        y: { range: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ most) => [0, (most || Number(figure.dataset.scale) || 1) * 1.05] },
      },
      axes: [
        { ...look, size: 28, grid: { show: false }, incrs: [...[300, 900], ...[1, 2, 3, 4, 6, 12].map((hours) => hours * 3600), ...[1, 2, 3, 7, 14, 28].map((days) => days * DAY)].filter((each) => each % step === 0), space: 56, values: (/** @type {any} */ _, /** @type {number[]} */ splits) => splits.map((at) => moment(at, step)) },
        { ...look, border: { show: false }, grid: { stroke: line, width: 1 }, size: (/** @type {any} */ self, /** @type {string[] | null} */ texts) => labelWidth(self, texts, font), space: 32, incrs: STEPS, values: (/** @type {any} */ _, /** @type {number[]} */ splits) => axisLabels(figure, splits) },
      ],
      series: [
        {},
        ...order.map((place) => {
          const own = token(`--c${place + 1}`);
          if (!bars) return { stroke: own, width: 1.75, dash: place ? [5, 3] : undefined, spanGaps: false, points: { show: true, size: 4, fill: own, filter: () => alone(drawn[place]) } };
          return { stroke: surface, width: 1, fill: own, paths: Plot.paths.bars({ size: [0.72, 64] }), points: { show: false } };
        }),
      ],
      hooks: {
        setCursor: [
          (/** @type {any} */ self) => {
            const place = self.cursor.idx;
            readout.textContent = place === null || place === undefined ? ""
              : [labels[place], ...names.map((name, series) => `${name} ${columns[series][place] === null ? "–" : write(figure, /** @type {number} */ (columns[series][place]), Number(figure.dataset.digits))}`)].join(" · ");
          },
        ],
      },
    },
    [times, ...order.map((place) => drawn[place])],
    canvas,
  );
  return { plot, times };
}

/** @param {HTMLElement} figure */
function attach(figure) {
  const canvas = /** @type {HTMLElement} */ (figure.querySelector(".canvas"));
  let drawn = draw(figure);
  const again = () => {
    drawn?.plot.destroy();
    drawn = draw(figure);
  };
  new ResizeObserver(() => drawn?.plot.setSize({ width: canvas.clientWidth, height: canvas.clientHeight })).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  new MutationObserver(again).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  const table = document.getElementById(figure.dataset.table ?? "");
  if (table && figure.dataset.columns) new MutationObserver(again).observe(table, { childList: true });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !drawn) return;
    event.preventDefault();
    const { plot, times } = drawn;
    const at = Math.max(0, Math.min(times.length - 1, (plot.cursor.idx ?? (by > 0 ? -1 : times.length)) + by));
    plot.setCursor({ left: plot.valToPos(times[at], "x"), top: 0 });
  });
}

for (const figure of document.querySelectorAll("figure[data-chart]")) attach(/** @type {HTMLElement} */ (figure));
