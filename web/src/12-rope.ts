/**
 * Step 12 — RoPE: positions as rotations.
 *
 * Pairs of a head's numbers are turned by an angle that grows with the position, slowly for the last pairs and quickly for the first;
 * the product of a query and a key then depends on how far apart they stand, and on nothing else (arXiv:2104.09864).
 * Sines and cosines of all positions are computed once, into the arena. Pairs are neighbours in llama's files, and i and i + pairs
 * in those of the other families.
 */

import { cosf, sinf } from "./libm.ts";

const fround = Math.fround;

/** Angles of positions 0 to n - 1: cos and sin are tables [position][pair]. `scale` and `factors` slow the angles down for long texts. */
export function fillRope(cos: Float32Array, sin: Float32Array, pairs: number, base: number, scale = 1, factors?: Float32Array): void {
  for (let i = 0; i < pairs; i++) {
    const exponent = fround((2 * i) / (2 * pairs));
    const divisor = fround(fround(fround(Math.pow(fround(base), exponent)) * fround(scale)) * (factors?.[i] ?? 1));
    for (let at = i, position = 0; at < cos.length; at += pairs, position++) {
      const angle = fround(position / divisor);
      cos[at] = cosf(angle);
      sin[at] = sinf(angle);
    }
  }
}

export interface Rope {
  readonly cos: Float32Array;
  readonly sin: Float32Array;
  readonly pairs: number;
  readonly halves: boolean; // pairs are i and i + pairs
}

/** Turn one head, whose numbers start at x[o]. */
export function turn(x: Float32Array, o: number, rope: Rope, position: number): void {
  const { cos, sin, pairs, halves } = rope;
  for (let i = 0; i < pairs; i++) {
    const first = halves ? o + i : o + 2 * i;
    const second = halves ? first + pairs : first + 1;
    const c = cos[position * pairs + i] as number;
    const s = sin[position * pairs + i] as number;
    const a = x[first] as number;
    const b = x[second] as number;
    x[first] = fround(a * c) - fround(b * s);
    x[second] = fround(a * s) + fround(b * c);
  }
}
