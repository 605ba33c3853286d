// @ts-check
/**
 * The view of the engine: draws the frames that the server sends up to four times a second
 * (`martlet/server/live_frames.py`). Read draw.js and charts.js next.
 */

import { call, stream } from "./api.js";
import { drawHistogram, drawTree } from "./charts.js";
import { byId, duration, el, number } from "./dom.js";
import { colourOf, drawPages, drawSteps } from "./draw.js";
import { startPage } from "./page.js";

const MAX_STEPS = 200; // that are kept for drawing
const RATE_S = 2; // over which tokens a second are taken
const AGAIN_S = [1, 2, 5, 10]; // until the next try to connect

const KINDS = [
  { letter: "o", style: "own", label: "one sequence’s" },
  { letter: "s", style: "shared", label: "shared by several" },
  { letter: "c", style: "cached", label: "cached for later" },
  { letter: "f", style: "free", label: "free" },
  { letter: "h", style: "held", label: "in use otherwise" },
];

class EngineView {
  constructor() {
    /** @type {any} */
    this.hello = {};
    /** @type {any} */
    this.frame = null;
    /** @type {any[]} */
    this.steps = [];
    /** @type {any[]} */
    this.past = []; // totals of the last seconds
    this.model = new URLSearchParams(window.location.search).get("model");
    this.paused = false;
    this.wanted = false; // a drawing is due
    this.grid = { columns: 1, size: 1 };
    const pause = byId("pause");
    pause.addEventListener("click", () => {
      this.paused = !this.paused;
      pause.setAttribute("aria-pressed", String(this.paused));
      pause.textContent = this.paused ? "Continue" : "Pause";
      this.draw();
    });
    for (const name of ["resize", "themechange"]) window.addEventListener(name, () => this.draw());
    byId("pages").addEventListener("pointermove", (event) => this.point(event));
    byId("pages").addEventListener("pointerleave", () => (byId("page-words").textContent = ""));
    this.choose();
    this.watch();
  }

  /** With several models, let the user choose an engine. */
  async choose() {
    const { data } = await call("/v1/models").catch(() => ({ data: [] }));
    const names = data.filter((/** @type {any} */ one) => !one.parent).map((/** @type {any} */ one) => one.id);
    if (names.length < 2) return;
    const select = byId("models", HTMLSelectElement);
    select.append(...names.map((/** @type {string} */ name) => el("option", { selected: name === this.model }, name)));
    select.hidden = false;
    byId("model").hidden = true;
    select.addEventListener("change", () => window.location.assign(`/engine?model=${encodeURIComponent(select.value)}`));
  }

  /** Read frames forever, and reconnect after a failure. */
  async watch() {
    const query = this.model ? `?model=${encodeURIComponent(this.model)}` : "";
    for (let tries = 0; ; tries += 1) {
      try {
        for await (const { name, data } of stream(`/engine/events${query}`, {})) {
          tries = 0;
          if (name === "hello") this.meet(data);
          else if (!this.paused) this.take(data);
        }
        this.say("The server ended the stream; trying again …");
      } catch (error) {
        const said = error instanceof TypeError ? "The server cannot be reached" : /** @type {Error} */ (error).message;
        this.say(`${said}; trying again …`);
      }
      await new Promise((again) => setTimeout(again, 1000 * AGAIN_S[Math.min(tries, AGAIN_S.length - 1)]));
    }
  }

  /** @param {string} words */
  say(words) {
    const node = byId("status");
    if (node.textContent !== words) node.textContent = words;
    node.hidden = words === "";
  }

  /** @param {any} hello */
  meet(hello) {
    this.hello = hello;
    this.steps = [];
    this.past = [];
    byId("model").textContent = hello.model;
    byId("page-tokens").textContent = number(hello.page_tokens);
    byId("text-head").hidden = !hello.with_text;
    this.say(this.frame ? "" : "Connected. The engine has done nothing yet.");
  }

  /** @param {any} frame */
  take(frame) {
    const seen = this.steps.at(-1)?.step ?? -1;
    this.steps.push(...frame.steps.filter((/** @type {any} */ step) => step.step > seen && step.spans.length + (step.preempted ?? []).length));
    this.steps.splice(0, this.steps.length - MAX_STEPS);
    this.past.push({ now: frame.now, ...frame.totals });
    while (this.past.length > 2 && this.past[0].now < frame.now - RATE_S) this.past.shift();
    this.frame = frame;
    this.say("");
    this.draw();
  }

  /** Draw once, at the browser's next frame. */
  draw() {
    if (this.wanted || this.frame === null) return;
    this.wanted = true;
    requestAnimationFrame(() => {
      this.wanted = false;
      this.show();
    });
  }

  show() {
    const { frame } = this;
    this.showNumbers();
    drawSteps(byId("steps", HTMLCanvasElement), this.steps);
    this.grid = drawPages(byId("pages", HTMLCanvasElement), frame.pages);
    this.showPages();
    this.showTree();
    this.showSequences();
    drawHistogram(byId("ttft"), frame.ttft, this.hello.ttft_bounds);
    drawHistogram(byId("itl"), frame.itl, this.hello.itl_bounds);
  }

