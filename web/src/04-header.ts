/**
 * Step 4 — the GGUF header: magic, version, and how many entries follow.
 *
 * A GGUF file is a header, metadata (step 5), a directory of tensors (step 6), and their bytes. All numbers are
 * little-endian. The file is a stranger's: whatever it says is compared with what is really there before it is used, and
 * a count that cannot be true stops the reading with a sentence. How long the first three parts are is known only when
 * they have been read, so the reader asks for more (`NeedMore`) and step 18's loader reads them again with a longer start.
 *
 * Format: github.com/ggml-org/ggml, docs/gguf.md.
 */

const MAGIC = 0x46554747; // "GGUF"

/** The bytes at hand end before the part that is being read does. */
export class NeedMore extends Error {}

export class FormatError extends Error {}

/** Reads numbers and strings in order, and never beyond the end. */
export class Cursor {
  at = 0;
  private readonly view: DataView;
  private readonly text = new TextDecoder();

  constructor(
    private readonly bytes: Uint8Array,
    readonly fileBytes: number,
  ) {
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  private step(length: number): number {
    if (this.at + length > this.fileBytes) {
      throw new FormatError(`The file ends at byte ${this.fileBytes}, in the middle of what byte ${this.at} begins.`);
    }
    if (this.at + length > this.bytes.length) throw new NeedMore();
    this.at += length;
    return this.at - length;
  }

  u8 = (): number => this.view.getUint8(this.step(1));
  i8 = (): number => this.view.getInt8(this.step(1));
  u16 = (): number => this.view.getUint16(this.step(2), true);
  i16 = (): number => this.view.getInt16(this.step(2), true);
  u32 = (): number => this.view.getUint32(this.step(4), true);
  i32 = (): number => this.view.getInt32(this.step(4), true);
  f32 = (): number => this.view.getFloat32(this.step(4), true);
  f64 = (): number => this.view.getFloat64(this.step(8), true);
  i64 = (): number => safe(this.view.getBigInt64(this.step(8), true));
  u64 = (): number => safe(this.view.getBigUint64(this.step(8), true));

  /** A count of things that take at least `least` bytes each; more than the file can hold is a lie. */
  count(what: string, least: number): number {
    const found = this.u64();
    if (found > (this.fileBytes - this.at) / least) {
      throw new FormatError(`The file says it has ${found} ${what}; its ${this.fileBytes} bytes cannot hold that many.`);
    }
    return found;
  }

  string(): string {
    const length = this.count("bytes in a string", 1);
    const start = this.step(length);
    return this.text.decode(this.bytes.subarray(start, start + length));
  }
}

function safe(value: bigint): number {
  const found = Number(value);
  if (!Number.isSafeInteger(found)) throw new FormatError(`The file has the number ${value}, which nothing can be counted by.`);
  return found;
}

export interface Header {
  readonly version: number;
  readonly tensors: number;
  readonly entries: number;
}

export function readHeader(cursor: Cursor): Header {
  if (cursor.fileBytes < 24 || cursor.u32() !== MAGIC) throw new FormatError("This is not a GGUF file: it does not start with GGUF.");
  const version = cursor.u32();
  if (version !== 2 && version !== 3) throw new FormatError(`GGUF version ${version}; expected 2 or 3, little-endian.`);
  const tensors = cursor.count("tensors", 24);
  const entries = cursor.count("metadata entries", 13);
  return { version, tensors, entries };
}
