// @ts-check
/** The engine page's canvases: the map of pages and the steps (read charts.js for its SVG). */

/** A colour for a sequence: neighbours in number differ most. @param {string} name */
export function colourOf(name) {
  const [number, index] = name.split(".");
  const hue = (Number(number) * 137.508 + 215 - 137.508 + Number(index ?? 0) * 20) % 360; // the golden angle
  return `oklch(0.57 0.16 ${hue.toFixed(1)})`; // of one lightness, on which white can be read
}

/** A colour of the style sheet. @param {string} name */
export function styled(name) {
  probe ??= document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  probe.style.color = `var(${name})`;
  probe.hidden = false;
  const found = getComputedStyle(probe).color; // as light-dark() has decided
  probe.hidden = true;
  return found;
}
/** @type {HTMLElement | undefined} */
let probe;

/**
 * Resize and clear a canvas; return its context. Lengths are CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
function pen(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/**
 * The map of pages: a square per page, in the order of their numbers.
 * @param {HTMLCanvasElement} canvas
 * @param {{ cells: string, whose: string[] }} pages
 * @returns {{ columns: number, size: number }} where to find a page again
 */
export function drawPages(canvas, { cells, whose }) {
  const width = Math.max(200, canvas.parentElement?.clientWidth ?? 200);
  const size = Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * 260) / Math.max(1, cells.length)))));
  const columns = Math.floor(width / size);
  const rows = Math.ceil(cells.length / columns);
  const context = pen(canvas, width, rows * size);
  const colours = new Map([["f", styled("--free")], ["c", styled("--cached")], ["s", styled("--shared")], ["h", styled("--held")]]);
  const gap = size > 6 ? 2 : 1;
  let owned = 0;
  for (let cell = 0; cell < cells.length; cell += 1) {
    const letter = cells[cell];
    context.fillStyle = letter === "o" ? colourOf(whose[owned++]) : (colours.get(letter) ?? "red");
    context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - gap, size - gap);
  }
  return { columns, size };
}

const LABEL = 46; // pixels for the names of rows
const ROW = 18;
const COLUMN = 22;
const TIMES = 62; // pixels for the times of steps
const MAX_ROWS = 24;

/**
 * The newest steps: rows are sequences, columns are steps; their times are below.
 * @param {HTMLCanvasElement} canvas
 * @param {any[]} steps
 */
export function drawSteps(canvas, steps) {
  const width = Math.max(320, canvas.parentElement?.clientWidth ?? 320);
  const shown = steps.slice(-Math.floor((width - LABEL) / COLUMN));
  const names = rowsOf(shown);
  const floor = Math.max(4, names.length) * ROW + 6;
  const context = pen(canvas, width, floor + TIMES + 16);
  const [text, muted, line, wrong] = ["--text", "--muted", "--line", "--wrong"].map(styled);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  names.forEach((name, row) => {
    context.fillStyle = colourOf(name);
    context.fillRect(0, row * ROW + 5, 8, 8);
    context.fillStyle = text;
    context.fillText(name, 13, row * ROW + 9.5, LABEL - 16);
    context.fillStyle = line;
    context.fillRect(LABEL, row * ROW + ROW - 1, width - LABEL, 0.5);
  });
  const times = ["--held", "--accent", "--held"].map(styled);
  const longest = scaleOf(shown.map((step) => sum(step.ms)));
  shown.forEach((step, column) => {
    const x = LABEL + column * COLUMN;
    if (column && step.step !== shown[column - 1].step + 1) gapBefore(context, x, floor, line);
    for (const span of step.spans) drawSpan(context, x, names.indexOf(span[0]), span);
    for (const name of step.preempted ?? []) {
      context.fillStyle = wrong;
      context.fillText("✕", x + 6, names.indexOf(name) * ROW + 9.5);
    }
    drawTime(context, x, floor, step.ms.map((/** @type {number} */ ms) => ms / longest), times);
  });
  context.fillStyle = muted;
  context.fillText(`${longest.toFixed(longest < 10 ? 1 : 0)} ms`, 0, floor + 11, LABEL - 4);
  context.fillText("0", LABEL - 12, floor + TIMES - 6);
  const last = shown.at(-1);
  if (last) context.fillText(`step ${shown[0].step}`, LABEL, floor + TIMES + 9);
  if (last && shown.length > 8) {
    context.textAlign = "right";
    context.fillText(`step ${last.step}`, LABEL + shown.length * COLUMN, floor + TIMES + 9);
    context.textAlign = "left";
  }
}

