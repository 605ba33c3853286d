/** Steps 13, 14, 16 and 18: whole models, against picoLM's recordings and the Python port. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { toHalf } from "../src/07-blocks.ts";
import { encode } from "../src/08-encode.ts";
import { cacheAt, keep } from "../src/13-kv.ts";
import { attend } from "../src/14-attention.ts";
import type { Loaded, Made, Settings } from "../src/18-loop.ts";
import { load, Loop } from "../src/18-loop.ts";
import { DiskSource, Npz, PICOLM, smolPath } from "./files.ts";
import { BUILT, firstDifference, loadTiny, quiet } from "./make.ts";

const RIGHT_IN_C = ["f32", "f16", "q8_0", "q4_0", "q4_k", "q6_k", "mix_q4km", "tied_q4_0"];
const MEET_A_TIE = new Map([["q4_k", 11], ["mix_q4km", 8]]); // at which position
const noLap = (): void => undefined;
const settings: Settings = { temperature: 0, topP: 1, seed: 1n, most: 8, exact: true };
const breathe = (): Promise<void> => Promise.resolve();

/** Logits of all positions. */
function logitsOf(loaded: Loaded, ids: readonly number[], exact: boolean): Float32Array {
  const loop = new Loop(loaded, noLap);
  const width = loaded.recipe.shape.vocabulary;
  const out = new Float32Array(ids.length * width);
  ids.forEach((id, i) => {
    loop.pass(id, true, exact);
    out.set(loaded.me.model.logits, i * width);
  });
  return out;
}

async function all(loop: Loop, prompt: readonly number[], how: Settings): Promise<{ ids: number[]; text: string; reason: string }> {
  const ids: number[] = [];
  let text = "";
  const run = loop.run(prompt, how, breathe);
  for (;;) {
    const next = await run.next();
    if (next.done) return { ids, text, reason: next.value };
    ids.push((next.value as Made).id);
    text += (next.value as Made).text;
  }
}

for (const name of RIGHT_IN_C) {
  test(`steps 10 to 16: ${name}: logits, keys and values of picoLM, bit for bit`, async () => {
    const recorded = new Npz(`${PICOLM}/forward.npz`);
    const ids = [...(recorded.get(`${name}/ids`).values as Int32Array)];
    const loaded = await loadTiny(name);
    const found = logitsOf(loaded, ids, true);
    const { cache } = loaded.me.model;
    const { shape, values } = recorded.get(`${name}/kv_scalar`); // [key or value, layer, position, width]
    const [, layers, positions, width] = shape as [number, number, number, number];
    const kept = (which: number, position: number, layer: number): boolean => {
      const start = ((which * layers + layer) * positions + position) * width;
      const at = cacheAt(cache, layer, position);
      const mine = (which ? cache.values : cache.keys).subarray(at, at + width);
      return mine.every((bits, i) => bits === (values as Uint16Array)[start + i]);
    };
    // picoLM rounds ties away from zero where it keeps keys and values (fault A20), which two of the models meet.
    const tie = Array.from({ length: positions }, (_, position) => position).find((position) =>
      [0, 1].some((which) => Array.from({ length: layers }, (_, layer) => layer).some((layer) => !kept(which, position, layer))),
    );
    assert.equal(tie, MEET_A_TIE.get(name));
    const upTo = (tie ?? positions) * loaded.recipe.shape.vocabulary;
    assert.equal(firstDifference(found.subarray(0, upTo), recorded.f32(`${name}/logits_scalar`).subarray(0, upTo)), -1);
  });
}

test("steps 10 to 16: every tiny model has the Python port's logits, bit for bit; fast ones are within 0.005", async () => {
  const port = new Npz(`${BUILT}/port.npz`);
  const names = port.names().filter((name) => name.endsWith("/ids")).map((name) => name.slice(0, -4));
  assert.equal(names.length, 15);
  let worst = 0;
  for (const name of names) {
    const ids = [...(port.get(`${name}/ids`).values as Int32Array)];
    const loaded = await loadTiny(name);
    const expected = port.f32(`${name}/logits`);
    assert.equal(firstDifference(logitsOf(loaded, ids, true), expected), -1, name);
    logitsOf(loaded, ids, false).forEach((value, i) => (worst = Math.max(worst, Math.abs(value - (expected[i] as number)))));
  }
  console.log(`largest difference of a fast logit: ${worst}`);
  assert.ok(worst < 0.005, String(worst));
});

