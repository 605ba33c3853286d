/**
 * Step 11 — matmul over quantised blocks: where the time goes.
 *
 * A token passes through every weight once: out[r] = Σ weight[r][c] · x[c]. Weights stay packed as in the file; a row is
 * unpacked while it is multiplied. Two orders of arithmetic, chosen by the page:
 *
 * `exact`: float32 throughout, Math.fround after every product and every sum, one after the other: the bits of the Python
 *   port's `scalar` order (Q4_K and Q6_K multiply codes first and scales a group at a time, as picoLM does).
 * `fast`: doubles. JavaScript has no float32 arithmetic of its own, so each rounding costs two conversions; without them, and
 *   with codes multiplied before their scale, Σ (code·scale + offset)·x = scale · Σ code·x + offset · Σ x, a block takes half the
 *   time, and the result is nearer to the true sum. It differs from `exact` by float32's rounding only: some 1e-6 of the sum of |w·x|.
 *
 * x is copied to doubles once for all rows, with the sums of each 16. The quick formats below are those of the default model
 * and of Q4_0 files; all others are unpacked to a row first, at about a quarter of the speed.
 *
 * Rows are shared among workers; each row is summed by one of them, so their number changes no bit.
 */

import type { Packed, Row } from "./07-blocks.ts";
import { decodeRow, unpackRow } from "./07-blocks.ts";
import type { Tensor } from "./06-tensors.ts";

const fround = Math.fround;

/** A vector to multiply with: as float32, as doubles, and the sums of each 16. */
export interface Operand {
  readonly values: Float64Array;
  readonly sums: Float64Array;
}

/** The weights, as bytes and as pairs of bytes: every row of every format starts at an even byte. */
export interface Weights extends Packed {
  readonly pairs: Uint16Array;
}

export function loadOperand(x: Float32Array, n: number, operand: Operand): void {
  const { values, sums } = operand;
  for (let i = 0; i < n; i += 16) {
    let sum = 0;
    for (let j = i; j < i + 16 && j < n; j++) sum += values[j] = x[j] as number;
    sums[i >> 4] = sum;
  }
}

/** Rows [from, to) of a product: out[r] = row r · x. */
export function matmul(w: Weights, tensor: Tensor, x: Operand, row: Row, out: Float32Array, from: number, to: number, exact: boolean): void {
  const { type, columns, rowBytes } = tensor;
  if (!exact && (type === 2 || type === 3)) return nibbleRows(w, tensor, x, out, from, to);
  if (!exact && type === 8) return byteRows(w, tensor, x, out, from, to);
  const groups = exact && (type === 12 || type === 14);
  if (exact && !groups) return rowsInOrder(w, tensor, x, row, out, from, to);
  for (let r = from; r < to; r++) {
    const group = unpackRow(w, type, tensor.offset + r * rowBytes, columns, row);
    out[r] = groups ? dotGroups(group, x, row, columns) : dotUnpacked(group, x, row, columns);
  }
}

/** exact: products and sums one after the other, each rounded; four rows at a time, for a sum waits for the one before it. */
function rowsInOrder(w: Weights, tensor: Tensor, x: Operand, row: Row, out: Float32Array, from: number, to: number): void {
  const { type, columns, rowBytes } = tensor;
  const { values } = x;
  const [r0, r1, r2, r3] = row.four;
  for (let r = from; r < to; r += 4) {
    const n = Math.min(4, to - r);
    for (let i = 0; i < n; i++) decodeRow(w, type, tensor.offset + (r + i) * rowBytes, columns, row, row.four[i] as Float32Array);
    let a = 0;
    let b = 0;
    let c = 0;
    let d = 0;
    for (let i = 0; i < columns; i++) {
      const value = values[i] as number;
      a = fround(a + fround((r0[i] as number) * value));
      b = fround(b + fround((r1[i] as number) * value));
      c = fround(c + fround((r2[i] as number) * value));
      d = fround(d + fround((r3[i] as number) * value));
    }
    out[r] = a;
    if (n > 1) out[r + 1] = b;
    if (n > 2) out[r + 2] = c;
    if (n > 3) out[r + 3] = d;
  }
}

/** exact, Q4_K and Q6_K: codes first, then scale and offset; Q4_K adds two groups at a time. */
function dotGroups(group: number, x: Operand, row: Row, n: number): number {
  let sum = 0;
  let pair = 0;
  for (let c = 0, g = 0; c < n; c += group, g++) {
    let dot = 0;
    let plain = 0;
    for (let i = c; i < c + group; i++) {
      const value = x.values[i] as number;
      dot = fround(dot + fround((row.codes[i] as number) * value));
      plain = fround(plain + value);
    }
    const scaled = fround((row.scales[g] as number) * dot);
    if (group === 16) {
      sum = fround(sum + scaled);
      continue;
    }
    const less = fround((row.offsets[g] as number) * plain);
    pair = g & 1 ? fround(fround(pair + scaled) + less) : fround(scaled + less);
    if (g & 1) sum = fround(sum + pair);
  }
  return sum;
}

