/**
 * The model: its shape (read from metadata), its plan of the arena, and the views that the steps work on.
 *
 * Three families: llama, qwen2 (biases, RoPE on halves) and gemma3 (norms of queries, of keys and of what layers add; GELU; scaled
 * embeddings; layers that see a window). A tensor that is not understood stops the loading: the result would be wrong.
 * Read after the steps 1 to 7; `forward.ts` is where it is used.
 */

import type { Arena } from "./01-arena.ts";
import { Bump, bytesOf, doublesOf, floatsOf, halvesOf, intsOf } from "./02-views.ts";
import { FormatError } from "./04-header.ts";
import type { Metadata } from "./05-metadata.ts";
import type { Directory, Tensor } from "./06-tensors.ts";
import type { Row } from "./07-blocks.ts";
import { decodeRow, fillHalfTable } from "./07-blocks.ts";
import type { Operand, Weights } from "./11-matmul.ts";
import type { Rope } from "./12-rope.ts";
import { fillRope } from "./12-rope.ts";
import type { Cache } from "./13-kv.ts";

const MAX_CONTEXT = 1 << 20; // positions that float32 and step 12 count exactly
const LOCAL_ROPE_BASE = 10000; // Gemma's layers with a window

export interface Shape {
  readonly family: string;
  readonly layers: number;
  readonly hidden: number;
  readonly ffn: number;
  readonly heads: number;
  readonly kvHeads: number;
  readonly headSize: number;
  readonly vocabulary: number;
  readonly trained: number; // the longest context that the model knows
  readonly context: number; // the one that there is room for
  readonly eps: number;
  readonly ropeBase: number;
  readonly ropePairs: number;
  readonly ropeScale: number;
  readonly window: number; // 0: all layers see everything
}

export const isGemma = (shape: Shape): boolean => shape.family === "gemma3";

export function readShape(metadata: Metadata, directory: Directory, context: number): Shape {
  const family = metadata.string("general.architecture");
  if (!["llama", "qwen2", "gemma3"].includes(family)) {
    throw new FormatError(`The model is of the family ${family}; this page knows llama, qwen2 and gemma3.`);
  }
  const whole = (key: string, otherwise?: number): number => {
    const value = metadata.number(`${family}.${key}`, otherwise);
    if (!Number.isInteger(value) || value < 1 || value === 2 ** 32 - 1) throw new FormatError(`${family}.${key} is ${value}; expected a count.`);
    return value;
  };
  const real = (key: string, otherwise: number): number => {
    const value = metadata.number(`${family}.${key}`, otherwise);
    if (!(value > 0 && value < Infinity)) throw new FormatError(`${family}.${key} is ${value}; expected a number above 0.`);
    return value;
  };
  if (metadata.get(`${family}.expert_count`)) throw new FormatError("The model is a mixture of experts; this page knows none.");
  const hidden = whole("embedding_length");
  const heads = whole("attention.head_count");
  const kvHeads = whole("attention.head_count_kv", heads);
  const headSize = whole("attention.key_length", hidden / heads);
  const ropeSize = whole("rope.dimension_count", headSize);
  if (heads % kvHeads !== 0) throw new FormatError(`${heads} heads cannot share ${kvHeads} heads of keys.`);
  if (ropeSize > headSize || ropeSize % 2 !== 0) throw new FormatError(`RoPE of ${ropeSize} in heads of ${headSize}.`);
  if (whole("attention.value_length", headSize) !== headSize) throw new FormatError("Keys and values of different lengths.");
  const scaling = metadata.string(`${family}.rope.scaling.type`, "none");
  if (scaling !== "none" && scaling !== "linear") throw new FormatError(`RoPE scaling of the kind ${scaling}; expected none or linear.`);
  const trained = Math.min(whole("context_length", 2048), MAX_CONTEXT);
  const vocabulary = tensorOf(directory, "token_embd.weight").rows;
  if (whole("vocab_size", vocabulary) !== vocabulary) throw new FormatError(`${family}.vocab_size is wrong: the embedding has ${vocabulary} rows.`);
  return {
    family, hidden, heads, kvHeads, headSize, trained, vocabulary,
    layers: whole("block_count"),
    ffn: whole("feed_forward_length"),
    context: Math.min(context, trained),
    eps: real("attention.layer_norm_rms_epsilon", 1e-5),
    ropeBase: real("rope.freq_base", family === "gemma3" ? 1e6 : 1e4),
    ropePairs: ropeSize / 2,
    ropeScale: scaling === "linear" ? real("rope.scaling.factor", 1) : 1,
    window: family === "gemma3" && metadata.get("gemma3.attention.sliding_window") ? whole("attention.sliding_window") : 0,
  };
}

