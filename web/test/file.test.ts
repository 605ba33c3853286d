/** Steps 1 to 6: the arena, views, files by ranges, header, metadata, tensor directory. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { makeArena, MOST_BYTES, regionOf } from "../src/01-arena.ts";
import { Bump, bytesOf, floatsOf } from "../src/02-views.ts";
import { BlobSource, copyInto, openUrl, PIECE_BYTES } from "../src/03-file.ts";
import { Cursor, FormatError, NeedMore, readHeader } from "../src/04-header.ts";
import { readMetadata } from "../src/05-metadata.ts";
import { nextState, seedState } from "../src/17-sampler.ts";
import { load, readStart } from "../src/18-loop.ts";
import { DiskSource } from "./files.ts";
import { BUILT, MemorySource, quiet, Writer } from "./make.ts";

test("step 1: an arena is one buffer, as long as its last region's end", () => {
  const arena = makeArena([{ name: "a", step: 1, offset: 0, bytes: 10 }, { name: "b", step: 2, offset: 64, bytes: 6 }], false);
  assert.equal(arena.buffer.byteLength, 70);
  assert.equal(regionOf(arena, "b").offset, 64);
  assert.throws(() => regionOf(arena, "c"), /no region c/);
  assert.ok(makeArena(arena.regions, true).buffer instanceof SharedArrayBuffer);
});

test("step 1: what a tab cannot hold is refused before anything is asked for", () => {
  assert.throws(() => makeArena([{ name: "a", step: 1, offset: 0, bytes: MOST_BYTES + 1 }], false), /needs 8192 MiB in one piece/);
});

test("step 2: regions start at multiples of 64 and do not overlap", () => {
  const bump = new Bump();
  for (const bytes of [1, 64, 65, 0, 4]) bump.take(`r${bump.regions.length}`, 1, bytes);
  assert.deepEqual(bump.regions.map((region) => region.offset), [0, 64, 128, 256, 256]);
  assert.throws(() => bump.take("bad", 1, 1.5), /cannot have 1.5 bytes/);
});

test("step 2: views look at the same bytes", () => {
  const bump = new Bump();
  bump.take("other", 1, 3);
  bump.take("numbers", 1, 8);
  const arena = makeArena(bump.regions, false);
  floatsOf(arena, "numbers")[1] = 1;
  assert.deepEqual([...bytesOf(arena, "numbers")], [0, 0, 0, 0, 0, 0, 128, 63]); // 1.0 is 0x3F800000
});

test("step 3: a file is copied piece by piece, whole and in order", async () => {
  const data = Uint8Array.from({ length: PIECE_BYTES + 1000 }, (_, i) => i * 7);
  const target = new Uint8Array(PIECE_BYTES + 990);
  const heard: number[] = [];
  await copyInto(new BlobSource(new Blob([data]), "blob"), 5, target, (bytes) => heard.push(bytes));
  assert.deepEqual(heard, [PIECE_BYTES, PIECE_BYTES + 990]);
  assert.ok(Buffer.from(target).equals(Buffer.from(data.subarray(5, 5 + target.length))));
});

test("step 3: a file that ends too early is an error", async () => {
  const source = new BlobSource(new Blob([new Uint8Array(10)]), "short");
  await assert.rejects(copyInto(source, 0, new Uint8Array(11), () => undefined), /short ends 1 bytes too early/);
});

/** A server that the test plays. */
async function withFetch<T>(answer: (range: string) => Response, work: () => Promise<T>): Promise<T> {
  const real = globalThis.fetch;
  globalThis.fetch = async (_, init) => answer(new Headers(init?.headers).get("range") ?? "");
  try {
    return await work();
  } finally {
    globalThis.fetch = real;
  }
}

test("step 3: a server is asked for ranges; one that changes its file meanwhile is noticed", async () => {
  let tag = "one";
  const asked: string[] = [];
  const answer = (range: string): Response => {
    asked.push(range);
    const [, from, to] = /(\d+)-(\d+)/.exec(range) ?? [];
    const body = new Uint8Array(Number(to) - Number(from) + 1);
    return new Response(body, { status: 206, headers: { "content-range": `bytes ${from}-${to}/100`, etag: tag } });
  };
  await withFetch(answer, async () => {
    const source = await openUrl("http://host/a%20model.gguf");
    assert.deepEqual([source.name, source.bytes], ["a model.gguf", 100]);
    assert.equal((await source.read(90, 10)).length, 10);
    assert.deepEqual(asked, ["bytes=0-0", "bytes=90-99"]);
    tag = "two";
    await assert.rejects(source.read(0, 10), /changed on the server/);
  });
});

