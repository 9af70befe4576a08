import { uptime } from "node:os";

const UNITS = {
  days: 86_400_000,
  hours: 3_600_000,
  minutes: 60_000,
  seconds: 1000,
  milliseconds: 1,
};
/** A span of time, with its units: `{ seconds: 30 }`. */
export type Span = { readonly [Unit in keyof typeof UNITS]?: number | undefined };

/** Returns the milliseconds of a span. Throws TypeError for a bare number, which has no unit, and
 * for anything else that is no span. `what` is the name of the value in the message. */
export function msOf(what: string, span: Span): number {
  const given = Object.entries(UNITS).flatMap(([unit, ms]) => {
    const count: unknown = Object(span)[unit];
    return count === undefined ? [] : [typeof count === "number" ? count * ms : NaN];
  });
  const total = given.reduce((sum, part) => sum + part, given.length > 0 ? 0 : NaN);
  if (!Number.isFinite(total)) {
    throw new TypeError(
      `${what} is a span of time with its units, as { seconds: 30 }: not ${JSON.stringify(span)}`,
    );
  }
  return total;
}

// The clock of performance.now() stands still while the computer sleeps, and Node.js has no other
// clock that cannot be set. The system's uptime goes on during a sleep, which it adds to
// the time. Its resolution is a hundredth of a second or a whole one, so its error is subtracted.
const START = performance.now();
const START_UPTIME = uptime() * 1000;
const UPTIME_ERROR = Number.isInteger(uptime()) ? 1000 : 20;

/** Returns the milliseconds of a clock that cannot be set, and that goes on while the computer
 * sleeps. */
export function now(): number {
  return Math.max(performance.now() - START, uptime() * 1000 - START_UPTIME - UPTIME_ERROR);
}
