// @ts-check
/**
 * Markdown of chat models as DOM nodes: their text is never parsed as HTML (read inline.js next).
 *
 * Paragraphs, headings, lists, quotes, code, tables and rules; HTML stays text. The subset follows
 * CommonMark (https://spec.commonmark.org/0.31.2/) and GitHub's tables, but a newline breaks the
 * line, and indented text is no code.
 */

import { el } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +|$)/;
const COLUMNS = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_NESTING = 10; // lists and quotes in one another
const MAX_LENGTH = 400_000; // characters; a longer text is shown as it is

/** @typedef {{ source: string, make: () => HTMLElement }} Block */

/**
 * Show `text` in `target`. Only changed blocks are rebuilt, so that a selection in a growing answer
 * survives.
 * @param {HTMLElement} target
 * @param {string} text
 */
export function show(target, text) {
  const blocks = text.length > MAX_LENGTH ? [plain(text)] : parse(text.split("\n"), 0);
  /** @type {string[]} */
  const before = shown.get(target) ?? [];
  let same = 0;
  while (same < before.length && same < blocks.length && before[same] === blocks[same].source) same += 1;
  while (target.childNodes.length > same) target.lastChild?.remove();
  target.append(...blocks.slice(same).map((block) => block.make()));
  shown.set(target, blocks.map((block) => block.source));
}

/** @type {WeakMap<HTMLElement, string[]>} */
const shown = new WeakMap(); // the sources of an element's children

/** @param {string} text @returns {Block} */
function plain(text) {
  return { source: text, make: () => el("p", { class: "plain" }, text) };
}

/**
 * @param {string[]} lines
 * @param {number} depth
 * @returns {Block[]}
 */
function parse(lines, depth) {
  if (depth > MAX_NESTING) return [plain(lines.join("\n"))];
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const start = at;
    const [end, make] = block(lines, at, depth);
    at = end;
    blocks.push({ source: lines.slice(start, end).join("\n"), make });
  }
  return blocks;
}

/**
 * The block that begins at a line: its end, and a function that makes its element.
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 * @returns {[number, () => HTMLElement]}
 */
function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(6, heading[1].length + 2); // the page's own are above
    return [at + 1, () => el(`h${level}`, {}, inline(heading[2] ?? ""))];
  }
  if (RULE.test(line)) return [at + 1, () => el("hr")];
  if (QUOTE.test(line)) return quote(lines, at, depth);
  if (ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && at + 1 < lines.length && isTable(line, lines[at + 1])) return table(lines, at);
  return paragraph(lines, at);
}

/** @param {string} line */
function interrupts(line) {
  const item = ITEM.exec(line);
  const begins = item && item[0].length < line.length && !/^\d/.test(item[2].replace(/^1[.)]$/, "-"));
  return Boolean(begins) || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @returns {[number, () => HTMLElement]}
 */
function paragraph(lines, at) {
  let end = at + 1;
  while (
    end < lines.length &&
    lines[end].trim() &&
    !interrupts(lines[end]) &&
    !(lines[end].includes("|") && end + 1 < lines.length && isTable(lines[end], lines[end + 1]))
  ) {
    end += 1;
  }
  const text = lines.slice(at, end).join("\n").trim();
  return [end, () => el("p", {}, inline(text))];
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {RegExpExecArray} fence
 * @returns {[number, () => HTMLElement]}
 */
function code(lines, at, fence) {
  const mark = fence[1];
  const isEnd = (/** @type {string} */ line) => {
    const found = /^ {0,3}(`{3,}|~{3,})\s*$/.exec(line);
    return found !== null && found[1][0] === mark[0] && found[1].length >= mark.length;
  };
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const language = fence[2].trim().split(/\s+/)[0].slice(0, 30);
  return [Math.min(lines.length, end + 1), () => codeBlock(text, language)];
}

/**
 * @param {string} text
 * @param {string} language
 */
function codeBlock(text, language) {
  const copy = el("button", { type: "button", class: "quiet" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const head = el("figcaption", {}, el("span", {}, language || "code"), copy);
  const body = el("pre", { tabindex: "0", role: "group", "aria-label": `${language} code` }, el("code", {}, text));
  return el("figure", { class: "code" }, head, body);
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 * @returns {[number, () => HTMLElement]}
 */
function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, () => el("blockquote", {}, ...parse(inner, depth + 1).map((child) => child.make()))];
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 * @returns {[number, () => HTMLElement]}
 */
function list(lines, at, depth) {
  const kind = kindOf(lines[at]);
  /** @type {string[][]} */
  const items = [];
  let indent = 0;
  let loose = false;
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const isInner = line.startsWith(" ".repeat(indent)) && items.length > 0;
    if (!line.trim()) {
      const next = lines.slice(end + 1, end + 3).find((later) => later.trim());
      const goesOn = next !== undefined && (next.startsWith(" ".repeat(indent)) || kindOf(next) === kind);
      if (!goesOn) break;
      loose = true;
      items[items.length - 1].push("");
    } else if (item && !isInner) {
      if (kindOf(line) !== kind || RULE.test(line)) break;
      indent = Math.max(2, item[1].length + item[2].length + 1);
      items.push([line.slice(item[0].length)]);
    } else if (isInner) {
      items[items.length - 1].push(line.slice(indent));
    } else if (interrupts(line) || !lines[end - 1].trim()) {
      break;
    } else {
      items[items.length - 1].push(line.trim()); // it goes on without its indent
    }
  }
  const first = /^\s*(\d+)/.exec(lines[at])?.[1];
  const start = first !== undefined && first !== "1" ? { start: Number(first) } : {};
  const make = () => el(first === undefined ? "ul" : "ol", start, ...items.map((item) => listItem(item, loose, depth)));
  return [end, make];
}

/** @param {string} line */
function kindOf(line) {
  return ITEM.exec(line)?.[2].replace(/^\d+/, "");
}

/**
 * @param {string[]} lines
 * @param {boolean} loose
 * @param {number} depth
 */
function listItem(lines, loose, depth) {
  const task = /^\[([ xX])\] +/.exec(lines[0]);
  const box = task && el("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "done" });
  const rest = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  const children = parse(rest, depth + 1).map((child) => child.make());
  const tight = !loose && children[0]?.tagName === "P" ? [...children[0].childNodes, ...children.slice(1)] : children;
  return el("li", task ? { class: "task" } : {}, box, ...tight);
}

/** @param {string} line */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/**
 * @param {string} head
 * @param {string} columns
 */
function isTable(head, columns) {
  return COLUMNS.test(columns) && columns.includes("-") && cells(head).length === cells(columns).length;
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @returns {[number, () => HTMLElement]}
 */
function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (/** @type {string} */ line, /** @type {string} */ tag) => {
    const found = cells(line);
    const make = (/** @type {string} */ side, /** @type {number} */ column) =>
      el(tag, { class: side || null, scope: tag === "th" ? "col" : null }, inline(found[column] ?? ""));
    return el("tr", {}, ...sides.map(make));
  };
  const make = () => {
    const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
    const all = el("table", {}, el("thead", {}, row(lines[at], "th")), el("tbody", {}, ...body));
    return el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "table" }, all);
  };
  return [end, make];
}