test("step 3: a server without ranges sends all; one that refuses is quoted", async () => {
  await withFetch(() => new Response("GGUF and so on"), async () => {
    const source = await openUrl("http://host/model.gguf");
    assert.equal(source.bytes, 14);
    assert.equal(Buffer.from(await source.read(0, 4)).toString(), "GGUF");
  });
  await withFetch(() => new Response("", { status: 404, statusText: "Not Found" }), async () => {
    await assert.rejects(openUrl("http://host/model.gguf"), /answered 404 Not Found/);
  });
});

test("step 3: no answer at all, and a picked file that has changed, are told as such", async () => {
  const silent = (): Response => {
    throw new TypeError("Failed to fetch");
  };
  await assert.rejects(withFetch(silent, () => openUrl("http://host/model.gguf")), /model.gguf: no answer \(Failed to fetch\)/);
  const changed = { size: 10, slice: () => ({ arrayBuffer: () => Promise.reject(new Error("could not be read")) }) };
  await assert.rejects(new BlobSource(changed as unknown as Blob, "mine").read(0, 4), /mine cannot be read any more .* pick it again/);
});

/** The browser's cache storage, as far as step 3 uses it. */
async function withCache(work: (kept: Map<string, Response>) => Promise<void>): Promise<void> {
  const kept = new Map<string, Response>();
  const cache = {
    match: (key: string) => Promise.resolve(kept.get(key)?.clone()),
    put: (key: string, reply: Response) => Promise.resolve(void kept.set(key, reply)),
    keys: () => Promise.resolve([...kept.keys()].map((url) => ({ url }))),
    delete: ({ url }: { url: string }) => Promise.resolve(kept.delete(url)),
  };
  Object.assign(globalThis, { caches: { open: () => Promise.resolve(cache) } });
  try {
    await work(kept);
  } finally {
    Reflect.deleteProperty(globalThis, "caches");
  }
}

test("step 3: pieces are kept by version, and given back when there is another; without a version none is kept", async () => {
  let named: Record<string, string> = { "last-modified": "Monday" };
  let asked = 0;
  const answer = (range: string): Response => {
    asked++;
    const [, from, to] = /(\d+)-(\d+)/.exec(range) ?? [];
    const body = new Uint8Array(Number(to) - Number(from) + 1).fill(asked);
    return new Response(body, { status: 206, headers: { "content-range": `bytes ${from}-${to}/100`, ...named } });
  };
  await withCache(async (kept) =>
    withFetch(answer, async () => {
      const first = await (await openUrl("http://host/m.gguf")).read(0, 2);
      assert.deepEqual([...(await (await openUrl("http://host/m.gguf")).read(0, 2))], [...first]); // 3 questions, not 4
      assert.deepEqual([asked, kept.size], [3, 1]);
      named = { "last-modified": "Tuesday" };
      const source = await openUrl("http://host/m.gguf");
      assert.equal(kept.size, 0);
      assert.deepEqual([...(await source.read(0, 2))], [5, 5]);
      named = { "last-modified": "Wednesday" };
      await assert.rejects(source.read(2, 2), /changed on the server/);
      named = {};
      await (await openUrl("http://host/m.gguf")).read(0, 2);
      assert.equal(kept.size, 0);
    }),
  );
});

const header = (): Writer => new Writer().raw(Buffer.from("GGUF")).u32(3);

test("step 4: a header says how much follows", () => {
  const bytes = header().u64(0).u64(1).text("k").u32(4).u32(7).bytes();
  assert.deepEqual(readHeader(new Cursor(bytes, bytes.length)), { version: 3, tensors: 0, entries: 1 });
});

test("step 4: counts that the file cannot hold, other magic and other versions are refused", () => {
  const read = (bytes: Uint8Array): unknown => readHeader(new Cursor(bytes, bytes.length));
  assert.throws(() => read(header().u64(2n ** 61n).u64(0).bytes()), FormatError);
  assert.throws(() => read(header().u64(10).u64(0).bytes()), /10 tensors; its 24 bytes cannot hold/);
  assert.throws(() => read(Buffer.from("GGML and something that is long")), /not a GGUF file/);
  assert.throws(() => read(new Writer().raw(Buffer.from("GGUF")).u32(1).u64(0).u64(0).bytes()), /version 1/);
});

test("step 4: bytes that are not here yet are asked for; bytes that are nowhere are an error", () => {
  const cursor = new Cursor(new Uint8Array(4), 8);
  assert.equal(cursor.u32(), 0);
  assert.throws(() => cursor.u32(), NeedMore);
  assert.throws(() => cursor.f64(), FormatError);
});

