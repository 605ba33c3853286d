/** Steps 7, 10 to 12, 15 and 17: numbers, bit for bit with picoLM's recordings and the Python port. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { BLOCK_TYPES } from "../src/06-tensors.ts";
import type { Packed, Row } from "../src/07-blocks.ts";
import { decodeRow, fillHalfTable, toHalf } from "../src/07-blocks.ts";
import { rmsNorm } from "../src/10-rmsnorm.ts";
import type { Operand, Weights } from "../src/11-matmul.ts";
import { loadOperand, matmul } from "../src/11-matmul.ts";
import { turn } from "../src/12-rope.ts";
import { gate } from "../src/15-swiglu.ts";
import { drawOf, nextState, Sampler, seedState, softmax } from "../src/17-sampler.ts";
import { cosf, expf, sinf } from "../src/libm.ts";
import { Npz, PICOLM } from "./files.ts";
import { BUILT, firstDifference } from "./make.ts";

const half = new Float32Array(65536);
fillHalfTable(half);
const LONGEST = 8448;
const rowOf = (): Row => {
  const floats = (n: number): Float32Array => new Float32Array(n);
  return { codes: floats(LONGEST), scales: floats(LONGEST / 16), offsets: floats(LONGEST / 16), four: [floats(LONGEST), floats(LONGEST), floats(LONGEST), floats(LONGEST)] };
};
const typeOf = (name: string): number => [...BLOCK_TYPES].find(([, block]) => block.name === name)?.[0] as number;
const same = (a: Float32Array, b: Float32Array, what: string): void => assert.equal(firstDifference(a, b), -1, what);
const recorded = (name: string): Npz => new Npz(`${PICOLM}/${name}.npz`);

test("step 7: all 65,536 half floats", () => {
  const digest = createHash("sha256").update(new Uint8Array(half.buffer)).digest();
  const expected = recorded("scalar_math").u8("from_fp16_all_sha256");
  // The recording keeps a NaN's bits, which a number in JavaScript has not: compare the others one by one if it differs.
  if (!digest.equals(Buffer.from(expected))) {
    for (let bits = 0; bits < 65536; bits++) {
      const exponent = (bits >> 10) & 31;
      const value = exponent === 31 ? (bits & 1023 ? NaN : Infinity) : exponent ? (1024 + (bits & 1023)) * 2 ** (exponent - 25) : (bits & 1023) * 2 ** -24;
      assert.ok(Object.is(half[bits], bits >> 15 ? -value : value), String(bits));
    }
  }
});

test("step 7: float32 to half, to the nearest, ties to even (fault A20)", () => {
  const data = recorded("scalar_math");
  const bits = data.get("fp32_bits").values as Uint32Array;
  const values = new Float32Array(bits.buffer, bits.byteOffset, bits.length);
  const expected = data.get("to_fp16_nearest_even").values as Uint16Array;
  values.forEach((value, i) => {
    if (Number.isNaN(value)) assert.ok(Number.isNaN(half[toHalf(value)]));
    else assert.equal(toHalf(value), expected[i], String(value));
  });
});

/** Rows of a recording as weights. */
function weightsOf(bytes: Uint8Array): Weights {
  const copy = Uint8Array.from([...bytes, ...(bytes.length % 2 ? [0] : [])]);
  return { bytes: copy, pairs: new Uint16Array(copy.buffer), half };
}

test("step 7: rows of every format, bit for bit (faults A3, A4)", () => {
  const row = rowOf();
  let seen = 0;
  for (const [file, dequant, prefix] of [["quant", "dequant", ""], ["spec", "dequant", "rows/"]] as const) {
    const data = recorded(file);
    for (const name of data.names().filter((found) => found.startsWith(prefix) && found.endsWith("/rows"))) {
      const base = name.slice(0, -"/rows".length);
      if (base.includes("picolm_order")) continue; // the order of bits that only picoLM reads
      const type = base.slice(prefix.length).split("/")[0] as string;
      const key = data.has(`${base}/spec_dequant`) ? `${base}/spec_dequant` : `${base}/${dequant}`;
      if (!data.has(key)) continue;
      const rows = data.get(name);
      const expected = data.f32(key);
      const n = expected.length / (rows.shape[0] as number);
      const packed: Packed = { bytes: rows.values as Uint8Array, half };
      for (let r = 0; r < (rows.shape[0] as number); r++) {
        const out = new Float32Array(n);
        decodeRow(packed, typeOf(type), r * (rows.shape[1] as number), n, row, out);
        same(out, expected.subarray(r * n, (r + 1) * n), `${base} row ${r}`);
      }
      seen++;
    }
  }
  assert.ok(seen >= 18, `${seen} cases`);
});

