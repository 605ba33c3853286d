/**
 * The team: several workers over one arena, and how they wait for each other.
 *
 * Worker 0 runs the loop (step 18); the others sleep until it starts a token, run the same forward pass on their share, and sleep
 * again. `meet` is a barrier: the last to arrive lets all go on. They meet some 150 times a token, so one who is early looks
 * for a while before it sleeps: waking costs more than a short wait. Everything is in the arena's `control` words.
 */

import type { Task } from "./forward.ts";
import type { Worker } from "./model.ts";

const START = 0; // counts the tokens; changing it starts one
const TOKEN = 1;
const POSITION = 2;
const LOGITS = 3;
const EXACT = 4;
const ARRIVED = 5;
const ROUND = 6; // counts the meetings
const LOOKS = 20000; // some 0.1 ms

/** Wait until all workers are here. */
export function meet(me: Worker): void {
  if (me.parts === 1) return;
  const { control } = me.model;
  const round = Atomics.load(control, ROUND);
  if (Atomics.add(control, ARRIVED, 1) === me.parts - 1) {
    Atomics.store(control, ARRIVED, 0);
    Atomics.add(control, ROUND, 1);
    Atomics.notify(control, ROUND);
    return;
  }
  for (let looks = 0; looks < LOOKS; looks++) if (Atomics.load(control, ROUND) !== round) return;
  while (Atomics.load(control, ROUND) === round) Atomics.wait(control, ROUND, round);
}

/** Worker 0: let the others begin with a token. */
export function startOthers(me: Worker, task: Task): void {
  if (me.parts === 1) return;
  const { control } = me.model;
  control[TOKEN] = task.token;
  control[POSITION] = task.position;
  control[LOGITS] = Number(task.logits);
  control[EXACT] = Number(task.exact);
  Atomics.add(control, START, 1);
  Atomics.notify(control, START);
}

/** The other workers: the task of each token, for ever. */
export function* tasks(me: Worker): Generator<Task> {
  const { control } = me.model;
  for (let seen = 0; ; seen++) {
    while (Atomics.load(control, START) === seen) Atomics.wait(control, START, seen);
    yield {
      token: control[TOKEN] as number,
      position: control[POSITION] as number,
      logits: control[LOGITS] === 1,
      exact: control[EXACT] === 1,
    };
  }
}
