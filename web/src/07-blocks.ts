/**
 * Step 7 — half floats and blocks: from packed bytes to numbers.
 *
 * A quantised row is made of blocks of 32 or 256 weights. Every format comes down to
 *
 *     weight = code · scale + offset
 *
 * with a small integer code for each weight and a scale, here and there an offset, for each group of 16 or 32. So a format
 * is one function from bytes to codes, scales and offsets; the rest is written once. Scales are half floats: a table with
 * the values of all 65,536 of them turns decoding one into a read. Layouts: ggml's ggml-quants.h.
 *
 * Same bits as the Python port: each product and each sum is rounded to float32 (Math.fround, or a Float32Array's own store).
 */

import { BLOCK_TYPES } from "./06-tensors.ts";

const fround = Math.fround;

/** The value of every half float, by its bits. 256 KiB; lies in the arena. */
export function fillHalfTable(table: Float32Array): void {
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    const size =
      exponent === 31 ? (fraction ? NaN : Infinity)
      : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024)
      : 2 ** -24 * fraction;
    table[bits] = bits >> 15 ? -size : size;
  }
}

const floatBits = new Uint32Array(1);
const floatValue = new Float32Array(floatBits.buffer);

/** A float32 as a half float's bits: to the nearest, ties to even; what is too large becomes infinite. */
export function toHalf(value: number): number {
  floatValue[0] = value;
  const bits = floatBits[0] as number;
  const sign = (bits >>> 16) & 0x8000;
  const size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;
  if (size >= 0x477ff000) return sign | 0x7c00;
  if (size < 0x38800000) {
    // Below the least normal half the step is 2^-24 throughout.
    const units = Math.abs(value) * 2 ** 24;
    const low = Math.floor(units);
    const rest = units - low;
    return sign | (low + (rest > 0.5 || (rest === 0.5 && low & 1) ? 1 : 0));
  }
  return sign | ((size - 0x38000000 + 0xfff + ((size >>> 13) & 1)) >>> 13);
}

/** What one row is unpacked into, and room for four as numbers. One a worker, in the arena; as long as the longest row. */
export interface Row {
  readonly codes: Float32Array;
  readonly scales: Float32Array;
  readonly offsets: Float32Array;
  readonly four: readonly [Float32Array, Float32Array, Float32Array, Float32Array];
}

/** The weights' bytes, and the table of half floats. */
export interface Packed {
  readonly bytes: Uint8Array;
  readonly half: Float32Array;
}

/** Unpacks the block at byte `p`: codes from `c` on, scales and offsets from group `g` on. */
type Unpack = (packed: Packed, p: number, row: Row, c: number, g: number) => void;

const NONE = -0; // as an offset: what is added to -0 stays what it was, -0 included

interface Format {
  readonly group: number; // weights that share a scale
  readonly unpack: Unpack;
}

const at = (bytes: Uint8Array, p: number): number => bytes[p] as number;
const halfAt = (w: Packed, p: number): number => w.half[at(w.bytes, p) | (at(w.bytes, p + 1) << 8)] as number;

/** 32 codes of four bits: the low nibbles first. */
function nibbles(bytes: Uint8Array, p: number, codes: Float32Array, c: number, minus: number): void {
  for (let i = 0; i < 16; i++) {
    const byte = at(bytes, p + i);
    codes[c + i] = (byte & 15) - minus;
    codes[c + 16 + i] = (byte >> 4) - minus;
  }
}

/** The same with a fifth bit each, which lie in the four bytes before. */
function fiveBits(bytes: Uint8Array, p: number, codes: Float32Array, c: number, minus: number): void {
  const low = at(bytes, p) | (at(bytes, p + 1) << 8);
  const high = at(bytes, p + 2) | (at(bytes, p + 3) << 8);
  for (let i = 0; i < 16; i++) {
    const byte = at(bytes, p + 4 + i);
    codes[c + i] = ((byte & 15) | (((low >> i) & 1) << 4)) - minus;
    codes[c + 16 + i] = ((byte >> 4) | (((high >> i) & 1) << 4)) - minus;
  }
}

const plain = (elements: (w: Packed, p: number) => number): Format => ({
  group: 1,
  unpack: (w, p, row, c) => {
    row.codes[c] = elements(w, p);
  },
});

/** 32 weights: a scale, an offset if `offset`, fifth bits if `fifth`, nibbles. */
const small = (offset: boolean, fifth: boolean): Format => ({
  group: 32,
  unpack: (w, p, row, c, g) => {
    row.scales[g] = halfAt(w, p);
    row.offsets[g] = offset ? halfAt(w, p + 2) : NONE;
    const start = p + (offset ? 4 : 2);
    if (fifth) fiveBits(w.bytes, start, row.codes, c, offset ? 0 : 16);
    else nibbles(w.bytes, start, row.codes, c, offset ? 0 : 8);
  },
});

/**
 * 256 weights as 8 groups of 32 (Q4_K, and Q5_K with a fifth bit): scales and offsets of six bits each in 12 bytes. The first four
 * of each lie in the low bits of bytes 0–3 and 4–7, the last four as nibbles in bytes 8–11 with their upper bits on top of bytes 0–7.
 */
const kBlock = (fifth: boolean): Format => ({
  group: 32,
  unpack: (w, p, row, c, g) => {
    const b = w.bytes;
    const d = halfAt(w, p);
    const least = halfAt(w, p + 2);
    for (let j = 0; j < 8; j++) {
      const s = p + 4 + (j & 3);
      const scale = j < 4 ? at(b, s) & 63 : (at(b, s + 8) & 15) | ((at(b, s) >> 6) << 4);
      const offset = j < 4 ? at(b, s + 4) & 63 : (at(b, s + 8) >> 4) | ((at(b, s + 4) >> 6) << 4);
      row.scales[g + j] = d * scale;
      row.offsets[g + j] = -fround(least * offset);
      const q = p + (fifth ? 48 : 16) + (j >> 1) * 32;
      for (let i = 0; i < 32; i++) {
        const code = (at(b, q + i) >> (4 * (j & 1))) & 15;
        row.codes[c + 32 * j + i] = fifth ? code | (((at(b, p + 16 + i) >> j) & 1) << 4) : code;
      }
    }
  },
});

