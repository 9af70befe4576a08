/**
 * Leases with fencing tokens of the PostgreSQL extension pg_fence. `pg_fence/pg` and `pg_fence/postgres` have a `Fence`
 * for their driver, and all of this.
 *
 * @module
 */
export type { Adopted, AdoptOptions } from "./adopted.js";
export type { Span } from "./clock.js";
export {
  CannotBeFenced,
  classify,
  FenceError,
  LeaseLost,
  NeverIssued,
  NoToken,
  NotSpeaking,
  StaleToken,
  TransactionLost,
  type LossReason,
} from "./errors.js";
export type { FenceOptions, LeadOptions } from "./fence.js";
export type { Query } from "./guarded.js";
export type { Ending, Holding } from "./holding.js";
export type { Lease, LeaseOptions } from "./lease.js";
