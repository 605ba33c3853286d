// Compares this engine's ids and logits with the Python port's, as bench/three_engines.py wrote them:
// `node build/bench/numbers.mjs MODEL.gguf PORT.npz [--exact]`
import { encode } from "../src/08-encode.ts";
import { largest } from "../src/17-sampler.ts";
import { load, Loop } from "../src/18-loop.ts";
import { DiskSource, Npz } from "../test/files.ts";
import { quiet } from "../test/make.ts";

const PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Water boils at a temperature of"];
const [path, portPath] = process.argv.slice(2) as [string, string];
const port = new Npz(portPath);
const loaded = await load(new DiskSource(path), 256, 1, quiet);

for (const exact of process.argv.includes("--exact") ? [false, true] : [false]) {
  let [worst, agree, steps, same] = [0, 0, 0, 0];
  PROMPTS.forEach((prompt, p) => {
    const ids = [...(port.get(`${p}/ids`).values as Int32Array)];
    const made = [...(port.get(`${p}/made`).values as Int32Array)];
    const expected = port.f32(`${p}/logits`);
    if (String(encode(loaded.vocabulary, [{ text: prompt, special: false }])) === String(ids)) same++;
    const loop = new Loop(loaded, () => undefined);
    [...ids, ...made.slice(0, -1)].forEach((id, i) => {
      const step = i - ids.length + 1;
      loop.pass(id, step >= 0, exact);
      if (step < 0) return;
      const { logits } = loaded.me.model;
      steps++;
      if (largest(logits) === made[step]) agree++;
      logits.forEach((value, j) => (worst = Math.max(worst, Math.abs(value - (expected[step * logits.length + j] as number)))));
    });
  });
  const name = exact ? "in exact float32" : "as the page computes";
  console.log(`  mini-picoLM ${name}: ${same} of 3 prompts' ids, ${agree} of ${steps} best tokens; logits differ by ${worst.toFixed(5)} at most`);
}
