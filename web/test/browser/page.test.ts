/** The page in headless Chromium: SmolLM2-135M loads and makes the Python port's tokens, isolated or not, served or from disk. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import type { Browser, Page } from "playwright-core";
import { smolPath } from "../files.ts";
import { BUILT } from "../make.ts";
import { CHROMIUM, openChromium, servePage } from "./serve.ts";

const smol = smolPath();
const skip = CHROMIUM === undefined ? "no Chromium" : smol === undefined ? "no model" : false;
const SLOW = 300_000;
let browser: Browser;

before(async () => {
  if (skip === false) browser = await openChromium();
});
after(async () => {
  if (skip === false) await browser.close();
});

interface Answer {
  readonly prompt: string;
  readonly ids: number[];
  readonly made: number[];
}

const answers = (): Answer[] => JSON.parse(readFileSync(`${BUILT}/answers.json`, "utf8")) as Answer[];

async function openPage(url: string): Promise<{ page: Page; errors: string[] }> {
  const page = await (await browser.newContext()).newPage();
  const errors: string[] = [];
  page.on("pageerror", (error) => errors.push(error.message));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  await page.goto(url);
  return { page, errors };
}

async function generate(page: Page, { prompt, made }: Answer): Promise<number[]> {
  await page.uncheck("#chat");
  await page.fill("#prompt", prompt);
  await page.fill("#most", String(made.length));
  const done = Number((await page.evaluate(() => document.body.dataset.done)) ?? 0);
  await page.click("#run");
  await page.locator(`body[data-done='${done + 1}']`).waitFor({ timeout: SLOW });
  const ids = (await page.locator("#ids").textContent()) ?? "";
  return (ids.split("→")[1] as string).trim().split(" ").map(Number);
}

test("served and isolated: all workers, the port's tokens; then one worker, the same", { skip }, async () => {
  const { url, server } = await servePage(smol as string, true);
  const { page, errors } = await openPage(url);
  try {
    const workers = await page.locator("#workers option").count();
    assert.ok(workers > 1 || (await page.evaluate(() => navigator.hardwareConcurrency)) === 1);
    for (const n of [...new Set([workers, 1])]) {
      await page.reload();
      await page.selectOption("#workers", String(n));
      await page.click("#fetch");
      await page.locator("body[data-ready=true]").waitFor({ timeout: SLOW });
      for (const answer of n === 1 ? answers().slice(0, 1) : answers()) assert.deepEqual(await generate(page, answer), answer.made);
    }
    assert.equal(await page.locator("#steps li.done").count(), 18);
    assert.deepEqual(errors, []);
  } finally {
    await page.context().close();
    server.close();
  }
});

test("not isolated: one worker; a stop is heard, and the page stays alive", { skip }, async () => {
  const { url, server } = await servePage(smol as string, false);
  const { page } = await openPage(url);
  try {
    assert.equal(await page.locator("#workers option").count(), 1);
    await page.click("#fetch");
    await page.locator("body[data-ready=true]").waitFor({ timeout: SLOW });
    await page.fill("#most", "1000");
    await page.click("#run");
    await page.waitForFunction(() => document.body.dataset.firstMs !== undefined, undefined, { timeout: SLOW });
    const begin = await page.evaluate(() => performance.now());
    assert.ok((await page.evaluate(() => performance.now())) - begin < 5000);
    await page.click("#stop");
    await page.locator("body[data-done='1']").waitFor({ timeout: SLOW });
    assert.match((await page.locator("#speed").textContent()) ?? "", /stopped/);
  } finally {
    await page.context().close();
    server.close();
  }
});

test("from disk: a picked file, one worker; another file is refused with a sentence", { skip }, async () => {
  const { page, errors } = await openPage(pathToFileURL("dist/index.html").href);
  try {
    assert.equal(await page.locator("#fetch").isVisible(), false);
    await page.setInputFiles("#file", "dist/index.html");
    await page.locator("#status.bad").waitFor({ timeout: SLOW });
    assert.match((await page.locator("#status").textContent()) ?? "", /not a GGUF file/);
    await page.setInputFiles("#file", smol as string);
    await page.locator("body[data-ready=true]").waitFor({ timeout: SLOW });
    const [answer] = answers();
    assert.deepEqual(await generate(page, answer as Answer), (answer as Answer).made);
    assert.deepEqual(errors, []);
  } finally {
    await page.context().close();
  }
});
