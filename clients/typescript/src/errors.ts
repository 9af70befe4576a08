import type { Holding } from "./heartbeat.js";
import type { Reason, Reply, WaitsFor } from "./lease_state.js";

export type { Reason, WaitsFor };
export type Left = { readonly milliseconds: number };

/** The base of all. */
export class FenceError extends Error {
  constructor(message: string, cause?: unknown) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = new.target.name;
  }
}

/** Somebody else has the lease: `holder`, for `remaining` at the most. What cannot be seen is
 * undefined. */
export class LeaseTaken extends FenceError {
  constructor(
    readonly names: readonly string[],
    readonly holder?: string,
    readonly remaining?: Left,
    readonly waitsFor?: WaitsFor,
    cause?: unknown,
  ) {
    const seconds = Math.ceil((remaining?.milliseconds ?? 0) / 1000);
    const until = {
      ttl: `, for ${seconds} s at the most unless it is renewed`,
      commit: ", whose acquire is not committed yet",
      guard: ", until a transaction ends that guards it: its ttl is over",
    };
    const by = holder === undefined ? "" : ` by ${holder}`;
    super(`the lease ${names.join(", ")} is taken${by}${waitsFor ? until[waitsFor] : ""}`, cause);
  }
}

/** The lease is ours no more: stop, and report no failure of the work. Somebody else may have it by
 * now. `reason`: it could not be renewed in time (`deadline`), the server says so (`gone`) or will
 * never renew it (`refused`), the connection of a session lease has ended (`session`), it was to be
 * held no longer (`at_most`), the heartbeat has failed (`heartbeat`), its holder has given it back
 * (`released`). */
export class LeaseLost extends FenceError {
  /** It met a commit, which may have landed. */
  inDoubt = false;

  constructor(
    readonly reason: Reason,
    readonly names: readonly string[],
    cause?: unknown,
    advice?: string,
  ) {
    const more = advice === undefined ? "" : `: it is another role's; ${ANOTHER_ROLE}`;
    super(`the lease ${names.join(", ")} is lost (${reason})${more}`, cause);
  }
}

/** The server refused a write, a guard or a call; `detail` is its DETAIL as an object. */
export class Refused extends FenceError {
  readonly detail: Readonly<Record<string, unknown>>;

  constructor(
    message: string,
    readonly sqlstate: string,
    detail: unknown,
    readonly hint: string | undefined,
    cause: unknown,
  ) {
    super(hint === undefined ? message : `${message} (${hint})`, cause);
    this.detail = { ...Object(detail) };
  }
}

/** The session ended under the transaction, or the work swallowed the error that undid it, or ended
 * it by itself. Nothing of it has landed, unless `inDoubt`. The lease may be held still. */
export class TransactionLost extends FenceError {
  inDoubt = false;
}
/** The extension is not in this database, or in a schema that is not on the `search_path`. */
export class NotInstalled extends FenceError {}
/** The role may not use this lease. */
export class NotGranted extends FenceError {}
/** There was no connection to the server: nothing was sent. */
export class NoConnection extends FenceError {
  sqlstate: string | undefined;
  /** A grant may be there, until its ttl. */
  inDoubt = false;
}
/** The server has not answered in time. */
export class NoAnswer extends NoConnection {}
/** The fence is closed. */
export class Closed extends FenceError {}

/** The session has ended: idle in transaction, transaction_timeout, terminated, crashed, starting,
 * idle; and class 08. */
const ENDED = /^(08...|25P03|25P04|57P0[1235])$/;
/** The words of drivers for that without an SQLSTATE; the system's errors, which name their call;
 * and pg's messages. */
const DRIVERS = /^CONNECT(ION_(CLOSED|ENDED|DESTROYED)|_TIMEOUT)$/;
const SYSTEMS =
  /^(ECONN(RESET|REFUSED|ABORTED)|EPIPE|ETIMEDOUT|EHOSTUNREACH|ENETUNREACH|ENETDOWN|EAI_AGAIN)$/;
const MESSAGES =
  /^(Connection terminated|timeout expired$|Client (was closed|has encountered a connection error) and)/;
/** Where drivers and ORMs keep what they wrap: Drizzle, Prisma, TypeORM, Sequelize, Objection. */
const WRAPPED = [
  "cause",
  "meta",
  "driverAdapterError",
  "driverError",
  "original",
  "parent",
  "nativeError",
];
type Link = Readonly<Record<string, unknown>>;

/** The remedy if the login role changes while a lease is held. */
const ANOTHER_ROLE =
  "a lease is used by the role that acquired it, and by its members: where login roles change, " +
  "let all of them act as one role (options=-c role=…, or SET ROLE)";

/** The error and what it wraps. `ours`: no further than through errors of ORMs, which have their
 * statement beside. */
function* chain(error: unknown, ours = false, seen = new Set<unknown>()): Generator<Link> {
  if (Object(error) !== error || seen.has(error)) return;
  const one = error as Link;
  seen.add(one);
  yield one;
  const wrapped = ours && !("query" in one || "sql" in one) ? [] : WRAPPED.map((key) => one[key]);
  for (const inner of wrapped.concat(one.errors).flat()) yield* chain(inner, ours, seen);
}

