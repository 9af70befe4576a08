/** The vectors of clients/spec/vectors, which every client plays; their format is in
 * clients/spec/README.md. */
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { LeadState, LeaseStates, NEVER } from "../dist/lease_state.js";

type Fields = Record<string, any>;
type Step = Record<"held" | "deadline" | "next_beat", Record<string, any> | undefined> & {
  at: number;
  in: Record<string, Fields>;
  out: Fields[];
  wake?: number;
};

/** Writes out the shorthands of lists. */
function whole(some: any): any {
  if (!Array.isArray(some)) return some;
  return some.flatMap((one) => {
    if (typeof one?.count !== "number") return [whole(one)];
    return Array.from({ length: one.count }, (_, i) => one.each ?? `${one.prefix}${i}`);
  });
}

const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
const camel = (name: string) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
const renamed = (of: Fields, how: (name: string) => string) =>
  Object.fromEntries(Object.entries(of).map(([name, value]) => [how(name), whole(value)]));

/** All that is expected is there; what is missing counts as 0, false or empty. */
function isLike(is: Fields, expected: Fields): boolean {
  return Object.entries(expected).every(([field, value]) => {
    if (typeof value?.length === "number" && !Array.isArray(value) && typeof value !== "string") {
      return is[field]?.length === value.length;
    }
    const empty = Array.isArray(value)
      ? []
      : { string: "", number: 0, boolean: false }[typeof value as "string"];
    return JSON.stringify(is[field] ?? empty) === JSON.stringify(whole(value));
  });
}

function lead(
  leader: LeadState,
  now: number,
  { what, cause, lost = false }: Fields,
): readonly object[] {
  const does: Record<string, () => object[]> = {
    start: () => leader.start(),
    granted: () => leader.granted(now),
    "work done": () => leader.workDone(),
    "work failed": () => leader.workFailed(now, cause, lost),
    "not granted": () => leader.notGranted(now, cause),
    stop: () => leader.stop(),
    tick: () => leader.tick(now),
  };
  return does[what]!();
}

function input(states: LeaseStates, what: string, of: any): void {
  const does: Record<string, () => void> = {
    acquire: () => states.acquire(of),
    keep_row: () => states.acquire({ ...of, names: [of.key] }),
    give_up: () => states.giveUp(of.id),
    release: () => states.release(of.key),
    check: () => states.check(of.key),
    last_transaction: () => states.last(of.keys, of.stage),
    row_locked: () => states.touches([of.key], true),
    row_unlocked: () => states.touches([of.key], false),
    suspect: () => states.suspect(of.keys),
    close: () => states.close(),
    heartbeat_died: () => states.died(),
    tick: () => {},
    sent: () => states.sent(of.call),
    answer: () => states.answered(of.call, of.rows ?? [], of.taken),
    failed: () => states.failed(of.call, of.code, of.broken),
    disconnected: () => states.disconnected(of.connection),
  };
  does[what]!();
}

function play({ jitter = 0, steps }: { jitter?: number; steps: Step[] }): void {
  const states = new LeaseStates(jitter);
  let leader: LeadState | undefined;
  let calls = 0;
  for (const [i, step] of steps.entries()) {
    const { at } = step;
    const [[what, raw]] = Object.entries(step.in) as [[string, Fields]];
    assert.ok((raw.call ?? 0) <= calls, `step ${i} at ${at}: never sent`);
    const of = renamed(raw, camel);
    let out: readonly object[] = [];
    if (what === "lead") {
      leader ??= new LeadState(raw.ttl, jitter);
      out = lead(leader, at, raw);
    } else if (what !== "nothing") out = states.step(at, () => input(states, what, of), raw.call);
    calls += out.filter((effect) => "call" in effect).length;
    const told = out.map((effect) => renamed(effect, snake));
    const is = `step ${i} at ${at}: ${JSON.stringify(told)}`;
    assert.ok(
      told.length === step.out.length && told.every((effect, i) => isLike(effect, step.out[i]!)),
      is,
    );
    for (const [key, value] of Object.entries(step.held ?? {}))
      assert.equal(states.remaining(at, key) > 0, value, `${is} held`);
    for (const [key, value] of Object.entries(step.deadline ?? {}))
      assert.equal(states.lease(key)?.deadline, value, `${is} deadline`);
    for (const [key, value] of Object.entries(step.next_beat ?? {}))
      assert.equal(states.lease(key)?.beatAt, value, `${is} next beat`);
    const wake = states.wake(at);
    if (step.wake !== undefined)
      assert.equal(wake === NEVER ? 2 ** 53 : wake, step.wake, `${is} wake`);
  }
}

const from = process.env.VECTORS ?? fileURLToPath(new URL("../../spec/vectors", import.meta.url));
for (const file of readdirSync(from).filter((name) => name.endsWith(".json"))) {
  for (const vector of JSON.parse(readFileSync(join(from, file), "utf8"))) {
    test(`${file}: ${vector.name}`, () => play(vector));
  }
}
