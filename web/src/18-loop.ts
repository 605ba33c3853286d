/**
 * Step 18 — the loop: load, then token after token.
 *
 * A prompt's tokens pass one by one; the last one's logits give the first new token, which passes in turn, until the model
 * ends its answer, the number of tokens is reached, or the context is full. What the cache still holds of the last prompt is not
 * computed again. Between tokens the loop gives way, so that a stop is heard.
 */

import type { Arena } from "./01-arena.ts";
import { makeArena } from "./01-arena.ts";
import { bytesOf } from "./02-views.ts";
import type { Source } from "./03-file.ts";
import { copyInto } from "./03-file.ts";
import { Cursor, NeedMore, readHeader } from "./04-header.ts";
import { Metadata, readMetadata } from "./05-metadata.ts";
import type { Directory } from "./06-tensors.ts";
import { readDirectory } from "./06-tensors.ts";
import type { Vocabulary } from "./08-encode.ts";
import { readVocabulary } from "./08-encode.ts";
import { Decoder } from "./09-decode.ts";
import { Sampler } from "./17-sampler.ts";
import type { Lap, Task } from "./forward.ts";
import { forward } from "./forward.ts";
import type { Recipe, Worker } from "./model.ts";
import { fillTables, makeRecipe, planArena, readShape, viewModel, viewWorker } from "./model.ts";
import { startOthers } from "./team.ts";

const FIRST_BYTES = 4 * 2 ** 20;

const mib = (bytes: number): string => `${(bytes / 2 ** 20).toFixed(1)} MiB`;

/** What happens, for whoever shows it. */
export interface Watch {
  step(step: number, note: string): void;
  progress(bytes: number, total: number): void;
  arena(arena: Arena): void;
}

export interface Loaded {
  readonly recipe: Recipe;
  readonly arena: Arena;
  readonly vocabulary: Vocabulary;
  readonly metadata: Metadata;
  readonly me: Worker;
}

/** Steps 4 to 6: everything that the file says before its weights. */
export async function readStart(source: Source, watch?: Watch): Promise<{ metadata: Metadata; directory: Directory }> {
  for (let length = FIRST_BYTES; ; length *= 2) {
    const cursor = new Cursor(await source.read(0, Math.min(length, source.bytes)), source.bytes);
    try {
      const header = readHeader(cursor);
      watch?.step(4, `GGUF version ${header.version}, ${header.tensors} tensors, ${header.entries} entries`);
      const metadata = readMetadata(cursor, header.entries);
      watch?.step(5, metadata.string("general.name", source.name));
      const directory = readDirectory(cursor, header.tensors, metadata);
      watch?.step(6, `${directory.tensors.size} tensors, ${mib(directory.dataBytes)}`);
      return { metadata, directory };
    } catch (error) {
      if (!(error instanceof NeedMore) || length >= source.bytes) throw error;
    }
  }
}

/** Steps 1 to 8: from a file to a model that is ready. */
export async function load(source: Source, context: number, parts: number, watch: Watch): Promise<Loaded> {
  watch.step(3, `${source.name}, ${mib(source.bytes)}`);
  const { metadata, directory } = await readStart(source, watch);
  const shape = readShape(metadata, directory, context);
  const vocabulary = readVocabulary(metadata);
  if (vocabulary.texts.length !== shape.vocabulary) {
    throw new Error(`The vocabulary has ${vocabulary.texts.length} tokens, the embedding ${shape.vocabulary} rows.`);
  }
  watch.step(8, `${vocabulary.texts.length} tokens in the vocabulary`);
  const recipe = makeRecipe(shape, directory, parts);
  const plan = planArena(recipe);
  watch.step(2, `${plan.regions.length} regions`);
  const arena = makeArena(plan.regions, parts > 1);
  watch.step(1, `${mib(arena.buffer.byteLength)}, ${parts > 1 ? "shared" : "one worker’s"}`);
  watch.arena(arena);
  await copyInto(source, directory.dataStart, bytesOf(arena, "weights"), (bytes) => watch.progress(bytes, directory.dataBytes));
  const me = viewWorker(viewModel(recipe, arena), arena, 0, parts);
  fillTables(recipe, arena, me);
  watch.step(7, "tables filled");
  return { recipe, arena, vocabulary, metadata, me };
}

export interface Settings {
  readonly temperature: number;
  readonly topP: number;
  readonly seed: bigint;
  readonly most: number; // new tokens
  readonly exact: boolean;
}

export interface Made {
  readonly id: number;
  readonly text: string;
}

export type Reason = "the model ended its answer" | "as many tokens as asked for" | "the context is full" | "stopped";

/** Makes text; keeps what the cache holds from one prompt to the next. */
export class Loop {
  private cached: number[] = [];
  private cachedExact = false;
  stopped = false;

  constructor(
    private readonly loaded: Loaded,
    private readonly lap: Lap,
  ) {}

  /** How many positions the cache holds. */
  get position(): number {
    return this.cached.length;
  }

  /** Pass one token at the next position. */
  pass(token: number, logits: boolean, exact: boolean): void {
    const task: Task = { token, position: this.cached.length, logits, exact };
    startOthers(this.loaded.me, task);
    forward(this.loaded.me, task, this.lap);
    this.cached.push(token);
  }

  /** New tokens as they come; `breathe` is awaited between tokens, prompt tokens included. Returns why it ended. */
  async *run(prompt: readonly number[], settings: Settings, breathe: () => Promise<void>): AsyncGenerator<Made, Reason> {
    const { me, vocabulary } = this.loaded;
    const { model } = me;
    const { context } = model.shape;
    if (prompt.length === 0) throw new RangeError("The prompt is empty.");
    if (prompt.length >= context) throw new RangeError(`The prompt has ${prompt.length} tokens; the context has room for ${context}: shorten it, or load the model with a larger context.`);
    if (!(settings.most >= 1)) throw new RangeError(`${settings.most} new tokens: expected at least 1.`);
    const sampler = new Sampler(settings.temperature, settings.topP, settings.seed, model.order);
    const decoder = new Decoder(vocabulary);
    this.stopped = false;
    this.cached.length = this.keeps(prompt, settings.exact);
    this.cachedExact = settings.exact;
    while (this.cached.length < prompt.length) {
      const at = this.cached.length;
      this.pass(prompt[at] as number, at + 1 === prompt.length, settings.exact);
      await breathe();
      if (this.stopped) return "stopped";
    }
    for (let made = 1; ; made++) {
      const id = sampler.pick(model.logits);
      this.lap(17);
      if (vocabulary.ends.has(id)) return yield* this.end(id, decoder);
      yield { id, text: decoder.feed(id) };
      if (made >= settings.most) return "as many tokens as asked for";
      if (this.cached.length >= context) return "the context is full";
      this.pass(id, true, settings.exact);
      await breathe();
      if (this.stopped) return "stopped";
    }
  }

  private *end(id: number, decoder: Decoder): Generator<Made, Reason> {
    yield { id, text: decoder.finish() };
    return "the model ended its answer";
  }

  /** How much of a prompt the cache holds; at least the last token is passed again, for its logits. */
  keeps(prompt: readonly number[], exact: boolean): number {
    if (exact !== this.cachedExact) return 0;
    let same = 0;
    while (same < this.cached.length && same < prompt.length - 1 && this.cached[same] === prompt[same]) same++;
    return same;
  }
}
