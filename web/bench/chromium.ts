// Measures the page in headless Chromium: tokens per second with one worker and with all, and the time from the click to
// the first token. Prints a line of JSON. `node build/bench/chromium.mjs MODEL.gguf [TOKENS]`
import { openChromium, servePage } from "../test/browser/serve.ts";

const model = process.argv[2];
if (model === undefined) throw new Error("usage: npm run bench -- MODEL.gguf [TOKENS]");
const tokens = process.argv[3] ?? "48";
const { url, server } = await servePage(model, true);
const browser = await openChromium();
const found: Record<string, unknown> = { chromium: browser.version(), model: model.split("/").pop(), tokens: Number(tokens) };
try {
  const page = await (await browser.newContext()).newPage();
  await page.goto(url);
  const workers = await page.locator("#workers option").count();
  for (const n of [...new Set([1, workers])]) {
    await page.reload(); // the second time the file is in the page's cache
    await page.selectOption("#workers", String(n));
    await page.locator("#fetch").click();
    await page.locator("body[data-ready=true]").waitFor({ timeout: 120_000 });
    await page.fill("#most", tokens);
    await page.locator("#run").click();
    await page.locator("body[data-done='1']").waitFor({ timeout: 300_000 });
    const said = (await page.locator("#speed").textContent()) ?? "";
    found[`workers ${n}`] = { said, firstMs: await page.evaluate(() => Number(document.body.dataset.firstMs)) };
  }
  // From the click that loads the model (cached) to the first token, as a user would do it.
  await page.reload();
  const begin = performance.now();
  await page.locator("#fetch").click();
  await page.locator("body[data-ready=true]").waitFor({ timeout: 120_000 });
  found.loadMs = performance.now() - begin;
  await page.locator("#run").click();
  await page.waitForFunction(() => document.body.dataset.firstMs !== undefined, undefined, { timeout: 60_000, polling: 20 });
  found.loadAndFirstMs = performance.now() - begin;
} finally {
  await browser.close();
  server.close();
}
console.log(JSON.stringify(found, null, 1));
