/**
 * Step 3 — reading a file by ranges: never the whole of it at once.
 *
 * A model's file is as large as the memory of many machines, so only pieces of it are in flight: the start, to find out
 * what is in it, then the weights in pieces of 8 MiB, straight to their place in the arena. A file that the user picked is
 * sliced; one on a server is asked for with `Range` headers, and the browser's cache storage keeps each piece, so that a
 * download which breaks off goes on where it was. A piece has the length and the version (ETag) that was asked for, or
 * reading fails. A server that knows no ranges sends the file whole, into a Blob, which the browser keeps on disk.
 */

export const PIECE_BYTES = 8 * 2 ** 20;
const CACHE = "mini-picolm-models";

export interface Source {
  readonly name: string;
  readonly bytes: number;
  read(offset: number, length: number): Promise<Uint8Array>;
}

/** A file that the user picked, or any other Blob. */
export class BlobSource implements Source {
  readonly bytes: number;

  constructor(
    private readonly blob: Blob,
    readonly name: string,
  ) {
    this.bytes = blob.size;
  }

  async read(offset: number, length: number): Promise<Uint8Array> {
    const bytes = await this.blob.slice(offset, offset + length).arrayBuffer().catch((error: Error) => {
      throw new Error(`${this.name} cannot be read any more (${error.message}); it has changed or gone: pick it again.`);
    });
    return new Uint8Array(bytes);
  }
}

/** A file on a server. Make it with `openUrl`. Without a version nothing is kept: it could be another file's. */
export class UrlSource implements Source {
  constructor(
    private readonly url: string,
    readonly name: string,
    readonly bytes: number,
    private readonly version: string,
  ) {}

  async read(offset: number, length: number): Promise<Uint8Array> {
    const key = `${this.url}?bytes=${offset}-${length}&of=${this.bytes}&version=${encodeURIComponent(this.version)}`;
    const cache = this.version === "" ? undefined : await openCache();
    const kept = await cache?.match(key).catch(() => undefined);
    if (kept !== undefined) {
      const bytes = new Uint8Array(await kept.arrayBuffer());
      if (bytes.length === length) return bytes;
    }
    const reply = await fetchRange(this.url, offset, length);
    const bytes = new Uint8Array(await reply.arrayBuffer());
    if (reply.status !== 206 || bytes.length !== length || versionOf(reply) !== this.version) {
      throw new Error(`${this.name} changed on the server while it was read; load it again.`);
    }
    await cache?.put(key, new Response(bytes)).catch(() => undefined); // no room to keep it: it is only slower next time
    return bytes;
  }
}

/** Ask a server for a file: its size, its version, and whether it knows ranges. */
export async function openUrl(url: string): Promise<Source> {
  const name = decodeURIComponent(url.split("/").pop() ?? url);
  const reply = await fetchRange(url, 0, 1);
  if (reply.status === 200) return new BlobSource(await reply.blob(), name);
  const total = /\/(\d+)$/.exec(reply.headers.get("content-range") ?? "");
  await reply.arrayBuffer();
  if (total === null) throw new Error(`The server does not say how large ${name} is.`);
  const version = versionOf(reply);
  await forgetOthers(url, version);
  const disposition = /filename="([^"]*)"/.exec(reply.headers.get("content-disposition") ?? "");
  return new UrlSource(url, disposition?.[1] ?? name, Number(total[1]), version);
}

/** Copy a stretch of the file into `target`, a piece at a time; `progress` hears how much is there. */
export async function copyInto(
  source: Source,
  offset: number,
  target: Uint8Array,
  progress: (bytes: number) => void,
): Promise<void> {
  let next = source.read(offset, Math.min(PIECE_BYTES, target.length));
  for (let done = 0; done < target.length; ) {
    const piece = await next;
    if (piece.length === 0) throw new Error(`${source.name} ends ${target.length - done} bytes too early.`);
    const after = done + piece.length;
    // The next piece is on its way while this one is copied.
    if (after < target.length) next = source.read(offset + after, Math.min(PIECE_BYTES, target.length - after));
    target.set(piece, done);
    done = after;
    progress(done);
  }
}

const versionOf = (reply: Response): string => reply.headers.get("etag") ?? reply.headers.get("last-modified") ?? "";

async function fetchRange(url: string, offset: number, length: number): Promise<Response> {
  const range = { Range: `bytes=${offset}-${offset + length - 1}` };
  const reply = await fetch(url, { headers: range, cache: "no-store" }).catch((error: Error) => {
    throw new Error(`${url}: no answer (${error.message}). Is the server there, and may this page read from it? Load again to go on.`);
  });
  if (!reply.ok) throw new Error(`${url}: the server answered ${reply.status} ${reply.statusText}.`);
  return reply;
}

/** Give back what is kept of this file's other versions. */
async function forgetOthers(url: string, version: string): Promise<void> {
  const cache = await openCache();
  const kept = (await cache?.keys().catch(() => undefined)) ?? [];
  const old = kept.filter((key) => key.url.startsWith(`${url}?bytes=`) && !key.url.endsWith(`&version=${encodeURIComponent(version)}`));
  for (const key of old) await cache?.delete(key).catch(() => false);
}

async function openCache(): Promise<Cache | undefined> {
  if (typeof caches === "undefined") return undefined; // a page from disk, or plain HTTP from another machine
  return caches.open(CACHE).catch(() => undefined);
}
