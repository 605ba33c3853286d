// @ts-check
/**
 * Inline Markdown as DOM nodes: emphasis, code, links (read markdown.js for blocks).
 *
 * Links lead only to http, https and mailto, and nothing is loaded by itself: an image becomes a
 * link, since a request for it could tell its server what the model wrote. Delimiters are matched
 * as in CommonMark (https://spec.commonmark.org/0.31.2/#delimiter-run), without its rule of three.
 */

import { el } from "./dom.js";

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SCHEMES = ["http:", "https:", "mailto:"];
const MAX_LABEL = 1000; // characters between brackets
const MAX_NESTING = 4; // links' labels in links' labels

/** @typedef {{ mark: string, count: number, opens: boolean, closes: boolean, node: Text }} Delimiter */

/**
 * @param {string} text
 * @param {number} [depth]
 * @returns {DocumentFragment}
 */
export function inline(text, depth = 0) {
  return new Inline(text, depth).run();
}

/**
 * The address, if a link may have it.
 * @param {string} address
 */
function safe(address) {
  try {
    const url = new URL(address);
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null; // relative, or no address at all
  }
}

/**
 * @param {string} address
 * @param {Node | string} label
 */
function link(address, label) {
  return el("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}

class Inline {
  /**
   * @param {string} text
   * @param {number} depth
   */
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.plain = "";
    this.out = document.createDocumentFragment();
    /** @type {Delimiter[]} */
    this.delimiters = [];
    this.noClose = new Set(); // lengths of runs of backticks that nothing closes
  }

  run() {
    const { text } = this;
    while (this.at < text.length) {
      const c = text[this.at];
      const taken =
        (c === "\\" && this.escape()) ||
        (c === "`" && this.code()) ||
        (c === "\n" && this.lineBreak()) ||
        (c === "<" && this.autolink()) ||
        ((c === "[" || (c === "!" && text[this.at + 1] === "[")) && this.link()) ||
        (c === "h" && this.bareAddress()) ||
        ((c === "*" || c === "_" || c === "~") && this.delimiter());
      if (!taken) {
        this.plain += c;
        this.at += 1;
      }
    }
    this.flush();
    this.emphasise();
    return this.out;
  }

  /** @param {(Node | null)[]} nodes */
  flush(...nodes) {
    if (this.plain) this.out.append(this.plain);
    this.plain = "";
    for (const node of nodes) if (node) this.out.append(node);
    return true;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") {
      this.at += 2;
      return this.flush(el("br"));
    }
    if (next === undefined || !PUNCTUATION.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  lineBreak() {
    // A model that writes a line break means one.
    this.plain = this.plain.replace(/ +$/, "");
    this.at += 1;
    return this.flush(el("br"));
  }

  code() {
    const run = /^`+/.exec(this.text.slice(this.at, this.at + 64))?.[0] ?? "`";
    const start = this.at + run.length;
    let end = this.noClose.has(run.length) ? -1 : this.text.indexOf(run, start);
    while (end >= 0 && (this.text[end + run.length] === "`" || this.text[end - 1] === "`")) {
      end = this.text.indexOf(run, end + 1);
    }
    if (end < 0) {
      this.noClose.add(run.length);
      this.plain += run;
      this.at = start;
      return true;
    }
    let inner = this.text.slice(start, end).replaceAll("\n", " ");
    if (inner.trim() && inner.startsWith(" ") && inner.endsWith(" ")) inner = inner.slice(1, -1);
    this.at = end + run.length;
    return this.flush(el("code", {}, inner));
  }

  autolink() {
    const found = /^<([a-z]+:[^\s<>]{1,2000})>/i.exec(this.text.slice(this.at, this.at + 2100));
    const address = found && safe(found[1]);
    if (!found || !address) return false;
    this.at += found[0].length;
    return this.flush(link(address, found[1]));
  }

  bareAddress() {
    if (/\w/.test(this.text[this.at - 1] ?? "")) return false;
    let found = /^https?:\/\/[^\s<>"`]{1,2000}/.exec(this.text.slice(this.at, this.at + 2100))?.[0];
    if (!found) return false;
    found = found.replace(/[.,:;!?'*_~]+$/, "");
    while (found.endsWith(")") && found.split(")").length > found.split("(").length) found = found.slice(0, -1);
    const address = safe(found);
    if (!address) return false;
    this.at += found.length;
    return this.flush(link(address, found));
  }

  link() {
    if (this.depth >= MAX_NESTING) return false;
    const image = this.text[this.at] === "!";
    const open = this.at + (image ? 1 : 0);
    const close = this.closingBracket(open);
    if (close < 0 || this.text[close + 1] !== "(") return false;
    const rest = this.text.slice(close + 2, close + 2200);
    const found = /^\s*(?:<([^<>\n]*)>|((?:[^\s()]|\([^\s()]*\))*))(?:\s+"[^"]*")?\s*\)/.exec(rest);
    if (!found) return false;
    const label = this.text.slice(open + 1, close);
    const address = safe(found[1] ?? found[2] ?? "");
    this.at = close + 2 + found[0].length;
    if (address === null) {
      // Shown as text with its address; it leads nowhere.
      this.plain += `${label} (${found[1] ?? found[2] ?? ""})`;
      return true;
    }
    return this.flush(link(address, image ? `image: ${label || address}` : inline(label, this.depth + 1)));
  }

  /** @param {number} open */
  closingBracket(open) {
    let level = 0;
    const end = Math.min(this.text.length, open + MAX_LABEL);
    for (let i = open; i < end; i += 1) {
      const c = this.text[i];
      if (c === "\\") i += 1;
      else if (c === "[") level += 1;
      else if (c === "]" && --level === 0) return i;
    }
    return -1;
  }

  delimiter() {
    const mark = this.text[this.at];
    let end = this.at;
    while (this.text[end] === mark) end += 1;
    const count = end - this.at;
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[end] ?? " ";
    const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
    const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
    const node = document.createTextNode(this.text.slice(this.at, end));
    this.at = end;
    this.flush(node);
    if (mark !== "~" || count === 2) {
      const opens = mark === "_" ? left && (!right || PUNCTUATION.test(before)) : left;
      const closes = mark === "_" ? right && (!left || PUNCTUATION.test(after)) : right;
      this.delimiters.push({ mark, count, opens, closes, node });
    }
    return true;
  }

  /** Wrap the nodes between matching delimiters in an element; other delimiters stay text. */
  emphasise() {
    /** @type {Delimiter[]} */
    const open = [];
    for (const closer of this.delimiters) {
      while (closer.closes && closer.count > 0) {
        const place = open.findLastIndex((opener) => opener.mark === closer.mark);
        if (place < 0) break;
        const opener = open[place];
        open.length = place + 1; // those between the two match nothing any more
        const size = closer.mark === "~" || (opener.count >= 2 && closer.count >= 2) ? 2 : 1;
        const tag = closer.mark === "~" ? "del" : size === 2 ? "strong" : "em";
        wrap(tag, opener.node, closer.node);
        for (const delimiter of [opener, closer]) {
          delimiter.count -= size;
          delimiter.node.data = delimiter.mark.repeat(delimiter.count);
        }
        if (opener.count === 0) open.pop();
      }
      if (closer.opens && closer.count > 0) {
        open.push(closer);
        if (open.length > 100) open.shift();
      }
    }
  }
}

/**
 * @param {string} tag
 * @param {Text} from
 * @param {Text} to
 */
function wrap(tag, from, to) {
  const holder = el(tag);
  while (from.nextSibling && from.nextSibling !== to) holder.append(from.nextSibling);
  from.after(holder);
}
