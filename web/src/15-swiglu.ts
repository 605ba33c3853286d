/**
 * Step 15 — SwiGLU: the feed-forward part's gate.
 *
 * Two products of the same vector; one decides, element by element, how much of the other passes: silu(gate) · up, with silu(x) = x / (1 + e^-x)
 * (arXiv:2002.05202). A third product brings the result back to the model's width. Gemma's gate is GELU in its tanh form;
 * Math.tanh is a double's, so there the bits are those of the port to about 1e-7.
 */

import { expf } from "./libm.ts";

const fround = Math.fround;

/** gate[i] = act(gate[i]) · up[i], for i in [from, to). */
export function gate(values: Float32Array, up: Float32Array, from: number, to: number, gelu: boolean): void {
  for (let i = from; i < to; i++) {
    const x = values[i] as number;
    const act = gelu ? geluOf(x) : fround(x / fround(1 + expf(-x)));
    values[i] = act * (up[i] as number);
  }
}

function geluOf(x: number): number {
  const cube = fround(fround(x * x) * x);
  const inner = fround(fround(0.7978845608028654) * fround(x + fround(fround(0.044715) * cube)));
  return fround(fround(0.5 * x) * fround(1 + fround(Math.tanh(inner))));
}
