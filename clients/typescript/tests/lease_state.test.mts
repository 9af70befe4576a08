/** The vectors of clients/spec/vectors, which every client plays; their format is in
 * clients/spec/README.md. */
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { guardFailed, LeadState, LeaseStates, NEVER } from "../dist/lease_state.js";
import type { GuardError, Reply } from "../dist/lease_state.js";

type Fields = Record<string, any>;
type Step = Record<"held" | "deadline" | "next_beat", Record<string, any> | undefined> & {
  at: number;
  in: Record<string, Fields>;
  out: Fields[];
  wake?: number;
};

/** Expands the shorthands of lists. */
function expanded(value: any): any {
  if (!Array.isArray(value)) return value;
  return value.flatMap((one) => {
    if (typeof one?.count !== "number") return [expanded(one)];
    return Array.from({ length: one.count }, (_, i) => one.each ?? `${one.prefix}${i}`);
  });
}

const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
const camel = (name: string) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
const renamed = (fields: Fields, rename: (name: string) => string) =>
  Object.fromEntries(
    Object.entries(fields).map(([name, value]) => [rename(name), expanded(value)]),
  );

/** Returns true if the actual fields equal the expected ones. A missing field counts as 0, false or
 * empty, and other actual fields are ignored. */
function matches(actual: Fields, expected: Fields): boolean {
  return Object.entries(expected).every(([field, value]) => {
    if (typeof value?.length === "number" && !Array.isArray(value) && typeof value !== "string") {
      return actual[field]?.length === value.length;
    }
    const empty = Array.isArray(value)
      ? []
      : { string: "", number: 0, boolean: false }[typeof value as "string"];
    return JSON.stringify(actual[field] ?? empty) === JSON.stringify(expanded(value));
  });
}

function lead(
  leader: LeadState,
  now: number,
  { what, error = "", code = "", lost = false, stopped = false, closed = false }: Fields,
): readonly object[] {
  if (what === "failed") return leader.failed(now, error, code, lost, stopped, closed);
  if (what === "granted") leader.granted(now);
  return [];
}

/** Returns the reply to a check, which is no input of the machine. */
function checked(states: LeaseStates, at: number, key: string): Reply {
  const lease = states.lease(key);
  if (states.remaining(at, key) > 0) return { reply: key };
  const late = { reason: states.isOver(at, key) ? ("deadline" as const) : ("released" as const) };
  const { reason, advice } = lease?.state === "lost" ? lease : { ...late, advice: undefined };
  return { reply: key, error: "LeaseLost", reason, advice };
}

function input(states: LeaseStates, at: number, what: string, fields: any): void {
  const inputs: Record<string, () => void> = {
    acquire: () => states.acquire(fields),
    keep_row: () => states.acquire({ ...fields, names: [fields.key] }),
    give_up: () => states.giveUp(fields.id),
    release: () => states.release(fields.key),
    check: () => states.effects.push(checked(states, at, fields.key)),
    last_transaction: () => states.lastTransaction(fields.keys, fields.stage),
    row_locked: () => states.rowLocked([fields.key]),
    row_unlocked: () => states.rowUnlocked([fields.key]),
    suspect: () => states.suspect(fields.keys),
    close: () => states.close(),
    heartbeat_died: () => states.heartbeatDied(),
    tick: () => {},
    sent: () => states.sent(fields.call),
    answer: () => states.answered(fields.call, fields.rows ?? [], fields.taken),
    failed: () => states.failed(fields.call, fields.code, fields.broken),
    disconnected: () => states.disconnected(fields.connection),
  };
  inputs[what]!();
}

function play({ jitter = 0, steps }: { jitter?: number; steps: Step[] }): void {
  const states = new LeaseStates(jitter);
  let leader: LeadState | undefined;
  let calls = 0;
  for (const [i, step] of steps.entries()) {
    const { at } = step;
    const [[what, raw]] = Object.entries(step.in) as [[string, Fields]];
    assert.ok((raw.call ?? 0) <= calls, `step ${i} at ${at}: never sent`);
    const fields = renamed(raw, camel);
    let out: readonly object[] = [];
    if (what === "lead") {
      leader ??= new LeadState(raw.ttl, jitter);
      out = lead(leader, at, raw);
    } else if (what === "guard_failed") out = [guardFailed(fields as GuardError)];
    else if (what !== "nothing")
      out = states.step(at, () => input(states, at, what, fields), raw.call);
    calls += out.filter((effect) => "call" in effect).length;
    const effects = out.map((effect) => renamed(effect, snake));
    const message = `step ${i} at ${at}: ${JSON.stringify(effects)}`;
    assert.ok(
      effects.length === step.out.length &&
        effects.every((effect, i) => matches(effect, step.out[i]!)),
      message,
    );
    for (const [key, value] of Object.entries(step.held ?? {}))
      assert.equal(states.remaining(at, key) > 0, value, `${message} held`);
    for (const [key, value] of Object.entries(step.deadline ?? {}))
      assert.equal(states.lease(key)?.deadline, value, `${message} deadline`);
    for (const [key, value] of Object.entries(step.next_beat ?? {}))
      assert.equal(states.lease(key)?.beatAt, value, `${message} next beat`);
    const wake = states.wake(at);
    if (step.wake !== undefined)
      assert.equal(wake === NEVER ? 2 ** 53 : wake, step.wake, `${message} wake`);
  }
}

const from = process.env.VECTORS ?? fileURLToPath(new URL("../../spec/vectors", import.meta.url));
for (const file of readdirSync(from).filter((name) => name.endsWith(".json"))) {
  for (const vector of JSON.parse(readFileSync(join(from, file), "utf8"))) {
    test(`${file}: ${vector.name}`, () => play(vector));
  }
}
