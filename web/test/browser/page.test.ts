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
  if (CHROMIUM !== undefined) browser = await openChromium();
});
after(async () => {
  if (CHROMIUM !== undefined) await browser.close();
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

const TINY = `${BUILT}/models/q8_0.gguf`;
const noBrowser = CHROMIUM === undefined ? "no Chromium" : false;
const status = async (page: Page): Promise<string> => (await page.locator("#status").textContent()) ?? "";
const ready = (page: Page): Promise<void> => page.locator("body[data-ready=true]").waitFor({ timeout: SLOW });

test("a server without ranges; two loads in a row; a broken file after a good one", { skip: noBrowser }, async () => {
  const { url, server } = await servePage(TINY, false, { whole: true });
  const { page, errors } = await openPage(url);
  try {
    await page.click("#fetch");
    await page.click("#fetch");
    await ready(page);
    assert.equal((await generate(page, { prompt: "the cat", ids: [], made: [0, 0, 0] })).length, 3);
    await page.setInputFiles("#file", `${BUILT}/malformed/cut_in_tensor_data.gguf`);
    await page.locator("#status.bad").waitFor({ timeout: SLOW });
    assert.match(await status(page), /Is the download complete/);
    assert.equal(await page.locator("#run").isDisabled(), true); // the good one is gone
    await page.setInputFiles("#file", `${BUILT}/models/q4_0.gguf`);
    await ready(page);
    await page.setInputFiles("#file", `${BUILT}/models/q4_0.gguf`); // the same once more
    await page.locator("body[data-ready=false]").waitFor({ timeout: SLOW }).catch(() => undefined);
    await ready(page);
    assert.match(await status(page), /q4_0.gguf/);
    assert.deepEqual(errors, []);
  } finally {
    await page.context().close();
    server.close();
  }
});

test("loading is stopped, and goes on; a setting that is wrong leaves the model", { skip: noBrowser }, async () => {
  const { url, server } = await servePage(TINY, false, { answers: 2 });
  const { page } = await openPage(url);
  try {
    await page.click("#fetch"); // the third question is never answered
    await page.click("#stop");
    assert.match(await status(page), /Loading was stopped/);
    assert.deepEqual([await page.locator("#run").isDisabled(), await page.locator("#stop").isDisabled()], [true, true]);
    await page.setInputFiles("#file", TINY);
    await ready(page);
    await page.fill("#seed", "1e3"); // a number for a form, and no whole one as it is written
    await page.click("#run");
    await page.locator("#speed.bad").waitFor({ timeout: SLOW });
    assert.match((await page.locator("#speed").textContent()) ?? "", /Seed 1e3: expected a whole number/);
    await page.fill("#seed", "7");
    await page.fill("#temperature", "0.75");
    assert.equal((await generate(page, { prompt: "the cat", ids: [], made: [0, 0] })).length, 2);
    assert.equal(await page.locator("#speed.bad").count(), 0);
    await page.fill("#prompt", "cat ".repeat(25_000));
    await page.click("#run");
    await page.locator("#speed.bad").waitFor({ timeout: SLOW });
    assert.match((await page.locator("#speed").textContent()) ?? "", /The prompt has \d+ tokens; the context has room for 96: shorten it/);
  } finally {
    await page.context().close();
    server.closeAllConnections();
    server.close();
  }
});

test("a model that was asked for and is not there is missed aloud", { skip: noBrowser }, async () => {
  const { url, server } = await servePage(TINY, false);
  try {
    for (const [asked, found] of [["missing.gguf", /answered 404/], ["index.html", /does not start with GGUF/], ["http://127.0.0.1:9/m.gguf", /Failed to fetch/], ["http://[", /is no model/]] as const) {
      const { page } = await openPage(`${url}?model=${encodeURIComponent(asked)}`);
      await page.locator("#status.bad").waitFor({ timeout: SLOW });
      assert.match(await status(page), found);
      assert.equal(await page.locator("#fetch").isVisible(), false);
      await page.context().close();
    }
  } finally {
    server.close();
  }
});
