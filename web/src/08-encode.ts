/**
 * Step 8 — encode: text to token ids.
 *
 * Two kinds of tokenizer, one algorithm. A text is cut into words (byte-level BPE) or taken whole (SentencePiece); a word is a
 * list of symbols; the neighbours of the best rank merge, the leftmost of equals, until none has a rank. Byte-level BPE ranks a pair
 * by its place in the file's list of merges and writes bytes as letters of GPT-2's alphabet; SentencePiece ranks it by
 * the score of the token it makes, writes a space as ▁, and spells what it has no token for in byte tokens.
 *
 * Control tokens (`<|im_end|>`) are found only where the caller wants them: in a chat's own frame, never in what the user wrote.
 */

import { FormatError } from "./04-header.ts";
import type { Metadata } from "./05-metadata.ts";

const CONTRACTION = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])";
const S = "\\p{White_Space}";
const GPT2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^${S}\\p{L}\\p{N}]+|${S}+(?!\\P{White_Space})|${S}+`;
const words = (digits: string): string =>
  `${CONTRACTION}|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}${digits}| ?[^${S}\\p{L}\\p{N}]+[\\r\\n]*|${S}*[\\r\\n]+|${S}+(?!\\P{White_Space})|${S}+`;

/** Where words end, by the file's `tokenizer.ggml.pre`: patterns that follow each other. */
const PATTERNS: ReadonlyMap<string, readonly string[]> = new Map([
  ["gpt-2", [GPT2]],
  ["smollm", ["\\p{N}", GPT2]],
  ["qwen2", [words("")]],
  ["llama-bpe", [words("{1,3}")]],
]);

const CONTROL = 3;
const USER_DEFINED = 4;
const UNKNOWN = 2;

/** GPT-2's alphabet: printable Latin-1 is itself, the other bytes are U+0100 and up. */
export const BYTE_LETTERS: readonly string[] = (() => {
  let next = 0x100;
  const printable = (byte: number): boolean => (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(printable(byte) ? byte : next++));
})();

/** What the file says of its vocabulary, in the form in which steps 8 and 9 ask for it. */
export interface Vocabulary {
  readonly texts: readonly string[];
  readonly ids: ReadonlyMap<string, number>; // ordinary tokens
  readonly added: ReadonlyMap<string, number>; // control and user-defined ones
  readonly control: ReadonlySet<number>;
  readonly ranks: ReadonlyMap<string, number>; // of "left right", or of the merged text; lower is better
  readonly byteLevel: boolean;
  readonly patterns: readonly RegExp[];
  readonly spaceInFront: boolean;
  readonly bos: number | undefined; // put before a text
  readonly ends: ReadonlySet<number>; // a token that ends the answer
}

export function readVocabulary(metadata: Metadata): Vocabulary {
  const key = (name: string): string => `tokenizer.ggml.${name}`;
  const kind = metadata.string(key("model"));
  if (kind !== "gpt2" && kind !== "llama") throw new FormatError(`The tokenizer is of the kind ${kind}; expected gpt2 or llama.`);
  const byteLevel = kind === "gpt2";
  const texts = metadata.list<string>(key("tokens"), "string");
  const types = metadata.list<number>(key("token_type"), "number");
  if (texts.length === 0) throw new FormatError("The file has no vocabulary.");
  if (types.length !== 0 && types.length !== texts.length) throw new FormatError(`${types.length} token types for ${texts.length} tokens.`);
  const ids = new Map<string, number>();
  const added = new Map<string, number>();
  const control = new Set<number>();
  texts.forEach((text, id) => {
    const type = types[id];
    if (type === CONTROL || type === UNKNOWN) control.add(id);
    if (type === CONTROL || type === UNKNOWN || type === USER_DEFINED) added.set(text, id);
    else if (!ids.has(text)) ids.set(text, id);
  });
  const ranks = new Map<string, number>();
  if (byteLevel) {
    metadata.list<string>(key("merges"), "string").forEach((merge, rank) => ranks.has(merge) || ranks.set(merge, rank));
    if (ranks.size === 0) throw new FormatError("The file has no merges, which a tokenizer of the kind gpt2 needs.");
  } else {
    const scores = metadata.list<number>(key("scores"), "number");
    if (scores.length !== texts.length) throw new FormatError(`${scores.length} scores for ${texts.length} tokens.`);
    for (const [text, id] of ids) ranks.set(text, -(scores[id] as number));
  }
  const pre = metadata.string(key("pre"), "default");
  const patterns = byteLevel ? PATTERNS.get(pre) : [];
  if (patterns === undefined) throw new FormatError(`The pre-tokenizer ${pre} is not known; expected ${[...PATTERNS.keys()].join(", ")}.`);
  const token = (name: string): number | undefined => {
    const id = metadata.get(key(name));
    if (id === undefined || id === -1 || id === 2 ** 32 - 1) return undefined; // all three mean that there is none
    if (typeof id !== "number" || !(id >= 0 && id < texts.length)) throw new FormatError(`${name} is ${id}; there are ${texts.length} tokens.`);
    return id;
  };
  const endings = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"].map((text) => added.get(text));
  const ends = [token("eos_token_id"), token("eot_token_id"), token("eom_token_id"), ...endings].filter((id) => id !== undefined);
  return {
    texts, ids, added, control, ranks, byteLevel,
    patterns: patterns.map((pattern) => new RegExp(pattern, "gu")),
    spaceInFront: metadata.flag(key("add_space_prefix"), !byteLevel),
    bos: metadata.flag(key("add_bos_token"), !byteLevel || pre === "llama-bpe") ? token("bos_token_id") : undefined,
    ends: new Set(ends),
  };
}

/** Text with a frame: its `special` parts may hold control tokens. */
export interface Part {
  readonly text: string;
  readonly special: boolean;
}

/** The ids of a prompt, with the token that begins texts in front if the model wants one. */
export function encode(vocabulary: Vocabulary, parts: readonly Part[]): number[] {
  const out: number[] = [];
  if (vocabulary.bos !== undefined) out.push(vocabulary.bos);
  let fresh = true; // SentencePiece puts a space in front of a text, and of one that follows a control token
  for (const { text, special } of parts) {
    for (const piece of splitAdded(vocabulary, text, special)) {
      if (typeof piece === "number") out.push(piece);
      else encodeText(vocabulary, fresh && vocabulary.spaceInFront ? ` ${piece}` : piece, out);
      fresh = typeof piece === "number";
    }
  }
  return out;
}

/** Cut out the added tokens: the leftmost, and the longest there. */
function splitAdded(vocabulary: Vocabulary, text: string, special: boolean): (string | number)[] {
  const wanted = [...vocabulary.added].filter(([added, id]) => added !== "" && (special || !vocabulary.control.has(id)));
  if (wanted.length === 0) return text === "" ? [] : [text];
  const found = new Map(wanted);
  const longestFirst = [...found.keys()].sort((a, b) => b.length - a.length);
  const escaped = longestFirst.map((added) => added.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&"));
  const pieces = text.split(new RegExp(`(${escaped.join("|")})`, "u"));
  return pieces.filter((piece) => piece !== "").map((piece) => found.get(piece) ?? piece);
}

function encodeText(vocabulary: Vocabulary, text: string, out: number[]): void {
  if (!vocabulary.byteLevel) {
    const symbols = merge([...text.replaceAll(" ", "▁")], vocabulary.ranks, "");
    for (const symbol of symbols) pushSymbol(vocabulary, symbol, out);
    return;
  }
  let pieces = [text];
  for (const pattern of vocabulary.patterns) pieces = pieces.flatMap((piece) => cut(piece, pattern));
  for (const piece of pieces) {
    const letters = Array.from(new TextEncoder().encode(piece), (byte) => BYTE_LETTERS[byte] as string);
    for (const symbol of merge(letters, vocabulary.ranks, " ")) {
      const id = vocabulary.ids.get(symbol);
      if (id === undefined) throw new FormatError(`The vocabulary lacks the token ${JSON.stringify(symbol)}.`);
      out.push(id);
    }
  }
}

/** A SentencePiece symbol's token, or its bytes' tokens. */
function pushSymbol(vocabulary: Vocabulary, symbol: string, out: number[]): void {
  const id = vocabulary.ids.get(symbol);
  if (id !== undefined) {
    out.push(id);
    return;
  }
  for (const byte of new TextEncoder().encode(symbol)) {
    const spelled = vocabulary.ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`);
    if (spelled !== undefined) out.push(spelled);
  }
}

