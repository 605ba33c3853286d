// @ts-check
/** The engine page's SVG: the tree of prefixes and the histograms. */

import { colourOf } from "./draw.js";
import { duration, number } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 20;
const MAX_ROWS = 40;

/**
 * @param {string} tag
 * @param {Record<string, string | number>} props
 * @param {...(Node | string)} children
 */
function svg(tag, props, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/**
 * @typedef {{ parent: number | null, start: number, tokens: number, pages: number, kind: string, users: string[],
 *   salt?: number, text?: string, row?: number, children?: Stretch[] }} Stretch
 */

/**
 * The tree: positions from left to right, a row per branch.
 * @param {HTMLElement} target
 * @param {Stretch[]} stretches
 * @returns {number} branches that there was no room for
 */
export function drawTree(target, stretches) {
  const roots = stretches.filter((one) => one.parent === null);
  stretches.forEach((one) => (one.children = []));
  stretches.forEach((one) => one.parent !== null && stretches[one.parent].children?.push(one));
  let rows = 0;
  let hidden = 0;
  /** @param {Stretch} one @param {number} row */
  const place = (one, row) => {
    one.row = row;
    one.children?.forEach((child, order) => {
      if (order > 0 && rows >= MAX_ROWS) hidden += 1;
      else place(child, order === 0 ? row : rows++);
    });
  };
  for (const root of roots) {
    if (rows >= MAX_ROWS) hidden += 1;
    else place(root, rows++);
  }
  const shown = stretches.filter((one) => one.row !== undefined);
  const width = Math.max(300, target.clientWidth);
  const end = Math.max(1, ...shown.map((one) => one.start + one.tokens));
  const scale = (width - 2) / end;
  const picture = svg("svg", { class: "chart tree", width, height: Math.max(1, rows) * ROW, role: "list" });
  for (const one of shown) picture.append(...edgeOf(one, stretches, scale), stretchOf(one, scale));
  target.replaceChildren(picture);
  return hidden;
}

/**
 * @param {Stretch} one
 * @param {Stretch[]} all
 * @param {number} scale
 */
function edgeOf(one, all, scale) {
  if (one.parent === null) return [];
  const from = all[one.parent].row ?? 0;
  const to = one.row ?? 0;
  if (from === to) return [];
  const x = one.start * scale + 1;
  return [svg("path", { class: "edge", d: `M${x} ${from * ROW + ROW - 4}V${to * ROW + ROW / 2}h3` })];
}

/**
 * @param {Stretch} one
 * @param {number} scale
 */
function stretchOf(one, scale) {
  const x = one.start * scale + 1;
  const y = (one.row ?? 0) * ROW + 2;
  const width = Math.max(3, one.tokens * scale - 1);
  const whose = one.users.length ? `used by ${one.users.join(", ")}` : one.kind === "t" ? "on disk only" : "cached, not in use";
  const salt = one.salt ? `, of cache salt ${one.salt}` : "";
  const words = `${number(one.tokens)} tokens from position ${number(one.start)}, ${whose}${salt}${one.text ? `: ${one.text}` : ""}`;
  const group = svg("g", { role: "listitem", "aria-label": words }, svg("title", {}, words));
  const box = svg("rect", { x, y, width, height: ROW - 5, rx: 3 });
  box.style.fill = { o: colourOf(one.users[0] ?? "0"), s: "var(--shared)", c: "var(--cached)" }[one.kind] ?? "var(--free)";
  group.append(box);
  const label = one.text ? one.text.replace(/\s+/g, " ") : number(one.tokens);
  const room = Math.floor((width - 6) / 6.2);
  if (room >= Math.min(label.length, 4)) {
    const text = svg("text", { x: x + 4, y: y + 11 }, label.length > room ? `${label.slice(0, room - 1)}…` : label);
    if (one.kind === "o") text.classList.add("in-dark");
    if (one.kind === "s") text.style.fill = "var(--surface)";
    group.append(text);
  }
  return group;
}

/**
 * A histogram: a bar per bucket, without empty buckets at both ends.
 * @param {HTMLElement} target
 * @param {number[]} counts
 * @param {number[]} bounds  in seconds; the last count is of all above
 */
export function drawHistogram(target, counts, bounds) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  const used = counts.flatMap((count, place) => (count ? [place] : []));
  if (!total) {
    target.replaceChildren(document.createTextNode("Nothing yet."));
    return;
  }
  const first = Math.max(0, used[0] - 1);
  const last = Math.min(counts.length - 1, used[used.length - 1] + 1);
  const shown = counts.slice(first, last + 1);
  const [width, height, bottom, top] = [Math.max(240, target.clientWidth), 150, 18, 14];
  const column = width / shown.length;
  const most = Math.max(...shown);
  const bars = svg("g", { class: "bars" });
  const labels = svg("g", {});
  shown.forEach((count, place) => {
    const tall = (count / most) * (height - bottom - top);
    const bound = bounds[first + place];
    const words = bound === undefined ? `more than ${duration(bounds[bounds.length - 1])}` : `up to ${duration(bound)}`;
    const bar = svg("rect", { x: place * column + 1, y: height - bottom - tall, width: column - 2, height: tall, rx: 2 });
    bar.append(svg("title", {}, `${words}: ${number(count)}`));
    bars.append(bar);
    if (bound !== undefined && column > 48) {
      labels.append(svg("text", { x: (place + 1) * column, y: height - 4, "text-anchor": "end" }, `≤ ${duration(bound)}`));
    } else if (bound !== undefined && place % 2 === 1) {
      labels.append(svg("text", { x: (place + 1) * column, y: height - 4, "text-anchor": "end" }, duration(bound)));
    }
    if (count) labels.append(svg("text", { x: (place + 0.5) * column, y: height - bottom - tall - 3, "text-anchor": "middle" }, number(count)));
  });
  const said = [0.5, 0.95, 0.99].map((share) => `${100 * share} % within ${within(counts, bounds, total * share)}`).join(" · ");
  const axis = svg("line", { class: "axis", x1: 0, x2: width, y1: height - bottom, y2: height - bottom });
  const picture = svg("svg", { class: "chart", width, height, role: "img", "aria-label": said }, bars, labels, axis);
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = `${number(total)} since the start: ${said}`;
  target.replaceChildren(note, picture);
}

/**
 * @param {number[]} counts
 * @param {number[]} bounds
 * @param {number} wanted
 */
function within(counts, bounds, wanted) {
  let sum = 0;
  for (let place = 0; place < bounds.length; place += 1) {
    sum += counts[place];
    if (sum >= wanted) return duration(bounds[place]);
  }
  return `more than ${duration(bounds[bounds.length - 1])}`;
}
