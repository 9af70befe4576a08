/**
 * The laboratory's worker in TypeScript: does what it reads, a JSON object a line, and says what became of it.
 *
 * What it is told and what it says is the same for the clients of all languages, and written down in
 * clients/README.md. `--plant` builds in a known fault, which the laboratory must catch; `--driver` is `pg` or
 * `postgres`.
 */
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

import { Adopted } from "../dist/adopted.js";
import { now } from "../dist/clock.js";
import { valueOf, type Driver } from "../dist/connection.js";
import {
  CannotBeFenced, classify, LeaseLost, NeverIssued, NoToken, NotSpeaking, StaleToken, TransactionLost,
} from "../dist/index.js";
import { Fence } from "../dist/fence.js";
import type { Holding } from "../dist/holding.js";
import { Keeper, type Kept } from "../dist/keeper.js";
import { Lease } from "../dist/lease.js";

type Order = Record<string, any>;
type Work = (tx: unknown) => Promise<void>;
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

function tellLoss(lease: Lease<any, any>): void {
  lease.signal.addEventListener("abort", () => {
    if (lease.loss !== undefined) {
      say("lost", { name: lease.names[0], reason: lease.loss.reason });
    }
  });
}

function refused(error: unknown): void {
  const told = classify(error);
  const sqlstate = told?.sqlstate ?? (error as { code?: string }).code;
  say("refused", { error: KINDS.get(told?.constructor) ?? "other", sqlstate, message: String(error) });
}

/** A keeper that says when the lease of `acquire` or `lead` was renewed, and that can be starved. */
class ObservedKeeper extends Keeper<any, any> {
  isStarved = false;

  protected override countsFrom(kept: Kept, before: number, token: number): void {
    super.countsFrom(kept, before, token);
    if (worker.lease instanceof Lease && worker.lease.token === kept.token) {
      say("renewed", { token, deadline: untilOf(worker.lease) });
    }
  }

  protected override async beat(due: readonly Kept[]): Promise<void> {
    while (this.isStarved && due.some((kept) => this.has(kept) && !kept.isEnding)) {
      await sleep(20);
    }
    return this.isStarved ? undefined : super.beat(due);
  }
}

class DeadlineFromAnswer extends ObservedKeeper {
  protected override countsFrom(kept: Kept, _: number, token: number): void {
    super.countsFrom(kept, now(), token);
  }
}

/** A renewal that failed is a loss, and so is the end of the connection, which shows before the next renewal. */
class ErrorIsLoss extends ObservedKeeper {
  readonly #all: Kept[] = [];

  constructor(driver: Driver<any, any>, schema: string) {
    const connection = (onEnd: () => void) => driver.connection(() => (onEnd(), this.#loseAll()));
    super({ ...driver, connection }, schema);
  }

  override add(kept: Kept): void {
    super.add(kept);
    this.#all.push(kept);
  }

  #loseAll(): void {
    this.#all.forEach((kept) => this.lose(kept, "denied"));
  }

  protected override async askToRenew(batch: readonly Kept[]): Promise<ReadonlyMap<number, number | null>> {
    try {
      return await super.askToRenew(batch);
    } catch (error) {
      batch.forEach((kept) => this.lose(kept, "denied", error));
      throw error;
    }
  }
}

class RenewInWork extends ObservedKeeper {
  protected override async askToRenew(batch: readonly Kept[]): Promise<ReadonlyMap<number, number | null>> {
    const [kept] = batch;
    if (worker.run === undefined || kept === undefined) {
      return super.askToRenew(batch);
    }
    const renewed = await worker.run(`SELECT lease_renew('${kept.names[0]}', ${kept.token})`);
    return new Map([[kept.token, Number(valueOf(renewed))]]);
  }
}

/** The deadline is looked at by the heartbeat only. */
class HangHidesLoss extends ObservedKeeper {
  protected override watch(): void {}
}

/** One that is gone is taken for all of them. */
class OneNullLosesAll extends ObservedKeeper {
  protected override async askToRenew(batch: readonly Kept[]): Promise<ReadonlyMap<number, number | null>> {
    const tokens = await super.askToRenew(batch);
    return [...tokens.values()].includes(null) ? new Map() : tokens;
  }
}

/** A batch whose statement was refused is not divided. */
class OneLockStopsAll extends ObservedKeeper {
  protected override divide(batch: readonly Kept[]): readonly (readonly Kept[])[] {
    return [batch];
  }
}

/** Until when it is believed to be held, in milliseconds since 1970. */
function untilOf(lease: Lease<any, any>): number {
  const wall = Date.now();
  return Math.floor(wall + lease.remainingMs);
}

/** A number is made known by the first transaction that is guarded with it. */
class AdoptsLate extends Adopted<any, any> {
  override async adopt(): Promise<boolean> {
    return true;
  }
}

/** A number is made known once, and never again. */
class AdoptsOnce extends Adopted<any, any> {
  override guardSql(): string {
    return `lease_guard('${this.names[0]}', ${this.token})`;
  }