/** fast, any format. */
function dotUnpacked(group: number, x: Operand, row: Row, n: number): number {
  const { codes, scales, offsets } = row;
  const { values, sums } = x;
  let sum = 0;
  if (group === 1) {
    let odd = 0;
    for (let i = 0; i + 1 < n; i += 2) {
      sum += (codes[i] as number) * (values[i] as number);
      odd += (codes[i + 1] as number) * (values[i + 1] as number);
    }
    return n & 1 ? sum + odd + (codes[n - 1] as number) * (values[n - 1] as number) : sum + odd;
  }
  for (let c = 0, g = 0; c < n; c += group, g++) {
    let a = 0;
    let b = 0;
    for (let i = c; i < c + group; i += 2) {
      a += (codes[i] as number) * (values[i] as number);
      b += (codes[i + 1] as number) * (values[i + 1] as number);
    }
    const plain = group === 32 ? (sums[c >> 4] as number) + (sums[(c >> 4) + 1] as number) : (sums[c >> 4] as number);
    sum += (scales[g] as number) * (a + b) + (offsets[g] as number) * plain;
  }
  return sum;
}

/**
 * fast, Q4_0 and Q4_1: two rows at a time, so that each x is read once for both and four sums are under way at once (an
 * addition takes several cycles, and the next need not wait for it). Eight codes are worked out of every four bytes.
 */
function nibbleRows(w: Weights, tensor: Tensor, x: Operand, out: Float32Array, from: number, to: number): void {
  const { columns, type } = tensor;
  const { pairs, half } = w;
  const { values, sums } = x;
  const head = type === 3 ? 2 : 1; // pairs of bytes before the codes: the scale, and for Q4_1 the offset
  const stride = tensor.rowBytes >> 1;
  for (let r = from; r < to; r += 2) {
    let p = (tensor.offset >> 1) + r * stride;
    let q = r + 1 < to ? p + stride : p;
    let sumP = 0;
    let sumQ = 0;
    for (let c = 0; c < columns; c += 32) {
      let a = 0;
      let b = 0;
      let d = 0;
      let e = 0;
      for (let k = 0; k < 8; k += 2) {
        const u = (pairs[p + head + k] as number) | ((pairs[p + head + k + 1] as number) << 16);
        const v = (pairs[q + head + k] as number) | ((pairs[q + head + k + 1] as number) << 16);
        const i = c + 2 * k;
        const x0 = values[i] as number;
        const x1 = values[i + 1] as number;
        const x2 = values[i + 2] as number;
        const x3 = values[i + 3] as number;
        const x4 = values[i + 16] as number;
        const x5 = values[i + 17] as number;
        const x6 = values[i + 18] as number;
        const x7 = values[i + 19] as number;
        a += (u & 15) * x0;
        b += ((u >>> 8) & 15) * x1;
        a += ((u >>> 16) & 15) * x2;
        b += ((u >>> 24) & 15) * x3;
        a += ((u >>> 4) & 15) * x4;
        b += ((u >>> 12) & 15) * x5;
        a += ((u >>> 20) & 15) * x6;
        b += (u >>> 28) * x7;
        d += (v & 15) * x0;
        e += ((v >>> 8) & 15) * x1;
        d += ((v >>> 16) & 15) * x2;
        e += ((v >>> 24) & 15) * x3;
        d += ((v >>> 4) & 15) * x4;
        e += ((v >>> 12) & 15) * x5;
        d += ((v >>> 20) & 15) * x6;
        e += (v >>> 28) * x7;
      }
      const plain = (sums[c >> 4] as number) + (sums[(c >> 4) + 1] as number);
      const scaleP = half[pairs[p] as number] as number;
      const scaleQ = half[pairs[q] as number] as number;
      const offsetP = type === 3 ? (half[pairs[p + 1] as number] as number) : -8 * scaleP;
      const offsetQ = type === 3 ? (half[pairs[q + 1] as number] as number) : -8 * scaleQ;
      sumP += scaleP * (a + b) + offsetP * plain;
      sumQ += scaleQ * (d + e) + offsetQ * plain;
      p += head + 8;
      q += head + 8;
    }
    out[r] = sumP;
    if (r + 1 < to) out[r + 1] = sumQ;
  }
}

/** fast, Q8_0: two rows at a time, four codes out of every four bytes. */
function byteRows(w: Weights, tensor: Tensor, x: Operand, out: Float32Array, from: number, to: number): void {
  const { columns } = tensor;
  const { pairs, half } = w;
  const { values } = x;
  const stride = tensor.rowBytes >> 1;
  for (let r = from; r < to; r += 2) {
    let p = (tensor.offset >> 1) + r * stride;
    let q = r + 1 < to ? p + stride : p;
    let sumP = 0;
    let sumQ = 0;
    for (let c = 0; c < columns; c += 32) {
      let a = 0;
      let b = 0;
      let d = 0;
      let e = 0;
      for (let k = 0; k < 16; k += 2) {
        const u = (pairs[p + 1 + k] as number) | ((pairs[p + 2 + k] as number) << 16);
        const v = (pairs[q + 1 + k] as number) | ((pairs[q + 2 + k] as number) << 16);
        const i = c + 2 * k;
        const x0 = values[i] as number;
        const x1 = values[i + 1] as number;
        const x2 = values[i + 2] as number;
        const x3 = values[i + 3] as number;
        a += ((u << 24) >> 24) * x0;
        b += ((u << 16) >> 24) * x1;
        a += ((u << 8) >> 24) * x2;
        b += (u >> 24) * x3;
        d += ((v << 24) >> 24) * x0;
        e += ((v << 16) >> 24) * x1;
        d += ((v << 8) >> 24) * x2;
        e += (v >> 24) * x3;
      }
      sumP += (half[pairs[p] as number] as number) * (a + b);
      sumQ += (half[pairs[q] as number] as number) * (d + e);
      p += 17;
      q += 17;
    }
    out[r] = sumP;
    if (r + 1 < to) out[r + 1] = sumQ;
  }
}