test("step 13: numbers are kept as half floats, each layer and position in its place", () => {
  const cache = { keys: new Uint16Array(24), values: new Uint16Array(24), context: 3, width: 4 };
  assert.equal(cacheAt(cache, 1, 2), 20);
  keep(cache.keys, cacheAt(cache, 1, 2), Float32Array.of(9, 1, -2), 1, 2);
  assert.deepEqual([...cache.keys.slice(19, 23)], [0, 0x3c00, 0xc000, 0]);
});

test("step 14: equal scores take the mean of the values; one far above takes its own", () => {
  const half = new Float32Array(65536);
  const put = (value: number): number => {
    const bits = toHalf(value);
    half[bits] = value;
    return bits;
  };
  const cache = { keys: new Uint16Array(4), values: Uint16Array.of(put(2), put(4), put(6), put(8)), context: 2, width: 2 };
  const out = new Float32Array(2);
  attend(Float32Array.of(1, 1), 0, 2, cache, half, 0, 0, 0, 1, out);
  assert.deepEqual([...out], [4, 6]);
  cache.keys.set([put(0), put(0), put(500), put(500)]);
  attend(Float32Array.of(1, 1), 0, 2, cache, half, 0, 0, 0, 1, out);
  assert.deepEqual([...out], [6, 8]);
  attend(Float32Array.of(1, 1), 0, 2, cache, half, 0, 0, 0, 0, out);
  assert.deepEqual([...out], [2, 4]);
});

test("step 18: as many tokens as asked for (fault A9), and why it ended", async () => {
  const loaded = await loadTiny("q8_0");
  const prompt = encode(loaded.vocabulary, [{ text: "the cat", special: false }]);
  const five = await all(new Loop(loaded, noLap), prompt, { ...settings, most: 5 });
  assert.equal(five.ids.length, 5);
  assert.equal(five.reason, "as many tokens as asked for");
  const full = await all(new Loop(loaded, noLap), prompt, { ...settings, most: 1000 });
  assert.ok(full.reason === "the context is full" || full.reason === "the model ended its answer");
  assert.deepEqual(full.ids.slice(0, 5), five.ids);
  const loop = new Loop(loaded, noLap);
  await assert.rejects(all(loop, Array<number>(96).fill(5), settings), /96 tokens; the context has room for 96/);
  await assert.rejects(all(loop, [], settings), /empty/);
});

test("step 18: what the cache holds is used again, and changes no token (fault A1)", async () => {
  const loaded = await loadTiny("q4_k");
  const [first, second] = ["the cat sat on the mat", "the cat sat on a dog"].map((text) => encode(loaded.vocabulary, [{ text, special: false }])) as [number[], number[]];
  const fresh = async (prompt: number[]): Promise<number[]> => (await all(new Loop(await loadTiny("q4_k"), noLap), prompt, settings)).ids;
  const loop = new Loop(loaded, noLap);
  assert.equal(loop.keeps(first, true), 0);
  assert.deepEqual((await all(loop, first, settings)).ids, await fresh(first));
  assert.equal(loop.keeps(first, true), first.length - 1);
  assert.equal(loop.keeps(first, false), 0); // other arithmetic has other numbers
  assert.deepEqual((await all(loop, second, settings)).ids, await fresh(second));
  assert.deepEqual((await all(loop, second, settings)).ids, await fresh(second));
});

test("step 18: a stop is heard between tokens", async () => {
  const loop = new Loop(await loadTiny("q4_0"), noLap);
  const run = loop.run([1, 300], { ...settings, most: 50 }, breathe);
  await run.next();
  loop.stopped = true;
  assert.deepEqual(await run.next(), { done: true, value: "stopped" });
});

const smol = smolPath();

test("step 18: SmolLM2-135M: the Python port's tokens", { skip: smol === undefined && "the model is not there" }, async () => {
  const loaded = await load(new DiskSource(smol as string), 256, 1, quiet);
  const answers = JSON.parse(readFileSync(`${BUILT}/answers.json`, "utf8")) as { ids: number[]; made: number[] }[];
  assert.equal(answers.length, 3);
  for (const { ids, made } of answers) {
    const { ids: found } = await all(new Loop(loaded, noLap), ids, { ...settings, exact: false, most: made.length });
    assert.deepEqual(found, made);
  }
});
