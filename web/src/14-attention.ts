/**
 * Step 14 — attention with an online softmax: what to take from which earlier position.
 *
 * For each head: a score for every position, softmax over the scores, and the sum of the values with those weights. The
 * table of scores is never stored: the sums are kept relative to the largest score so far and rescaled when a larger one comes
 * (arXiv:1805.02867). So memory does not grow with the context, and no exponential overflows.
 *
 * Rounded to float32 after each operation, in order: the bits of the Python port's `scalar` order.
 */

import { expf } from "./libm.ts";
import type { Cache } from "./13-kv.ts";
import { cacheAt } from "./13-kv.ts";

const fround = Math.fround;

/** One head's query at q[o …], over positions first to last; the result goes to out[o …]. */
export function attend(
  q: Float32Array, o: number, size: number, cache: Cache, half: Float32Array,
  layer: number, kvHead: number, first: number, last: number, out: Float32Array,
): void {
  const { keys, values } = cache;
  const divisor = fround(Math.sqrt(size));
  let largest = fround(-1e30);
  let total = 0;
  for (let i = 0; i < size; i++) out[o + i] = 0;
  for (let position = first; position <= last; position++) {
    const at = cacheAt(cache, layer, position) + kvHead * size;
    let dot = 0;
    for (let i = 0; i < size; i++) dot = fround(dot + fround((q[o + i] as number) * (half[keys[at + i] as number] as number)));
    const score = fround(dot / divisor);
    if (score > largest) {
      const shrink = expf(fround(largest - score));
      total = fround(fround(total * shrink) + 1);
      for (let i = 0; i < size; i++) out[o + i] = fround((out[o + i] as number) * shrink) + (half[values[at + i] as number] as number);
      largest = score;
    } else {
      const weight = expf(fround(score - largest));
      total = fround(total + weight);
      for (let i = 0; i < size; i++) out[o + i] = (out[o + i] as number) + fround(weight * (half[values[at + i] as number] as number));
    }
  }
  const inverse = fround(1 / total);
  for (let i = 0; i < size; i++) out[o + i] = (out[o + i] as number) * inverse;
}
