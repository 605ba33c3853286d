/**
 * The forward pass: one token through all layers (steps 10 to 16 in the order in which they run).
 *
 *     x = embedding of the token
 *     a layer:  x += Wo · attention(rope(Wq·n), rope(Wk·n), Wv·n)    n = rmsnorm(x)
 *               x += Wdown · (silu(Wgate·n) · (Wup·n))               n = rmsnorm(x)
 *     logits = Wout · rmsnorm(x)
 *
 * All workers run this same function side by side, each on its own rows and heads, and wait for each other (`meet`) where one
 * reads what another has written. Alone, `meet` does nothing. A worker writes to shared vectors only its own share.
 */

import { decodeRow } from "./07-blocks.ts";
import { rmsNorm } from "./10-rmsnorm.ts";
import { loadOperand, matmul } from "./11-matmul.ts";
import { turn } from "./12-rope.ts";
import { cacheAt, keep } from "./13-kv.ts";
import { attend } from "./14-attention.ts";
import { gate } from "./15-swiglu.ts";
import { computeLogits } from "./16-logits.ts";
import type { Layer, Worker } from "./model.ts";
import { isGemma, share } from "./model.ts";
import type { Tensor } from "./06-tensors.ts";
import { meet } from "./team.ts";

/** Hears which step the time went to. */
export type Lap = (step: number) => void;

export interface Task {
  readonly token: number;
  readonly position: number;
  readonly logits: boolean;
  readonly exact: boolean;
}

export function forward(me: Worker, task: Task, lap: Lap): void {
  const { model } = me;
  if (me.part === 0) embed(me, task.token);
  meet(me);
  lap(7);
  model.layers.forEach((layer, i) => {
    attention(me, layer, i, task, lap);
    feedForward(me, layer, task, lap);
  });
  if (task.logits) {
    computeLogits(me, task.exact);
    meet(me);
    lap(16);
  }
}

function embed(me: Worker, token: number): void {
  const { embedding, shape, weights, x } = me.model;
  decodeRow(weights, embedding.type, embedding.offset + token * embedding.rowBytes, shape.hidden, me.row, x);
  if (!isGemma(shape)) return;
  const scale = Math.fround(Math.sqrt(shape.hidden));
  for (let i = 0; i < shape.hidden; i++) x[i] = (x[i] as number) * scale;
}

/** This worker's rows of a product, and their biases. */
function project(me: Worker, layer: Layer, name: string, out: Float32Array, exact: boolean): void {
  const tensor = layer.matrix.get(name) as Tensor;
  const [from, to] = share(me, tensor.rows, 2);
  matmul(me.model.weights, tensor, me.operand, me.row, out, from, to, exact);
  const bias = layer.vector.get(`${name}.bias`);
  if (bias !== undefined) for (let r = from; r < to; r++) out[r] = (out[r] as number) + (bias[r] as number);
}

function attention(me: Worker, layer: Layer, index: number, task: Task, lap: Lap): void {
  const { model } = me;
  const { shape, q, k, v, attended, cache, weights } = model;
  const { headSize, heads, kvHeads } = shape;
  const { position, exact } = task;
  normed(me, layer, "attn_norm", lap);
  project(me, layer, "attn_q", q, exact);
  project(me, layer, "attn_k", k, exact);
  project(me, layer, "attn_v", v, exact);
  meet(me);
  lap(11);
  const [from, to] = share(me, heads);
  for (let h = from; h < to; h++) turnHead(me, layer, "attn_q_norm", q, h * headSize, position);
  const [kvFrom, kvTo] = share(me, kvHeads);
  for (let h = kvFrom; h < kvTo; h++) turnHead(me, layer, "attn_k_norm", k, h * headSize, position);
  lap(12);
  const at = cacheAt(cache, index, position) + kvFrom * headSize;
  keep(cache.keys, at, k, kvFrom * headSize, (kvTo - kvFrom) * headSize);
  keep(cache.values, at, v, kvFrom * headSize, (kvTo - kvFrom) * headSize);
  meet(me);
  lap(13);
  const first = layer.window > 0 ? Math.max(0, position - layer.window + 1) : 0;
  for (let h = from; h < to; h++) {
    attend(q, h * headSize, headSize, cache, weights.half, index, Math.floor((h * kvHeads) / heads), first, position, attended);
  }
  meet(me);
  lap(14);
  loadOperand(attended, heads * headSize, me.operand);
  addProduct(me, layer, "attn_output", "post_attention_norm", exact, lap);
}

function feedForward(me: Worker, layer: Layer, task: Task, lap: Lap): void {
  const { model } = me;
  const { shape } = model;
  normed(me, layer, "ffn_norm", lap);
  project(me, layer, "ffn_gate", model.gate, task.exact);
  project(me, layer, "ffn_up", model.up, task.exact);
  lap(11);
  const [from, to] = share(me, shape.ffn, 2);
  gate(model.gate, model.up, from, to, isGemma(shape));
  meet(me);
  lap(15);
  loadOperand(model.gate, shape.ffn, me.operand);
  addProduct(me, layer, "ffn_down", "post_ffw_norm", task.exact, lap);
}

/** Norm x, and make the result the operand of the products that follow. */
function normed(me: Worker, layer: Layer, name: string, lap: Lap): void {
  const { shape, x } = me.model;
  rmsNorm(x, 0, shape.hidden, layer.vector.get(`${name}.weight`) as Float32Array, shape.eps, me.norm);
  loadOperand(me.norm, shape.hidden, me.operand);
  lap(10);
}

function turnHead(me: Worker, layer: Layer, norm: string, heads: Float32Array, o: number, position: number): void {
  const { shape } = me.model;
  const weight = layer.vector.get(`${norm}.weight`);
  if (weight !== undefined) rmsNorm(heads, o, shape.headSize, weight, shape.eps, heads);
  turn(heads, o, layer.rope, position);
}

/** x += W · operand, in Gemma's models after a norm. */
function addProduct(me: Worker, layer: Layer, matrix: string, postNorm: string, exact: boolean, lap: Lap): void {
  const { shape, sum, x } = me.model;
  project(me, layer, matrix, sum, exact);
  const weight = layer.vector.get(`${postNorm}.weight`);
  let added = sum;
  if (weight !== undefined) {
    meet(me);
    rmsNorm(sum, 0, shape.hidden, weight, shape.eps, me.norm);
    added = me.norm;
  }
  const [from, to] = share(me, shape.hidden, 2);
  for (let i = from; i < to; i++) x[i] = (x[i] as number) + (added[i] as number);
  meet(me);
  lap(11);
}