/** The matches of a pattern and the gaps between them: nothing is lost. */
function cut(text: string, pattern: RegExp): string[] {
  const pieces: string[] = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > end) pieces.push(text.slice(end, match.index));
    if (match[0] !== "") pieces.push(match[0]);
    end = match.index + match[0].length;
  }
  if (end < text.length) pieces.push(text.slice(end));
  return pieces;
}

/**
 * Merge neighbours, the best rank first and the leftmost of equals. A heap holds the pairs; one whose symbols have changed since is
 * stale and skipped, so a text of n symbols takes n log n.
 */
export function merge(symbols: string[], ranks: ReadonlyMap<string, number>, joint: string): string[] {
  const n = symbols.length;
  const next = Array.from(symbols, (_, i) => i + 1);
  const before = Array.from(symbols, (_, i) => i - 1);
  const heap: Pair[] = [];
  const offer = (left: number): void => {
    const right = left < 0 ? n : (next[left] as number);
    if (right >= n) return;
    const text = `${symbols[left]}${joint}${symbols[right]}`;
    const rank = ranks.get(text);
    if (rank !== undefined) push(heap, { rank, left, text });
  };
  for (let i = 0; i + 1 < n; i++) offer(i);
  for (let best = pop(heap); best !== undefined; best = pop(heap)) {
    const { left, text } = best;
    const right = next[left] as number;
    if (right >= n || symbols[left] === "" || `${symbols[left]}${joint}${symbols[right]}` !== text) continue;
    symbols[left] += symbols[right] as string;
    symbols[right] = "";
    next[left] = next[right] as number;
    if ((next[left] as number) < n) before[next[left] as number] = left;
    offer(before[left] as number);
    offer(left);
  }
  return symbols.filter((symbol) => symbol !== "");
}

interface Pair {
  readonly rank: number;
  readonly left: number;
  readonly text: string;
}

const isBefore = (a: Pair, b: Pair): boolean => a.rank < b.rank || (a.rank === b.rank && a.left < b.left);

function push(heap: Pair[], pair: Pair): void {
  let i = heap.length;
  for (let up = (i - 1) >> 1; i > 0 && isBefore(pair, heap[up] as Pair); up = (i - 1) >> 1) {
    heap[i] = heap[up] as Pair;
    i = up;
  }
  heap[i] = pair;
}

function pop(heap: Pair[]): Pair | undefined {
  const top = heap[0];
  const last = heap.pop();
  if (top === undefined || last === undefined || heap.length === 0) return top;
  let i = 0;
  for (let down = 1; down < heap.length; down = 2 * i + 1) {
    if (down + 1 < heap.length && isBefore(heap[down + 1] as Pair, heap[down] as Pair)) down++;
    if (!isBefore(heap[down] as Pair, last)) break;
    heap[i] = heap[down] as Pair;
    i = down;
  }
  heap[i] = last;
  return top;
}
