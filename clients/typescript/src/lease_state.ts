/**
 * The state machine of the client's leases. Its specification is clients/spec/lease_state.md, and
 * the tests play the vectors of clients/spec/vectors. The machine has no clock, timer or socket:
 * each input comes with the time, in milliseconds of a monotonic clock, and returns effects, which
 * the heartbeat carries out in their order.
 */

export const [LONGEST_CALL, SHORTEST_OPENING] = [10_000, 2_000];
const [SHORTEST_PAUSE, SHORTEST_WAIT, LONGEST_PAUSE] = [10, 250, 10_000];
const [WAIT_PORTION, RETRY_INTERVAL, PORTION_INTERVAL] = [2_000, 250, 50];
const [FIRST_RETRY, SHORTEST_RETRY_TIME, QUEUE_TIMEOUT] = [20, 1_000, 20_000];
const [CHECK_INTERVAL, CLOSE_TIMEOUT] = [1_000, 5_000];
const [MAX_PAIRS, MAX_RELEASED_NAMES] = [10_000, 200];
const [BEATS_PER_TTL, MAX_BEATS_IN_A_ROW] = [3, 2];
export const NEVER = Infinity;

/** Why a lease is lost; `unconfirmed` is of a release that got no answer. */
export type Reason =
  | "deadline"
  | "gone"
  | "refused"
  | "session"
  | "at_most"
  | "heartbeat"
  | "released"
  | "unconfirmed";
/** What the wait for a taken lease ends with: its ttl, the commit of its acquire, or the end of a
 * transaction that guards it. */
export type WaitsFor = "ttl" | "commit" | "guard";
type Verb = "acquire" | "keep" | "keep_row" | "release" | "undo";
/** The stages of a transaction that releases leases. */
export type LastStage = "begins" | "committed" | "rolled back" | "in doubt" | "inner";

/** A statement to send on a connection. If the call is `open`, the connection is opened first. */
export interface CallEffect {
  call: number;
  do: Verb;
  connection: number;
  open: boolean;
  names: readonly string[];
  tokens: readonly number[];
  ttls: readonly number[];
  limit: number;
  table: string | undefined;
  /** The first of the leases. The next fields are those of its acquire, or of an undo. */
  for: string | undefined;
  wait?: number;
  holder?: string | undefined;
  reclaim?: boolean;
}
export type EventEffect = Pick<LeaseState, "key" | "token" | "reason" | "advice"> & {
  event: "acquired" | "renewed" | "lost" | "released";
  remaining: number;
};
/** The reply to an acquire: its `leases`, or why it has failed. */
export interface Reply extends Taken {
  reply: string;
  leases?: readonly string[];
  error?: string;
  sqlstate?: string | undefined;
  inDoubt?: boolean;
  reason?: Reason | undefined;
  advice?: string | undefined;
  waitsFor?: WaitsFor | undefined;
}
export interface LogEffect {
  log: string;
  /** The lease whose acquire the line is about. */
  key?: string;
  code?: string;
  reason?: Reason | undefined;
  count?: number;
}
/** The end of a connection, at once, also while a call hangs on it (`cut`), or after its last call
 * (`hangUp`); and the end of `close`. */
type EndEffect = { cut: number } | { hangUp: number } | { closed: true };
export type Effect = CallEffect | EventEffect | Reply | LogEffect | EndEffect;

/** What the program requests of a lease. The id is used once, and is the key of the lease. */
export interface LeaseRequest {
  readonly id: string;
  readonly names: readonly string[];
  readonly ttl: number;
  readonly wait?: number;
  readonly atMost?: number | undefined;
  /** The holder is unique, unless the program has `named` it. */
  readonly holder?: string;
  readonly named?: boolean;
  readonly reclaim?: boolean;
  readonly session?: boolean;
  readonly shared?: boolean;
  readonly slots?: number;
  /** A JSON text. The machine only passes it on. */
  readonly metadata?: string | null;
  /** The table of a row lease, whose row the program has claimed with `token`. The name of the
   * lease is the row's key. */
  readonly table?: string;
  readonly token?: number;
}

/** One row of an answer, by what its call does. An acquire that is `taken` has no row. */
export interface Rows {
  acquire: readonly [names: readonly string[], token: number];
  keep: Outcome;
  keep_row: Outcome;
  release: number | null;
  undo: number;
}
type Maybe<T> = T | null | undefined;
export type Outcome = readonly [
  outcome: string,
  remaining?: Maybe<number>,
  againIn?: Maybe<number>,
  code?: Maybe<string>,
];
export type Taken = { holder?: Maybe<string>; remaining?: Maybe<number>; state?: Maybe<string> };

/** What sends calls, and may own a connection: a lease or an undo. The machine itself sends the
 * calls on the shared connection. */
type Sender = { connection: ConnectionState | undefined };
/** A connection, the call on it, and the errors in a row on it. Without an owner it is closed after
 * its call. */
interface ConnectionState {
  readonly number: number;
  owner: Sender | undefined;
  call: Call | undefined;
  errors: number;
}
/** One statement on one connection. */
interface Call {
  readonly number: number;
  readonly do: Verb;
  readonly connection: ConnectionState;
  readonly limit: number;
  readonly leases: readonly LeaseState[];
  /** The undo that waits for the answer. Any other answer is for `leases`. */
  readonly undo: Undo | undefined;
  /** When it was sent, or undefined while its connection is being opened. */
  sent: number | undefined;
  until: number;
}
/** When a call was sent that got no answer, and until when the server may carry it out. */
type Doubt = { readonly sent: number; readonly until: number };
/** Releases what the server may have granted to an acquire that got no answer. */
interface Undo extends Sender, Doubt {
  readonly lease: LeaseState;
  dueAt: number;
  tries: number;
}
/** A release of some leases, from its queueing to its answer or its end without one. `isInDoubt`: an
 * earlier attempt may have released them. `isAlone`: no other joins its call. */
type Release = {
  until: number;
  dueAt: number;
  tries: number;
  isInDoubt: boolean;
  isAlone: boolean;
};

/** One lease, from its acquire on. A separate connection may acquire and confirm it. A session
 * lease keeps that connection, and ends with it. */
class LeaseState implements Sender {
  readonly key: string;
  readonly names: readonly string[];
  readonly ttl: number;
  /** A lease that is confirming or held is live. */
  state: "acquiring" | "confirming" | "held" | "releasing" | "lost" | "released" = "acquiring";
  connection: ConnectionState | undefined;
  /** The call that has no answer yet. */
  call: Call | undefined;

