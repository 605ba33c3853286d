/**
 * Step 2 — views and bump allocation: where each region lies, and how it is read.
 *
 * A bump allocator is a number that only grows: a region starts where the last one ended, rounded up so that vectors
 * never share a cache line (64 bytes). It runs before there is any buffer, so the arena can be shown, and refused, before
 * a byte is asked for. Nothing is ever given back: regions live as long as the model.
 *
 * A typed array over the arena is a view: it owns nothing and costs nothing. Each worker makes its own over the same bytes.
 */

import type { Arena, Region } from "./01-arena.ts";
import { regionOf } from "./01-arena.ts";

export const ALIGNMENT = 64;

export class Bump {
  readonly regions: Region[] = [];
  private used = 0;

  /** Set `bytes` aside under `name`. */
  take(name: string, step: number, bytes: number): void {
    if (!Number.isSafeInteger(bytes) || bytes < 0) throw new RangeError(`${name} cannot have ${bytes} bytes.`);
    const offset = Math.ceil(this.used / ALIGNMENT) * ALIGNMENT;
    this.regions.push({ name, step, offset, bytes });
    this.used = offset + bytes;
  }
}

export function bytesOf(arena: Arena, name: string): Uint8Array {
  const { offset, bytes } = regionOf(arena, name);
  return new Uint8Array(arena.buffer, offset, bytes);
}

export function halvesOf(arena: Arena, name: string): Uint16Array {
  const { offset, bytes } = regionOf(arena, name);
  return new Uint16Array(arena.buffer, offset, bytes >>> 1);
}

export function intsOf(arena: Arena, name: string): Int32Array {
  const { offset, bytes } = regionOf(arena, name);
  return new Int32Array(arena.buffer, offset, bytes / 4);
}

export function floatsOf(arena: Arena, name: string): Float32Array {
  const { offset, bytes } = regionOf(arena, name);
  return new Float32Array(arena.buffer, offset, bytes / 4);
}

export function doublesOf(arena: Arena, name: string): Float64Array {
  const { offset, bytes } = regionOf(arena, name);
  return new Float64Array(arena.buffer, offset, bytes / 8);
}