function tensorOf(directory: Directory, name: string): Tensor {
  const found = directory.tensors.get(name);
  if (found === undefined) throw new FormatError(`The file has no tensor ${name}.`);
  return found;
}

/** The vectors of a layer: name and length. Those that end in `?` may be missing. */
function vectorsOf(shape: Shape): ReadonlyMap<string, number> {
  const { hidden, headSize } = shape;
  const q = shape.heads * headSize;
  const kv = shape.kvHeads * headSize;
  const gemma: [string, number][] = [
    ["attn_q_norm.weight", headSize], ["attn_k_norm.weight", headSize],
    ["post_attention_norm.weight", hidden], ["post_ffw_norm.weight", hidden],
  ];
  return new Map([
    ["attn_norm.weight", hidden], ["ffn_norm.weight", hidden], ...(isGemma(shape) ? gemma : []),
    ["attn_q.bias?", q], ["attn_k.bias?", kv], ["attn_v.bias?", kv],
  ]);
}

/** The matrices of a layer: name, rows, columns. */
function matricesOf(shape: Shape): readonly (readonly [string, number, number])[] {
  const { hidden, ffn } = shape;
  const q = shape.heads * shape.headSize;
  const kv = shape.kvHeads * shape.headSize;
  return [
    ["attn_q", q, hidden], ["attn_k", kv, hidden], ["attn_v", kv, hidden], ["attn_output", hidden, q],
    ["ffn_gate", ffn, hidden], ["ffn_up", ffn, hidden], ["ffn_down", hidden, ffn],
  ];
}

/** What all workers need to know to build the same model over the same arena. */
export interface Recipe {
  readonly shape: Shape;
  readonly directory: Directory;
  readonly matrices: readonly ReadonlyMap<string, Tensor>[];
  readonly vectors: readonly { readonly tensor: Tensor; readonly start: number }[]; // where each is kept, in floats
  readonly parts: number; // workers
}

export function makeRecipe(shape: Shape, directory: Directory, parts: number): Recipe {
  const used = new Set(["token_embd.weight"]);
  const take = (name: string, rows: number, columns: number): Tensor => {
    const tensor = tensorOf(directory, name);
    if (tensor.rows !== rows || tensor.columns !== columns) {
      throw new FormatError(`${name} has ${tensor.rows} rows of ${tensor.columns}; expected ${rows} of ${columns}.`);
    }
    used.add(name);
    return tensor;
  };
  const vectors: { tensor: Tensor; start: number }[] = [];
  let start = 0;
  const keepVector = (name: string, length: number): void => {
    vectors.push({ tensor: take(name, 1, length), start });
    start += length;
  };
  const matrices = Array.from({ length: shape.layers }, (_, layer) => {
    for (const [name, length] of vectorsOf(shape)) {
      const full = `blk.${layer}.${name.replace("?", "")}`;
      if (!name.endsWith("?") || directory.tensors.has(full)) keepVector(full, length);
    }
    return new Map(matricesOf(shape).map(([name, rows, columns]) => [name, take(`blk.${layer}.${name}.weight`, rows, columns)]));
  });
  keepVector("output_norm.weight", shape.hidden);
  if (directory.tensors.has("rope_freqs.weight")) keepVector("rope_freqs.weight", shape.ropePairs);
  take("token_embd.weight", shape.vocabulary, shape.hidden);
  if (directory.tensors.has("output.weight")) take("output.weight", shape.vocabulary, shape.hidden);
  const unknown = [...directory.tensors.keys()].find((name) => !used.has(name));
  if (unknown !== undefined) throw new FormatError(`The file has the tensor ${unknown}, which this page does not know; the result would be wrong.`);
  return { shape, directory, matrices, vectors, parts };
}

