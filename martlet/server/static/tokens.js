// @ts-check
/** An answer's tokens, coloured by their probability, with the model's alternatives. */

import { el, number } from "./dom.js";

/** @typedef {{ token: string, logprob: number, bytes: number[] | null, top_logprobs?: Token[] }} Token */
/** @typedef {{ text: string, probability: number, tokens: Token[] }} Piece */

const LEVELS = [0.9, 0.5, 0.2, 0.05]; // of probability, from which on a colour begins

/** @param {number} probability */
function level(probability) {
  const found = LEVELS.findIndex((least) => probability >= least);
  return found < 0 ? LEVELS.length : found;
}

/** @param {number} probability */
function percent(probability) {
  return `${number(100 * probability, probability < 0.0995 ? 2 : 1)} %`;
}

/**
 * Join tokens that end within a character with the tokens that complete it.
 * @param {Token[]} tokens
 * @returns {Piece[]}
 */
export function pieces(tokens) {
  /** @type {Piece[]} */
  const found = [];
  const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  /** @type {Token[]} */
  let open = [];
  for (const token of tokens) {
    open.push(token);
    const text = textOf(open, decoder);
    if (text === null && open.length < 8) continue;
    const logprob = open.reduce((sum, part) => sum + part.logprob, 0);
    found.push({ text: text ?? open.map((part) => part.token).join(""), probability: Math.exp(logprob), tokens: open });
    open = [];
  }
  return found;
}

/**
 * @param {Token[]} tokens
 * @param {TextDecoder} decoder
 */
function textOf(tokens, decoder) {
  if (tokens.some((token) => !token.bytes)) return tokens.map((token) => token.token).join("");
  try {
    return decoder.decode(new Uint8Array(tokens.flatMap((token) => token.bytes ?? [])));
  } catch {
    return null;
  }
}

/** Spaces and line ends that can be seen. @param {string} text */
function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}

/**
 * The answer as tokens. Arrow keys move between them; the chosen token is explained below.
 * @param {Token[]} tokens
 * @returns {HTMLElement}
 */
export function tokensView(tokens) {
  const details = el("div", { class: "token-details", role: "status" }, "Choose a token to see its alternatives.");
  const all = pieces(tokens).map((piece, place) =>
    el(
      "span",
      { class: `token p${level(piece.probability)}`, tabindex: place === 0 ? "0" : "-1", title: percent(piece.probability) },
      piece.text,
    ),
  );
  const found = pieces(tokens);
  const body = el("div", { class: "tokens", role: "group", "aria-label": "Tokens; arrow keys move" }, ...all);
  const choose = (/** @type {Element} */ node) => {
    const place = all.indexOf(/** @type {HTMLElement} */ (node));
    if (place < 0) return;
    for (const other of all) other.tabIndex = -1;
    all[place].tabIndex = 0;
    details.replaceChildren(...explain(found[place]));
    details.scrollIntoView({ block: "nearest" });
  };
  body.addEventListener("focusin", (event) => choose(/** @type {Element} */ (event.target)));
  body.addEventListener("click", (event) => /** @type {HTMLElement} */ (event.target).focus?.());
  body.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const place = all.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    all[Math.min(all.length - 1, Math.max(0, place + step))]?.focus();
  });
  return el("div", {}, legend(), body, details);
}

function legend() {
  const names = ["≥ 90 %", "≥ 50 %", "≥ 20 %", "≥ 5 %", "less"];
  const keys = names.map((name, place) => el("span", { class: `token p${place}` }, name));
  return el("p", { class: "legend", "aria-hidden": "true" }, "Probability: ", ...keys);
}

/** @param {Piece} piece */
function explain(piece) {
  return piece.tokens.map((token) => {
    const others = token.top_logprobs ?? [];
    const isListed = others.some((other) => other.token === token.token);
    const rows = (isListed ? others : [...others, token]).map((other) => {
      const probability = Math.exp(other.logprob);
      const bar = /** @type {HTMLMeterElement} */ (el("meter", { min: "0", max: "1", value: probability }));
      return el(
        "tr",
        { class: other.token === token.token ? "chosen" : null },
        el("th", { scope: "row" }, visible(other.token)),
        el("td", {}, percent(probability)),
        el("td", {}, bar),
      );
    });
    return el("table", {}, el("caption", {}, `“${visible(token.token)}” and what else could have stood there`), ...rows);
  });
}
