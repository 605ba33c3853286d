/** Small files made by hand, and a model over them. */

import type { Source } from "../src/03-file.ts";
import type { Loaded, Watch } from "../src/18-loop.ts";
import { load } from "../src/18-loop.ts";
import { DiskSource } from "./files.ts";

export const BUILT = "build/data"; // what prepare.py wrote

export const quiet: Watch = { step: () => undefined, progress: () => undefined, arena: () => undefined };

export const loadTiny = (name: string): Promise<Loaded> => load(new DiskSource(`${BUILT}/models/${name}.gguf`), 96, 1, quiet);

/** Bytes in memory as a file. */
export class MemorySource implements Source {
  readonly bytes: number;
  constructor(
    readonly name: string,
    private readonly data: Uint8Array,
  ) {
    this.bytes = data.length;
  }
  read(offset: number, length: number): Promise<Uint8Array> {
    return Promise.resolve(this.data.slice(offset, offset + length));
  }
}

/** Writes GGUF by hand. */
export class Writer {
  private readonly parts: Buffer[] = [];

  raw(bytes: Uint8Array): this {
    this.parts.push(Buffer.from(bytes));
    return this;
  }
  u32(value: number): this {
    const out = Buffer.alloc(4);
    out.writeUInt32LE(value);
    return this.raw(out);
  }
  u64(value: number | bigint): this {
    const out = Buffer.alloc(8);
    out.writeBigUInt64LE(BigInt(value));
    return this.raw(out);
  }
  text(value: string): this {
    const bytes = Buffer.from(value);
    return this.u64(bytes.length).raw(bytes);
  }
  bytes(): Uint8Array {
    return Buffer.concat(this.parts);
  }
}

/** Equal bit for bit; a NaN equals a NaN. The first place where they differ, or -1. */
export function firstDifference(a: Float32Array, b: Float32Array): number {
  if (a.length !== b.length) return Math.min(a.length, b.length);
  for (let i = 0; i < a.length; i++) if (!Object.is(a[i], b[i])) return i;
  return -1;
}
