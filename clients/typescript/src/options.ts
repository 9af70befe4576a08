/** Waiting, ttl and what else a lease is asked for with. */
import { spanMs, type Span } from "./clock.js";

/** How a lease is asked for. */
export interface LeaseOptions {
  /** How long it is held without a renewal: 30 s. At least 100 ms. */
  readonly ttl?: Span | undefined;
  /** How long to wait in line for it. */
  readonly wait?: Span | undefined;
  /** What the view of all leases shows as its holder; by default a text that is unique for each call. */
  readonly holder?: string | undefined;
  /** Anything that has a JSON. */
  readonly metadata?: unknown;
  readonly shared?: boolean | undefined;
  readonly slots?: number | undefined;
  /** The lease ends with its session, too: it keeps a connection of its own. Not through a pooler. */
  readonly session?: boolean | undefined;
  /** Where `holder` has it already, it gets a new grant at once. */
  readonly reclaim?: boolean | undefined;
  /** From so long after the acquire on it is not renewed: a stuck loop then loses it at its deadline. */
  readonly holdAtMost?: Span | undefined;
  /** A release before that leaves the lease to end so long after the acquire: for schedulers whose clocks differ. */
  readonly holdAtLeast?: Span | undefined;
  /** Gives the waiting up. */
  readonly signal?: AbortSignal | undefined;
}

/** The shortest ttl: below that a pause of the process loses it. */
const SHORTEST_TTL_MS = 100;

export function ttlMsOf(options: { readonly ttl?: Span | undefined }): number {
  const ttlMs = spanMs("ttl", options.ttl ?? { seconds: 30 });
  if (ttlMs < SHORTEST_TTL_MS) {
    throw new RangeError(`a ttl of ${ttlMs} ms is too short: it takes ${SHORTEST_TTL_MS} ms or more`);
  }
  return ttlMs;
}

/** A span that is not negative; undefined where there is none. */
export function notNegativeMs(what: string, span: Span): number {
  const ms = spanMs(what, span);
  if (ms < 0) {
    throw new RangeError(`${what} of ${ms} ms: it cannot be negative`);
  }
  return ms;
}

/** The names of one lease: several are taken as several arguments or as one list. */
export function namesOf(given: readonly unknown[]): string[] {
  const names = given.flat();
  if (names.length === 0) {
    throw new TypeError("a lease needs a name");
  }
  for (const name of names) {
    if (typeof name !== "string") {
      throw new TypeError(`the name of a lease is a string, and not ${String(name)}`);
    }
  }
  return names as string[];
}
