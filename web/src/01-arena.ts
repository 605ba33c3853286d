/**
 * Step 1 — the arena: one buffer that holds everything the model needs.
 *
 * Weights, tables, the cache of keys and values, and every vector of the forward pass lie in a single ArrayBuffer,
 * asked for once. So the whole price is known before it is paid, nothing is allocated while tokens are made, nothing is
 * left for the garbage collector, and a second worker needs no more than this buffer to join in. Where the page is
 * cross-origin isolated the buffer is a SharedArrayBuffer; where it is not, one worker owns it alone.
 *
 * A region is a named stretch of the arena. Step 2 decides where they lie; the page draws them.
 */

export interface Region {
  readonly name: string;
  readonly step: number; // the step that uses it first
  readonly offset: number;
  readonly bytes: number;
}

export interface Arena {
  readonly buffer: ArrayBufferLike;
  readonly regions: readonly Region[];
}

/** The most that one buffer may take: browsers refuse more, some of them much less. */
export const MOST_BYTES = 8 * 2 ** 30;

/** Ask for the buffer. Throws a sentence for people if the browser has not got that much. */
export function makeArena(regions: readonly Region[], shared: boolean): Arena {
  const last = regions[regions.length - 1];
  const bytes = last === undefined ? 0 : last.offset + last.bytes;
  const size = `${(bytes / 2 ** 20).toFixed(0)} MiB`;
  if (bytes > MOST_BYTES) throw new RangeError(`The model needs ${size} in one piece; a page may have 8192 MiB.`);
  try {
    return { buffer: shared ? new SharedArrayBuffer(bytes) : new ArrayBuffer(bytes), regions };
  } catch {
    throw new RangeError(`The browser has no ${size} for this page. Close other tabs, or lower the context.`);
  }
}

/** The region called `name`. */
export function regionOf(arena: Arena, name: string): Region {
  const found = arena.regions.find((region) => region.name === name);
  if (found === undefined) throw new Error(`The arena has no region ${name}.`);
  return found;
}