test("step 5: every type of value is read", () => {
  const w = new Writer();
  const number = (key: string, type: number, bytes: number[]): void => void w.text(key).u32(type).raw(Uint8Array.from(bytes));
  number("u8", 0, [200]);
  number("i8", 1, [200]);
  number("u16", 2, [1, 2]);
  number("i16", 3, [255, 255]);
  number("u32", 4, [255, 255, 255, 255]);
  number("i32", 5, [254, 255, 255, 255]);
  number("f32", 6, [0, 0, 192, 63]);
  number("bool", 7, [1]);
  w.text("text").u32(8).text("é");
  w.text("list").u32(9).u32(8).u64(2).text("a").text("b");
  number("u64", 10, [0, 0, 0, 0, 1, 0, 0, 0]);
  number("i64", 11, Array<number>(8).fill(255));
  number("f64", 12, [0, 0, 0, 0, 0, 0, 4, 64]);
  const bytes = w.bytes();
  const found = readMetadata(new Cursor(bytes, bytes.length), 13);
  const expected = { u8: 200, i8: -56, u16: 513, i16: -1, u32: 2 ** 32 - 1, i32: -2, f32: 1.5, bool: true, text: "é", list: ["a", "b"], u64: 2 ** 32, i64: -1, f64: 2.5 };
  for (const [key, value] of Object.entries(expected)) assert.deepEqual(found.get(key), value, key);
  assert.throws(() => found.number("text"), /text should be a number; it is é/);
  assert.throws(() => found.number("nothing"), /does not say nothing/);
});

test("step 5: nested arrays and doubled keys are refused", () => {
  const nested = new Writer().text("k").u32(9).u32(9).u64(1).bytes();
  assert.throws(() => readMetadata(new Cursor(nested, nested.length), 1), /array of arrays/);
  const doubled = new Writer().text("k").u32(4).u32(1).text("k").u32(4).u32(2).bytes();
  assert.throws(() => readMetadata(new Cursor(doubled, doubled.length), 2), /says k twice/);
});

test("step 6: a tensor's rows have whole blocks, within the file, aligned", async () => {
  const file = (columns: number, type: number, offset: number): MemorySource => {
    const w = header().u64(1).u64(0).text("t").u32(2).u64(columns).u64(3).u32(type).u64(offset);
    return new MemorySource("made", Buffer.concat([w.bytes(), Buffer.alloc(400)]));
  };
  const { directory } = await readStart(file(64, 3, 32));
  const tensor = directory.tensors.get("t");
  assert.deepEqual([tensor?.rowBytes, tensor?.offset, directory.dataBytes], [40, 32, 32 + 120]);
  assert.equal(directory.dataStart % 32, 0);
  await assert.rejects(readStart(file(20, 8, 0)), /rows of 20; Q8_0 packs 32/);
  await assert.rejects(readStart(file(64, 3, 33)), /no multiple of 32/);
  await assert.rejects(readStart(file(64, 0, 0)), /would end at/);
  await assert.rejects(readStart(file(64, 16, 0)), /type 16, which is none of/);
});

test("step 6: no broken file is taken (picoLM's faults B)", async (t) => {
  const cases = JSON.parse(readFileSync(`${BUILT}/malformed.json`, "utf8")) as { name: string; should: string }[];
  assert.equal(cases.length, 73);
  // float64 scores are numbers too, and a norm may be of any type that step 7 knows: both are read rightly.
  const taken = new Set(["scores_float64", "unknown_norm_type"]);
  for (const { name, should } of cases) {
    await t.test(name, async () => {
      const work = load(new DiskSource(`${BUILT}/malformed/${name}.gguf`), 32, 1, quiet);
      if (should.startsWith("reject") && !taken.has(name)) {
        await assert.rejects(work, (error: Error) => error.message.length > 20 && !(error instanceof TypeError));
      } else {
        await work.catch((error: Error) => assert.ok(/or reject|else reject|: reject|mismatch/.test(should) && !(error instanceof TypeError), `${should}: ${error.message}`));
      }
    });
  }
});

test("step 6: 400 damaged files: each is read, or refused with a sentence of ours (picoLM's faults B)", async () => {
  const whole = readFileSync(`${BUILT}/malformed/plain.gguf`);
  const { directory } = await readStart(new MemorySource("plain", whole));
  let state = seedState(5n);
  const random = (n: number): number => Number((state = nextState(state)) % BigInt(n));
  const numbers = [0n, 1n, 2n ** 31n, 2n ** 32n - 1n, 2n ** 62n, 2n ** 63n, 2n ** 64n - 1n];
  for (let i = 0; i < 400; i++) {
    const data = Buffer.from(whole);
    if (i % 3 === 0) data.writeBigUInt64LE(numbers[random(numbers.length)] as bigint, random(directory.dataStart - 8));
    else for (let n = random(4); n >= 0; n--) data[random(directory.dataStart)] = random(256);
    const cut = i % 3 === 2 ? random(data.length) : data.length;
    await load(new MemorySource("damaged", data.subarray(0, cut)), 32, 1, quiet).catch((error: Error) => {
      assert.ok(error instanceof FormatError || error.constructor === Error || error instanceof RangeError, `${i}: ${error.stack}`);
      assert.ok(error.message.length > 20, `${i}: ${error.message}`);
    });
  }
});