function stateOf({ code, originalCode }: Link): string | undefined {
  // The system's codes begin with an E, and Prisma's own, as P2039, are as long.
  const is = (state: unknown) =>
    typeof state === "string" && /^(?!E|P[1-9])[0-9A-Z]{5}$/.test(state);
  return [code, originalCode].find(is) as string | undefined;
}

/** That of the server, however deep it is wrapped. */
export const sqlstateOf = (error: unknown): string =>
  [...chain(error)].map(stateOf).find((state) => state !== undefined) ?? "";

/** Whether the error says that a session has ended, or could not be had. */
export function sessionEnded(error: unknown): boolean {
  const says = ({ code, message, syscall }: Link) =>
    DRIVERS.test(String(code)) ||
    (SYSTEMS.test(String(code)) && syscall !== undefined) ||
    MESSAGES.test(String(message));
  const state = sqlstateOf(error);
  return state === "" ? [...chain(error, true)].some(says) : ENDED.test(state);
}

/** The code of a connection that could not be opened: an SQLSTATE; `connect`, if it may open later;
 * or `misconfigured`: the server speaks no TLS, its certificate or a password is wrong, or what
 * opens connections has failed by itself. */
export function codeOfOpening(error: unknown): string {
  const mayPass = ({ code, name, message }: Link) =>
    /^E(?!RR_(?!SSL_))/.test(String(code)) || /time(d |-| )?out/i.test(`${name} ${message}`);
  const passes = sessionEnded(error) || [...chain(error)].some(mayPass);
  return sqlstateOf(error) || (passes ? "connect" : "misconfigured");
}

/** Timers and streams wrap the reason for which their signal was aborted. */
export function ofSignal(error: unknown): unknown {
  const { name, cause } = Object(error) as Error;
  return name === "AbortError" && cause instanceof LeaseLost ? cause : error;
}

/** The meaning of an error of the work's own statements: a refusal of the fence, or itself. */
export const toldOfWork = (error: unknown) =>
  sqlstateOf(error).startsWith("PF") ? refusal(error) : ofSignal(error);

/** The meaning of an error of one of our own statements, or of one that keeps rows of a table. */
export function toldOfCall(error: unknown, role = "…", table?: string): unknown {
  const [state, { message }] = [sqlstateOf(error), Object(error) as Error];
  if (error instanceof FenceError) return error;
  if (state === "3F000" && table !== undefined) return error;
  if (state === "42883" || state === "3F000") {
    const where =
      "CREATE EXTENSION pg_fence, or name the schema that it is in: new Fence(…, { schema })";
    return new NotInstalled(
      `pg_fence is not in this database, or not on the search_path: ${where} (${message})`,
      error,
    );
  }
  if (state === "42501" && table !== undefined) {
    const needs = `rows of ${table}, for which it needs SELECT and UPDATE`;
    return new NotGranted(`the role ${role} may not keep ${needs}: ${message}`, error);
  }
  if (state === "42501") {
    const level = message.includes("lease_adopt") ? ", 'adopter'" : "";
    const grant = `an administrator grants it: SELECT fence_grant('${role}'${level})`;
    const remedy = message.includes("was granted to another role") ? ANOTHER_ROLE : grant;
    return new NotGranted(`the role ${role} may not use the lease: ${message}; ${remedy}`, error);
  }
  return /^(PF|22|55|0A|53)/.test(state) && state !== "55P03" ? refusal(error) : error;
}

function refusal(error: unknown): unknown {
  if (error instanceof FenceError) return error;
  const { detail, message, originalMessage, hint } = [...chain(error)].find(stateOf) ?? {};
  let parsed: unknown;
  try {
    parsed = JSON.parse(String(detail));
  } catch {}
  return new Refused(
    String(message ?? originalMessage),
    sqlstateOf(error),
    parsed,
    hint as string | undefined,
    error,
  );
}

/** The error that answers an acquire. */
export function toldOfAcquire(reply: Reply, { names, cause, role, request }: Holding): unknown {
  const { error, holder, remaining, waitsFor, sqlstate, reason = "gone", inDoubt = false } = reply;
  if (error === "LeaseTaken") {
    const left = waitsFor && { milliseconds: remaining ?? 0 };
    return new LeaseTaken(names, holder ?? undefined, left, waitsFor);
  }
  // The call that confirms a row can never succeed: its error says why.
  const isRefused = reason === "refused" && cause !== undefined;
  if (error === "LeaseLost" && !isRefused)
    return new LeaseLost(reason, names, undefined, reply.advice);
  if (error === "Closed") return new Closed("the fence is closed");
  if (error === "NoConnection" || error === "NoAnswer") {
    const [Type, what] =
      error === "NoAnswer"
        ? [NoAnswer, "the server has not answered in time"]
        : [NoConnection, "no connection to the server"];
    const why = cause instanceof Error ? `: ${cause.message || sqlstateOf(cause)}` : "";
    return Object.assign(new Type(what + why, cause), { inDoubt, sqlstate });
  }
  return toldOfCall(cause, role, request.table && names[0]);
}
