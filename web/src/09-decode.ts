/**
 * Step 9 — decode: token ids back to text, as they come.
 *
 * A token is bytes, not characters: an emoji may take four tokens. The decoder hands on whole characters only and keeps
 * the beginning of one for the next token. Control tokens have no text.
 */

import type { Vocabulary } from "./08-encode.ts";
import { BYTE_LETTERS } from "./08-encode.ts";

const BYTE_OF_LETTER: ReadonlyMap<string, number> = new Map(BYTE_LETTERS.map((letter, byte) => [letter, byte]));

/** The bytes that a token stands for. */
export function tokenBytes(vocabulary: Vocabulary, id: number): Uint8Array {
  const text = vocabulary.texts[id];
  if (text === undefined || vocabulary.control.has(id)) return new Uint8Array(0);
  const encoder = new TextEncoder();
  if (vocabulary.added.has(text)) return encoder.encode(text);
  if (vocabulary.byteLevel) {
    const bytes = Array.from(text, (letter) => BYTE_OF_LETTER.get(letter));
    return bytes.includes(undefined) ? encoder.encode(text) : Uint8Array.from(bytes as number[]);
  }
  const spelled = /^<0x([0-9A-F]{2})>$/.exec(text);
  return spelled ? Uint8Array.of(parseInt(spelled[1] as string, 16)) : encoder.encode(text.replaceAll("▁", " "));
}

/** Turns ids into text; the pieces joined are the text of the whole. */
export class Decoder {
  private readonly characters = new TextDecoder();

  constructor(private readonly vocabulary: Vocabulary) {}

  /** The characters that this token completes. */
  feed(id: number): string {
    return this.characters.decode(tokenBytes(this.vocabulary, id), { stream: true });
  }

  /** What is left at the end: a sign for a character that was cut, or nothing. */
  finish(): string {
    return this.characters.decode();
  }
}
