import { setTimeout as sleep } from "node:timers/promises";

import { spanMs, type Span } from "./clock.js";
import { literal } from "./connection.js";
import { classify, isPermanent, NotInstalled } from "./errors.js";
import { tokenOf, type Keeper } from "./keeper.js";
import { log } from "./log.js";

/** Who holds a lease. */
export interface Leader {
  /** Null: nobody. */
  readonly holder: string | null;
  /** The token that its acquire returned. */
  readonly token: number | null;
  readonly since: Date | null;
}

/** How a lease is observed. */
export interface ObserveOptions {
  /** How often to look: each second. */
  readonly every?: Span | undefined;
  /** Ends it. */
  readonly signal?: AbortSignal | undefined;
}

/** Who holds that lease, at first and at each change. */
export async function* observe(
  keeper: Keeper,
  name: string,
  { every = { seconds: 1 }, signal }: ObserveOptions = {},
): AsyncGenerator<Leader, void, undefined> {
  const everyMs = spanMs("every", every);
  let known: Leader | undefined;
  keeper.startLooking();
  try {
    while (!signal?.aborted) {
      const leader = await look(keeper, name).catch((error) => {
        if (isPermanent(error)) {
          const told = classify(error);
          throw told instanceof NotInstalled ? told : error;
        }
        log("nobody told who holds %s: %s", name, error);
        return known;
      });
      if (leader !== undefined && leader.token !== known?.token && !signal?.aborted) {
        known = leader;
        yield leader;
      }
      await sleep(everyMs, undefined, { signal }).catch(() => {});
    }
  } finally {
    await keeper.stopLooking();
  }
}

/** A lookup takes no longer than that. */
const LIMIT_MS = 10_000;

async function look(keeper: Keeper, name: string): Promise<Leader> {
  const what = "holder, first_token AS token, (extract(epoch FROM acquired_at) * 1000)::float8 AS since";
  const from = `${keeper.schema}lease_info(${literal(name)}::text)`;
  const sql = `SELECT ${what} FROM ${from} WHERE state = 'held' ORDER BY first_token LIMIT 1`;
  const [row] = await keeper.rows(LIMIT_MS, () => sql);
  const since = row?.["since"];
  return {
    holder: (row?.["holder"] ?? null) as string | null,
    token: tokenOf(row?.["token"]),
    since: since === undefined || since === null ? null : new Date(Number(since)),
  };
}
