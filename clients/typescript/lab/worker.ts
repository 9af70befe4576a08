/**
 * The laboratory's worker in TypeScript: does what it reads, a JSON object a line, and says what became of it.
 *
 * What it is told and what it says is the same for the clients of all languages, and written down in
 * clients/README.md. `--plant` builds in a known fault, which the laboratory must catch; `--driver` is `pg` or
 * `postgres`.
 */
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

import { Adopted, type AdoptSpec } from "../dist/adopted.js";
import { now } from "../dist/clock.js";
import { valueOf, type Driver } from "../dist/connection.js";
import {
  CannotBeFenced, classify, LeaseLost, NeverIssued, NoToken, NotSpeaking, StaleToken, TransactionLost,
} from "../dist/index.js";
import { Fence } from "../dist/fence.js";
import type { Holding } from "../dist/holding.js";
import { Lease, type Spec } from "../dist/lease.js";

type Order = Record<string, any>;
/** What the work runs its statements by. */
type Run = (sql: string) => Promise<unknown>;

function say(event: string, more: object = {}): void {
  process.stdout.write(`${JSON.stringify({ event, at: Date.now(), ...more })}\n`);
}

const KINDS = new Map<unknown, string>([
  [StaleToken, "stale"],
  [NoToken, "no-token"],
  [NeverIssued, "never-issued"],
  [NotSpeaking, "not-speaking"],
  [CannotBeFenced, "cannot-be-fenced"],
  [LeaseLost, "lost"],
  [TransactionLost, "transaction-lost"],
]);

function refused(error: unknown): void {
  const told = classify(error);
  const sqlstate = told?.sqlstate ?? (error as { code?: string }).code;
  say("refused", { error: KINDS.get(told?.constructor) ?? "other", sqlstate, message: String(error) });
}

/** A lease that says when it was renewed and lost, and whose heartbeat can be starved. */
class Observed extends Lease<any, any> {
  isStarved = false;
  #isAcquired = false;

  constructor(spec: Spec<any, any>) {
    super(spec);
    this.signal.addEventListener("abort", () => say("lost", { reason: this.loss?.reason }));
  }

  /** Until when it believes to be held, in milliseconds since 1970. */
  until(): number {
    const wall = Date.now();
    return Math.floor(wall + this.remainingMs);
  }

  protected override countsFrom(before: number, token: number): void {
    super.countsFrom(before, token);
    if (this.#isAcquired) {
      say("renewed", { token, deadline: this.until() });
    }
    this.#isAcquired = true;
  }

  protected override async beat(): Promise<void> {
    while (this.isStarved && this.loss === undefined && !this.isEnding) {
      await sleep(20);
    }
    return this.isStarved ? undefined : super.beat();
  }
}

class DeadlineFromAnswer extends Observed {
  protected override countsFrom(_: number, token: number): void {
    super.countsFrom(now(), token);
  }
}

class ErrorIsLoss extends Observed {
  protected override async askToRenew(): Promise<number | null> {
    try {
      return await super.askToRenew();
    } catch (error) {
      this.lose("denied", error);
      throw error;
    }
  }
}

class RenewInWork extends Observed {
  protected override async askToRenew(): Promise<number | null> {
    if (worker.run === undefined) {
      return super.askToRenew();
    }
    return Number(valueOf(await worker.run(`SELECT lease_renew('${this.names[0]}', ${this.token})`)));
  }
}

/** The deadline is looked at by the heartbeat only. */
class HangHidesLoss extends Observed {
  protected override watch(): void {}
}

/** A number is made known by the first transaction that is guarded with it. */
class AdoptsLate extends Adopted<any, any> {
  override async adopt(): Promise<boolean> {
    return true;
  }
}

/** A number is made known once, and never again. */
class AdoptsOnce extends Adopted<any, any> {
  protected override guardOf(name: string): string {
    return `SELECT lease_guard('${name}', ${this.token})`;
  }

  override async mend(): Promise<boolean> {
    return false;
  }
}

const PLANTS: Record<string, typeof Observed> = {
  "deadline-from-answer": DeadlineFromAnswer,
  "error-is-loss": ErrorIsLoss,
  "renew-in-work": RenewInWork,
  "hang-hides-loss": HangHidesLoss,
};