  // Used until the grant.
  /** The end of `wait`, and the time of the next call. */
  readonly until: number;
  dueAt: number;
  tries = 0;
  /** True once the acquire has its reply. */
  hasReply = false;
  /** True while it waits for the end of an outage. */
  inOutage = false;
  doubt: Doubt | undefined;

  // Used after the grant.
  token = 0;
  deadline = 0;
  beatAt = 0;
  /** When `atMost` is over, and the lease is lost. */
  endsAt = NEVER;
  reason: Reason | undefined;
  advice: string | undefined;
  /** The number of last transactions under way, and of the worker's transactions that have locked
   * the row. */
  lastTransactions = 0;
  rowLocks = 0;
  /** True after a release in a savepoint: the program's transaction has not committed yet. */
  hasUncommittedRelease = false;
  /** True once the event `acquired` was emitted. */
  isReported = false;
  /** False while the last renewal that was sent has no answer. */
  isRenewalAnswered = true;
  /** After a loss: the names that the server may still hold for this lease. */
  unreleased: readonly string[] = [];
  release: Release | undefined;

  constructor(
    readonly request: LeaseRequest,
    readonly requestedAt: number,
  ) {
    [this.key, this.names, this.ttl] = [request.id, request.names, request.ttl];
    [this.dueAt, this.until] = [requestedAt, requestedAt + (request.wait ?? 0)];
  }
}

const hasOneName = ({ names }: LeaseState) => names.length === 1;
/** True if a separate connection acquires it. */
const acquiresSeparately = (lease: LeaseState) =>
  !!lease.request.session || (lease.until > lease.requestedAt && hasOneName(lease));
const isExclusive = ({ shared, slots = 1 }: LeaseRequest) => !shared && slots === 1;
const mayReclaim = (lease: LeaseState) =>
  !!lease.request.reclaim ||
  (hasOneName(lease) && isExclusive(lease.request) && !lease.request.named);
const isHeld = ({ state }: LeaseState) => state === "held";
const isLive = (lease: LeaseState) => lease.state === "confirming" || isHeld(lease);
/** True if its next call confirms a row. That call has no other leases: its error is thrown by
 * `keepRow`, as a name or a value of the key may be wrong. */
const confirmsRow = ({ state, request }: LeaseState) => state === "confirming" && !!request.table;
/** True if the connection that has acquired it confirms it. */
const confirmsSeparately = ({ state, connection }: LeaseState) =>
  state === "confirming" && connection !== undefined;
/** True if it waits to send its next acquire. */
const isQueued = ({ state, call, hasReply }: LeaseState) =>
  state === "acquiring" && !call && !hasReply;
const isInTransaction = ({ lastTransactions, rowLocks }: LeaseState) =>
  lastTransactions > 0 || rowLocks > 0;
/** True if it must not be renewed now. */
const isBusy = (lease: LeaseState) => isInTransaction(lease) || !!lease.call;
/** True if the shared connection renews it at `beatAt`. */
const isRenewable = (lease: LeaseState) =>
  isLive(lease) && !isBusy(lease) && !confirmsSeparately(lease);
/** Returns the names of its next call: of a lost lease those that are unreleased. */
const namesToSend = ({ unreleased, names }: LeaseState) =>
  unreleased.length > 0 ? unreleased : names;

/** Returns the shortest time until the next renewal, if `left` remains until the deadline. */
function shortestInterval({ ttl }: LeaseState, left: number): number {
  const shortest = Math.max(SHORTEST_PAUSE, Math.floor(ttl / 60));
  return Math.min(shortest, Math.floor(left / 4));
}

/** The machine of all leases of a fence. */
export class LeaseStates implements Sender {
  /** The shared connection. */
  connection: ConnectionState | undefined;
  #now = 0;
  effects: Effect[] = [];
  #logs: LogEffect[] = [];
  readonly #leases = new Map<string, LeaseState>();
  readonly #undos = new Set<Undo>();
  readonly #calls = new Map<number, Call>();
  readonly #connections = new Map<number, ConnectionState>();
  #lastCall = 0;
  #lastConnection = 0;
  #beatsInARow = 0;
  #inOutage = false;
  #isLossLogged = false;
  #closedAt = NEVER;
  #hasClosed = false;

  /** The jitter, from 0 to 1000, shortens the pauses, so that clients do not retry at the same
   * time. */
  constructor(readonly jitter: number) {}

  /** True once the program has begun to close the fence. */
  get isClosing(): boolean {
    return this.#closedAt < NEVER;
  }

  // Inputs from the program. Each is passed to `step`.

