// @ts-check
/**
 * The chat: a conversation, stored only in this browser, and its streamed answers.
 * Read message.js, settings.js and api.js next.
 */

import { ServerError, call, stream } from "./api.js";
import { byId, el, local, number } from "./dom.js";
import { MessageView } from "./message.js";
import { startPage } from "./page.js";
import { Settings } from "./settings.js";

/** @typedef {import("./message.js").Message} Message */

const STORE = "martlet.conversation";
const FRAME_MS = 50; // between two drawings of an answer that grows
const IDEAS = [
  "Why is the sky blue?",
  "Write a haiku about swallows.",
  "List three uses of a Python generator, each with code.",
];

class Chat {
  constructor() {
    this.settings = new Settings();
    this.log = byId("log");
    this.input = byId("input", HTMLTextAreaElement);
    /** @type {Message[]} */
    this.messages = [];
    /** @type {MessageView[]} */
    this.views = [];
    /** @type {AbortController | null} */
    this.running = null;
    this.model = "";
    /** @type {any[]} */
    this.models = [];
    this.used = 0; // tokens of context, after the last answer
    this.context = 0;
    this.follows = true; // the newest line stays in sight
    this.listen();
    this.load();
    this.meet();
  }

  // -- the page -----------------------------------------------------------------------------------
  listen() {
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      } else if (event.key === "ArrowUp" && this.input.value === "") {
        const last = this.messages.findLastIndex((message) => message.role === "user");
        if (last < 0 || this.running) return;
        event.preventDefault();
        this.views[last].edit();
      }
    });
    this.input.addEventListener("input", () => this.fit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new").addEventListener("click", () => this.renew());
    byId("export").addEventListener("click", () => this.download());
    byId("latest").addEventListener("click", () => this.scroll(true));
    byId("models", HTMLSelectElement).addEventListener("change", (event) => {
      this.use(/** @type {HTMLSelectElement} */ (event.target).value);
    });
    window.addEventListener("scroll", () => this.watchScroll(), { passive: true });
    byId("ideas").append(
      ...IDEAS.map((idea) => el("button", { type: "button", click: () => this.ask(idea) }, idea)),
    );
  }

  /** Get the models from the server. */
  async meet() {
    try {
      const { data } = await call("/v1/models");
      this.models = data;
      const select = byId("models", HTMLSelectElement);
      select.append(...data.map((/** @type {any} */ model) => el("option", { value: model.id }, model.id)));
      select.hidden = data.length < 2;
      byId("model").hidden = data.length > 1;
      await this.use(data[0].id);
    } catch (error) {
      this.say(`${wordsOf(error)}`);
    }
  }

  /** @param {string} name */
  async use(name) {
    const model = this.models.find((/** @type {any} */ one) => one.id === name) ?? {};
    this.model = name;
    this.context = model.max_model_len ?? 0;
    byId("model").textContent = name;
    document.title = `${name} · Martlet`;
    if (model.loaded === false) this.say(`Loading ${name} …`);
    await this.settings.ask(name);
    if (model.loaded === false) this.say("");
  }

  /** @param {string} words */
  say(words) {
    byId("status").textContent = words;
  }

  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 0.4 * window.innerHeight)}px`;
  }

  watchScroll() {
    const { scrollHeight } = document.documentElement;
    this.follows = window.innerHeight + window.scrollY > scrollHeight - 80;
    byId("latest").hidden = this.follows;
  }

  /** @param {boolean} [always] */
  scroll(always = false) {
    if (always) this.follows = true;
    if (this.follows) window.scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
  }

  // -- the conversation ---------------------------------------------------------------------------
  load() {
    try {
      const found = JSON.parse(local.get(STORE) ?? "[]");
      for (const message of found) {
        if (typeof message.content === "string" && ["user", "assistant"].includes(message.role)) this.add(message);
      }
    } catch {
      // not written by this page
    }
    this.arrange();
    this.scroll(true);
  }

  save() {
    const text = (/** @type {unknown} */ all) => (this.messages.length ? JSON.stringify(all) : null);
    if (!local.set(STORE, text(this.messages))) {
      local.set(STORE, text(this.messages.map((message) => ({ ...message, tokens: undefined, asTokens: false }))));
    }
  }

  /** @param {Message} message */
  add(message) {
    const view = new MessageView(message, (action, text) => this.act(view, action, text));
    this.messages.push(message);
    this.views.push(view);
    this.log.append(view.node);
    return view;
  }

  /** @param {number} length */
  cut(length) {
    for (const view of this.views.splice(length)) view.node.remove();
    this.messages.length = length;
  }

  arrange() {
    byId("welcome").hidden = this.messages.length > 0;
    byId("send").hidden = this.running !== null;
    byId("stop").hidden = this.running === null;
  }

  renew() {
    this.stop();
    this.cut(0);
    this.save();
    this.arrange();
    this.say("");
    this.input.focus();
  }

  download() {
    const messages = this.history(this.messages.length);
    const text = JSON.stringify({ model: this.model, messages }, null, 2);
    const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    el("a", { href: address, download: "conversation.json" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  /**
   * Handle a message's button.
   * @param {MessageView} view
   * @param {string} action
   * @param {string} [text]
   */
  async act(view, action, text = "") {
    const place = this.views.indexOf(view);
    const { message } = view;
    if (action === "copy") {
      await navigator.clipboard.writeText(message.content);
      this.say("Copied.");
    } else if (action === "tokens") {
      message.asTokens = !message.asTokens;
      view.update(false);
    } else if (this.running) {
      this.say("An answer is being written; stop it first.");
    } else if (action === "ask") {
      this.cut(place);
      this.ask(text);
    } else if (action === "change") {
      this.cut(place);
      this.add({ role: "assistant", content: text, finish: "stopped" });
      this.save();
    } else if (action === "regenerate") {
      this.cut(place);
      await this.answer(this.add({ role: "assistant", content: "" }));
    } else if (action === "continue") {
      await this.answer(view);
    }
  }

  // -- asking -------------------------------------------------------------------------------------
  send() {
    const text = this.input.value.trim();
    if (!text || this.running) return;
    this.input.value = "";
    this.fit();
    this.ask(text);
  }

  /** @param {string} text */
  ask(text) {
    if (this.running) return;
    this.add({ role: "user", content: text });
    this.answer(this.add({ role: "assistant", content: "" }));
    this.scroll(true);
  }

  stop() {
    this.running?.abort();
  }

  /**
   * The messages before an index, in the API's format.
   * @param {number} end
   */
  history(end) {
    const system = this.settings.system.value.trim();
    /** @type {{ role: string, content: string }[]} */
    const all = [];
    for (const { role, content } of this.messages.slice(0, end)) {
      const last = all.at(-1);
      // A failed answer leaves two questions in a row, which many chat templates refuse.
      if (last?.role === role) last.content += `\n\n${content}`;
      else if (content) all.push({ role, content });
    }
    return system ? [{ role: "system", content: system }, ...all] : all;
  }

  /**
   * Request an answer, or the rest of an answer that was stopped.
   * @param {MessageView} view
   */
  async answer(view) {
    const { message } = view;
    const goesOn = message.content !== "";
    const control = (this.running = new AbortController());
    this.arrange();
    this.say("Answering …");
    Object.assign(message, { finish: undefined, error: undefined, timings: undefined, warnings: undefined });
    const painter = new Painter(() => {
      view.update(true);
      this.scroll();
    });
    try {
      const fields = this.settings.fields();
      const body = {
        model: this.model || undefined,
        messages: this.history(this.views.indexOf(view) + (goesOn ? 1 : 0)),
        stream: true,
        stream_options: { include_usage: true },
        ...(goesOn ? { continue_final_message: true, add_generation_prompt: false } : {}),
        ...fields,
      };
      message.tokens = fields.logprobs ? (goesOn ? (message.tokens ?? []) : []) : undefined;
      message.asTokens = Boolean(fields.logprobs);
      await this.read(stream("/v1/chat/completions", { body, signal: control.signal }), message, painter);
      if (!message.finish) throw new Error("The stream ended before the answer did.");
      this.say(this.summary(message));
    } catch (error) {
      if (control.signal.aborted) {
        message.finish = "stopped";
        this.say("Stopped.");
      } else {
        message.error = wordsOf(error);
        this.say("The answer failed.");
      }
    }
    painter.stop();
    if (this.running === control) this.running = null;
    this.arrange();
    if (!this.views.includes(view)) return; // a new chat has begun
    view.update(false);
    this.save();
    this.scroll();
  }

  /**
   * Read the chunks of a stream.
   * @param {AsyncIterable<{ data: any }>} chunks
   * @param {Message} message
   * @param {Painter} painter
   */
  async read(chunks, message, painter) {
    let count = 0;
    let first = 0;
    for await (const { data } of chunks) {
      if (data.error) throw new ServerError(data.error.message, 200);
      if (data.usage) this.used = data.usage.total_tokens;
      const choice = data.choices?.[0];
      if (!choice) continue;
      const { delta } = choice;
      message.content += delta.content ?? "";
      if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
      if (choice.logprobs) message.tokens?.push(...choice.logprobs.content);
      if (choice.finish_reason) message.finish = choice.finish_reason;
      if (data.timings) message.timings = data.timings;
      if (data.warnings) message.warnings = data.warnings;
      if (delta.content || delta.reasoning_content) {
        count += 1; // a chunk is a token, nearly always; the true number comes at the end
        first ||= performance.now();
        const seconds = (performance.now() - first) / 1000;
        if (seconds > 0.2) message.rate = (count - 1) / seconds;
      }
      painter.want();
    }
  }

  /** @param {Message} message */
  summary(message) {
    const room = this.context && this.used ? `${number(this.used)} of ${number(this.context)} tokens of context used.` : "";
    return `${message.finish === "length" ? "The answer was cut at its greatest length." : "Answered."} ${room}`;
  }
}

/** Limits the rate of drawing, so that it does not slow the reading of the stream. */
class Painter {
  /** @param {() => void} paint */
  constructor(paint) {
    this.paint = paint;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
  }

  want() {
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      this.paint();
    }, FRAME_MS);
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = undefined;
  }
}

/** @param {unknown} error */
function wordsOf(error) {
  if (error instanceof TypeError) return "The server cannot be reached, or the connection broke.";
  return error instanceof Error ? error.message : String(error);
}

startPage();
new Chat();
