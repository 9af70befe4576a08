import type { ErrorType, Reason, WaitsFor } from "./lease_state.js";
import { quoted } from "./statements.js";

export type { Reason, WaitsFor };
export type Left = { readonly milliseconds: number };

/** The base class of this package's errors. */
export class FenceError extends Error {
  constructor(message: string, cause?: unknown) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = new.target.name;
  }
}

/** Another holder has the lease: `holder`, for at most `remaining` unless it is renewed. The wait
 * would end with `waitsFor`: its `ttl`, the `commit` of its acquire, or, as its ttl is over, the
 * end of a transaction that guards it (`guard`). Each is undefined if it is not visible. */
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

/** The lease is lost, and another holder may have it: stop, and report no failure of the work.
 *
 * `reason` is `deadline` (it could not be renewed in time), `gone` (the server says so), `refused`
 * (the server will never renew it), `session` (the connection of a session lease has ended),
 * `at_most` (its longest time is over), `heartbeat` (the heartbeat has failed) or `released` (by
 * its holder). */
export class LeaseLost extends FenceError {
  /** True if a commit was under way, and may have succeeded. */
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

/** The server refused a write, a guard or a call. `detail` is its DETAIL as an object. */
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

/** The session ended during the transaction, or the work swallowed an error that rolled it back, or
 * ended the transaction itself. Nothing was committed, unless `inDoubt`. The lease may still be
 * held. */
export class TransactionLost extends FenceError {
  inDoubt = false;
}
/** The extension is not in this database, or in a schema that is not on the `search_path`. */
export class NotInstalled extends FenceError {}
/** The role may not use this lease. */
export class NotGranted extends FenceError {}
/** There was no connection to the server, so nothing was sent. */
export class NoConnection extends FenceError {
  sqlstate: string | undefined;
  /** True if the server may have granted the lease, which then ends at its ttl or before. */
  inDoubt = false;
}
/** The server has not answered in time. */
export class NoAnswer extends NoConnection {}
/** The fence is closed. */
export class Closed extends FenceError {}

/** The errors of an ended session that have no SQLSTATE: the codes of `postgres`, the codes of the
 * operating system, which also have the name of a system call, and the messages of `pg`. */
const DRIVER_CODES = /^CONNECT(ION_(CLOSED|ENDED|DESTROYED)|_TIMEOUT)$/;
const SYSTEM_CODES =
  /^(ECONN(RESET|REFUSED|ABORTED)|EPIPE|ETIMEDOUT|EHOSTUNREACH|ENETUNREACH|ENETDOWN|EAI_AGAIN)$/;
const DRIVER_MESSAGES =
  /^(Connection terminated|timeout expired$|Client (was closed|has encountered a connection error) and)/;
/** The properties of a wrapped error in Drizzle, Prisma, TypeORM, Sequelize and Objection. */
const WRAPPED = [
  "cause",
  "meta",
  "driverAdapterError",
  "driverError",
  "original",
  "parent",
  "nativeError",
];
type ErrorFields = Readonly<Record<string, unknown>>;

/** The remedy if the login role changes while a lease is held. */
const ANOTHER_ROLE =
  "a lease is used by the role that acquired it, and by its members: where login roles change, " +
  "let all of them act as one role (options=-c role=…, or SET ROLE)";

/** Yields the error and those that it wraps. An error that the program has made from one of this
 * package is the program's own. With `onlyOrms` it looks into no other wrappers than the errors of
 * ORMs, which have their statement as a property. */
function* chain(
  error: unknown,
  onlyOrms = false,
  seen = new Set<unknown>(),
): Generator<ErrorFields> {
  if (Object(error) !== error || seen.has(error)) return;
  if (seen.size > 0 && error instanceof FenceError) return;
  const outer = error as ErrorFields;
  seen.add(outer);
  yield outer;
  const isClosed = onlyOrms && !("query" in outer || "sql" in outer);
  const wrapped = isClosed ? [] : WRAPPED.map((key) => outer[key]);
  for (const inner of wrapped.concat(outer.errors).flat()) yield* chain(inner, onlyOrms, seen);
}

function stateOf({ code, originalCode }: ErrorFields): string | undefined {
  // The codes of the system, as EPIPE, and of Prisma, as P2039, are as long as an SQLSTATE.
  const isState = (state: unknown) =>
    typeof state === "string" && /^(?!E|P[1-9])[0-9A-Z]{5}$/.test(state);
  return [code, originalCode].find(isState) as string | undefined;
}

/** Returns the SQLSTATE of the first error in the chain that has one, or an empty text. */
export const sqlstateOf = (error: unknown): string =>
  [...chain(error)].map(stateOf).find((state) => state !== undefined) ?? "";

/** Returns the code of an error: its SQLSTATE; `ended`, if the error means that a database session
 * has ended or could not be opened; for a NoConnection that of the opening; or an empty text. */
export function codeOf(error: unknown): string {
  if (error instanceof NoConnection && error.cause) return codeOfOpening(error.cause);
  const isEnd = ({ code, message, syscall }: ErrorFields) =>
    DRIVER_CODES.test(String(code)) ||
    (SYSTEM_CODES.test(String(code)) && syscall !== undefined) ||
    DRIVER_MESSAGES.test(String(message));
  return sqlstateOf(error) || ([...chain(error, true)].some(isEnd) ? "ended" : "");
}

/** True if the severity of the server's error is FATAL or PANIC. In postgres `severity` may be
 * missing; the other one is in the server's language, as in pg. */
export const isFatal = (error: unknown): boolean =>
  [...chain(error)]
    .flatMap(({ severity, severity_local }) => [severity, severity_local])
    .some((severity) => severity === "FATAL" || severity === "PANIC");

/** Returns the code of a connection that could not be opened: an SQLSTATE; `connect`, if a retry
 * may open it; or `misconfigured`, if none can: the server speaks no TLS, a certificate or a
 * password is wrong, or the program's own function has failed. */
export function codeOfOpening(error: unknown): string {
  const mayPass = ({ code, name, message }: ErrorFields) =>
    /^E(?!RR_(?!SSL_))/.test(String(code)) || /time(d |-| )?out/i.test(`${name} ${message}`);
  const isPassing = codeOf(error) === "ended" || [...chain(error)].some(mayPass);
  return sqlstateOf(error) || (isPassing ? "connect" : "misconfigured");
}

/** Returns the LeaseLost that is the cause of an AbortError, which timers and streams throw when
 * their signal is aborted; or the error itself. */
export function unwrapAbort(error: unknown): unknown {
  const { name, cause } = Object(error) as Error;
  return name === "AbortError" && cause instanceof LeaseLost ? cause : error;
}

/** Returns the error as the type that the machine names, or the error itself if that is empty.
 * `isOfRows`: the statement was about rows of a table. */
export function typed(error: unknown, type: ErrorType, role = "…", isOfRows = false): unknown {
  const { message } = Object(error) as Error;
  if (type === "NotInstalled") {
    const where =
      "CREATE EXTENSION pg_fence, or name the schema that it is in: new Fence(…, { schema })";
    return new NotInstalled(
      `pg_fence is not in this database, or not on the search_path: ${where} (${message})`,
      error,
    );
  }
  if (type === "NotGranted") {
    const level = message.includes("lease_adopt") ? ", 'adopter'" : "";
    // The server reads the text as an identifier.
    const isPlain = /^[a-z0-9_…]*$/.test(role);
    const granted = isPlain ? role : quoted(role).replaceAll("'", "''");
    let remedy = `an administrator grants it: SELECT fence_grant('${granted}'${level})`;
    if (message.includes("was granted to another role")) remedy = ANOTHER_ROLE;
    if (isOfRows) remedy = "for rows of a table it needs SELECT and UPDATE";
    return new NotGranted(`the role ${role} may not use the lease: ${message}; ${remedy}`, error);
  }
  return type === "Refused" ? refusal(error) : error;
}

/** Returns the error of the server as Refused. */
export function refusal(error: unknown): Refused {
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
