/** The eighteen steps, as the page names them. */

export interface Step {
  readonly name: string;
  readonly says: string;
}

export const STEPS: readonly Step[] = [
  { name: "arena", says: "One buffer for everything, asked for once." },
  { name: "views", says: "Where each region lies: a number that only grows." },
  { name: "file", says: "Read by ranges, never the whole at once." },
  { name: "header", says: "Magic, version, counts." },
  { name: "metadata", says: "Sizes, settings, vocabulary." },
  { name: "tensors", says: "Names, shapes, and where the bytes lie." },
  { name: "blocks", says: "Packed bytes to numbers: code · scale + offset." },
  { name: "encode", says: "Text to token ids: merge neighbours, best first." },
  { name: "decode", says: "Ids to bytes to whole characters." },
  { name: "RMSNorm", says: "A vector divided by its root mean square." },
  { name: "matmul", says: "Every weight, once a token." },
  { name: "RoPE", says: "Positions as rotations." },
  { name: "KV cache", says: "What earlier tokens left for later ones." },
  { name: "attention", says: "What to take from which position." },
  { name: "SwiGLU", says: "A gate, element by element." },
  { name: "logits", says: "A number for every token there is." },
  { name: "sampler", says: "From those numbers to one token." },
  { name: "loop", says: "Again, until the answer ends." },
];
