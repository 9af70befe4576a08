/** What belongs to an error beside its message. */
export interface ErrorParts {
  readonly sqlstate?: string | undefined;
  /** The server's DETAIL: JSON. */
  readonly detail?: unknown;
  readonly hint?: unknown;
  readonly cause?: unknown;
}

/** Everything that pg_fence and its client refuse or tell. */
export class FenceError extends Error {
  readonly sqlstate: string | undefined;
  /** What the server said beside: `presented`, `stored`, `lease`, `holder`… */
  readonly detail: Readonly<Record<string, unknown>>;
  readonly hint: string | undefined;
  /** Whether it was the commit that failed: then the transaction may have landed all the same. */
  inDoubt = false;

  constructor(message: string, parts: ErrorParts = {}) {
    super(message, "cause" in parts ? { cause: parts.cause } : undefined);
    this.name = new.target.name;
    this.sqlstate = parts.sqlstate;
    this.detail = objectIn(parts.detail);
    this.hint = typeof parts.hint === "string" ? parts.hint : undefined;
  }
}

/** PF001: the row has seen the same or a greater token. The lease is lost: stop. */
export class StaleToken extends FenceError {}
/** PF002: the write presented no token. It ran outside of `guard` and `present`. */
export class NoToken extends FenceError {}
/** PF003: this database never issued that token. */
export class NeverIssued extends FenceError {}
/** PF004: the token does not speak for the lease. */
export class NotSpeaking extends FenceError {}
/** PF005: a statement that cannot be fenced (TRUNCATE). */
export class CannotBeFenced extends FenceError {}
/** The session has ended under the transaction. The lease may well be held still. */
export class TransactionLost extends FenceError {}

/**
 * `deadline`: it could not be renewed in time. `gone`: the server says so. `denied`: the server will not renew it, and
 * trying again will not help. `session`: the session that it was bound to has ended. `released`: by its holder.
 */
export type LossReason = "deadline" | "gone" | "denied" | "session" | "released";

/** The lease is ours no more: stop, and report no failure of the work. Somebody else may have it by now. */
export class LeaseLost extends FenceError {
  constructor(readonly reason: LossReason, readonly names: readonly string[], cause?: unknown) {
    super(`the lease ${names.join(", ")} is lost (${reason})`, cause === undefined ? {} : { cause });
  }
}

/** The server did not answer in time, so the call was broken off. The lease may be taken until its ttl has passed. */
export class AcquireTimeout extends FenceError {}

/** The database does not have the extension, or its schema is not on the `search_path`. */
export class NotInstalled extends FenceError {}

