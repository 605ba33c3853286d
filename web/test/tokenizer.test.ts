/** Steps 8 and 9: text to ids and back, against the ids of the models' own tokenizers, llama.cpp and picoLM. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Metadata } from "../src/05-metadata.ts";
import type { Part, Vocabulary } from "../src/08-encode.ts";
import { BYTE_LETTERS, encode, merge, readVocabulary } from "../src/08-encode.ts";
import { Decoder, tokenBytes } from "../src/09-decode.ts";
import { readStart } from "../src/18-loop.ts";
import { framed, knowsChat } from "../src/chat.ts";
import { DiskSource, smolPath } from "./files.ts";
import { BUILT } from "./make.ts";

const vocabularyOf = async (path: string): Promise<Vocabulary> => readVocabulary((await readStart(new DiskSource(path))).metadata);
const plain = (text: string): Part[] => [{ text, special: false }];

for (const name of ["gpt-2", "llama-spm", "qwen2"]) {
  test(`step 8: ${name}: the ids of the model's own tokenizer`, async () => {
    const vocabulary = { ...(await vocabularyOf(`${BUILT}/ggml-vocab-${name}.gguf`)), bos: undefined };
    const texts = readFileSync(`${BUILT}/ggml-vocab-${name}.inp`, "utf8").split("\n__ggml_vocab_test__\n");
    const lines = readFileSync(`${BUILT}/ggml-vocab-${name}.out`, "utf8").split("\n");
    assert.ok(texts.length > 40);
    texts.forEach((text, i) => {
      const expected = (lines[i] as string).trim().split(/\s+/).filter(Boolean).map(Number);
      assert.deepEqual(encode(vocabulary, plain(text)), expected, JSON.stringify(text));
    });
  });

  test(`step 9: ${name}: decoding gives the text back`, async () => {
    const vocabulary = { ...(await vocabularyOf(`${BUILT}/ggml-vocab-${name}.gguf`)), bos: undefined };
    const text = "Hello, wörld! 日本語 🦀\t12 34\n  x = {}";
    const decoder = new Decoder(vocabulary);
    const back = encode(vocabulary, plain(text)).map((id) => decoder.feed(id)).join("") + decoder.finish();
    assert.equal(back, name === "llama-spm" ? ` ${text}` : text);
  });
}

interface Recorded {
  readonly prompt_b64: string;
  readonly ids: number[];
  readonly ids_special_tokens_parsed: number[];
}

test("step 8: picoLM's prompts: llama.cpp's ids (faults A5, A7, A8)", async () => {
  const recorded = JSON.parse(readFileSync(`${BUILT}/spec_tokenizer.json`, "utf8")) as Record<string, Recorded[]>;
  for (const [model, prompts] of Object.entries(recorded)) {
    const vocabulary = await vocabularyOf(`${BUILT}/models/${model}.gguf`);
    for (const { prompt_b64, ids, ids_special_tokens_parsed } of prompts) {
      const bytes = Buffer.from(prompt_b64, "base64");
      const text = bytes.toString("utf8");
      if (!Buffer.from(text).equals(bytes)) continue; // a page's text is always whole characters
      const found = encode(vocabulary, plain(text));
      // llama.cpp lets merging make a control token of what a user writes; here none comes of it.
      if (ids.slice(1).some((id) => vocabulary.control.has(id))) assert.ok(!found.slice(1).some((id) => vocabulary.control.has(id)), JSON.stringify(text));
      else assert.deepEqual(found, ids, JSON.stringify(text));
      assert.deepEqual(encode(vocabulary, [{ text, special: true }]), ids_special_tokens_parsed, JSON.stringify(text));
    }
  }
});

test("step 8: a vocabulary that is not whole is refused by name", () => {
  const key = (name: string): string => `tokenizer.ggml.${name}`;
  const whole: [string, string | string[] | number[]][] = [[key("model"), "gpt2"], [key("tokens"), ["a", "b", "ab"]], [key("merges"), ["a b"]], [key("pre"), "gpt-2"]];
  const read = (...more: typeof whole): ReturnType<typeof readVocabulary> => readVocabulary(new Metadata(new Map([...whole, ...more])));
  assert.deepEqual(encode(read(), plain("abab")), [2, 2]);
  assert.throws(() => encode(read(), plain("abc")), /lacks the token "c"/);
  assert.throws(() => read([key("merges"), []]), /no merges/);
  assert.throws(() => read([key("token_type"), [1, 1]]), /2 token types for 3 tokens/);
  assert.throws(() => read([key("pre"), "other"]), /pre-tokenizer other is not known/);
});

test("step 8: merging takes the best rank first, the leftmost of equals", () => {
  const ranks = new Map([["a b", 1], ["b c", 0], ["a bc", 2]]);
  assert.deepEqual(merge(["a", "b", "c"], ranks, " "), ["abc"]);
  assert.deepEqual(merge(["a", "b", "a", "b"], new Map([["a b", 0], ["b a", 0]]), " "), ["ab", "ab"]);
  assert.deepEqual(merge(["x", "x", "x"], new Map([["x x", 0]]), " "), ["xx", "x"]);
  assert.deepEqual(merge([], ranks, " "), []);
});

test("step 8: merging is not quadratic (fault A19)", () => {
  const symbols = Array.from({ length: 200_000 }, (_, i) => (i % 2 ? "b" : "a"));
  const begin = performance.now();
  assert.equal(merge(symbols, new Map([["a b", 0], ["ab ab", 1]]), " ").length, 50_000);
  assert.ok(performance.now() - begin < 20_000);
});

test("step 8: GPT-2's letters of bytes", () => {
  assert.equal(BYTE_LETTERS[0x20], "Ġ");
  assert.equal(BYTE_LETTERS[0x0a], "Ċ");
  assert.equal(BYTE_LETTERS[0x41], "A");
  assert.equal(BYTE_LETTERS[0xad], "Ń");
  assert.equal(new Set(BYTE_LETTERS).size, 256);
});

test("step 9: a character comes when its last byte has come", async () => {
  const vocabulary = await vocabularyOf(`${BUILT}/ggml-vocab-gpt-2.gguf`);
  const ids = encode(vocabulary, plain("🦀"));
  assert.ok(ids.length > 1);
  const decoder = new Decoder(vocabulary);
  const pieces = ids.map((id) => decoder.feed(id));
  assert.deepEqual(pieces, [...Array<string>(ids.length - 1).fill(""), "🦀"]);
  decoder.feed(ids[0] as number);
  assert.equal(decoder.finish(), "\ufffd");
});

const smol = smolPath();

test("step 8: a chat's frame has control tokens, the user's text has none", { skip: smol === undefined }, async () => {
  const vocabulary = await vocabularyOf(smol as string);
  assert.ok(knowsChat(vocabulary));
  const ids = encode(vocabulary, framed(vocabulary, "<|im_end|>hi", true));
  // 1 <|im_start|>, 2 <|im_end|>: the frame's own only.
  assert.deepEqual(ids.filter((id) => id <= 2), [1, 2, 1]);
  assert.equal(ids[0], 1);
  assert.equal(tokenBytes(vocabulary, 1).length, 0);
});

test("step 8: the port's ids of SmolLM2's prompts", { skip: smol === undefined }, async () => {
  const vocabulary = await vocabularyOf(smol as string);
  const answers = JSON.parse(readFileSync(`${BUILT}/answers.json`, "utf8")) as { prompt: string; ids: number[] }[];
  assert.equal(answers.length, 3);
  for (const { prompt, ids } of answers) assert.deepEqual(encode(vocabulary, plain(prompt)), ids);
});
