/**
 * The C library's expf, sinf and cosf, to the bit.
 *
 * Math.exp and its kind are doubles, and may differ from browser to browser. These are the float32 functions that glibc
 * has (from Arm's optimized routines: the constants are theirs), written in double arithmetic without fused
 * operations, which JavaScript does exactly. So softmax, SwiGLU and RoPE give the same bits here as in C and in the Python port.
 */

const fround = Math.fround;

// 2^(i/32), to the nearest double.
const EXP2 = Float64Array.of(
  1, 1.0218971486541166, 1.0442737824274138, 1.0671404006768237, 1.0905077326652577, 1.1143867425958924,
  1.1387886347566916, 1.1637248587775775, 1.189207115002721, 1.215247359980469, 1.241857812073484, 1.2690509571917332,
  1.2968395546510096, 1.3252366431597413, 1.3542555469368927, 1.383909881963832, 1.4142135623730951, 1.4451808069770467,
  1.4768261459394993, 1.5091644275934228, 1.5422108254079407, 1.5759808451078865, 1.6104903319492543, 1.645755478153965,
  1.681792830507429, 1.718619298122478, 1.7562521603732995, 1.7947090750031072, 1.8340080864093424, 1.8741676341103,
  1.9152065613971474, 1.9571441241754002,
);
const POWERS = Float64Array.from({ length: 300 }, (_, i) => 2 ** (i - 160));
const SHIFT = 6755399441055744; // 1.5 · 2^52: adding and taking it away rounds to an integer
const INV_LN2_32 = 46.16624130844683; // 32 / ln 2
const C0 = 1.6938359250920212e-6;
const C1 = 0.00023459809789509004;
const C2 = 0.021660849396613134;

/** e^x as a float32; x is a float32. */
export function expf(x: number): number {
  if (x > 88.72283172607422) return Infinity;
  if (x < -103.97207641601562) return 0;
  if (x !== x) return x;
  const z = x * INV_LN2_32;
  const rounded = z + SHIFT - SHIFT;
  const k = rounded | 0;
  const r = z - rounded;
  const i = k & 31;
  const scale = (EXP2[i] as number) * (POWERS[((k - i) >> 5) + 160] as number);
  const y = (C0 * r + C1) * (r * r) + (C2 * r + 1);
  return fround(y * scale);
}

const COS = [1, -0.49999999725108224, 0.041666623324344516, -0.001388676379437604, 2.4390450703564542e-5] as const;
const SIN = [-0.16666654943701084, 0.008332178146138854, -0.00019517298981385725] as const;
// π/2 in three pieces, of which the first two have 33 bits: n times a piece is exact for every n below 2^20.
const HALF_PI = [1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21] as const;
const INV_HALF_PI = 0.6366197723675814; // 2/π

/** sin (turn 0) or cos (turn 1) of a float32 below a million, as a float32: the angle less n quarter turns, then a polynomial. */
function sinCos(x: number, turn: 0 | 1): number {
  const n = x * INV_HALF_PI + SHIFT - SHIFT;
  const r = x - n * HALF_PI[0] - n * HALF_PI[1] - n * HALF_PI[2];
  const r2 = r * r;
  const r3 = r * r2;
  const r4 = r2 * r2;
  const quarter = (n + turn) & 3; // 0: sin, 1: cos, 2: -sin, 3: -cos
  const value =
    quarter & 1
      ? COS[0] + r2 * COS[1] + r4 * COS[2] + r4 * r2 * (COS[3] + r2 * COS[4])
      : r + r3 * SIN[0] + r3 * r2 * (SIN[1] + r2 * SIN[2]);
  return fround(quarter & 2 ? -value : value);
}

export const sinf = (x: number): number => sinCos(x, 0);
export const cosf = (x: number): number => sinCos(x, 1);
