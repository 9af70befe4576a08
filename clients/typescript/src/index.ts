/** Leases with fencing tokens of the extension pg_fence; `Fence` is in `pg_fence/pg` and `pg_fence/postgres`. @module */
export type { LeaseOptions } from "./asked.js";
export { FenceError, LeaseLost, LeaseTaken, NotGranted, NotInstalled, Refused, TransactionLost, type Reason } from "./errors.js";
export { options } from "./fence.js";
export type { AdoptOptions, FenceOptions, GuardOptions, LeadOptions } from "./fence.js";
export type { Query } from "./guard.js";
export type { LeaseEvent } from "./keeper.js";
export type { Span } from "./span.js";
