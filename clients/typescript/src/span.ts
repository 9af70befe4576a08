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

/** In milliseconds. A bare number is refused: it has no unit. */
export function msOf(what: string, span: Span): number {
  const given = Object.entries(UNITS).flatMap(([unit, ms]) => {
    const count: unknown = Object(span)[unit];
    return count === undefined ? [] : [typeof count === "number" ? count * ms : NaN];
  });
  const total = given.reduce((sum, one) => sum + one, given.length > 0 ? 0 : NaN);
  if (!Number.isFinite(total)) {
    throw new TypeError(
      `${what} is a span of time with its units, as { seconds: 30 }: not ${JSON.stringify(span)}`,
    );
  }
  return total;
}

// The clock of performance.now() stands still while the machine sleeps, and Node.js has no other
// that nobody can set. The system's uptime goes on, in hundredths of a second or in whole ones: it
// serves to notice a sleep, set back by its fault.
const START = performance.now();
const START_UPTIME = uptime() * 1000;
const COARSE = Number.isInteger(uptime()) ? 1000 : 20;

/** Milliseconds on a clock that nobody can set, and that goes on while the machine sleeps. */
export function now(): number {
  return Math.max(performance.now() - START, uptime() * 1000 - START_UPTIME - COARSE);
}