/** Set aside every byte that the model will use. */
export function planArena(recipe: Recipe): Bump {
  const { shape, directory, vectors, parts } = recipe;
  const bump = new Bump();
  const kv = shape.kvHeads * shape.headSize;
  const q = shape.heads * shape.headSize;
  const longest = Math.max(shape.hidden, shape.ffn, q);
  const last = vectors[vectors.length - 1];
  bump.take("weights", 6, directory.dataBytes);
  bump.take("half floats", 7, 65536 * 4);
  bump.take("vectors", 10, last === undefined ? 0 : (last.start + last.tensor.columns) * 4);
  for (let part = 0; part < parts; part++) {
    bump.take(`norm ${part}`, 10, longest * 4);
    bump.take(`operand ${part}`, 11, longest * 8);
    bump.take(`sums ${part}`, 11, Math.ceil(longest / 16) * 8);
    bump.take(`codes ${part}`, 11, longest * 4);
    bump.take(`scales ${part}`, 11, Math.ceil(longest / 16) * 4);
    bump.take(`offsets ${part}`, 11, Math.ceil(longest / 16) * 4);
    for (let i = 0; i < 4; i++) bump.take(`row ${part}.${i}`, 11, longest * 4);
  }
  for (const name of isGemma(shape) ? ["rope", "local rope"] : ["rope"]) {
    bump.take(`${name} cos`, 12, shape.context * shape.ropePairs * 4);
    bump.take(`${name} sin`, 12, shape.context * shape.ropePairs * 4);
  }
  bump.take("keys", 13, shape.layers * shape.context * kv * 2);
  bump.take("values", 13, shape.layers * shape.context * kv * 2);
  bump.take("x", 10, shape.hidden * 4);
  bump.take("q", 11, q * 4);
  bump.take("k", 11, kv * 4);
  bump.take("v", 11, kv * 4);
  bump.take("attended", 14, q * 4);
  bump.take("gate", 15, shape.ffn * 4);
  bump.take("up", 15, shape.ffn * 4);
  bump.take("sum", 11, shape.hidden * 4);
  bump.take("logits", 16, shape.vocabulary * 4);
  bump.take("order", 17, shape.vocabulary * 4);
  bump.take("control", 18, 64);
  return bump;
}

export interface Layer {
  readonly matrix: ReadonlyMap<string, Tensor>;
  readonly vector: ReadonlyMap<string, Float32Array>;
  readonly window: number;
  readonly rope: Rope;
}

/** Views over the arena that all workers share. */
export interface Model {
  readonly shape: Shape;
  readonly weights: Weights;
  readonly layers: readonly Layer[];
  readonly embedding: Tensor;
  readonly output: Tensor;
  readonly outputNorm: Float32Array;
  readonly cache: Cache;
  readonly x: Float32Array;
  readonly q: Float32Array;
  readonly k: Float32Array;
  readonly v: Float32Array;
  readonly attended: Float32Array;
  readonly gate: Float32Array;
  readonly up: Float32Array;
  readonly sum: Float32Array;
  readonly logits: Float32Array;
  readonly order: Int32Array;
  readonly control: Int32Array;
}

/** One of the workers: what it alone writes. */
export interface Worker {
  readonly model: Model;
  readonly part: number;
  readonly parts: number;
  readonly norm: Float32Array;
  readonly operand: Operand;
  readonly row: Row;
}

