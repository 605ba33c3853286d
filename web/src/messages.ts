/** What the page and its worker say to each other, and the worker to those that help it. */

import type { Region } from "./01-arena.ts";
import type { Recipe } from "./model.ts";

export type ToWorker =
  | { readonly kind: "load"; readonly file: File | string; readonly context: number; readonly workers: number }
  | {
      readonly kind: "run";
      readonly prompt: string;
      readonly chat: boolean;
      readonly temperature: number;
      readonly topP: number;
      readonly seed: string;
      readonly most: number;
      readonly exact: boolean;
    }
  | { readonly kind: "stop" }
  | { readonly kind: "join"; readonly recipe: Recipe; readonly buffer: SharedArrayBuffer; readonly regions: readonly Region[]; readonly part: number };

export type ToPage =
  | { readonly kind: "step"; readonly step: number; readonly note: string }
  | { readonly kind: "arena"; readonly regions: readonly Region[]; readonly bytes: number; readonly shared: boolean }
  | { readonly kind: "progress"; readonly bytes: number; readonly total: number }
  | { readonly kind: "ready"; readonly name: string; readonly chat: boolean; readonly context: number; readonly layers: number; readonly workers: number }
  | { readonly kind: "prompt"; readonly ids: readonly number[]; readonly kept: number }
  | {
      readonly kind: "token";
      readonly id: number;
      readonly text: string;
      readonly position: number;
      readonly times: Float64Array; // milliseconds of each step for this token
      readonly ms: number;
    }
  | { readonly kind: "passed"; readonly position: number }
  | { readonly kind: "done"; readonly reason: string; readonly tokens: number; readonly seconds: number; readonly firstMs: number }
  | { readonly kind: "error"; readonly message: string };