/** Two bits of code k of a block of 256: each 32 bytes hold four runs of 32 codes, lowest bits first. */
const twoBits = (b: Uint8Array, p: number, k: number): number => (at(b, p + (k >> 7) * 32 + (k & 31)) >> (2 * ((k >> 5) & 3))) & 3;

const q2k: Unpack = (w, p, row, c, g) => {
  const d = halfAt(w, p + 80);
  const least = halfAt(w, p + 82);
  for (let j = 0; j < 16; j++) {
    row.scales[g + j] = d * (at(w.bytes, p + j) & 15);
    row.offsets[g + j] = -fround(least * (at(w.bytes, p + j) >> 4));
  }
  for (let k = 0; k < 256; k++) row.codes[c + k] = twoBits(w.bytes, p + 16, k);
};

const q3k: Unpack = (w, p, row, c, g) => {
  const b = w.bytes;
  const d = halfAt(w, p + 108);
  for (let j = 0; j < 16; j++) {
    const low = (at(b, p + 96 + (j & 7)) >> (j < 8 ? 0 : 4)) & 15;
    const high = (at(b, p + 104 + (j & 3)) >> (2 * (j >> 2))) & 3;
    row.scales[g + j] = d * ((low | (high << 4)) - 32);
    row.offsets[g + j] = NONE;
  }
  for (let k = 0; k < 256; k++) {
    const third = (at(b, p + (k & 31)) >> (k >> 5)) & 1;
    row.codes[c + k] = (twoBits(b, p + 32, k) | (third << 2)) - 4;
  }
};

const q6k: Unpack = (w, p, row, c, g) => {
  const b = w.bytes;
  const d = halfAt(w, p + 208);
  for (let j = 0; j < 16; j++) {
    row.scales[g + j] = d * ((at(b, p + 192 + j) << 24) >> 24);
    row.offsets[g + j] = NONE;
  }
  for (let k = 0; k < 256; k++) {
    const low = (at(b, p + (k >> 7) * 64 + (k & 63)) >> (4 * ((k >> 6) & 1))) & 15;
    row.codes[c + k] = (low | (twoBits(b, p + 128, k) << 4)) - 32;
  }
};

const q8: Unpack = (w, p, row, c, g) => {
  row.scales[g] = halfAt(w, p);
  row.offsets[g] = NONE;
  for (let i = 0; i < 32; i++) row.codes[c + i] = (at(w.bytes, p + 2 + i) << 24) >> 24;
};

/** The float32 whose bits are the four bytes at p. */
function floatAt(w: Packed, p: number): number {
  floatBits[0] = at(w.bytes, p) | (at(w.bytes, p + 1) << 8) | (at(w.bytes, p + 2) << 16) | (at(w.bytes, p + 3) << 24);
  return floatValue[0] as number;
}

function upperHalf(w: Packed, p: number): number {
  floatBits[0] = (at(w.bytes, p) << 16) | (at(w.bytes, p + 1) << 24);
  return floatValue[0] as number;
}

const FORMATS: ReadonlyMap<string, Format> = new Map<string, Format>([
  ["F32", plain(floatAt)], ["F16", plain(halfAt)], ["BF16", plain(upperHalf)],
  ["Q4_0", small(false, false)], ["Q4_1", small(true, false)], ["Q5_0", small(false, true)], ["Q5_1", small(true, true)],
  ["Q8_0", { group: 32, unpack: q8 }],
  ["Q2_K", { group: 16, unpack: q2k }], ["Q3_K", { group: 16, unpack: q3k }],
  ["Q4_K", kBlock(false)], ["Q5_K", kBlock(true)], ["Q6_K", { group: 16, unpack: q6k }],
]);

function formatOf(type: number): Format & { elements: number; bytes: number; name: string } {
  const block = BLOCK_TYPES.get(type);
  const format = block && FORMATS.get(block.name);
  if (!block || !format) throw new Error(`Type ${type} cannot be decoded.`);
  return { ...block, ...format };
}

/** Each type's block and format, looked up once. */
const BY_TYPE = Array.from({ length: 31 }, (_, type) => (BLOCK_TYPES.has(type) ? formatOf(type) : undefined));

/** Unpack the row of n weights at byte `p`; returns how many weights share a scale: 1 means that the codes are the weights. */
export function unpackRow(packed: Packed, type: number, p: number, n: number, row: Row): number {
  const { elements, bytes, group, unpack } = BY_TYPE[type] as NonNullable<(typeof BY_TYPE)[number]>;
  const groups = elements / group;
  for (let c = 0, g = 0; c < n; c += elements, g += groups, p += bytes) unpack(packed, p, row, c, g);
  return group;
}

/** The same, as numbers: code · scale + offset, each rounded to float32. `out` may be the row's codes. */
export function decodeRow(packed: Packed, type: number, p: number, n: number, row: Row, out: Float32Array): void {
  const group = unpackRow(packed, type, p, n, row);
  const { codes, scales, offsets } = row;
  if (group === 1) return out.set(codes.subarray(0, n));
  for (let c = 0, g = 0; c < n; g++) {
    const scale = scales[g] as number;
    const offset = offsets[g] as number;
    for (const end = c + group; c < end; c++) out[c] = fround((codes[c] as number) * scale) + offset;
  }
}
