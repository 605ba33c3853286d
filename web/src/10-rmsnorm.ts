/**
 * Step 10 — RMSNorm: a vector divided by its root mean square, times a weight for each element.
 *
 * Every layer begins with it, so that numbers neither grow nor shrink on their way (arXiv:1910.07467). The sum of squares runs in
 * order, and every operation is rounded to float32: the bits of the Python port's `scalar` order.
 */

const fround = Math.fround;

/** out[o + i] = x[o + i] / rms · weight[w + i], for n elements; `out` may be `x`. */
export function rmsNorm(x: Float32Array, o: number, n: number, weight: Float32Array, eps: number, out: Float32Array): void {
  let sum = 0;
  for (let i = 0; i < n; i++) {
    const value = x[o + i] as number;
    sum = fround(sum + fround(value * value));
  }
  const mean = fround(fround(sum / n) + fround(eps));
  const scale = fround(1 / fround(Math.sqrt(mean)));
  for (let i = 0; i < n; i++) out[o + i] = fround((x[o + i] as number) * scale) * (weight[i] as number);
}
