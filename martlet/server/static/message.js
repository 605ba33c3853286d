// @ts-check
/** One message of the conversation: its data and its view (read chat.js for its buttons). */

import { duration, el, number } from "./dom.js";
import { show } from "./markdown.js";
import { tokensView } from "./tokens.js";

/**
 * @typedef {{
 *   role: "user" | "assistant", content: string, reasoning?: string, tokens?: import("./tokens.js").Token[],
 *   finish?: string, error?: string, timings?: Record<string, any>, warnings?: string[], asTokens?: boolean, rate?: number,
 * }} Message
 * @typedef {(action: string, text?: string) => void} Act
 */

const ENDS = new Map([
  ["length", "cut: the longest answer allowed"],
  ["abort", "stopped"],
  ["stopped", "stopped"],
  ["tool_calls", "asked for a tool"],
]);

export class MessageView {
  /**
   * @param {Message} message
   * @param {Act} act
   */
  constructor(message, act) {
    this.message = message;
    this.act = act;
    const who = message.role === "user" ? "You" : "Model";
    this.body = el("div", { class: "text" });
    this.thoughts = el("div", { class: "text" });
    this.reasoning = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.thoughts);
    this.foot = el("div", { class: "foot" });
    this.node = el("li", { class: `message ${message.role}` }, el("h3", { class: "hidden" }, who));
    this.node.append(this.reasoning, this.body, this.foot);
    this.update(false);
  }

  /**
   * Show the message's current state.
   * @param {boolean} running
   */
  update(running) {
    const { message } = this;
    this.node.classList.toggle("running", running);
    this.node.setAttribute("aria-busy", String(running));
    if (message.role === "user") {
      this.body.textContent = message.content;
    } else if (message.asTokens && message.tokens?.length && !running) {
      this.body.replaceChildren(tokensView(message.tokens));
    } else if (message.asTokens && message.tokens?.length) {
      this.growTokens(message.tokens);
    } else {
      if (this.body.firstElementChild?.classList.contains("tokens-growing")) this.body.replaceChildren();
      show(this.body, message.content);
    }
    this.reasoning.hidden = !message.reasoning;
    if (message.reasoning) show(this.thoughts, message.reasoning);
    if (!running) this.showFoot();
    else this.foot.replaceChildren(this.facts(true));
  }

  /**
   * Show the text of a growing answer's tokens; at its end they are rendered one by one.
   * @param {import("./tokens.js").Token[]} tokens
   */
  growTokens(tokens) {
    this.body.replaceChildren(el("div", { class: "tokens-growing tokens" }, tokens.map((token) => token.token).join("")));
  }

  /** @param {boolean} running */
  facts(running) {
    const { message } = this;
    const said = [];
    const timings = message.timings;
    if (timings) {
      said.push(`${number(timings.generated_tokens)} tokens`);
      const after = timings.generated_tokens - 1;
      if (timings.decode_ms > 0 && after > 0) said.push(`${number((1000 * after) / timings.decode_ms, 1)} tokens/s`);
      if (timings.ttft_ms !== null) said.push(`first after ${duration(timings.ttft_ms / 1000)}`);
      said.push(`${number(timings.cached_tokens)} of ${number(timings.prompt_tokens)} prompt tokens cached`);
    } else if (running && message.rate) {
      said.push(`${number(message.rate, 1)} tokens/s`);
    }
    const end = ENDS.get(message.finish ?? "");
    if (end && !running) said.unshift(end);
    return el("span", { class: "facts" }, said.join(" · "));
  }

  showFoot() {
    const { message } = this;
    const button = (/** @type {string} */ label, /** @type {string} */ action) =>
      el("button", { type: "button", class: "quiet", click: () => this.act(action) }, label);
    const all = [button("Copy", "copy"), el("button", { type: "button", class: "quiet", click: () => this.edit() }, "Edit")];
    if (message.role === "assistant") {
      all.unshift(button("Regenerate", "regenerate"));
      if (message.finish === "length" || message.finish === "stopped") all.unshift(button("Continue", "continue"));
      if (message.tokens?.length) all.push(button(message.asTokens ? "As text" : "As tokens", "tokens"));
    }
    const said = message.error ? el("p", { class: "error", role: "alert" }, message.error) : null;
    const warned = (message.warnings ?? []).map((warning) => el("p", { class: "note" }, warning));
    this.foot.replaceChildren(...(said ? [said] : []), ...warned, el("div", { class: "row" }, ...all, this.facts(false)));
  }

  /** Let the user edit the text, and ask an edited question again. */
  edit() {
    const { message } = this;
    const isQuestion = message.role === "user";
    const box = /** @type {HTMLTextAreaElement} */ (el("textarea", { "aria-label": "Text of the message" }));
    box.value = message.content;
    box.rows = Math.min(20, message.content.split("\n").length + 1);
    const done = () => this.act(isQuestion ? "ask" : "change", box.value);
    const cancel = () => {
      this.node.classList.remove("editing");
      this.body.replaceChildren();
      this.body = fresh(this.body);
      this.update(false);
    };
    const keys = (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done();
      else return;
      event.preventDefault();
      event.stopPropagation();
    };
    box.addEventListener("keydown", keys);
    const save = el("button", { type: "button", class: "primary", click: done }, isQuestion ? "Ask again" : "Save");
    this.node.classList.add("editing");
    this.body = fresh(this.body);
    this.body.append(box);
    this.foot.replaceChildren(
      el("div", { class: "row" }, save, el("button", { type: "button", click: cancel }, "Cancel")),
    );
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }
}

/** A fresh copy of an element, without state of its children. @param {HTMLElement} old */
function fresh(old) {
  const made = el("div", { class: old.className });
  old.replaceWith(made);
  return made;
}
