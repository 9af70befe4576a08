/** Leases with fencing tokens of the PostgreSQL extension pg_fence. The class `Fence` is in
 * `pg_fence/pg` and in `pg_fence/postgres`. @module */
export { Closed, FenceError, LeaseLost, LeaseTaken, NoAnswer, NoConnection } from "./errors.js";
export { NotGranted, NotInstalled, Refused, TransactionLost } from "./errors.js";
export type { Reason, WaitsFor } from "./errors.js";
export { options } from "./fence.js";
export type { AdoptOptions, FenceOptions, GuardOptions } from "./fence.js";
export type { LeadOptions, LeaseOptions, RowOptions } from "./fence.js";
export type { LeaseEvent } from "./heartbeat.js";
export type { Span } from "./span.js";
export type { Query } from "./transaction.js";
