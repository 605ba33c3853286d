/**
 * Step 13 — the KV cache: what earlier tokens left for later ones.
 *
 * Attention looks back at the keys and values of all earlier positions. They never change, so they are computed once and
 * kept, as half floats: [layer][position][all heads]. This is the part of the arena that grows with the context: 2 (keys, values) ·
 * layers · context · width · 2 bytes; for SmolLM2-135M 22.5 KiB a token. Going back to an earlier position is free: what lies behind it is
 * simply written again, which is how a prompt that begins like the last one is not computed twice.
 */

import { toHalf } from "./07-blocks.ts";

export interface Cache {
  readonly keys: Uint16Array;
  readonly values: Uint16Array;
  readonly context: number;
  readonly width: number; // of one position: heads · head size
}

/** Where a position of a layer starts. */
export function cacheAt(cache: Cache, layer: number, position: number): number {
  return (layer * cache.context + position) * cache.width;
}

/** Keep n numbers from x[o] on. */
export function keep(target: Uint16Array, start: number, x: Float32Array, o: number, n: number): void {
  for (let i = 0; i < n; i++) target[start + i] = toHalf(x[o + i] as number);
}
