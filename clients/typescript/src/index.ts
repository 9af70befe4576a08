/**
 * Leases with fencing tokens of the PostgreSQL extension pg_fence. `pg_fence/pg` and `pg_fence/postgres` have a `Fence`
 * for their driver, and all of this.
 *
 * @module
 */
export type { Adopted, AdoptOptions } from "./adopted.js";
export type { ClaimOptions } from "./claim.js";
export type { Span } from "./clock.js";
export {
  AcquireTimeout,
  CannotBeFenced,
  classify,
  FenceError,
  LeaseLost,
  NeverIssued,
  NoToken,
  NotInstalled,
  NotSpeaking,
  StaleToken,
  TransactionLost,
  type LossReason,
} from "./errors.js";
export type { FenceOptions, ResumeOptions } from "./fence.js";
export type { Query } from "./guarded.js";
export type { Ending, Holding } from "./holding.js";
export type { Attributes, Hooks } from "./hooks.js";
export type { LeadOptions } from "./lead.js";
export type { Lease } from "./lease.js";
export type { Leader, ObserveOptions } from "./observe.js";
export type { LeaseOptions } from "./options.js";
