/**
 * Step 16 — logits: a number for every token of the vocabulary.
 *
 * The last vector is normed once more and multiplied with the output matrix, the largest of all: a fifth of SmolLM2's work. Prompt
 * tokens but the last need none of it. Where a file has no output matrix, the embedding serves as one ("tied").
 */

import { rmsNorm } from "./10-rmsnorm.ts";
import { loadOperand, matmul } from "./11-matmul.ts";
import type { Worker } from "./model.ts";
import { share } from "./model.ts";

/** This worker's share of the logits. */
export function computeLogits(me: Worker, exact: boolean): void {
  const { model, norm, operand, row } = me;
  const { shape, output, outputNorm, x, logits, weights } = model;
  rmsNorm(x, 0, shape.hidden, outputNorm, shape.eps, norm);
  loadOperand(norm, shape.hidden, operand);
  const [from, to] = share(me, output.rows, 2);
  matmul(weights, output, operand, row, logits, from, to, exact);
}