function operandOf(x: Float32Array): Operand {
  const operand = { values: new Float64Array(x.length), sums: new Float64Array(Math.ceil(x.length / 16)) };
  loadOperand(x, x.length, operand);
  return operand;
}

function product(w: Uint8Array, type: number, rows: number, x: Float32Array, exact: boolean): Float32Array {
  const out = new Float32Array(rows);
  const tensor = { name: "w", type, columns: x.length, rows, offset: 0, rowBytes: w.length / rows };
  matmul(weightsOf(w), tensor, operandOf(x), rowOf(), out, 0, rows, exact);
  return out;
}

test("step 11: exact products have picoLM's bits; fast ones are within a millionth of Σ |w·x|", () => {
  const data = recorded("quant");
  const row = rowOf();
  let seen = 0;
  for (const name of data.names().filter((found) => found.endsWith("/vec_dot_scalar") || found.endsWith("/vec_dot"))) {
    const base = name.slice(0, name.lastIndexOf("/"));
    const type = base.split("/")[0] as string;
    if (type === "Q2_K" || type === "Q3_K" || base.includes("/bits")) continue; // read wrongly there; numbers of any size
    const [rows, x, expected] = [data.get(`${base}/rows`), data.f32(`${base}/x`), data.f32(name)];
    const count = rows.shape[0] as number;
    same(product(rows.values as Uint8Array, typeOf(type), count, x, true), expected, base);
    const fast = product(rows.values as Uint8Array, typeOf(type), count, x, false);
    const weights = new Float32Array(x.length);
    for (let r = 0; r < count; r++) {
      decodeRow({ bytes: rows.values as Uint8Array, half }, typeOf(type), r * (rows.shape[1] as number), x.length, row, weights);
      const size = weights.reduce((sum, weight, i) => sum + Math.abs(weight * (x[i] as number)), 0);
      assert.ok(Math.abs((fast[r] as number) - (expected[r] as number)) <= 1e-6 * size, `${base} row ${r}`);
    }
    seen++;
  }
  assert.ok(seen >= 8, `${seen} cases`);
});

test("step 11: recorded matrices, any number of rows", () => {
  const data = recorded("ops");
  const names = data.names().filter((name) => /^matmul_(?!Q[23]_K).*\/w$/.test(name)).map((name) => name.slice(0, -2));
  assert.ok(names.length >= 4);
  for (const name of names) {
    const [, type, rows] = /^matmul_(.*)_(\d+)x\d+$/.exec(name) as unknown as [string, string, string];
    const key = data.has(`${name}/out_scalar`) ? `${name}/out_scalar` : `${name}/out`;
    same(product(data.u8(`${name}/w`), typeOf(type), Number(rows), data.f32(`${name}/x`), true), data.f32(key), name);
  }
});

test("step 11: the fast product of a row does not depend on which rows are computed with it", () => {
  const data = recorded("quant");
  for (const type of ["Q4_0", "Q8_0", "Q6_K"]) {
    const [rows, x] = [data.get(`${type}/real/rows`), data.f32(`${type}/real/x`)];
    const all = product(rows.values as Uint8Array, typeOf(type), 4, x, false);
    for (let r = 0; r < 4; r++) {
      const length = rows.shape[1] as number;
      const one = product((rows.values as Uint8Array).slice(r * length, (r + 1) * length), typeOf(type), 1, x, false);
      assert.ok(Object.is(one[0], all[r]), `${type} row ${r}`);
    }
  }
});

test("step 10: RMSNorm", () => {
  const data = recorded("ops");
  for (const name of data.names().filter((found) => /^rmsnorm_\d+\/x$/.test(found)).map((found) => found.slice(0, -2))) {
    const x = data.f32(`${name}/x`);
    const out = new Float32Array(x.length);
    rmsNorm(x, 0, x.length, data.f32(`${name}/w`), 1e-5, out);
    same(out, data.f32(data.has(`${name}/out_scalar`) ? `${name}/out_scalar` : `${name}/out`), name);
  }
});

test("step 12: RoPE on neighbours, and on halves", () => {
  const data = recorded("ops");
  for (const name of ["rope_32_8_2", "rope_64_4_4", "rope_6_2_1"]) {
    const [cos, sin] = [data.f32(`${name}/cos`), data.f32(`${name}/sin`)];
    const rope = { cos, sin, pairs: cos.length, halves: false };
    for (const which of ["q", "k"]) {
      const x = data.f32(`${name}/${which}`);
      for (let o = 0; o < x.length; o += 2 * cos.length) turn(x, o, rope, 0);
      const key = data.names().find((found) => found.startsWith(`${name}/${which}_`) || found === `${name}/${which}out`) as string;
      same(x, data.f32(key), `${name} ${which}`);
    }
  }
  const x = Float32Array.of(1, 2, 3, 4); // a quarter turn of the first pair (1, 3), none of the second (2, 4)
  turn(x, 0, { cos: Float32Array.of(0, 1), sin: Float32Array.of(1, 0), pairs: 2, halves: true }, 0);
  assert.deepEqual([...x], [-3, 2, 1, 4]);
});