export function viewModel(recipe: Recipe, arena: Arena): Model {
  const { shape, directory } = recipe;
  const bytes = bytesOf(arena, "weights");
  const kept = floatsOf(arena, "vectors");
  const vector = new Map(recipe.vectors.map(({ tensor, start }) => [tensor.name, kept.subarray(start, start + tensor.columns)]));
  const rope = (name: string): Rope => ({
    cos: floatsOf(arena, `${name} cos`), sin: floatsOf(arena, `${name} sin`), pairs: shape.ropePairs, halves: shape.family !== "llama",
  });
  const everywhere = rope("rope");
  const near = isGemma(shape) ? rope("local rope") : everywhere;
  const layers = recipe.matrices.map((matrix, i) => {
    const prefix = `blk.${i}.`;
    const own = [...vector].filter(([name]) => name.startsWith(prefix)).map(([name, view]) => [name.slice(prefix.length), view] as const);
    const local = shape.window > 0 && i % 6 !== 5;
    return { matrix, vector: new Map(own), window: local ? shape.window : 0, rope: local ? near : everywhere };
  });
  const embedding = tensorOf(directory, "token_embd.weight");
  return {
    shape, layers, embedding,
    weights: { bytes, pairs: halvesOf(arena, "weights"), half: floatsOf(arena, "half floats") },
    output: directory.tensors.get("output.weight") ?? embedding,
    outputNorm: vector.get("output_norm.weight") as Float32Array,
    cache: { keys: halvesOf(arena, "keys"), values: halvesOf(arena, "values"), context: shape.context, width: shape.kvHeads * shape.headSize },
    x: floatsOf(arena, "x"), q: floatsOf(arena, "q"), k: floatsOf(arena, "k"), v: floatsOf(arena, "v"),
    attended: floatsOf(arena, "attended"), gate: floatsOf(arena, "gate"), up: floatsOf(arena, "up"), sum: floatsOf(arena, "sum"),
    logits: floatsOf(arena, "logits"), order: intsOf(arena, "order"), control: intsOf(arena, "control"),
  };
}

export function viewWorker(model: Model, arena: Arena, part: number, parts: number): Worker {
  const own = (i: number): Float32Array => floatsOf(arena, `row ${part}.${i}`);
  return {
    model, part, parts,
    norm: floatsOf(arena, `norm ${part}`),
    operand: { values: doublesOf(arena, `operand ${part}`), sums: doublesOf(arena, `sums ${part}`) },
    row: {
      codes: floatsOf(arena, `codes ${part}`), scales: floatsOf(arena, `scales ${part}`), offsets: floatsOf(arena, `offsets ${part}`),
      four: [own(0), own(1), own(2), own(3)],
    },
  };
}

/** Which of n rows are this worker's, in units of `unit`. */
export function share(me: Worker, n: number, unit = 1): readonly [number, number] {
  const edge = (part: number): number => Math.min(n, Math.round((n * part) / me.parts / unit) * unit);
  return [edge(me.part), me.part + 1 === me.parts ? n : edge(me.part + 1)];
}

/** Fill the tables, once the weights are there: half floats, norms and biases, angles. */
export function fillTables(recipe: Recipe, arena: Arena, me: Worker): void {
  const { shape, vectors } = recipe;
  const { weights } = me.model;
  fillHalfTable(weights.half);
  const kept = floatsOf(arena, "vectors");
  let factors: Float32Array | undefined;
  for (const { tensor, start } of vectors) {
    const view = kept.subarray(start, start + tensor.columns);
    decodeRow(weights, tensor.type, tensor.offset, tensor.columns, me.row, view);
    if (tensor.name === "rope_freqs.weight") factors = view;
  }
  fillRope(floatsOf(arena, "rope cos"), floatsOf(arena, "rope sin"), shape.ropePairs, shape.ropeBase, shape.ropeScale, factors);
  if (isGemma(shape)) fillRope(floatsOf(arena, "local rope cos"), floatsOf(arena, "local rope sin"), shape.ropePairs, LOCAL_ROPE_BASE, 1);
}
