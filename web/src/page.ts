/**
 * The page: controls, and a picture of what the worker does. No arithmetic happens here.
 *
 * The worker's script is in this one (the build puts it there) and starts from a Blob, so that the page also works when it is
 * opened from disk. A new model gets a new worker: ending one is the only way to give its arena back at once.
 */

import type { Region } from "./01-arena.ts";
import { drawArena, size } from "./map.ts";
import type { ToPage, ToWorker } from "./messages.ts";
import { STEPS } from "./steps.ts";

declare const WORKER_SOURCE: string;

const MOST_WORKERS = 16;

function element<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`The page has no #${id}.`);
  return found as T;
}

const number = (id: string): number => element<HTMLInputElement>(id).valueAsNumber;
const checked = (id: string): boolean => element<HTMLInputElement>(id).checked;

const workerUrl = URL.createObjectURL(new Blob([WORKER_SOURCE], { type: "text/javascript" }));
const shared = self.crossOriginIsolated && typeof SharedArrayBuffer !== "undefined";
const map = drawArena(element<HTMLCanvasElement>("map"), element("legend"));
let worker: Worker | undefined;
let clickedAt = 0;
let average = new Float64Array(STEPS.length + 1);
let seen = 0;

const stepItems = STEPS.map(({ name, says }, i) => {
  const item = document.createElement("li");
  const title = Object.assign(document.createElement("b"), { textContent: `${i + 1} ${name}` });
  const time = document.createElement("span");
  const note = Object.assign(document.createElement("p"), { textContent: says });
  const bytes = document.createElement("small");
  const bar = document.createElement("i");
  item.append(time, title, note, bytes, bar);
  element("steps").append(item);
  return { item, time, note, bytes, bar };
});

function tell(text: string, bad = false): void {
  element("status").textContent = text;
  element("status").classList.toggle("bad", bad);
}

function tellSpeed(text: string, bad = false): void {
  element("speed").textContent = text;
  element("speed").classList.toggle("bad", bad);
}

function busy(running: boolean): void {
  element<HTMLButtonElement>("run").disabled = running;
  element<HTMLButtonElement>("stop").disabled = !running;
}

function start(file: File | string): void {
  worker?.terminate();
  for (const { item, time, bar } of stepItems) {
    item.classList.remove("done");
    time.textContent = "";
    bar.style.width = "0";
  }
  document.body.dataset.ready = "false";
  busy(true); // so that a stop ends the loading
  element<HTMLProgressElement>("progress").value = 0;
  element<HTMLProgressElement>("progress").hidden = false;
  tellSpeed("");
  tell("Reading the file…");
  const mine = new Worker(workerUrl);
  worker = mine;
  mine.onmessage = ({ data }: MessageEvent<ToPage>) => worker === mine && hear(data); // an ended worker's last words may still come
  mine.onerror = (event) => hear({ kind: "error", message: `The worker failed: ${event.message}` });
  const workers = Number(element<HTMLSelectElement>("workers").value);
  const context = Number(element<HTMLSelectElement>("context").value);
  mine.postMessage({ kind: "load", file, context, workers } satisfies ToWorker);
}

/** Between tokens the loop hears a stop; while a model loads, its worker is ended. */
function stop(): void {
  if (document.body.dataset.ready === "true") return worker?.postMessage({ kind: "stop" } satisfies ToWorker);
  worker?.terminate();
  worker = undefined;
  hear({ kind: "error", message: "Loading was stopped. Load or pick a model to begin." });
}

function run(): void {
  clickedAt = performance.now();
  busy(true);
  average = new Float64Array(STEPS.length + 1);
  seen = 0;
  element("text").textContent = "";
  element("ids").textContent = "";
  tellSpeed("Reading the prompt…");
  const message: ToWorker = {
    kind: "run",
    prompt: element<HTMLTextAreaElement>("prompt").value,
    chat: checked("chat"),
    temperature: number("temperature"),
    topP: number("top-p"),
    seed: element<HTMLInputElement>("seed").value || "42",
    most: number("most"),
    exact: checked("exact"),
  };
  worker?.postMessage(message);
}

function hear(message: ToPage): void {
  switch (message.kind) {
    case "step":
      return showStep(message.step, message.note);
    case "arena":
      element("arena-size").textContent = `${size(message.bytes)}, ${message.shared ? "shared by all workers" : "one worker’s own"}`;
      showRegions(message.regions);
      return map.show(message.regions, message.bytes);
    case "progress":
      element<HTMLProgressElement>("progress").value = message.bytes / message.total;
      tell(`${size(message.bytes)} of ${size(message.total)}`);
      return map.fill("weights", message.bytes / message.total);
    case "ready":
      return showReady(message);
    case "prompt":
      element("ids").textContent = `${message.ids.join(" ")} → `;
      return showStep(8, `${message.ids.length} tokens, ${message.kept} of them still in the cache`);
    case "passed":
      tellSpeed(`Reading the prompt: position ${message.position}`);
      return showPosition(message.position);
    case "token":
      return showToken(message);
    case "done": {
      const speed = message.seconds > 0 ? `${((message.tokens - 1) / message.seconds).toFixed(1)} tokens/s, ` : "";
      const first = message.tokens > 0 ? `first after ${(message.firstMs / 1000).toFixed(2)} s; ` : "";
      tellSpeed(`${speed}${first}${message.tokens} tokens: ${message.reason}.`);
      document.body.dataset.done = String(Number(document.body.dataset.done ?? 0) + 1);
      return busy(false);
    }
    case "error": {
      const ready = document.body.dataset.ready === "true"; // then it is the prompt or a setting, and the model stays
      (ready ? tellSpeed : tell)(message.message, true);
      element<HTMLProgressElement>("progress").hidden = true;
      busy(false);
      element<HTMLButtonElement>("run").disabled = !ready;
    }
  }
}