  override async mend(): Promise<boolean> {
    return false;
  }
}

const PLANTS: Record<string, typeof ObservedKeeper> = {
  "deadline-from-answer": DeadlineFromAnswer,
  "error-is-loss": ErrorIsLoss,
  "renew-in-work": RenewInWork,
  "hang-hides-loss": HangHidesLoss,
  "one-null-loses-all": OneNullLosesAll,
  "one-lock-stops-all": OneLockStopsAll,
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
  protected override makeKeeper(driver: Driver<any, any>, schema: string): ObservedKeeper {
    keeper = new (PLANTS[plant] ?? ObservedKeeper)(driver, schema);
    return keeper;
  }

  protected override makeAdopted(...of: ConstructorParameters<typeof Adopted>): Adopted<any, any> {
    return new (ADOPTED[plant] ?? Adopted)(...of) as Adopted<any, any>;
  }
}

/** Of the only fence. */
let keeper: ObservedKeeper;

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
  /** Of `acquire`, `resume`, `adopt` or `lead`. */
  lease: Holding<any, any> | undefined;
  /** Of `hold` and `claim`. */
  crowd: Lease<any, any>[] = [];
  /** What is run in the transaction that is open. */
  run: Run | undefined;
  #side!: Side;
  #fence!: ObservedFence;
  #leading: Promise<void> | undefined;
  #observing: Promise<void>[] = [];
  #stop = new AbortController();

  async serve(): Promise<void> {
    for (let next = await order(); next !== undefined; next = await order()) {
      const { do: what, ...rest } = next;
      try {
        if (WITHIN.has(what)) {
          throw new LeaseLost("released", ["its transaction has ended"]);
        }
        if (typeof (this as any)[what] !== "function") {
          throw new Error("unknown order");
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

  async acquire({ names, ttl_ms, wait_ms = 0, hold_at_most_ms, hold_at_least_ms, ...kind }: Order): Promise<void> {
    await this.lease?.release();
    this.lease = undefined;
    const lease = await this.#fence.lease(names, {
      ttl: { milliseconds: ttl_ms },
      wait: { milliseconds: wait_ms },
      ...(hold_at_most_ms === undefined ? {} : { holdAtMost: { milliseconds: hold_at_most_ms } }),
      ...(hold_at_least_ms === undefined ? {} : { holdAtLeast: { milliseconds: hold_at_least_ms } }),
      ...kind,
    });
    if (lease === null) {
      return say("taken");
    }
    this.#acquired(lease);
  }

  #acquired(lease: Lease<any, any>): void {
    this.lease = lease;
    tellLoss(lease);
    say("acquired", { token: lease.token, deadline: untilOf(lease) });
  }

  async resume({ name, token, ttl_ms }: Order): Promise<void> {
    this.#acquired(await this.#fence.resume(name, token, { ttl: { milliseconds: ttl_ms } }));
  }

  async detach(): Promise<void> {
    say("detached", { token: await this.#heldLease().detach() });
  }

  async hold({ names, ttl_ms }: Order): Promise<void> {
    const ttl = { milliseconds: ttl_ms };
    const leases = await Promise.all(names.map((name: string) => this.#fence.lease(name, { ttl })));
    const held = leases.filter((lease) => lease !== null);
    held.forEach(tellLoss);
    this.crowd.push(...held);
    if (held.length < leases.length) {
      return say("taken");
    }
    this.holding();
  }

  async claim({ names, n, ttl_ms }: Order): Promise<void> {
    const query = "SELECT unnest($1::text[]) AS name";
    const claimed = await this.#fence.claim(query, [names], n, { ttl: { milliseconds: ttl_ms } });
    claimed.forEach(tellLoss);
    this.crowd.push(...claimed);
    say("claimed", { names: claimed.map(({ row }) => row?.["name"]) });
  }

  holding(): void {
    say("holding", { count: this.crowd.filter(({ held }) => held).length });
  }

  async "release-all"(): Promise<void> {
    await Promise.all(this.crowd.splice(0).map((lease) => lease.release()));
    say("released");
  }

  "guard-all"(): Promise<void> {
    return this.#transaction("guarded", (on, work) => this.#fence.guard(this.crowd, on, work));
  }

  async observe({ name }: Order): Promise<void> {
    this.#observing.push(this.#observe(name));
    say("done");
  }

  async #observe(name: string): Promise<void> {
    for await (const { holder, token } of this.#fence.observe(name, { signal: this.#stop.signal })) {
      say("leader", { name, holder, token });
    }
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

  #heldLease(): Lease<any, any> {
    return this.#held() as Lease<any, any>;
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
    const lease = this.#held();
    return this.#transaction("guarded", (on, work) => lease.guard(on, work));
  }

  present(): Promise<void> {
    const lease = this.#held();
    return this.#transaction("presented", (on, work) => lease.present(on, work));
  }

  /** Until it reads `commit` or `rollback`, what it does is one transaction. */
  async #transaction(begun: string, by: (on: unknown, work: Work) => Promise<void>): Promise<void> {
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
      await by(on, work)
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
    keeper.isStarved = true;
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
      tellLoss(lease);
      say("leading", { token: lease.token, deadline: untilOf(lease) });
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
    const resources = process.getActiveResourcesInfo().filter((one) => one !== "PipeWrap").length;
    // Those of the keeper do not keep the process alive, so that they are not among them.
    say("census", { tasks: resources + (keeper.isIdle ? 0 : 1) });
  }

  async close(): Promise<void> {
    this.#stop.abort();
    await Promise.all([this.#leading, ...this.#observing.splice(0)]);
    await Promise.all([this.lease, ...this.crowd.splice(0)].map((lease) => lease?.release()));
    this.lease = this.#leading = undefined;
    say("closed");
  }
}

const worker = new Worker();
await worker.serve();
