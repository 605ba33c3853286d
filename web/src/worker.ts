/**
 * The worker: where the model runs, so that the page never freezes. The first one loads and loops; the others join its arena.
 * Read `18-loop.ts` for what it does; here is only the talk with the page.
 */

import type { Source } from "./03-file.ts";
import { BlobSource, openUrl } from "./03-file.ts";
import { encode } from "./08-encode.ts";
import type { Loaded } from "./18-loop.ts";
import { load, Loop } from "./18-loop.ts";
import { framed, knowsChat } from "./chat.ts";
import { forward } from "./forward.ts";
import type { ToPage, ToWorker } from "./messages.ts";
import { viewModel, viewWorker } from "./model.ts";
import { tasks } from "./team.ts";

const STEPS = 19;
const say = (message: ToPage): void => self.postMessage(message);

let loaded: Loaded | undefined;
let loop: Loop | undefined;
const times = new Float64Array(STEPS); // of each step, since the last token
let lapAt = 0;

function lap(step: number): void {
  const now = performance.now();
  times[step] = (times[step] as number) + now - lapAt;
  lapAt = now;
}

/** Let waiting messages in. A channel is quicker than a timer, which browsers hold back. */
const channel = new MessageChannel();
let goOn: () => void = () => undefined;
channel.port1.onmessage = () => goOn();
function breathe(): Promise<void> {
  return new Promise((resolve) => {
    goOn = resolve;
    channel.port2.postMessage(0);
  });
}

async function open(file: File | string, context: number, workers: number): Promise<void> {
  const source: Source = typeof file === "string" ? await openUrl(file) : new BlobSource(file, file.name);
  loaded = await load(source, context, workers, {
    step: (step, note) => say({ kind: "step", step, note }),
    progress: (bytes, total) => say({ kind: "progress", bytes, total }),
    arena: ({ buffer, regions }) => say({ kind: "arena", regions, bytes: buffer.byteLength, shared: workers > 1 }),
  });
  const { arena, recipe, vocabulary } = loaded;
  for (let part = 1; part < workers; part++) {
    const helper = new Worker(self.location.href);
    helper.onerror = (event) => say({ kind: "error", message: `A worker failed: ${event.message}` });
    helper.postMessage({ kind: "join", recipe, buffer: arena.buffer as SharedArrayBuffer, regions: arena.regions, part } satisfies ToWorker);
  }
  loop = new Loop(loaded, lap);
  say({ kind: "ready", name: source.name, chat: knowsChat(vocabulary), context: recipe.shape.context, layers: recipe.shape.layers, workers });
}

async function run(message: Extract<ToWorker, { kind: "run" }>): Promise<void> {
  if (loaded === undefined || loop === undefined) throw new Error("Load a model first.");
  const begin = performance.now();
  const ids = encode(loaded.vocabulary, framed(loaded.vocabulary, message.prompt, message.chat));
  if (!/^\d+$/.test(message.seed)) throw new RangeError(`Seed ${message.seed}: expected a whole number from 0.`);
  const settings = { ...message, seed: BigInt(message.seed) };
  let made = 0;
  let first = 0;
  let last = begin;
  times.fill(0);
  lapAt = begin;
  say({ kind: "prompt", ids, kept: loop.keeps(ids, message.exact) });
  const tokens = loop.run(ids, settings, async () => {
    if (made === 0) say({ kind: "passed", position: (loop as Loop).position });
    await breathe();
    lapAt = performance.now();
  });
  for (let next = await tokens.next(); ; next = await tokens.next()) {
    const now = performance.now();
    if (next.done) {
      const seconds = made > 1 ? (last - first) / 1000 : 0;
      say({ kind: "done", reason: next.value, tokens: made, seconds, firstMs: made > 0 ? first - begin : 0 });
      return;
    }
    if (made++ === 0) first = now;
    say({ kind: "token", ...next.value, position: loop.position, times, ms: now - last });
    times.fill(0);
    last = lapAt = now;
  }
}

/** A worker that helps: the same forward pass, for ever. It never gets back to its messages. */
function join({ recipe, buffer, regions, part }: Extract<ToWorker, { kind: "join" }>): void {
  const arena = { buffer, regions };
  const me = viewWorker(viewModel(recipe, arena), arena, part, recipe.parts);
  for (const task of tasks(me)) forward(me, task, () => undefined);
}

self.onmessage = async ({ data }: MessageEvent<ToWorker>): Promise<void> => {
  try {
    if (data.kind === "load") await open(data.file, data.context, data.workers);
    else if (data.kind === "run") await run(data);
    else if (data.kind === "join") join(data);
    else if (loop !== undefined) loop.stopped = true;
  } catch (error) {
    say({ kind: "error", message: error instanceof Error ? error.message : String(error) });
  }
};
