/** A chat's frame around a prompt, for the two kinds of frame that the page's models use. */

import type { Part, Vocabulary } from "./08-encode.ts";

const FRAMES = [
  { sign: "<|im_start|>", before: "<|im_start|>user\n", after: "<|im_end|>\n<|im_start|>assistant\n" },
  { sign: "<start_of_turn>", before: "<start_of_turn>user\n", after: "<end_of_turn>\n<start_of_turn>model\n" },
] as const;

const frameOf = (vocabulary: Vocabulary): (typeof FRAMES)[number] | undefined => FRAMES.find(({ sign }) => vocabulary.added.has(sign));

export const knowsChat = (vocabulary: Vocabulary): boolean => frameOf(vocabulary) !== undefined;

/** The prompt's parts. Only the frame may hold control tokens: what the user writes cannot end their turn. */
export function framed(vocabulary: Vocabulary, prompt: string, chat: boolean): Part[] {
  const frame = chat ? frameOf(vocabulary) : undefined;
  if (frame === undefined) return [{ text: prompt, special: false }];
  return [{ text: frame.before, special: true }, { text: prompt, special: false }, { text: frame.after, special: true }];
}