/** The sequences of these steps in numeric order; the newest if too many. @param {any[]} steps */
function rowsOf(steps) {
  const names = new Set(steps.flatMap((step) => [...step.spans.map((/** @type {any} */ s) => s[0]), ...(step.preempted ?? [])]));
  const order = (/** @type {string} */ name) => {
    const [number, index] = name.split(".");
    return Number(number) * 1000 + Number(index ?? 0);
  };
  return [...names].sort((a, b) => order(a) - order(b)).slice(-MAX_ROWS);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} row
 * @param {[string, number, number, boolean, number?]} span
 */
function drawSpan(context, x, row, [name, , count, decodes, right]) {
  if (row < 0) return;
  const y = row * ROW;
  context.fillStyle = colourOf(name);
  if (right !== undefined) {
    // A verified draft: a point for the certain token, a bar per draft token, filled if accepted.
    const wide = (COLUMN - 10) / Math.max(1, count - 1);
    context.strokeStyle = context.fillStyle;
    context.fillRect(x + 2, y + ROW / 2 - 2, 4, 4);
    for (let guess = 0; guess < count - 1; guess += 1) {
      const box = /** @type {[number, number, number, number]} */ ([x + 8 + guess * wide, y + 4.5, Math.max(1, wide - 1), ROW - 9]);
      if (guess < right) context.fillRect(...box);
      else context.strokeRect(...box);
    }
    return;
  }
  if (decodes) {
    context.beginPath();
    context.arc(x + COLUMN / 2, y + ROW / 2, 3.5, 0, 7);
    context.fill();
    return;
  }
  context.fillRect(x + 1, y + 1, COLUMN - 2, ROW - 3);
  context.fillStyle = "#fff";
  context.textAlign = "center";
  context.fillText(count > 999 ? `${Math.round(count / 1000)}k` : String(count), x + COLUMN / 2, y + ROW / 2, COLUMN - 3);
  context.textAlign = "left";
}

/**
 * A step's times for plan, run and commit, as shares of the longest step.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} floor
 * @param {number[]} shares
 * @param {string[]} colours
 */
function drawTime(context, x, floor, shares, colours) {
  const [top, bottom] = [floor + 8, floor + TIMES];
  let y = bottom;
  shares.forEach((share, part) => {
    const height = Math.min(share * (bottom - top), y - top);
    context.fillStyle = colours[part];
    context.fillRect(x + 3, y - height, COLUMN - 6, height);
    y -= height;
  });
  if (sum(shares) > 1.001) {
    context.fillStyle = colours[0]; // it was longer than the scale
    context.fillText("▴", x + COLUMN / 2 - 4, floor + 3);
  }
}

/**
 * Draw the mark of missing steps before a step.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} height
 * @param {string} colour
 */
function gapBefore(context, x, height, colour) {
  context.strokeStyle = colour;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(x + 0.5, 0);
  context.lineTo(x + 0.5, height + TIMES);
  context.stroke();
  context.setLineDash([]);
}

/** The scale's top: the longest time, unless it would hide all others. @param {number[]} times */
function scaleOf(times) {
  const ordered = [...times].sort((a, b) => a - b);
  const median = ordered[ordered.length >> 1] ?? 1;
  return Math.max(0.1, Math.min(ordered.at(-1) ?? 1, 5 * median));
}

/** @param {number[]} values */
function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
