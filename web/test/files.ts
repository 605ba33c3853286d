/** What the tests read: files as a Source, and NumPy's .npz. */

import { openSync, readSync, fstatSync, readFileSync, existsSync } from "node:fs";
import { inflateRawSync } from "node:zlib";
import type { Source } from "../src/03-file.ts";

/** The repository's test data, from web/. */
export const DATA = "../tests/data";
export const PICOLM = `${DATA}/picolm`;

export class DiskSource implements Source {
  readonly bytes: number;
  private readonly fd: number;

  constructor(readonly name: string) {
    this.fd = openSync(name, "r");
    this.bytes = fstatSync(this.fd).size;
  }

  read(offset: number, length: number): Promise<Uint8Array> {
    const out = new Uint8Array(Math.max(0, Math.min(length, this.bytes - offset)));
    readSync(this.fd, out, 0, out.length, offset);
    return Promise.resolve(out);
  }
}

/** The default model, where the Python tests look for it; undefined if it is not there. */
export function smolPath(): string | undefined {
  const folder = process.env.MARTLET_TEST_MODELS ?? `${process.env.HOME}/.cache/martlet/models`;
  const path = `${folder}/SmolLM2-135M-Instruct.Q4_1.gguf`;
  return existsSync(path) ? path : undefined;
}

export type Values = Float32Array | Int32Array | Uint8Array | Uint16Array | Uint32Array | Float64Array | BigInt64Array;

export interface Arr {
  readonly shape: readonly number[];
  readonly values: Values;
}

const TYPES: Record<string, new (buffer: ArrayBuffer) => Values> = {
  "<f4": Float32Array, "<f8": Float64Array, "<i4": Int32Array, "<i8": BigInt64Array, "|u1": Uint8Array, "<u2": Uint16Array, "<u4": Uint32Array,
};

/** An .npz file: a zip of .npy files, stored or deflated. */
export class Npz {
  private readonly entries = new Map<string, () => Arr>();

  constructor(path: string) {
    const bytes = readFileSync(path);
    const end = bytes.lastIndexOf("PK\x05\x06");
    let at = bytes.readUInt32LE(end + 16);
    for (let i = bytes.readUInt16LE(end + 10); i > 0; i--) {
      const [method, packed] = [bytes.readUInt16LE(at + 10), bytes.readUInt32LE(at + 20)];
      const [nameLength, extra, comment] = [bytes.readUInt16LE(at + 28), bytes.readUInt16LE(at + 30), bytes.readUInt16LE(at + 32)];
      const local = bytes.readUInt32LE(at + 42);
      const name = bytes.toString("utf8", at + 46, at + 46 + nameLength).replace(/\.npy$/, "");
      const start = local + 30 + bytes.readUInt16LE(local + 26) + bytes.readUInt16LE(local + 28);
      const raw = bytes.subarray(start, start + packed);
      this.entries.set(name, () => readNpy(method === 8 ? inflateRawSync(raw) : raw));
      at += 46 + nameLength + extra + comment;
    }
  }

  names(): string[] {
    return [...this.entries.keys()];
  }

  has(name: string): boolean {
    return this.entries.has(name);
  }

  get(name: string): Arr {
    const found = this.entries.get(name);
    if (found === undefined) throw new Error(`no array ${name}`);
    return found();
  }

  f32(name: string): Float32Array {
    return this.get(name).values as Float32Array;
  }

  u8(name: string): Uint8Array {
    return this.get(name).values as Uint8Array;
  }
}

function readNpy(bytes: Buffer): Arr {
  const length = bytes[6] === 1 ? bytes.readUInt16LE(8) : bytes.readUInt32LE(8);
  const start = bytes[6] === 1 ? 10 : 12;
  const header = bytes.toString("latin1", start, start + length);
  const type = /'descr': '([^']+)'/.exec(header)?.[1] ?? "";
  const shape = (/'shape': \(([^)]*)\)/.exec(header)?.[1] ?? "").split(",").filter((part) => part.trim() !== "").map(Number);
  const Type = TYPES[type];
  if (Type === undefined) throw new Error(`arrays of ${type} are not read`);
  const data = new Uint8Array(bytes.subarray(start + length)); // copied, so that it is aligned
  return { shape, values: new Type(data.buffer) };
}