function showStep(step: number, note: string): void {
  const shown = stepItems[step - 1];
  if (shown === undefined) return;
  shown.item.classList.add("done");
  shown.note.textContent = note;
}

/** How much of the arena each step uses first. */
function showRegions(regions: readonly Region[]): void {
  stepItems.forEach(({ bytes }, i) => {
    const sum = regions.filter((region) => region.step === i + 1).reduce((all, region) => all + region.bytes, 0);
    bytes.textContent = sum === 0 ? "" : `${size(sum)} of the arena`;
  });
}

let context = 1;

function showReady(message: Extract<ToPage, { kind: "ready" }>): void {
  context = message.context;
  element<HTMLProgressElement>("progress").hidden = true;
  const workers = message.workers === 1 ? "one worker" : `${message.workers} workers`;
  tell(`${message.name}: ${message.layers} layers, context ${message.context}, ${workers}. Nothing leaves this page.`);
  const chat = element<HTMLInputElement>("chat");
  chat.disabled = !message.chat;
  chat.checked = message.chat;
  document.body.dataset.ready = "true";
  busy(false);
}

function showPosition(position: number): void {
  map.fill("keys", position / context);
  map.fill("values", position / context);
  showStep(13, `${position} of ${context} positions`);
}

function showToken(message: Extract<ToPage, { kind: "token" }>): void {
  if (seen === 0) document.body.dataset.firstMs = String(performance.now() - clickedAt);
  element("text").append(message.text);
  element("ids").append(`${message.id} `);
  showStep(9, JSON.stringify(message.text));
  showPosition(message.position);
  showStep(18, `${seen + 1} tokens made`);
  if (seen++ === 0) return; // its time is the whole prompt's
  tellSpeed(`${(1000 / message.ms).toFixed(1)} tokens/s`);
  const share = 1 / Math.min(seen - 1, 16); // an average that forgets
  let sum = 0;
  message.times.forEach((ms, step) => {
    average[step] = (average[step] as number) + share * (ms - (average[step] as number));
    sum += average[step] as number;
  });
  stepItems.forEach(({ item, time, bar }, i) => {
    const ms = average[i + 1] as number;
    if (ms === 0) return;
    item.classList.add("done");
    time.textContent = `${ms.toFixed(2)} ms`;
    bar.style.width = `${(100 * ms) / sum}%`;
  });
}

function offerWorkers(): void {
  const select = element<HTMLSelectElement>("workers");
  const most = shared ? Math.min(navigator.hardwareConcurrency || 1, MOST_WORKERS) : 1;
  for (let n = 1; n <= most; n++) select.add(new Option(String(n), String(n), n === most, n === most));
  if (!shared) select.title = "More than one worker needs a page that is cross-origin isolated: `martlet serve` sends it so.";
}

/** Whether the server has a model for us: `?model=URL`, or model.gguf beside the page. Only what was asked for is missed aloud. */
async function offerServersModel(): Promise<void> {
  const asked = new URLSearchParams(location.search).get("model");
  if (asked === null && !location.protocol.startsWith("http")) return;
  let found: string;
  try {
    const url = new URL(asked ?? "model.gguf", location.href).href;
    const reply = await fetch(url, { headers: { Range: "bytes=0-3" } });
    const begins = await firstBytes(reply);
    if (reply.ok && begins === "GGUF") {
      const button = element<HTMLButtonElement>("fetch");
      button.hidden = false;
      button.onclick = () => start(url);
      return;
    }
    found = reply.ok ? "it does not start with GGUF" : `the server answered ${reply.status} ${reply.statusText}`;
  } catch (error) {
    found = (error as Error).message;
  }
  if (asked !== null) tell(`${asked} is no model that this page can read (${found}). Pick a file.`, true);
}

/** Four bytes of an answer; the rest, which a server without ranges would send, is not waited for. */
async function firstBytes(reply: Response): Promise<string> {
  const reader = reply.body?.getReader();
  const piece = await reader?.read();
  await reader?.cancel();
  return new TextDecoder().decode(piece?.value?.subarray(0, 4));
}

element<HTMLInputElement>("file").onchange = ({ target }) => {
  const file = (target as HTMLInputElement).files?.[0];
  if (file !== undefined) start(file);
  (target as HTMLInputElement).value = ""; // so that the same file can be picked again
};
element<HTMLFormElement>("form").onsubmit = (event) => {
  event.preventDefault();
  run();
};
element<HTMLButtonElement>("stop").onclick = stop;
offerWorkers();
void offerServersModel();
