import type { FenceError, LeaseLost } from "./errors.js";
import { log } from "./log.js";

/** What is known of a span. */
export type Attributes = Readonly<Record<string, string | number | boolean>>;

/** For measuring and tracing: `pg_fence/opentelemetry` makes them. */
export interface Hooks {
  /** Runs `work` as a span of that name: `pg_fence.acquire`, `pg_fence.guard`, `pg_fence.present`. */
  span<T>(name: string, attributes: Attributes, work: () => Promise<T>): Promise<T>;
  /** A lease was lost. */
  lost(loss: LeaseLost): void;
  /** The server refused a write or a guard of a transaction: StaleToken, NoToken, NotSpeaking… */
  refused(error: FenceError): void;
}

export const NO_HOOKS: Hooks = {
  span: (_name, _attributes, work) => work(),
  lost() {},
  refused() {},
};

/** A hook that throws is no reason to stop. */
export function tellHook(tell: () => void): void {
  try {
    tell();
  } catch (error) {
    log("a hook threw: %s", error);
  }
}
