/**
 * Step 5 — metadata: what the file says about the model and its tokenizer.
 *
 * Keys with typed values: numbers, truth values, strings, and arrays of those. The vocabulary is here too, as an array of
 * strings, which makes this the longest part before the weights (megabytes). Arrays of arrays exist in the format and in
 * no file; they are refused, so that nobody can nest a million of them.
 */

import { Cursor, FormatError } from "./04-header.ts";

export type Scalar = number | boolean | string;
export type Value = Scalar | readonly Scalar[];

const STRING = 8;
const ARRAY = 9;
const BYTES = [1, 1, 2, 2, 4, 4, 4, 1, 8, 0, 8, 8, 8]; // least bytes of each type

export class Metadata {
  constructor(private readonly values: ReadonlyMap<string, Value>) {}

  get(key: string): Value | undefined {
    return this.values.get(key);
  }

  number(key: string, otherwise?: number): number {
    return this.typed(key, "number", otherwise);
  }

  string(key: string, otherwise?: string): string {
    return this.typed(key, "string", otherwise);
  }

  flag(key: string, otherwise: boolean): boolean {
    return this.typed(key, "boolean", otherwise);
  }

  /** An array of one type; empty if it is not there. */
  list<T extends Scalar>(key: string, type: "number" | "string"): readonly T[] {
    const found = this.values.get(key) ?? [];
    if (!Array.isArray(found) || (found.length > 0 && typeof found[0] !== type)) {
      throw new FormatError(`${key} should be a list of ${type}s.`);
    }
    return found as readonly T[];
  }

  private typed<T extends Scalar>(key: string, type: string, otherwise: T | undefined): T {
    const found = this.values.get(key) ?? otherwise;
    if (found === undefined) throw new FormatError(`The file does not say ${key}.`);
    if (typeof found !== type) throw new FormatError(`${key} should be a ${type}; it is ${String(found).slice(0, 40)}.`);
    return found as T;
  }
}

export function readMetadata(cursor: Cursor, entries: number): Metadata {
  const values = new Map<string, Value>();
  for (let i = 0; i < entries; i++) {
    const key = cursor.string();
    if (values.has(key)) throw new FormatError(`The file says ${key} twice.`);
    values.set(key, readValue(cursor, key, cursor.u32()));
  }
  return new Metadata(values);
}

function readValue(cursor: Cursor, key: string, type: number): Value {
  if (type !== ARRAY) return readScalar(cursor, key, type);
  const inner = cursor.u32();
  if (inner === ARRAY) throw new FormatError(`${key} is an array of arrays; no model needs one.`);
  const length = cursor.count(`entries in ${key}`, BYTES[inner] ?? 1);
  const out: Scalar[] = [];
  for (let i = 0; i < length; i++) out.push(readScalar(cursor, key, inner));
  return out;
}

function readScalar(cursor: Cursor, key: string, type: number): Scalar {
  switch (type) {
    case 0: return cursor.u8();
    case 1: return cursor.i8();
    case 2: return cursor.u16();
    case 3: return cursor.i16();
    case 4: return cursor.u32();
    case 5: return cursor.i32();
    case 6: return cursor.f32();
    case 7: return cursor.u8() !== 0;
    case STRING: return cursor.string();
    case 10: return cursor.u64();
    case 11: return cursor.i64();
    case 12: return cursor.f64();
    default: throw new FormatError(`${key} has the type ${type}, which GGUF does not know.`);
  }
}