const BY_SQLSTATE: Record<string, typeof FenceError> = {
  PF001: StaleToken, PF002: NoToken, PF003: NeverIssued, PF004: NotSpeaking, PF005: CannotBeFenced,
};
const CALLS = /\b(lease_(acquire|renew|release|guard)(_all)?|lease_(adopt|info))\(/;
/**
 * The session, and with it the transaction, has ended: idle_in_transaction_session_timeout, transaction_timeout,
 * terminated, crashed, idle_session_timeout. And all of class 08.
 */
const ENDED = /^(25P03|25P04|57P01|57P02|57P05|08...)$/;
/** What the drivers say, without an SQLSTATE, when a connection is gone. */
const DRIVER_CODES = /^CONNECT(ION_(CLOSED|ENDED|DESTROYED)|_TIMEOUT)$/;
const DRIVER_MESSAGES =
  /^Connection terminated|^Client (was closed|has encountered a connection error) and is not queryable|^timeout expired$/;
const SYSTEM_CODES = /^(ECONNRESET|ECONNREFUSED|ECONNABORTED|EPIPE|ETIMEDOUT|EHOSTUNREACH|ENETUNREACH|ENETDOWN)$/;
/**
 * Where drivers and ORMs keep what they wrap: Drizzle in `cause`, Prisma in `meta.driverAdapterError.cause`, TypeORM in
 * `driverError`, Sequelize in `original`, Objection in `nativeError`; JavaScript itself, at the end of an `await using`, in `error` and
 * `suppressed`.
 */
const WRAPPED = [
  "cause", "driverError", "original", "parent", "nativeError", "meta", "driverAdapterError", "error", "suppressed",
];

/**
 * The typed error in what a driver or an ORM threw, however deep it is wrapped. Nothing: it is no business of
 * pg_fence.
 */
export function classify(error: unknown): FenceError | undefined {
  const all = [...chain(error)];
  const typed = all.find(({ one }) => one instanceof FenceError);
  if (typed !== undefined) {
    return typed.one as unknown as FenceError;
  }
  for (const { one, isDrivers } of all) {
    const sqlstate = sqlstateOf(one);
    const Type = BY_SQLSTATE[sqlstate ?? ""];
    const message = String(one["message"] ?? error);
    if (Type !== undefined) {
      return new Type(message, { sqlstate, detail: one["detail"], hint: one["hint"], cause: error });
    }
    if (sqlstate === "42883" && CALLS.test(message)) {
      return notInstalled(error, sqlstate);
    }
    if (ENDED.test(sqlstate ?? "") || (isDrivers && isBrokenConnection(one, message))) {
      return transactionLost(error, sqlstate, message);
    }
  }
  return undefined;
}

function notInstalled(error: unknown, sqlstate: string): NotInstalled {
  return new NotInstalled("this database does not have pg_fence, or not in a schema of the search_path", {
    sqlstate,
    hint: "CREATE EXTENSION pg_fence, or say where it is: new Fence(…, { schema: '…' }).",
    cause: error,
  });
}

/** The session has ended, for that reason. */
export function transactionLost(error: unknown, sqlstate?: string, message = String(error)): TransactionLost {
  return new TransactionLost(`the session ended under the transaction: ${message}`, { sqlstate, cause: error });
}

/** Whether a heartbeat that failed so will fail again, so that there is nothing to wait for. */
export function isPermanent(error: unknown): boolean {
  return /^(22|28|3D|3F|42|0A000$|55000$)/.test(sqlstateIn(error) ?? "");
}

/** That of the server, however deep it is wrapped. */
export function sqlstateIn(error: unknown): string | undefined {
  return [...chain(error)].map(({ one }) => sqlstateOf(one)).find((found) => found !== undefined);
}

interface Link {
  readonly one: Readonly<Record<string, unknown>>;
  /** Whether nothing but drivers' and ORMs' errors lies around it: a broken connection of something else that the
   * work talks to is none of ours. */
  readonly isDrivers: boolean;
}

/** The error and what it wraps. */
function* chain(error: unknown, isDrivers = true, seen = new Set<unknown>()): Generator<Link> {
  if (typeof error !== "object" || error === null || seen.has(error)) {
    return;
  }
  seen.add(error);
  const one = error as Record<string, unknown>;
  yield { one, isDrivers };
  // The ORMs' errors have the statement beside.
  const wraps = isDrivers && ("query" in one || "sql" in one || "suppressed" in one);
  for (const key of WRAPPED) {
    yield* chain(one[key], wraps, seen);
  }
  if (Array.isArray(one["errors"])) {
    for (const inner of one["errors"]) {
      yield* chain(inner, isDrivers, seen);
    }
  }
}

function sqlstateOf(one: Link["one"]): string | undefined {
  const found = [one["code"], one["originalCode"], one["sqlState"]];
  // Those of the system begin with an E, and Prisma's own, as P2039, are as long.
  const is = (code: unknown) => typeof code === "string" && /^[0-9A-Z]{5}$/.test(code) && !/^(E|P[1-9])/.test(code);
  return found.find((code): code is string => is(code));
}

function isBrokenConnection(one: Link["one"], message: string): boolean {
  const code = typeof one["code"] === "string" ? one["code"] : "";
  return DRIVER_CODES.test(code) || (SYSTEM_CODES.test(code) && "syscall" in one) || DRIVER_MESSAGES.test(message);
}

function objectIn(json: unknown): Record<string, unknown> {
  try {
    const value: unknown = typeof json === "string" ? JSON.parse(json) : undefined;
    return typeof value === "object" && value !== null ? { ...value } : {};
  } catch {
    return {};
  }
}
