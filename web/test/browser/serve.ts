/** A static server for the built page with the headers that isolate it, and ranges; and Chromium to look at it. */

import { createServer, type Server } from "node:http";
import { createReadStream, existsSync, readFileSync, statSync } from "node:fs";
import { type AddressInfo } from "node:net";
import { type Browser, chromium } from "playwright-core";

export const CHROMIUM = process.env.CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);

/** How the server answers for the model: by ranges, whole (it knows no ranges), or by ranges until a number of answers, then with silence. */
export interface Manner {
  readonly whole?: boolean;
  readonly answers?: number;
}

export async function servePage(model: string, isolated: boolean, manner: Manner = {}): Promise<{ url: string; server: Server }> {
  let left = manner.answers ?? Infinity;
  const server = createServer((request, response) => {
    if (isolated) {
      response.setHeader("Cross-Origin-Opener-Policy", "same-origin");
      response.setHeader("Cross-Origin-Embedder-Policy", "require-corp");
    }
    if (request.url === "/model.gguf") {
      if (left-- <= 0) return; // the connection stays open
      const range = manner.whole === true ? null : /bytes=(\d+)-(\d+)/.exec(request.headers.range ?? "");
      const size = statSync(model).size;
      const [from, to] = range ? [Number(range[1]), Math.min(Number(range[2]), size - 1)] : [0, size - 1];
      const part = range ? { "Content-Range": `bytes ${from}-${to}/${size}` } : {};
      response.writeHead(range ? 206 : 200, { ...part, "Content-Length": to - from + 1, ETag: '"one"' });
      createReadStream(model, { start: from, end: to }).pipe(response);
      return;
    }
    response.writeHead(request.url?.startsWith("/index.html") ? 200 : 404, { "Content-Type": "text/html" });
    response.end(readFileSync("dist/index.html"));
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/index.html`, server };
}

export async function openChromium(): Promise<Browser> {
  if (CHROMIUM === undefined) throw new Error("no Chromium; set CHROMIUM to its path");
  return chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu"] });
}