/** What an adopted lease is with a fault. */
const ADOPTED: Record<string, typeof AdoptsLate | typeof AdoptsOnce> = {
  "adopts-late": AdoptsLate,
  "adopts-once": AdoptsOnce,
};

const plant = argument("--plant") ?? "";
if (plant !== "" && !(plant in PLANTS) && !(plant in ADOPTED)) {
  throw new Error(`no such plant: ${plant}`);
}

class ObservedFence extends Fence<any, any> {
  protected override make(spec: Spec<any, any>): Observed {
    return new (PLANTS[plant] ?? Observed)(spec);
  }

  protected override makeAdopted(spec: AdoptSpec<any, any>): Adopted<any, any> {
    return new (ADOPTED[plant] ?? Adopted)(spec);
  }
}

/** What differs between the drivers for the work. */
interface Side {
  readonly driver: Driver<any, any>;
  /** Opens a connection, has something done with it, and closes it. */
  with(work: (on: unknown) => Promise<void>): Promise<void>;
  /** How a statement is run by what the work is given. */
  by(tx: any): Run;
}

async function sideOf(driver: string, place: Order): Promise<Side> {
  const { host, port, user, dbname, application } = place;
  if (driver === "postgres") {
    const { default: postgres } = await import("postgres");
    const { driver } = await import("../dist/postgres.js");
    const settings = { host, port, user, database: dbname, connection: { application_name: application } };
    return {
      driver: driver(settings),
      async with(work) {
        const sql = postgres({ ...settings, max: 1, onnotice() {} });
        try {
          await work(sql);
        } finally {
          await sql.end({ timeout: 0 });
        }
      },
      by: (tx) => (sql) => tx.unsafe(sql),
    };
  }
  const { default: pg } = await import("pg");
  const { driver: onPg } = await import("../dist/pg.js");
  const settings = { host, port, user, database: dbname, application_name: application };
  return {
    driver: onPg(settings),
    async with(work) {
      const client = new pg.Client(settings);
      client.on("error", () => {});
      try {
        await client.connect();
        await work(client);
      } finally {
        await client.end();
      }
    },
    by: (tx) => (sql) => tx.query(sql),
  };
}

function argument(name: string): string | undefined {
  const at = process.argv.indexOf(name);
  return at < 0 ? undefined : process.argv[at + 1];
}

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

async function order(): Promise<Order | undefined> {
  const { value, done } = await lines.next();
  return done ? undefined : JSON.parse(value);
}

/** Orders within a transaction. */
const WITHIN = new Set(["update", "sleep", "commit", "rollback"]);
const ROLLBACK = new Error("rollback");
const UPDATE = (value: string) => `UPDATE work SET value = '${value}' WHERE id = 1`;

class Worker {
  lease: Holding<any, any> | undefined;
  /** What is run in the transaction that is open. */
  run: Run | undefined;
  #side!: Side;
  #fence!: ObservedFence;
  #leading: Promise<void> | undefined;
  #stop = new AbortController();

  async serve(): Promise<void> {
    for (let next = await order(); next !== undefined; next = await order()) {
      const { do: what, ...rest } = next;
      try {
        if (WITHIN.has(what)) {
          throw new LeaseLost("released", ["its transaction has ended"]);
        }
        await (this as any)[what](rest);
      } catch (error) {
        refused(error);
      }
    }
  }

  async connect(place: Order): Promise<void> {
    this.#side = await sideOf(argument("--driver") ?? "pg", place);
    this.#fence = new ObservedFence(this.#side.driver);
    say("connected");
  }

  async acquire({ names, ttl_ms, wait_ms = 0, ...kind }: Order): Promise<void> {
    await this.lease?.release();
    this.lease = undefined;
    const span = { ttl: { milliseconds: ttl_ms }, wait: { milliseconds: wait_ms } };
    const lease = (await this.#fence.lease(names, { ...span, ...kind })) as Observed | null;
    if (lease === null) {
      return say("taken");
    }
    this.lease = lease;
    say("acquired", { token: lease.token, deadline: lease.until() });
  }

  async adopt({ name, token, wait_ms = 0 }: Order): Promise<void> {
    const adopted = await this.#fence.adopt(name, token, { wait: { milliseconds: wait_ms } });
    if (adopted === null) {
      return say("taken");
    }
    this.lease = adopted;
    say("adopted", { token });
  }

  #held(): Holding<any, any> {
    if (this.lease === undefined) {
      throw new LeaseLost("gone", ["job"]);
    }
    return this.lease;
  }