  acquire(request: LeaseRequest): void {
    const lease = new LeaseState(request, this.#now);
    this.#leases.set(lease.key, lease);
    if (this.isClosing) this.#reply(lease, { error: "Closed" });
    else if (request.token !== undefined) {
      // The program has claimed the row at an unknown time, so a renewal confirms it first.
      this.#granted(lease, request.token, this.#now - request.ttl);
    }
  }

  giveUp(id: string): void {
    const lease = this.#leases.get(id);
    if (lease && !lease.hasReply) this.#reply(lease, { error: "GivenUp" });
  }

  release(key: string): void {
    const lease = this.#leases.get(key);
    if (!lease || lease.release) return;
    const isUnreleased = lease.state === "lost" && lease.unreleased.length > 0 && !this.#hasClosed;
    if (isHeld(lease) || isUnreleased) this.#queueRelease(lease);
    else if (lease.state === "lost") this.#forgetLease(lease);
  }

  /** A transaction that releases the leases. `begins` comes before its release statement, and then
   * one of `committed`, `rolled back`, `in doubt` (the commit got no answer) and `inner` (a
   * savepoint was released, and the program's transaction goes on). */
  lastTransaction(keys: readonly string[], stage: LastStage): void {
    for (const lease of this.#known(keys)) {
      lease.lastTransactions += stage === "begins" ? 1 : -1;
      if (stage === "begins" || !isHeld(lease)) continue;
      if (stage === "committed") this.#markReleased(lease);
      else if (stage === "in doubt") this.#queueRelease(lease, true);
      else [lease.beatAt, lease.hasUncommittedRelease] = [this.#now, stage === "inner"];
    }
  }

  /** The worker's transaction has locked the rows, which nobody else can claim meanwhile. */
  rowLocked(keys: readonly string[]): void {
    for (const lease of this.#known(keys)) lease.rowLocks++;
  }

  rowUnlocked(keys: readonly string[]): void {
    for (const lease of this.#known(keys)) {
      lease.rowLocks--;
      lease.beatAt = Math.min(lease.beatAt, this.#now);
      this.#endByClock();
    }
  }

  suspect(keys: readonly string[]): void {
    for (const lease of this.#known(keys)) lease.beatAt = this.#now;
  }

  close(): void {
    this.#closedAt = Math.min(this.#closedAt, this.#now);
    const isPending = ({ hasReply }: LeaseState) => !hasReply;
    for (const lease of this.#all().filter(isPending)) this.#reply(lease, { error: "Closed" });
    for (const lease of this.#all().filter(isHeld)) this.#queueRelease(lease);
  }

  // Inputs from the connections.

  /** The connection of a call with `open` is established, and the call is sent next. */
  sent(number: number): void {
    const call = this.#calls.get(number);
    if (call && call.sent === undefined) this.#markSent(call);
  }

  /** The answer of an acquire without a grant is `taken`. */
  answered(number: number, rows: readonly Rows[Verb][], taken?: Taken): void {
    const call = this.#calls.get(number);
    if (!call) return;
    this.#endCall(call);
    this.#inOutage = this.#isLossLogged = false;
    call.connection.errors = 0;
    if (call.undo) this.#undoAnswered(call.undo, rows[0] as Rows["undo"]);
    else if (call.do === "acquire") this.#acquireAnswered(call, rows[0] as Rows["acquire"], taken);
    else if (call.do === "release") this.#releaseAnswered(call, rows as Rows["release"][]);
    else this.#keepAnswered(call, rows as Rows["keep"][]);
  }

  /** `code` is one of clients/spec/errors.md. `isBroken`: the connection cannot be used again. */
  failed(number: number, code: string, isBroken = false): void {
    const call = this.#calls.get(number);
    if (call) this.#callFailed(call, code, isBroken);
  }

  disconnected(number: number): void {
    const connection = this.#connections.get(number);
    if (connection?.call) this.#callFailed(connection.call, "ended", true);
    else if (connection) this.#forgetConnection(connection);
  }

  heartbeatDied(): void {
    for (const lease of this.#all()) {
      if (isHeld(lease)) this.#markLost(lease, "heartbeat", lease.names);
    }
  }

  // Queries, which are no inputs, and may come at any time.

  lease(key: string): Readonly<LeaseState> | undefined {
    return this.#leases.get(key);
  }

  /** Returns how long the client may believe that it holds the lease. */
  remaining(now: number, key: string): number {
    const lease = this.#leases.get(key);
    if (!(lease && isHeld(lease))) return 0;
    return Math.max(0, Math.min(lease.deadline, lease.endsAt) - now);
  }

  /** Returns true if the window of a lease is over, but the lease is not lost: a transaction has
   * locked its row. */
  isOver(now: number, key: string): boolean {
    return this.#leases.get(key)?.state === "held" && this.remaining(now, key) === 0;
  }

  /** True if the program may be waiting for a call, an acquire or a release. */
  get isWaitedFor(): boolean {
    if (this.#calls.size > 0) return true;
    for (const { state, release } of this.#leases.values()) {
      if (state === "acquiring" || state === "confirming" || release) return true;
    }
    return false;
  }

  /** Returns the latest time of the next step, or NEVER if there is nothing to do. */
  wake(now: number): number {
    let next = NEVER;
    const add = (time: number) => (next = Math.min(next, time));
    const isFree = !this.connection?.call;
    for (const call of this.#calls.values()) add(call.until);
    for (const undo of this.#undos) if (!undo.connection?.call) add(undo.dueAt);
    for (const lease of this.#leases.values()) {
      const release = lease.call?.do === "release" ? undefined : lease.release;
      if (release) add(isFree ? Math.min(release.until, release.dueAt) : release.until);
      if (isQueued(lease)) {
        add(lease.until + QUEUE_TIMEOUT);
        if (acquiresSeparately(lease) || isFree) add(lease.dueAt);
      }
      if (!isLive(lease)) continue;
      add(Math.min(lease.endsAt, now + CHECK_INTERVAL));
      if (lease.rowLocks === 0) add(lease.deadline);
      if (!isBusy(lease) && (confirmsSeparately(lease) || isFree)) add(lease.beatAt);
    }
    if (this.isClosing && !this.#hasClosed) add(this.#closedAt + CLOSE_TIMEOUT);
    return next === NEVER ? NEVER : Math.max(now, Math.min(next, now + CHECK_INTERVAL));
  }

  // Time. Each step first ends what has ended by its time.

  /** Takes the input `decide` and returns the effects. If the input answers a call, its number is
   * `answerTo`, and the limit of that call is not applied. */
  step(now: number, decide: () => void, answerTo?: number): readonly Effect[] {
    [this.#now, this.effects, this.#logs] = [now, [], []];
    this.#endByClock(answerTo);
    decide();
    this.#closeUnusedConnections();
    this.#sendDueCalls();
    for (const line of this.#logs) {
      // An outage writes one line to the log, and all losses by it write one more.
      const isOfOutage = this.#inOutage && line.reason === "deadline";
      if (!isOfOutage || !this.#isLossLogged) this.effects.push(line);
      this.#isLossLogged ||= isOfOutage;
    }
    return this.effects;
  }

  #endByClock(answerTo?: number): void {
    const now = this.#now;
    for (const lease of this.#leases.values()) {
      if (isHeld(lease) && lease.endsAt <= now) this.#markLost(lease, "at_most", lease.names);
      else if (isLive(lease) && lease.deadline <= now && lease.rowLocks === 0) {
        // The server may have received a renewal that got no answer.
        this.#markLost(lease, "deadline", lease.isRenewalAnswered ? [] : lease.names);
      }
    }
    const isLate = now >= this.#closedAt + CLOSE_TIMEOUT;
    for (const call of [...this.#calls.values()]) {
      const isOverdue = call.number !== answerTo && call.until <= now;
      if (isLate || isOverdue) this.#callFailed(call, "no answer", true);
    }
    if (isLate) this.#undos.clear();
    for (const lease of this.#leases.values()) {
      const { release } = lease;
      if (release && lease.call?.do !== "release" && (isLate || release.until <= now)) {
        this.#abandonRelease(lease);
      }
    }
    for (const lease of this.#leases.values()) {
      const isOverdue = isQueued(lease) && lease.until + QUEUE_TIMEOUT <= now;
      if (isOverdue) this.#reply(lease, { error: "NoConnection" });
    }
  }

  // Calls. The shared connection has one call at a time, and none of them waits in the server.

  #sendDueCalls(): void {
    const leases = this.#all();
    for (const lease of leases) {
      if (acquiresSeparately(lease) && this.#isAcquireDue(lease)) this.#sendAcquire(lease);
    }
    for (const undo of this.#undos) {
      const { names, ttl, request } = undo.lease;
      if (!undo.connection?.call && undo.dueAt <= this.#now)
        this.#sendCall("undo", [], undo, ownLimit(ttl), { names, holder: request.holder });
    }
    for (const lease of leases) {
      if (confirmsSeparately(lease) && !lease.call && lease.beatAt <= this.#now)
        this.#sendRenewal([lease], lease);
    }
    if (!this.connection?.call) this.#sendOnSharedConnection(leases);
    this.#endIfIdle();
  }

  #isAcquireDue(lease: LeaseState): boolean {
    return isQueued(lease) && lease.dueAt <= this.#now;
  }

  #sendOnSharedConnection(leases: readonly LeaseState[]): void {
    const due = leases.filter((lease) => isRenewable(lease) && lease.beatAt <= this.#now);
    const release = leases.find((lease) => this.#isReleaseDue(lease));
    const isRequest = (one: LeaseState) => !acquiresSeparately(one) && this.#isAcquireDue(one);
    const request = leases.find(isRequest);
    // Heartbeats go first, but after two in a row another call has its turn.
    if (due.length > 0 && (this.#beatsInARow < MAX_BEATS_IN_A_ROW || !(release || request))) {
      this.#beatsInARow++;
      const first = due.reduce((first, lease) => (lease.beatAt < first.beatAt ? lease : first));
      this.#sendRenewal(this.#renewableWith(first, leases), this);
      return;
    }
    this.#beatsInARow = 0;
    if (release) this.#sendRelease(release, leases);
    else if (request) this.#sendAcquire(request);
  }

  /** Returns the leases to renew in one call with `first`: the earliest first. */
  #renewableWith(first: LeaseState, leases: readonly LeaseState[]): readonly LeaseState[] {
    if (confirmsRow(first)) return [first];
    const isSoon = (lease: LeaseState) =>
      lease.beatAt <= this.#now + Math.floor(lease.ttl / 6) &&
      lease.request.table === first.request.table &&
      isRenewable(lease) &&
      !confirmsRow(lease);
    const soon = leases.filter(isSoon).sort((one, other) => one.beatAt - other.beatAt);
    return firstWithin(MAX_PAIRS, soon);
  }

  #sendRenewal(leases: readonly LeaseState[], owner: Sender): void {
    const verb = leases[0]?.request.table === undefined ? "keep" : "keep_row";
    this.#sendCall(verb, leases, owner, this.#limit());
  }

  /** Sends a call on its owner's connection, which is opened if there is none. */
  #sendCall(
    verb: Verb,
    leases: readonly LeaseState[],
    owner: Sender,
    limit: number,
    more: Partial<CallEffect> = {},
  ): void {
    const open = !owner.connection;
    owner.connection ??= { number: ++this.#lastConnection, owner, call: undefined, errors: 0 };
    const { connection } = owner;
    this.#connections.set(connection.number, connection);
    const [sent, until] = [undefined, this.#now + Math.max(limit, SHORTEST_OPENING)];
    const number = ++this.#lastCall;
    const undo = verb === "undo" ? (owner as Undo) : undefined;
    const call: Call = { number, do: verb, connection, limit, leases, undo, sent, until };
    this.#calls.set(number, call);
    connection.call = call;
    if (!open) this.#markSent(call);
    for (const lease of leases) lease.call = call;
    const forEachName = <T>(of: (lease: LeaseState) => T) =>
      leases.flatMap((lease) => namesToSend(lease).map(() => of(lease)));
    this.effects.push({
      call: number,
      do: verb,
      connection: connection.number,
      open,
      names: leases.flatMap(namesToSend),
      tokens: forEachName(({ token }) => token),
      ttls: forEachName(({ ttl }) => ttl),
      limit,
      table: leases[0]?.request.table,
      for: leases[0]?.key,
      ...more,
    });
  }

  #markSent(call: Call): void {
    [call.sent, call.until] = [this.#now, this.#now + call.limit];
    if (call.do.startsWith("keep"))
      for (const lease of call.leases) lease.isRenewalAnswered = false;
  }

  /** Returns the limit of a call: a third of `ttl` and of each live lease's ttl. */
  #limit(ttl = NEVER): number {
    let shortest = ttl;
    for (const lease of this.#leases.values()) {
      if (isLive(lease)) shortest = Math.min(shortest, lease.ttl);
    }
    return Math.min(LONGEST_CALL, Math.floor(shortest / 3));
  }

  /** Returns how long conflicts and releases are retried. */
  #retryTime(ttl: number): number {
    return Math.max(SHORTEST_RETRY_TIME, this.#limit(ttl));
  }

  #pause(ttl: number): number {
    const pause = Math.min(Math.max(Math.floor(ttl / 12), SHORTEST_PAUSE), LONGEST_PAUSE);
    return jittered(pause, this.jitter);
  }

  #all(): LeaseState[] {
    return [...this.#leases.values()];
  }

  #known(keys: readonly string[]): LeaseState[] {
    return keys.flatMap((key) => this.#leases.get(key) ?? []);
  }

  #endCall(call: Call): void {
    this.#calls.delete(call.number);
    call.connection.call = undefined;
    for (const lease of call.leases) if (lease.call === call) lease.call = undefined;
  }

  // Connections.

  #callFailed(call: Call, code: string, isBroken: boolean): void {
    this.#endCall(call);
    const isOpening = call.sent === undefined;
    if (isOpening && code === "no answer") code = "connect";
    const { connection } = call;
    if (!isLockError(code)) connection.errors++;
    const isUseless = isOpening || isBroken || isConnectionError(code) || code === "panicked";
    // After a second error in a row the next call opens another connection.
    if (isUseless || connection.errors > 1 || !connection.owner) {
      this.effects.push({ cut: connection.number });
      this.#forgetConnection(connection);
    }
    if (call.undo) this.#undoFailed(call.undo, code);
    else if (call.do === "acquire") this.#acquireFailed(call, code, isOpening);
    else if (call.do === "release") this.#releaseFailed(call, code, isOpening);
    else this.#keepFailed(call, code, isOpening);
  }

  /** Forgets a connection that has ended. The session lease on it is lost. */
  #forgetConnection({ number, owner }: ConnectionState): void {
    this.#connections.delete(number);
    if (!owner) return;
    owner.connection = undefined;
    const isLost = owner instanceof LeaseState && owner.request.session && isLive(owner);
    if (isLost) this.#markLost(owner, "session");
  }

  /** Takes the connection from its owner. It is closed after its call. */
  #dropConnection(owner: Sender): void {
    if (owner.connection) owner.connection.owner = undefined;
    owner.connection = undefined;
  }

  #closeUnusedConnections(): void {
    for (const { number, owner, call } of this.#connections.values()) {
      if (owner || call) continue;
      this.effects.push({ hangUp: number });
      this.#connections.delete(number);
    }
  }

  /** Closes the shared connection after the last lease, and reports the end of `close`. */
  #endIfIdle(): void {
    const hasEnded = ({ state, release }: LeaseState) => state === "lost" && !release;
    if (this.#calls.size > 0) return;
    for (const lease of this.#leases.values()) if (!hasEnded(lease)) return;
    const endsClose = this.isClosing && !this.#hasClosed;
    if (endsClose) {
      this.#undos.clear();
      for (const { owner } of this.#connections.values()) if (owner) this.#dropConnection(owner);
    } else if (this.#undos.size === 0) {
      this.#dropConnection(this);
    }
    this.#closeUnusedConnections();
    this.#hasClosed ||= endsClose;
    if (endsClose) this.effects.push({ closed: true });
  }

  // Renewals.

  #keepAnswered(call: Call, rows: readonly Outcome[]): void {
    const parts = byLease(call, rows);
    const keptAny = parts.some(([, part]) => part.every(([outcome]) => outcome === "kept"));
    for (const [lease, part] of parts) this.#takeOutcomes(lease, part, call, keptAny);
  }

  /** Applies the outcomes of the names of one lease. */
  #takeOutcomes(
    lease: LeaseState,
    rows: readonly Outcome[],
    { sent }: Call,
    keptAny: boolean,
  ): void {
    let [kept, gone, refused, remaining, again] = [0, 0, 0, NEVER, NEVER];
    for (const [outcome, left, againIn] of rows) {
      if (outcome === "kept") kept++;
      else if (outcome === "lost") gone++;
      else if (outcome === "refused") refused++;
      remaining = Math.min(remaining, left ?? NEVER);
      again = Math.min(again, againIn ?? NEVER);
    }
    const isLost = gone + refused > 0;
    lease.isRenewalAnswered = true;
    if (!isLive(lease) || (isLost && lease.lastTransactions > 0)) return;
    if (kept === rows.length) return this.#extend(lease, sent as number, remaining, again);
    if (lease.hasUncommittedRelease && gone === rows.length) return this.#markReleased(lease);
    if (isLost) {
      const isOthers = ([outcome, , , code]: Outcome) => outcome === "refused" && code === "42501";
      if (gone === 0 && !lease.request.table && rows.some(isOthers)) lease.advice = "other role";
      const isUnreleased = (_: string, i: number) => ["kept", "later"].includes(rows[i]?.[0] ?? "");
      return this.#markLost(lease, gone > 0 ? "gone" : "refused", lease.names.filter(isUnreleased));
    }
    const least = shortestInterval(lease, lease.deadline - this.#now);
    const isUnclear = again === NEVER || (again === 0 && !keptAny);
    const pause = Math.max(isUnclear ? this.#pause(lease.ttl) : again, least);
    // The server was out of locks: the next transaction has them again, if this call has renewed
    // another lease.
    lease.beatAt = this.#now + (again === 0 && keptAny ? 0 : pause);
  }

  #extend(lease: LeaseState, sent: number, left: number, again: number): void {
    const [deadline, least] = [sent + windowOf(left), shortestInterval(lease, left)];
    lease.beatAt = sent + Math.min(Math.max(again, least), Math.floor(left / BEATS_PER_TTL));
    if (deadline <= this.#now) return;
    const wasHeld = isHeld(lease);
    [lease.deadline, lease.state, lease.hasUncommittedRelease] = [deadline, "held", false];
    if (wasHeld) return this.#emit("renewed", lease);
    this.#acquired(lease);
  }

  #keepFailed({ leases }: Call, code: string, isOpening: boolean): void {
    const isWrong = leases.some(confirmsRow) && !isTransient(code);
    const isRefused = isWrong || (!isOpening && ["42501", "42883", "3F000"].includes(code));
    let pause = this.#pause(shortestTtl(leases));
    if (code === "unsent") pause = 0;
    else if (code === "panicked") this.heartbeatDied();
    else if (!isRefused && !this.#inOutage && leases.some(isLive)) {
      this.effects.push({ log: "not renewed", code });
      this.#inOutage = true;
      if (isConnectionError(code)) pause = 0;
    }
    for (const lease of leases.filter(isLive)) {
      lease.beatAt = this.#now + pause;
      if (!isRefused || lease.lastTransactions > 0) continue;
      if (lease.state === "confirming") {
        lease.state = "lost";
        this.#reply(lease, notGranted(code, isOpening, confirmsRow(lease)));
      }
      this.#markLost(lease, "refused");
    }
  }

  // Acquires.

  #sendAcquire(lease: LeaseState): void {
    const isSeparate = acquiresSeparately(lease);
    const own = ownLimit(lease.ttl);
    const limit = isSeparate ? own : Math.min(own, this.#limit());
    // The snapshot of a longer wait would hold back vacuum.
    const portion = Math.max(0, Math.min(lease.until - this.#now, WAIT_PORTION));
    const wait = isSeparate && hasOneName(lease) ? portion : 0;
    const { holder } = lease.request;
    const reclaim = !!lease.request.reclaim || lease.doubt !== undefined;
    const owner = isSeparate ? lease : this;
    this.#sendCall("acquire", [lease], owner, limit + wait, { wait, holder, reclaim });
  }

  #acquireAnswered(call: Call, grant: Rows["acquire"] | undefined, taken: Taken = {}): void {
    const [lease] = call.leases as [LeaseState];
    lease.inOutage = false;
    if (grant) {
      lease.doubt = undefined;
      return this.#granted(lease, grant[1], call.sent as number);
    }
    const { doubt } = lease;
    // True if the lease is taken by its own first call, whose answer was lost.
    const isByItself = doubt !== undefined && taken.holder === lease.request.holder;
    if (doubt && !isByItself && this.#now >= doubt.until) lease.doubt = undefined;
    if (lease.hasReply) return this.#endAcquire(lease);
    const until = isByItself ? Math.max(lease.until, doubt.until) : lease.until;
    if (this.#now < until) {
      const isPortion = acquiresSeparately(lease) && hasOneName(lease) && !isByItself;
      const next = (call.sent as number) + PORTION_INTERVAL;
      lease.dueAt = Math.min(isPortion ? next : this.#now + RETRY_INTERVAL, until);
    } else if (isByItself) this.#reply(lease, { error: "NoAnswer" });
    else {
      const { holder, remaining, state } = taken;
      const byTime = (remaining ?? 0) > 0 ? "ttl" : "guard";
      const waitsFor = state ? (state === "uncommitted" ? "commit" : byTime) : undefined;
      this.#reply(lease, { error: "LeaseTaken", holder, remaining, waitsFor });
    }
  }

  #granted(lease: LeaseState, token: number, sent: number): void {
    [lease.token, lease.state] = [token, "confirming"];
    // If the answer was late, a renewal on the same connection confirms the lease, and until then
    // it may last no longer than a ttl from now.
    [lease.deadline, lease.beatAt] = [this.#now + lease.ttl, this.#now];
    if (lease.hasReply) return this.#queueRelease(lease);
    const firstBeat = sent + Math.floor(lease.ttl / BEATS_PER_TTL);
    if (this.#now >= firstBeat) return;
    [lease.state, lease.deadline, lease.beatAt] = ["held", sent + windowOf(lease.ttl), firstBeat];
    this.#acquired(lease);
  }

  #acquired(lease: LeaseState): void {
    lease.isReported = true;
    lease.endsAt = this.#now + (lease.request.atMost || NEVER);
    this.#emit("acquired", lease);
    this.#reply(lease, { leases: [lease.key] });
  }

  /** Replies to an acquire, once. A grant that is not confirmed, or in doubt, is released. */
  #reply(lease: LeaseState, reply: Omit<Reply, "reply">): void {
    lease.hasReply = true;
    const hasFailed = reply.error !== undefined;
    const inDoubt = hasFailed && lease.doubt !== undefined && reply.error !== "LeaseTaken";
    this.effects.push({ ...reply, inDoubt, reply: lease.key });
    if (hasFailed && isLive(lease)) this.#queueRelease(lease);
    if (lease.state === "acquiring") this.#leases.delete(lease.key);
    if (lease.call?.do !== "acquire") this.#endAcquire(lease);
  }

  /** Ends an acquire that has its reply, and no call under way. */
  #endAcquire(lease: LeaseState): void {
    this.#queueUndo(lease);
    if (lease.state === "acquiring" || !lease.request.session) this.#dropConnection(lease);
  }

  #acquireFailed(call: Call, code: string, isOpening: boolean): void {
    const [lease] = call.leases as [LeaseState];
    const wasInDoubt = lease.doubt !== undefined;
    if (!isOpening && !lease.request.session && leavesDoubt(code))
      lease.doubt = { sent: call.sent as number, until: (call.sent ?? 0) + call.limit };
    if (lease.hasReply) return this.#endAcquire(lease);
    // The lease is still due, and is sent on another connection.
    if (code === "unsent") return;
    lease.tries++;
    const { tries, doubt } = lease;
    let [until, longest] = [lease.until, longestBackoff(lease.ttl)];
    const [isConflict, isOutage] = [isConflictError(code), isConnectionError(code)];
    if (isConflict) {
      until = Math.max(until, lease.requestedAt + this.#retryTime(lease.ttl));
      longest = RETRY_INTERVAL;
    }
    const isFirst = tries === 1 || (this.#now >= until && !wasInDoubt);
    if (doubt && mayReclaim(lease) && isFirst && isOutage) return;
    // A retry in doubt reclaims, so it must not take over the grant of another client.
    const mayPass = (isConflict || isOutage) && (mayReclaim(lease) || !doubt);
    if (!mayPass || this.#now >= until) {
      this.#reply(lease, notGranted(code, isOpening && !doubt, false));
      return;
    }
    if (isOutage) {
      // One line of the log for an outage, however many acquires wait for its end.
      const isLogged = this.#all().some(({ inOutage }) => inOutage);
      if (!isLogged) this.effects.push({ log: "not acquired", key: lease.key, code });
      lease.inOutage = true;
    }
    const pause = jittered(backoff(FIRST_RETRY, tries - 1, longest), this.jitter);
    lease.dueAt = this.#now + Math.min(pause, until - this.#now);
  }

  /** Queues the release of a grant in doubt, if no other client can have the same holder. */
  #queueUndo(lease: LeaseState): void {
    const { doubt } = lease;
    if (!doubt || lease.request.named) return;
    this.#undos.add({ ...doubt, lease, dueAt: this.#now, tries: 0, connection: undefined });
    lease.doubt = undefined;
  }

  #undoAnswered(undo: Undo, released: number): void {
    undo.tries++;
    undo.dueAt = Math.min(this.#now + RETRY_INTERVAL, undo.until);
    // Until then the server may still carry out the acquire.
    if (released > 0 || this.#now >= undo.until) this.#endUndo(undo);
  }

  #undoFailed(undo: Undo, code: string): void {
    undo.tries++;
    const pause = jittered(backoff(FIRST_RETRY, undo.tries - 1, LONGEST_PAUSE), this.jitter);
    undo.dueAt = this.#now + (code === "unsent" ? 0 : pause);
    const mayPass = isTransient(code) || code === "panicked";
    if (!mayPass || undo.dueAt >= undo.sent + undo.lease.ttl) this.#endUndo(undo);
  }

  #endUndo(undo: Undo): void {
    this.#undos.delete(undo);
    this.#dropConnection(undo);
  }

  // Releases, in the order of the leases.

  #queueRelease(
    lease: LeaseState,
    isInDoubt = lease.hasUncommittedRelease || isInTransaction(lease),
  ): void {
    const until = this.#now + this.#retryTime(lease.ttl);
    lease.release = { dueAt: this.#now, until, tries: 0, isInDoubt, isAlone: isInDoubt };
    if (lease.state !== "lost") lease.state = "releasing";
    this.#moveToEnd(lease);
    if (!lease.request.session) this.#dropConnection(lease);
  }

  #moveToEnd(lease: LeaseState): void {
    this.#leases.delete(lease.key);
    this.#leases.set(lease.key, lease);
  }

  /** Sends the queued releases in one call, those of rows in one call for each table. */
  #sendRelease(first: LeaseState, leases: readonly LeaseState[]): void {
    const mayJoin = (lease: LeaseState) =>
      this.#isReleaseDue(lease) &&
      !lease.release?.isAlone &&
      lease.request.table === first.request.table;
    const due = first.release?.isAlone ? [first] : leases.filter(mayJoin);
    const within = firstWithin(MAX_RELEASED_NAMES, due);
    // One that was joined before goes as a whole.
    const next = due[within.length]?.release;
    const joined = within.filter(({ release }) => release !== next);
    const releases = joined.flatMap(({ release }) => release ?? []);
    const until = Math.min(...releases.map((release) => release.until));
    const isInDoubt = releases.some((release) => release.isInDoubt);
    const release = Object.assign(first.release as Release, { until, isInDoubt });
    for (const lease of joined) {
      lease.release = release;
      // A retry comes after the other releases.
      this.#moveToEnd(lease);
    }
    // Without a shared connection a session lease is released on its own, unless a renewal that
    // confirms the lease is under way there.
    const isIdle = first.request.session && first.connection && !first.connection.call;
    const isOwn = isIdle && !this.connection && joined.length === 1;
    const limit = Math.min(this.#limit(), ownLimit(shortestTtl(joined)));
    this.#sendCall("release", joined, isOwn ? first : this, limit);
  }

  #isReleaseDue({ release, call }: LeaseState): boolean {
    return release !== undefined && release.dueAt <= this.#now && call?.do !== "release";
  }

  #releaseAnswered(call: Call, rows: readonly Rows["release"][]): void {
    for (const [lease, part] of byLease(call, rows)) {
      const isGone = part.includes(null);
      const hasSession = !lease.request.session || lease.connection !== undefined;
      const isKnown = !lease.release?.isInDoubt && lease.request.table === undefined && hasSession;
      lease.release = undefined;
      if (lease.state === "lost") this.#forgetLease(lease);
      else if (isGone && isKnown && this.#now < lease.deadline) {
        this.#markLost(lease, "gone");
        this.#forgetLease(lease);
      } else this.#markReleased(lease);
    }
  }

  /** Ends a release without an answer: the server keeps the lease until its ttl. */
  #abandonRelease(lease: LeaseState): void {
    lease.release = undefined;
    if (lease.state === "lost") return this.#forgetLease(lease);
    this.#log("not released");
    this.#markReleased(lease, "unconfirmed");
  }

  #releaseFailed({ leases }: Call, code: string, isOpening: boolean): void {
    const isDisconnected = isConnectionError(code);
    // The error of a statement may be caused by one lease of several.
    const splits = leases.length > 1 && !isOpening && !isDisconnected;
    const mayPass = splits || isDisconnected || isLockError(code);
    const release = leases[0]?.release as Release;
    release.isInDoubt ||= !isOpening && leavesDoubt(code);
    if (!mayPass || this.#now >= release.until) {
      for (const lease of leases) this.#abandonRelease(lease);
      return;
    }
    // Retried at once if the connection had ended, and one by one if a lease caused the error.
    const isFirst = ++release.tries === 1 && isDisconnected;
    const pause = Math.max(SHORTEST_PAUSE, Math.floor((release.until - this.#now) / 4));
    release.dueAt = this.#now + (isFirst || splits || code === "unsent" ? 0 : pause);
    if (!splits) return;
    for (const lease of leases) {
      lease.release = { ...release, isAlone: true };
      this.#moveToEnd(lease);
    }
  }

  // Ends.

  #markLost(lease: LeaseState, reason: Reason, unreleased: readonly string[] = []): void {
    [lease.state, lease.reason, lease.unreleased] = ["lost", reason, unreleased];
    if (lease.isReported) {
      this.#log("lost", reason);
      return this.#emit("lost", lease);
    }
    if (unreleased.length > 0) this.#queueRelease(lease);
    else this.#forgetLease(lease);
    const { advice } = lease;
    if (!lease.hasReply) this.#reply(lease, { error: "LeaseLost", reason, advice });
  }

  #markReleased(lease: LeaseState, reason?: Reason): void {
    [lease.state, lease.reason] = ["released", reason];
    this.#forgetLease(lease);
    if (lease.isReported) this.#emit("released", lease);
  }

  #forgetLease(lease: LeaseState): void {
    this.#leases.delete(lease.key);
    this.#dropConnection(lease);
  }

  #emit(event: EventEffect["event"], lease: LeaseState): void {
    const { key, token, reason, advice } = lease;
    const remaining = isHeld(lease) ? lease.deadline - this.#now : 0;
    this.effects.push({ event, key, token, remaining, reason, advice });
  }

  /** Writes one line for all equal ones of a step, with their count. */
  #log(log: string, reason?: Reason): void {
    const equal = this.#logs.find((line) => line.log === log && line.reason === reason);
    if (equal) equal.count = (equal.count ?? 0) + 1;
    else this.#logs.push({ log, reason, count: 1 });
  }
}

export type LeadEffect =
  | { readonly lead: "pause"; readonly pause: number }
  | { readonly lead: "end"; readonly code: string }
  | { readonly log: string; readonly code: string }
  | { readonly event: "interrupted"; readonly code: string };

/** The state of one `lead`. Its last effect after an error is `pause`, before it acquires again, or
 * `end`. */
export class LeadState {
  #failures = 0;
  /** Since when it leads, or NEVER. */
  #leadingSince = NEVER;

  constructor(
    readonly ttl: number,
    readonly jitter: number,
  ) {}

  granted(now: number): void {
    this.#leadingSince = now;
  }

  /** The acquire or the work has failed. `error` is the type of the error, or empty if this package
   * has none for it. After a loss of the lease it does not matter. `isClosed`: the fence is closed.
   * An outage writes one line to the log, and emits one event if this process has led. */
  failed(
    now: number,
    error: string,
    code: string,
    isLost: boolean,
    isStopped: boolean,
    isClosed: boolean,
  ): LeadEffect[] {
    const since = this.#leadingSince;
    this.#leadingSince = NEVER;
    const cause = causeOf(error, code, since === NEVER);
    if (cause === "own" && !isLost) return [{ lead: "end", code: cause }];
    if (isStopped || isClosed) return [{ lead: "end", code: isStopped ? "stopped" : "closed" }];
    if (now - since >= Math.min(this.ttl, 60_000)) this.#failures = 0;
    const effects: LeadEffect[] = [];
    if (this.#failures === 0) {
      effects.push({ log: "leads no more", code: cause });
      if (since !== NEVER) effects.push({ event: "interrupted", code: cause });
    }
    const shortest = Math.max(Math.floor(this.ttl / 12), SHORTEST_PAUSE);
    const longest = longestBackoff(this.ttl);
    const pause = jittered(backoff(shortest, this.#failures++, longest), this.jitter);
    return [...effects, { lead: "pause", pause }];
  }
}

/** Returns why a leader acquires again, or `own` if it does not. */
function causeOf(error: string, code: string, isOfAcquire: boolean): string {
  if (/^(LeaseLost|LeaseTaken|TransactionLost|NoAnswer)$/.test(error)) return error;
  // The lease may be lost: the next acquire shows it.
  if (code === "PF001" || code === "PF004") return "LeaseLost";
  if (error === "NoConnection" && (code === "" || isTransient(code))) return error;
  // 53300: the server has no connection left for the work.
  if (endsSession(code) || code === "53300") return "ConnectionLost";
  return isOfAcquire && isTransient(code) ? "transient" : "own";
}

/** An error in a guarded transaction. Its stages, codes and sessions are those of
 * clients/spec/errors.md. */
export interface GuardError {
  readonly stage: "open" | "begin" | "work" | "check" | "release" | "commit";
  readonly code: string;
  /** True if its severity is FATAL or PANIC. */
  readonly isFatal?: boolean;
  readonly session?: "open" | "closed" | "unknown";
  /** What guards the transaction: leases, of rows of a table alone, or an adopted lease. */
  readonly of?: "names" | "rows" | "adopted";
  /** True if it is a savepoint. */
  readonly isInner?: boolean;
  /** True if a lease of it is lost. */
  readonly isLost?: boolean;
}
/** What follows from it: among others the type of the error to throw, or an empty text if that is
 * the error itself. */
export type GuardFailure = ReturnType<typeof guardFailed>;

/** Returns what follows from an error in a guarded transaction. */
export function guardFailed(failed: GuardError) {
  const { stage, code, isFatal = false, session = "open", of = "names" } = failed;
  const { isInner = false, isLost = false } = failed;
  // A fatal error ends a session, whatever its SQLSTATE: poolers have some of their own.
  const isEnd = isFatal || endsSession(code);
  // An answer of the server is no end, even if the session has ended after it.
  const isOwnEnd = session === "closed" && (isEnd || code === "");
  let isBroken = isEnd || isOwnEnd;
  // Without a connection no transaction has begun.
  if (stage === "open") isBroken = endsOpenSession(code) || isOwnEnd;
  // The work may use other connections, whose end is not the end of this one.
  else if (stage === "work") isBroken = endsOpenSession(code) || (isEnd && session !== "open");
  const hasFailed = code === "25P02" && /^(check|release|commit)$/.test(stage);
  const hasNone = code === "no transaction";
  // With 25P03 and 25P04 the server has ended an idle transaction before it read the commit.
  const isUnknown = stage === "commit" && !isInner && !/^25P0[34]$/.test(code);
  const inDoubt = isBroken || code === "" ? isUnknown : hasNone;
  let error: ErrorType | "LeaseLost" | "LeaseTaken" | "TransactionLost";
  if (isBroken) error = isLost ? "LeaseLost" : "TransactionLost";
  else if (hasFailed || hasNone) error = "TransactionLost";
  // 22004: lease_adopt has returned NULL, as a transaction guards an older number. PF004: another
  // holder has adopted this number.
  else if (of === "adopted" && stage === "begin" && /^(22004|PF004)$/.test(code))
    error = "LeaseTaken";
  else if (stage === "begin" || stage === "release") error = errorType(code, of === "rows");
  // An error of the work: deferred triggers and constraints run at the commit.
  else error = code.startsWith("PF") ? "Refused" : "";
  const last: LastStage = inDoubt && stage === "commit" ? "in doubt" : "rolled back";
  // The next renewal, which is due at once, shows whether the leases are lost.
  const suspect = of !== "adopted" && /^PF00[14]$/.test(code);
  // After a failover a token is valid only after a renewal: the guard begins once more.
  const again = error === "Refused" && stage === "begin" && code === "PF004" && !isInner;
  return { error, inDoubt, last, suspect, again };
}

/** The types of errors of this package's statements. */
export type ErrorType = "NotInstalled" | "NotGranted" | "Refused" | "";

/** Returns the type of an error of one of this package's statements, or an empty text if it remains
 * the driver's. If the statement is about rows of a table, 3F000 may mean the table's schema. */
export function errorType(code: string, isOfTable: boolean): ErrorType {
  if (code === "42883" || (code === "3F000" && !isOfTable)) return "NotInstalled";
  if (code === "42501") return "NotGranted";
  return /^(PF|22|55(?!P03)|0A|53)/.test(code) ? "Refused" : "";
}

/** Returns the leases of a call, each with its rows, of which there is one for each name. */
function byLease<R>({ leases }: Call, rows: readonly R[]) {
  let end = 0;
  return leases.map((lease) => {
    const start = end;
    end += namesToSend(lease).length;
    return [lease, rows.slice(start, end)] as const;
  });
}

const shortestTtl = (leases: readonly LeaseState[]) =>
  leases.reduce((shortest, { ttl }) => Math.min(shortest, ttl), NEVER);

/** Returns the first leases that have together at most `most` names, and at least one lease. */
function firstWithin(most: number, leases: readonly LeaseState[]): readonly LeaseState[] {
  let count = 0;
  const exceeds = (lease: LeaseState, i: number) => {
    count += namesToSend(lease).length;
    return count > most && i > 0;
  };
  const end = leases.findIndex(exceeds);
  return end < 0 ? leases : leases.slice(0, end);
}

/** Returns the part of a span that the client trusts: the server counts it by another clock. */
const windowOf = (span: number) => span - Math.ceil(span / 50);
/** Returns the limit of an acquire, a release or an undo without regard to other leases. */
const ownLimit = (ttl: number) =>
  Math.min(Math.max(Math.floor(ttl / 3), SHORTEST_RETRY_TIME), LONGEST_CALL);
const backoff = (first: number, tries: number, longest: number) =>
  Math.min(first * 2 ** tries, longest);
const longestBackoff = (ttl: number) =>
  Math.min(Math.max(Math.floor(ttl / 3), SHORTEST_WAIT), LONGEST_PAUSE);
const jittered = (pause: number, jitter: number) => pause - Math.floor((pause * jitter) / 4000);

/** True if a call on another connection may succeed. */
const isConnectionError = (code: string) =>
  /^(connect|unsent|ended|no answer|25006|53300|08.*|57P0.*)$/.test(code);
/** True if the server may have carried out the statement. */
const leavesDoubt = (code: string) =>
  /^(unreadable|panicked)$/.test(code) ||
  (isConnectionError(code) && !/^(unsent|25006|53300)$/.test(code));
const isConflictError = (code: string) => code === "40001" || code === "40P01";
/** True if the same statement may succeed later, as on a standby that is promoted. */
const isTransient = (code: string) =>
  /^(25|40|53|55P03|57|58)/.test(code) || isConnectionError(code);
const isLockError = (code: string) => code === "55P03" || isConflictError(code);
/** True if a session has ended, or could not be opened. */
export const endsSession = (code: string) =>
  /^(ended|57P03|08)/.test(code) || endsOpenSession(code);
/** True if the server has ended an open session: idle in transaction, transaction_timeout,
 * terminated, crashed, idle. */
const endsOpenSession = (code: string) => /^(25P0[34]|57P0[125])$/.test(code);

function notGranted(code: string, isOpening: boolean, isOfTable: boolean): Omit<Reply, "reply"> {
  const sqlstate = /^[0-9A-Z]{5}$/.test(code) ? code : undefined;
  if (isOpening) return { error: "NoConnection", sqlstate };
  if (isConnectionError(code) || leavesDoubt(code)) return { error: "NoAnswer", sqlstate };
  return { error: errorType(code, isOfTable) || "Refused", sqlstate };
}
