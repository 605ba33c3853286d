/**
 * Step 17 — the sampler: from logits to one token.
 *
 * Temperature 0 takes the largest. Otherwise logits are divided by the temperature and become probabilities (softmax), the least probable
 * tokens are left out (top-p: the fewest that together reach p), and a random number decides among the rest. The generator is xorshift64,
 * seeded through SplitMix64, so a seed gives the same text here and in the Python port: same float32 operations, same order.
 *
 * Only as much of the vocabulary is sorted as is needed: a heap gives up its largest until p is reached.
 */

import { expf } from "./libm.ts";

const fround = Math.fround;
const MASK = (1n << 64n) - 1n;

/** A state for a seed; never 0. */
export function seedState(seed: bigint): bigint {
  let z = (seed + 0x9e3779b97f4a7c15n) & MASK;
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return z ^ (z >> 31n) || 42n;
}

/** The next state (Marsaglia's xorshift, 13, 7, 17). */
export function nextState(state: bigint): bigint {
  let x = state;
  x ^= (x << 13n) & MASK;
  x ^= x >> 7n;
  return x ^ ((x << 17n) & MASK);
}

/** 24 bits of a state, as a float32 in [0, 1). */
export const drawOf = (state: bigint): number => Number(state >> 40n) / 2 ** 24;

export function largest(logits: Float32Array): number {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if ((logits[i] as number) > (logits[best] as number)) best = i;
  return best;
}

/** Probabilities in place of numbers. */
export function softmax(values: Float32Array): void {
  const most = values[largest(values)] as number;
  let sum = 0;
  for (let i = 0; i < values.length; i++) {
    const e = expf(fround((values[i] as number) - most));
    values[i] = e;
    sum = fround(sum + e);
  }
  const inverse = fround(1 / sum);
  for (let i = 0; i < values.length; i++) values[i] = (values[i] as number) * inverse;
}

export class Sampler {
  private state: bigint;

  /** `order`: room for the vocabulary's ids, in the arena. */
  constructor(
    private readonly temperature: number,
    private readonly topP: number,
    seed: bigint,
    private readonly order: Int32Array,
  ) {
    if (!(temperature >= 0 && temperature < Infinity)) throw new RangeError(`Temperature ${temperature}: expected a number from 0.`);
    if (!(topP >= 0 && topP <= 1)) throw new RangeError(`Top-p ${topP}: expected a number from 0 to 1.`);
    this.state = seedState(BigInt.asUintN(64, seed));
  }

  /** A token; the logits become probabilities. */
  pick(logits: Float32Array): number {
    const best = largest(logits);
    if (logits.some(Number.isNaN)) throw new Error("The model's numbers are not numbers any more: is its file damaged?");
    const inverse = fround(1 / fround(this.temperature));
    if (inverse === Infinity || fround((logits[best] as number) * inverse) === Infinity) return best;
    for (let i = 0; i < logits.length; i++) logits[i] = (logits[i] as number) * inverse;
    softmax(logits);
    this.state = nextState(this.state);
    const draw = drawOf(this.state);
    return this.topP >= 1 ? pickOfAll(logits, draw) : pickOfLikely(logits, fround(this.topP), draw, this.order);
  }
}

/** The first token, in order of ids, at which the sum of probabilities is above the draw. */
export function pickOfAll(probabilities: Float32Array, draw: number): number {
  let sum = 0;
  for (let i = 0; i < probabilities.length; i++) {
    sum = fround(sum + (probabilities[i] as number));
    if (sum > draw) return i;
  }
  return probabilities.length - 1;
}

/** The same among the most probable tokens that together reach p. */
export function pickOfLikely(probabilities: Float32Array, p: number, draw: number, order: Int32Array): number {
  const n = probabilities.length;
  for (let i = 0; i < n; i++) order[i] = i;
  for (let i = (n >> 1) - 1; i >= 0; i--) sink(probabilities, order, i, n);
  // The heap shrinks from the end; what it gives up is put there, the largest last.
  let sum = 0;
  let left = n;
  while (left > 0) {
    const id = order[0] as number;
    left--;
    order[0] = order[left] as number;
    order[left] = id;
    sink(probabilities, order, 0, left);
    sum = fround(sum + (probabilities[id] as number));
    if (sum >= p) break;
  }
  const limit = fround(draw * sum);
  sum = 0;
  for (let i = n - 1; i >= left; i--) {
    sum = fround(sum + (probabilities[order[i] as number] as number));
    if (sum > limit) return order[i] as number;
  }
  return order[n - 1] as number;
}

/** Put the entry at i where it belongs in a heap whose root is the most probable, on ties the lowest id. */
function sink(probabilities: Float32Array, order: Int32Array, i: number, n: number): void {
  const id = order[i] as number;
  const mine = probabilities[id] as number;
  for (let down = 2 * i + 1; down < n; down = 2 * i + 1) {
    if (down + 1 < n && isAbove(probabilities, order[down + 1] as number, order[down] as number)) down++;
    const other = order[down] as number;
    const theirs = probabilities[other] as number;
    if (mine > theirs || (mine === theirs && id < other)) break;
    order[i] = other;
    i = down;
  }
  order[i] = id;
}

function isAbove(probabilities: Float32Array, a: number, b: number): boolean {
  const p = probabilities[a] as number;
  const q = probabilities[b] as number;
  return p > q || (p === q && a < b);
}
