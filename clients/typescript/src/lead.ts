import { setTimeout as sleep } from "node:timers/promises";

import { uniqueHolder } from "./acquire.js";
import type { Span } from "./clock.js";
import { classify, isPermanent, LeaseLost, NotInstalled, NotSpeaking, StaleToken } from "./errors.js";
import type { Fence } from "./fence.js";
import type { Lease } from "./lease.js";
import type { Leader } from "./observe.js";
import { ttlMsOf } from "./options.js";

/** How somebody leads. */
export interface LeadOptions {
  readonly ttl?: Span | undefined;
  /** Ends it: the waiting, and the work, whose lease ends, too. */
  readonly signal?: AbortSignal | undefined;
  /** Is told who leads, at each change. */
  readonly onLeader?: ((leader: Leader) => void) | undefined;
}

type Work<On, Tx, T> = (lease: Lease<On, Tx>, signal: AbortSignal) => Promise<T>;

/** What `Fence.lead` does. */
export async function lead<On, Tx, T>(
  fence: Fence<On, Tx>,
  name: string,
  work: Work<On, Tx, T>,
  { ttl, signal: end, onLeader }: LeadOptions,
): Promise<T | undefined> {
  const over = new AbortController();
  const signal = end === undefined ? over.signal : AbortSignal.any([end, over.signal]);
  let failure: unknown;
  const watching =
    onLeader === undefined
      ? Promise.resolve()
      : tellLeaders(fence, name, signal, onLeader).catch((error) => {
          failure = { error };
          over.abort(error);
        });
  try {
    return await leadUntil(fence, name, work, ttl, signal);
  } finally {
    over.abort();
    await watching;
    if (failure !== undefined) {
      throw (failure as { error: unknown }).error;
    }
  }
}

async function tellLeaders(
  fence: Fence<any, any>,
  name: string,
  signal: AbortSignal,
  onLeader: (leader: Leader) => void,
): Promise<void> {
  for await (const leader of fence.observe(name, { signal })) {
    onLeader(leader);
  }
}

async function leadUntil<On, Tx, T>(
  fence: Fence<On, Tx>,
  name: string,
  work: Work<On, Tx, T>,
  ttl: Span | undefined,
  signal: AbortSignal,
): Promise<T | undefined> {
  const ttlMs = ttlMsOf({ ttl });
  // If the answer to an acquire was lost, the unique name takes the grant over.
  const wait = { milliseconds: Math.min(Math.max(ttlMs / 3, 1000), 10_000) };
  const request = { ttl, wait, holder: uniqueHolder(), reclaim: true, signal };
  while (!signal.aborted) {
    let lease: Lease<On, Tx> | null = null;
    try {
      lease = await fence.lease(name, request);
      if (lease !== null) {
        const result = await workWith(lease, work, signal);
        await lease.release();
        if (lease.loss === undefined) {
          return result;
        }
      }
    } catch (error) {
      if (isEnd(error, signal)) {
        return undefined;
      }
      if (!goesOn(lease, error)) {
        throw error;
      }
      await lease?.release();
      await sleep(ttlMs / 12, undefined, { signal }).catch(() => {});
    } finally {
      await lease?.release();
    }
  }
  return undefined;
}

async function workWith<On, Tx, T>(lease: Lease<On, Tx>, work: Work<On, Tx, T>, end: AbortSignal): Promise<T> {
  const stop = () => lease.stop(end.reason);
  end.addEventListener("abort", stop);
  try {
    if (end.aborted) {
      stop();
    }
    return await work(lease, AbortSignal.any([lease.signal, end]));
  } finally {
    end.removeEventListener("abort", stop);
  }
}

/** Whether it is the end that was asked for, as `fetch`, a timer or the lease tells it. */
function isEnd(error: unknown, signal: AbortSignal): boolean {
  const isReason = error === signal.reason || (error as Error | null)?.cause === signal.reason;
  return signal.aborted && (isReason || classify(error) instanceof LeaseLost);
}

/** Does the leader try again? It does when the lease was lost, or the server could not be reached to acquire it. */
function goesOn(lease: Lease<any, any> | null, error: unknown): boolean {
  const told = classify(error);
  if (lease === null) {
    const isOurs = error instanceof TypeError || error instanceof RangeError || told instanceof NotInstalled;
    return !isPermanent(error) && !isOurs;
  }
  return (
    lease.loss !== undefined || told instanceof LeaseLost || told instanceof StaleToken || told instanceof NotSpeaking
  );
}