  showNumbers() {
    const { totals, running, n_waiting: waiting, pages } = this.frame;
    const first = this.past[0];
    const seconds = Math.max(1e-3, this.frame.now - first.now);
    const rate = (/** @type {string} */ name) => (running.length ? (totals[name] - first[name]) / seconds : 0);
    const last = this.steps.at(-1);
    const [drafted, accepted] = ["drafted", "accepted"].map((name) => sum(totals.speculation?.[name] ?? []));
    const guessed = drafted ? `${number((100 * accepted) / drafted)} % of drafts accepted` : "";
    const all = pages.counts;
    const used = all.o + all.s + all.h;
    /** @type {[string, string, string][]} */
    const shown = [
      ["New tokens/s", number(rate("generated"), rate("generated") < 100 ? 1 : 0), guessed],
      ["Prompt tokens/s", number(rate("prefilled")), ""],
      ["Running", number(running.length), `of ${number(this.hello.max_seqs)}`],
      ["Waiting", number(waiting), ""],
      ["Pages in use", number(used), `of ${number(this.hello.n_pages)}`],
      ["Prompts cached", totals.prompt ? `${number((100 * totals.cached) / totals.prompt)} %` : "–", ""],
      ["Last step", last ? duration((last.ms[0] + last.ms[1] + last.ms[2]) / 1000) : "–", last ? `${number(last.tokens)} token${last.tokens === 1 ? "" : "s"}` : ""],
      ["Preempted", number(totals.preempted), ""],
    ];
    byId("numbers").replaceChildren(
      ...shown.map(([label, value, more]) =>
        el("div", {}, el("dt", {}, label), el("dd", {}, value, more ? el("small", {}, ` ${more}`) : null)),
      ),
    );
  }

  showPages() {
    const { counts, each } = this.frame.pages;
    const keys = KINDS.filter(({ letter }) => letter !== "h" || counts.h > 0).map(({ letter, style, label }) =>
      el("li", {}, el("span", { class: `key ${style}` }), `${number(counts[letter])} ${label}`),
    );
    byId("page-keys").replaceChildren(...keys);
    byId("pages").setAttribute("aria-label", KINDS.map(({ letter, label }) => `${counts[letter]} ${label}`).join(", "));
    if (each > 1) byId("pages-note").textContent = `Each square is ${each} pages of ${this.hello.page_tokens} tokens of keys and values.`;
  }

  /** Name the owner of the page under the pointer. @param {PointerEvent} event */
  point(event) {
    if (this.frame === null) return;
    const { cells, whose, each } = this.frame.pages;
    const { columns, size } = this.grid;
    const cell = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
    const kind = KINDS.find(({ letter }) => letter === cells[cell]);
    if (!kind) return;
    const place = [...cells.slice(0, cell)].filter((letter) => letter === "o").length;
    const words = kind.letter === "o" ? `sequence ${whose[place]}’s` : kind.label;
    byId("page-words").textContent = `Page ${number(cell * each)}: ${words}`;
  }

  showTree() {
    const { stretches, n_pages: pages, n_hidden: missing } = this.frame.tree;
    const hidden = drawTree(byId("tree"), stretches);
    const more = hidden + missing > 0 ? ` Not shown: ${number(hidden)} branches, ${number(missing)} pages.` : "";
    byId("tree-words").textContent = pages ? `${number(pages)} ${pages === 1 ? "page is" : "pages are"} cached.${more}` : "Nothing is cached.";
  }

  showSequences() {
    const { running, waiting, n_waiting: nWaiting } = this.frame;
    const rows = [
      ...running.map((/** @type {any} */ seq) => this.row(seq, seq.computed < seq.prompt ? "prefill" : "decode")),
      ...waiting.slice(0, 16).map((/** @type {any} */ seq) => this.row(seq, seq.preempted ? "preempted" : "queued")),
    ];
    byId("sequences").querySelector("tbody")?.replaceChildren(...rows);
    const more = nWaiting - Math.min(waiting.length, 16);
    byId("queue-words").textContent = more > 0 ? `${number(more)} more in the queue.` : rows.length ? "" : "None.";
  }

  /** @param {any} seq @param {string} state */
  row(seq, state) {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = state === "queued" || state === "preempted" ? "var(--free)" : colourOf(seq.name);
    const bar = el("progress", { max: seq.limit, value: seq.computed, "aria-label": `${seq.computed} of ${seq.limit}` });
    return el(
      "tr",
      {},
      el("td", {}, swatch, seq.name),
      el("td", {}, state),
      el("td", {}, number(seq.prompt)),
      el("td", {}, number(seq.generated)),
      el("td", {}, bar),
      el("td", {}, number(seq.pages)),
      el("td", {}, seq.preempted ? number(seq.preempted) : "–"),
      this.hello.with_text ? el("td", { class: "text" }, seq.text) : null,
    );
  }
}

/** @param {number[]} values */
function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

startPage();
new EngineView();
