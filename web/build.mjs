// Builds the page: one HTML file that holds its styles, its script and its worker's script, so that it can be served by
// anything and opened from disk. `--test` bundles the tests for node in place of that.
import { build } from "esbuild";
import { mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";

const common = { bundle: true, format: "esm", target: "es2022", logLevel: "warning" };

async function script(entry, define = {}) {
  const made = await build({ ...common, entryPoints: [entry], minify: true, format: "iife", write: false, define });
  return made.outputFiles[0].text;
}

async function page() {
  const worker = await script("src/worker.ts");
  const main = await script("src/page.ts", { WORKER_SOURCE: JSON.stringify(worker) });
  const html = await readFile("src/page.html", "utf8");
  const css = await build({ entryPoints: ["src/page.css"], minify: true, write: false });
  // A function as replacement: the scripts hold $ signs.
  const whole = html
    .replace("/* STYLE */", () => css.outputFiles[0].text)
    .replace("/* SCRIPT */", () => main.replaceAll("</script", "<\\/script"));
  for (const folder of ["dist", "../martlet/server/mini_page"]) {
    await mkdir(folder, { recursive: true });
    await writeFile(`${folder}/index.html`, whole);
  }
}

async function tests() {
  for (const [from, to, ending] of [["test", "test", ".test.ts"], ["test/browser", "browser", ".test.ts"], ["bench", "bench", ".ts"]]) {
    await rm(`build/${to}`, { recursive: true, force: true });
    const entryPoints = (await readdir(from)).filter((name) => name.endsWith(ending)).map((name) => `${from}/${name}`);
    const out = { outdir: `build/${to}`, outExtension: { ".js": ".mjs" } };
    await build({ ...common, ...out, entryPoints, platform: "node", packages: "external", sourcemap: "inline" });
  }
}

await (process.argv.includes("--test") ? tests() : page());
