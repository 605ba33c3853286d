/** The arena, drawn: each region as wide as it is large (by its square root, so that small ones are seen), filled as far as it is used. */

import type { Region } from "./01-arena.ts";

/** Bytes for people. */
export const size = (bytes: number): string => (bytes < 2 ** 20 ? `${(bytes / 2 ** 10).toFixed(1)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`);

interface ArenaMap {
  show(regions: readonly Region[], bytes: number): void;
  fill(name: string, part: number): void;
}

/** Regions as the legend groups them. */
const GROUPS: readonly (readonly [string, RegExp])[] = [
  ["weights", /^weights$/],
  ["half floats", /^half floats$/],
  ["angles", /rope/],
  ["keys", /^keys$/],
  ["values", /^values$/],
  ["logits and order", /^(logits|order)$/],
  ["vectors", /./],
];
const colour = (group: number, light: number): string => `hsl(${(215 + group * 51) % 360} 60% ${light}%)`;

export function drawArena(canvas: HTMLCanvasElement, legend: HTMLElement): ArenaMap {
  let bytes = 0;
  let groups: { name: string; bytes: number; filled: number; colour: string; faint: string }[] = [];

  function draw(): void {
    const scale = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = canvas.clientHeight * scale;
    const context = canvas.getContext("2d");
    if (context === null || groups.length === 0) return;
    const total = groups.reduce((sum, group) => sum + Math.sqrt(group.bytes), 0);
    let x = 0;
    for (const group of groups) {
      const width = (canvas.width * Math.sqrt(group.bytes)) / total;
      context.fillStyle = group.faint;
      context.fillRect(x, 0, width - scale, canvas.height);
      context.fillStyle = group.colour;
      const height = canvas.height * Math.min(1, group.filled);
      context.fillRect(x, canvas.height - height, width - scale, height);
      x += width;
    }
  }

  new ResizeObserver(draw).observe(canvas);
  return {
    show(regions, all) {
      bytes = all;
      const sizes = GROUPS.map(() => 0);
      for (const region of regions) {
        const group = GROUPS.findIndex(([, pattern]) => pattern.test(region.name));
        sizes[group] = (sizes[group] as number) + region.bytes;
      }
      groups = GROUPS.map(([name], i) => ({
        name, bytes: sizes[i] as number, colour: colour(i, 52), faint: `hsl(${(215 + i * 51) % 360} 60% 52% / 0.25)`,
        filled: ["weights", "keys", "values"].includes(name) ? 0 : 1,
      })).filter((group) => group.bytes > 0);
      legend.replaceChildren(
        ...groups.map((group) => {
          const item = document.createElement("li");
          const sign = document.createElement("i");
          sign.style.background = group.colour;
          item.append(sign, `${group.name}: ${size(group.bytes)} (${((100 * group.bytes) / bytes).toFixed(1)} %)`);
          return item;
        }),
      );
      draw();
    },
    fill(name, part) {
      const group = groups.find((found) => found.name === name);
      if (group === undefined) return;
      group.filled = part;
      draw();
    },
  };
}