test("step 15: SwiGLU", () => {
  const data = recorded("ops");
  const x = data.f32("silu/x");
  const ones = new Float32Array(x.length).fill(1);
  const key = data.names().find((name) => name.startsWith("silu/") && name !== "silu/x") as string;
  gate(x, ones, 0, x.length, false);
  same(x, data.f32(key), "silu");
  const gelu = Float32Array.of(0, 1, -1, 3);
  gate(gelu, Float32Array.of(1, 1, 1, 2), 0, 4, true);
  // 0.5·x·(1 + tanh(√(2/π)(x + 0.044715x³))), by hand in double precision
  [0, 0.8411919906082768, -0.15880800939172324, 2 * 2.996362607918227].forEach((value, i) => assert.ok(Math.abs((gelu[i] as number) - value) < 1e-6));
});

test("the C library's expf, sinf and cosf", () => {
  const data = recorded("scalar_math");
  const check = (x: Float32Array, f: (value: number) => number, name: string): void => same(Float32Array.from(x, f), data.f32(name), name);
  check(data.f32("expf_x"), expf, "expf");
  const angles = data.f32("trig_x").filter((x) => Math.abs(x) < 2 ** 20);
  const kept = [...data.f32("trig_x").keys()].filter((i) => Math.abs(data.f32("trig_x")[i] as number) < 2 ** 20);
  assert.ok(angles.length > 2000);
  same(Float32Array.from(angles, sinf), Float32Array.from(kept, (i) => data.f32("sinf")[i] as number), "sinf");
  same(Float32Array.from(angles, cosf), Float32Array.from(kept, (i) => data.f32("cosf")[i] as number), "cosf");
});

test("step 17: softmax", () => {
  const data = recorded("ops");
  for (const name of data.names().filter((found) => /^softmax_\w+\/x$/.test(found)).map((found) => found.slice(0, -2))) {
    const x = data.f32(`${name}/x`);
    softmax(x);
    same(x, data.f32(data.names().find((found) => found.startsWith(`${name}/`) && found !== `${name}/x`) as string), name);
  }
});

test("step 17: the generator's states; seeds are mixed, and a draw is never 1 (fault A12)", () => {
  const { rng } = JSON.parse(readFileSync(`${BUILT}/sampler.json`, "utf8").replace(/(?<=[[,:\s])(\d{16,})(?=[,\]}\s])/g, '"$1"')) as { rng: { seed: number | string; states: (number | string)[] }[] };
  for (const { seed, states } of rng) {
    let state = BigInt(seed) || 42n;
    for (const expected of states) {
      state = nextState(state);
      assert.equal(state, BigInt(expected));
    }
  }
  // SplitMix64's first output for the seed 0 (Vigna's reference: 0xe220a8397b1dcdaf).
  assert.equal(seedState(0n), 0xe220a8397b1dcdafn);
  assert.ok(drawOf(2n ** 64n - 1n) < 1);
});

test("step 17: the same picks as the Python port", () => {
  const cases = JSON.parse(readFileSync(`${BUILT}/samples.json`, "utf8")) as { logits: string; temperature: number; topP: number; seed: string; picks: number[] }[];
  const data = recorded("sampler");
  assert.equal(cases.length, 400);
  for (const { logits, temperature, topP, seed, picks } of cases) {
    const values = data.f32(`logits/${logits}`);
    const sampler = new Sampler(temperature, topP, BigInt(seed), new Int32Array(values.length));
    assert.deepEqual(picks.map(() => sampler.pick(values.slice())), picks, JSON.stringify({ logits, temperature, topP, seed }));
  }
});

test("step 17: settings out of range and logits that are no numbers are errors (fault A17)", () => {
  const order = new Int32Array(2);
  assert.throws(() => new Sampler(NaN, 1, 1n, order), /Temperature/);
  assert.throws(() => new Sampler(1, 1.5, 1n, order), /Top-p/);
  assert.throws(() => new Sampler(1, 1, 1n, order).pick(Float32Array.of(1, NaN)), /not numbers/);
  assert.equal(new Sampler(1e-39, 1, 1n, order).pick(Float32Array.of(1, 2)), 1);
});