  #heldLease(): Observed {
    return this.#held() as Observed;
  }

  check(): void {
    this.#heldLease().check();
    say("held");
  }

  async renew(): Promise<void> {
    await this.#heldLease().renew();
    say("done");
  }

  guard(): Promise<void> {
    return this.#transaction("guarded", "guard");
  }

  present(): Promise<void> {
    return this.#transaction("presented", "present");
  }

  /** Until it reads `commit` or `rollback`, what it does is one transaction. */
  async #transaction(begun: string, by: "guard" | "present"): Promise<void> {
    const lease = this.#held();
    let last = "commit";
    await this.#side.with(async (on) => {
      const work = async (tx: unknown) => {
        this.run = this.#side.by(tx);
        say(begun);
        last = await this.#steps(this.run);
        if (last === "rollback") {
          throw ROLLBACK;
        }
      };
      await lease[by](on, work)
        .catch((error: unknown) => {
          if (error !== ROLLBACK) {
            throw error;
          }
        })
        .finally(() => (this.run = undefined));
    });
    say(last === "commit" ? "committed" : "rolled-back");
  }

  async #steps(run: Run): Promise<string> {
    for (;;) {
      const step = (await order()) ?? { do: "rollback" };
      if (step.do === "update") {
        await run(UPDATE(step.value));
        say("updated");
      } else if (step.do === "sleep") {
        await run(`SELECT pg_sleep(${step.ms / 1000})`);
        say("slept");
      } else {
        return step.do;
      }
    }
  }

  /** A whole transaction; with `release`, the last one. */
  async write({ value, by = "guard", release = false }: Order): Promise<void> {
    const lease = this.#held();
    const work = async (tx: unknown) => void (await this.#side.by(tx)(UPDATE(value)));
    await this.#side.with((on) => lease[by as "guard" | "present"](on, work, { release }));
    say("wrote");
  }

  async truncate(): Promise<void> {
    const lease = this.#held();
    const work = async (tx: unknown) => void (await this.#side.by(tx)("TRUNCATE work"));
    await this.#side.with((on) => lease.guard(on, work));
    say("wrote");
  }

  /** A write that knows nothing of leases. */
  async unfenced({ value }: Order): Promise<void> {
    await this.#side.with(async (on) => void (await this.#side.by(on)(UPDATE(value))));
    say("wrote");
  }

  starve(): void {
    this.#heldLease().isStarved = true;
    say("done");
  }

  async release(): Promise<void> {
    const lease = this.#held();
    await lease.release();
    if (lease.loss !== undefined) {
      lease.refuseIfOver();
    }
    say("released");
  }

  lead({ name, ttl_ms }: Order): void {
    const { signal } = (this.#stop = new AbortController());
    const work = async (lease: Lease<any, any>, ends: AbortSignal) => {
      this.lease = lease;
      say("leading", { token: lease.token, deadline: (lease as Observed).until() });
      await new Promise((_, reject) => ends.addEventListener("abort", () => reject(ends.reason)));
    };
    this.#leading = this.#fence.lead(name, work, { ttl: { milliseconds: ttl_ms }, signal }).then(
      () => (signal.aborted ? undefined : say("stopped")),
      (error) => say("stopped", { message: String(error) }),
    );
    say("done");
  }

  census(): void {
    // Pipes are its own standard streams, which appear when they are first used.
    const tasks = process.getActiveResourcesInfo().filter((one) => one !== "PipeWrap").length;
    say("census", { tasks });
  }

  async close(): Promise<void> {
    this.#stop.abort();
    await this.#leading;
    await this.lease?.release();
    this.lease = this.#leading = undefined;
    say("closed");
  }
}

const worker = new Worker();
await worker.serve();
