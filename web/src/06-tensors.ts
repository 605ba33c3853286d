/**
 * Step 6 — the tensor directory: which weights there are, how they are packed, and where their bytes lie.
 *
 * A tensor is a name, a shape (rows of `columns` numbers), a block type and an offset. A block type packs a fixed number of
 * neighbours into a fixed number of bytes (step 7), so every row has the same length, and where row r lies is a
 * multiplication. Each entry is checked here, once: whole blocks only, inside the file, aligned.
 */

import { Cursor, FormatError } from "./04-header.ts";
import type { Metadata } from "./05-metadata.ts";

export interface BlockType {
  readonly name: string;
  readonly elements: number;
  readonly bytes: number;
}

/** ggml's numbers of the types that step 7 can decode. */
export const BLOCK_TYPES: ReadonlyMap<number, BlockType> = new Map(
  ([
    [0, "F32", 1, 4], [1, "F16", 1, 2], [30, "BF16", 1, 2],
    [2, "Q4_0", 32, 18], [3, "Q4_1", 32, 20], [6, "Q5_0", 32, 22], [7, "Q5_1", 32, 24], [8, "Q8_0", 32, 34],
    [10, "Q2_K", 256, 84], [11, "Q3_K", 256, 110], [12, "Q4_K", 256, 144], [13, "Q5_K", 256, 176], [14, "Q6_K", 256, 210],
  ] as const).map(([type, name, elements, bytes]) => [type, { name, elements, bytes }]),
);

export interface Tensor {
  readonly name: string;
  readonly type: number;
  readonly columns: number;
  readonly rows: number;
  readonly offset: number; // from the start of the weights
  readonly rowBytes: number;
}

export interface Directory {
  readonly tensors: ReadonlyMap<string, Tensor>;
  readonly dataStart: number; // where the weights begin in the file
  readonly dataBytes: number;
}

export function readDirectory(cursor: Cursor, count: number, metadata: Metadata): Directory {
  const alignment = metadata.number("general.alignment", 32);
  if (alignment < 8 || alignment % 8 !== 0) throw new FormatError(`general.alignment is ${alignment}; expected a multiple of 8.`);
  const tensors = new Map<string, Tensor>();
  for (let i = 0; i < count; i++) {
    const tensor = readTensor(cursor, alignment);
    if (tensors.has(tensor.name)) throw new FormatError(`The file has the tensor ${tensor.name} twice.`);
    tensors.set(tensor.name, tensor);
  }
  const dataStart = Math.ceil(cursor.at / alignment) * alignment;
  let dataBytes = 0;
  for (const tensor of tensors.values()) {
    const end = tensor.offset + tensor.rows * tensor.rowBytes;
    if (dataStart + end > cursor.fileBytes) {
      throw new FormatError(`The file has ${cursor.fileBytes} bytes; ${tensor.name} would end at ${dataStart + end}. Is the download complete?`);
    }
    dataBytes = Math.max(dataBytes, end);
  }
  return { tensors, dataStart, dataBytes };
}

function readTensor(cursor: Cursor, alignment: number): Tensor {
  const name = cursor.string();
  const nDims = cursor.u32();
  if (nDims < 1 || nDims > 4) throw new FormatError(`${name} has ${nDims} dimensions; expected 1 to 4.`);
  const dims = Array.from({ length: nDims }, () => cursor.u64());
  const columns = dims[0] ?? 0;
  const rows = dims.slice(1).reduce((product, dim) => product * dim, 1);
  if (columns < 1 || rows < 1 || columns * rows > 2 ** 40) throw new FormatError(`${name} has the shape ${dims.join(" × ")}.`);
  const type = cursor.u32();
  const offset = cursor.u64();
  const block = BLOCK_TYPES.get(type);
  if (block === undefined) {
    const known = [...BLOCK_TYPES.values()].map((found) => found.name).join(", ");
    throw new FormatError(`${name} is packed as type ${type}, which is none of ${known}.`);
  }
  if (columns % block.elements !== 0) throw new FormatError(`${name} has rows of ${columns}; ${block.name} packs ${block.elements} at a time.`);
  if (offset % alignment !== 0) throw new FormatError(`${name} starts at ${offset}, which is no multiple of ${alignment}.`);
  return { name, type, columns, rows, offset, rowBytes: (columns / block.elements) * block.bytes };
}
