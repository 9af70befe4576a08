import { uptime } from "node:os";

/** A span of time, with its units. */
export interface Span {
  readonly days?: number;
  readonly hours?: number;
  readonly minutes?: number;
  readonly seconds?: number;
  readonly milliseconds?: number;
}

const UNITS = { days: 86_400_000, hours: 3_600_000, minutes: 60_000, seconds: 1000, milliseconds: 1 };

/** In milliseconds. `what` is what it is for, to be said where it is refused. */
export function spanMs(what: string, span: Span): number {
  let total = 0;
  let hasUnit = false;
  for (const [unit, ms] of Object.entries(UNITS)) {
    // Not its keys: those of a Temporal.Duration are not enumerable.
    const count = Object(span) === span ? span[unit as keyof Span] : undefined;
    if (count !== undefined) {
      total += count * ms;
      hasUnit = true;
    }
  }
  if (!hasUnit || !Number.isFinite(total)) {
    throw new TypeError(`${what} is a span of time with its units, as { seconds: 30 }, and not ${String(span)}`);
  }
  return total;
}

// The clock of performance.now() stands still while the machine sleeps, and Node.js has no other that is monotonic.
// What the system says of its uptime goes on, in hundredths of a second or in whole ones. It is only used to notice a
// sleep, so it is set back by as much as it may be wrong.
const START_MS = performance.now();
const START_UPTIME_MS = uptime() * 1000;
const COARSE_MS = Number.isInteger(uptime()) ? 1000 : 20;

/** Milliseconds on a clock that nobody can set, and that goes on while the machine sleeps. */
export function now(): number {
  return Math.max(performance.now() - START_MS, uptime() * 1000 - START_UPTIME_MS - COARSE_MS);
}

/** Timers stand still while the machine sleeps; so they look at the clock again after so long. */
export const LOOK_AGAIN_MS = 1000;

/** The longest that a timer can wait: it takes anything longer for nothing at all. */
export const LONGEST_TIMER_MS = 2 ** 31 - 1;
