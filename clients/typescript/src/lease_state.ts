/**
 * What a client decides about its leases. The specification is clients/spec/lease_state.md, and the
 * tests play its vectors. There is no clock, timer or socket here: each input has the time, in
 * whole milliseconds of a monotonic clock, and returns effects to be carried out in their order.
 */

const [LONGEST_CALL, SHORTEST_OPENING] = [10_000, 2_000];
const [SHORTEST_PAUSE, SHORTEST_WAIT, LONGEST_PAUSE] = [10, 250, 10_000];
const [PORTION, TRY_AGAIN, AFTER_PORTION] = [2_000, 250, 50];
const [FIRST_RETRY, LEAST_PATIENCE, LONGEST_QUEUE] = [20, 1_000, 20_000];
const [LOOK_AGAIN, CLOSING] = [1_000, 5_000];
const [MOST_PAIRS, MOST_RELEASED] = [10_000, 200];
const [BEATS_PER_TTL, MOST_BEATS] = [3, 2];
export const NEVER = Infinity;

/** Why a lease has ended. */
export type Reason =
  "deadline" | "gone" | "refused" | "session" | "at_most" | "heartbeat" | "released" | "unconfirmed";
/** What ends a lease that is taken: its ttl, the commit of its acquire, the end of a guard. */
export type WaitsFor = "ttl" | "commit" | "guard";
type Verb = "acquire" | "keep" | "keep_row" | "release" | "undo";
type Stage = "begins" | "committed" | "rolled back" | "in doubt" | "inner";

/** A statement that is to be sent `on` a connection, which is to be opened before. */
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
  /** The lease that it is for, or the first one; and how that is acquired. */
  for: string | undefined;
  wait?: number;
  holder?: string | undefined;
  reclaim?: boolean;
}
export type EventEffect = Pick<LeaseState, "key" | "token" | "reason" | "advice"> & {
  event: "acquired" | "renewed" | "lost" | "released";
  remaining: number;
};
/** Why an acquire has failed. */
export interface Told extends Taken {
  error?: string;
  sqlstate?: string | undefined;
  inDoubt?: boolean;
  reason?: Reason | undefined;
  advice?: string | undefined;
  waitsFor?: WaitsFor | undefined;
}
export type Reply = Told & { reply: string; leases?: readonly string[] };
export interface LogEffect {
  log: string;
  /** The acquire that it is about. */
  key?: string;
  code?: string;
  reason?: Reason | undefined;
  count?: number;
}
/** Connections end at once, whatever hangs in them (`cut`), or as they should (`hangUp`). */
type End = { cut: number } | { hangUp: number } | { closed: true };
export type Effect = CallEffect | EventEffect | Reply | LogEffect | End;

/** How a lease is asked for. The id is used once, and is the key of the lease. */
export interface Ask {
  readonly id: string;
  readonly names: readonly string[];
  readonly ttl: number;
  readonly wait?: number;
  readonly atMost?: number | undefined;
  /** It is unique for this acquire, unless the caller has `named` it. */
  readonly holder?: string;
  readonly named?: boolean;
  readonly reclaim?: boolean;
  readonly session?: boolean;
  readonly shared?: boolean;
  readonly slots?: number;
  /** A JSON, which the states of leases do not know. */
  readonly metadata?: string | null;
  /** Of a row lease, whose name is the row's key: a statement of the worker's has claimed it. */
  readonly table?: string;
  readonly token?: number;
}

/** The rows of an answer, by what the call does; an acquire that is `taken` has none. */
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

/** A place that a connection is kept for: a lease, an undo, or what all share. */
type Place = { link: Link | undefined };
/** A connection, the call on it, and its errors in a row. It ends when it has no place any more. */
interface Link {
  readonly number: number;
  place: Place | undefined;
  call: Call | undefined;
  errors: number;
}
/** It has not been sent while its connection is opened. */
interface Call {
  readonly number: number;
  readonly do: Verb;
  readonly link: Link;
  readonly limit: number;
  readonly leases: readonly LeaseState[];
  /** For which it is, if it is one. */
  readonly undo: Undo | undefined;
  sent: number | undefined;
  until: number;
}
type Doubt = { readonly sent: number; readonly until: number };
/** The release of what an acquire in doubt may have been granted. */
interface Undo extends Place, Doubt {
  readonly names: readonly string[];
  readonly holder: string | undefined;
  readonly ttl: number;
  at: number;
  tries: number;
}
type Giving = { until: number; at: number; tries: number; isInDoubt: boolean; isAlone: boolean };

/** One lease, from its acquire to its end. */
class LeaseState implements Place {
  readonly key: string;
  readonly names: readonly string[];
  readonly ttl: number;
  state: "asking" | "confirming" | "held" | "releasing" | "lost" | "released" = "asking";
  link: Link | undefined;
  call: Call | undefined;

  // Its acquire.
  readonly until: number;
  at: number;
  isAnswered = false;
  tries = 0;
  /** It waits for the end of an outage. */
  isOut = false;
  /** A call was sent, and may be carried out without an answer `until` then. */
  doubt: Doubt | undefined;

  token = 0;
  deadline = 0;
  beatAt = 0;
  endsAt = NEVER;
  reason: Reason | undefined;
  advice: string | undefined;
  /** How many last transactions are under way, and how many of its worker's that hold its row. */
  resting = 0;
  touched = 0;
  isEnding = false;
  isTold = false;
  /** The last renewal that was sent has had an answer. */
  isBeatAnswered = true;
  /** The names of a lost lease that the server may still hold for it. */
  rest: readonly string[] = [];
  giving: Giving | undefined;

  constructor(
    readonly ask: Ask,
    readonly begun: number,
  ) {
    [this.key, this.names, this.ttl] = [ask.id, ask.names, ask.ttl];
    [this.at, this.until] = [begun, begun + (ask.wait ?? 0)];
  }
}

const holds = ({ state }: LeaseState) => state === "held";
const lives = (lease: LeaseState) => lease.state === "confirming" || holds(lease);
const rests = ({ resting, touched }: LeaseState) => resting > 0 || touched > 0;
const isOne = ({ names }: LeaseState) => names.length === 1;
/** It is confirmed over the connection that has answered its acquire. */
const isApart = ({ state, link }: LeaseState) => state === "confirming" && link !== undefined;
/** An error of the call that confirms a row is its caller's, so that goes by itself. */
const confirmsRow = ({ state, ask }: LeaseState) => state === "confirming" && !!ask.table;
/** Its acquire may wait, so it has a connection of its own. */
const waits = (lease: LeaseState) =>
  !!lease.ask.session || (lease.until > lease.begun && isOne(lease));
const isAsking = ({ state, call, isAnswered }: LeaseState) =>
  state === "asking" && !call && !isAnswered;
const isRenewable = (lease: LeaseState) => lives(lease) && !rests(lease) && !lease.call;
const isExclusive = ({ shared, slots = 1 }: Ask) => !shared && slots === 1;
const reclaims = (lease: LeaseState) =>
  !!lease.ask.reclaim || (isOne(lease) && isExclusive(lease.ask) && !lease.ask.named);
/** All names; of one that is lost, what is to be given back. */
const owed = ({ rest, names }: LeaseState) => (rest.length > 0 ? rest : names);

/** The shortest time until the next renewal, of what is left. */
function leastOf({ ttl }: LeaseState, left: number): number {
  const least = Math.max(SHORTEST_PAUSE, Math.floor(ttl / 60));
  return Math.min(least, Math.floor(left / 4));
}

/** All leases of a fence. */
export class LeaseStates implements Place {
  /** The connection that all share. */
  link: Link | undefined;
  #now = 0;
  #effects: Effect[] = [];
  #logs: LogEffect[] = [];
  readonly #leases = new Map<string, LeaseState>();
  readonly #undos = new Set<Undo>();
  readonly #calls = new Map<number, Call>();
  readonly #links = new Map<number, Link>();
  #lastCall = 0;
  #lastLink = 0;
  /** Heartbeats in a row. */
  #beats = 0;
  #isOut = false;
  #isLossLogged = false;
  #closedAt = NEVER;
  #isDone = false;

  /** The spread is between 0 and 1000, and makes the pauses of clients differ. */
  constructor(readonly spread: number) {}

  // What the program asks: each of these is an input, within a step.

  acquire(ask: Ask): void {
    const lease = new LeaseState(ask, this.#now);
    this.#leases.set(lease.key, lease);
    if (this.#closedAt < NEVER) this.#finish(lease, { error: "Closed" });
    // When a row was claimed is not known here.
    else if (ask.token !== undefined) this.#granted(lease, ask.token, this.#now - ask.ttl);
  }

  giveUp(id: string): void {
    const lease = this.#leases.get(id);
    if (lease && !lease.isAnswered) this.#finish(lease, { error: "GivenUp" });
  }

  release(key: string): void {
    const lease = this.#leases.get(key);
    if (!lease || lease.giving) return;
    const isOwed = lease.state === "lost" && lease.rest.length > 0 && !this.#isDone;
    if (holds(lease) || isOwed) this.#giveBack(lease);
    else if (lease.state === "lost") this.#forgetLease(lease);
  }

  /** A transaction that releases. `inner`: a savepoint, and the program's own one goes on. */
  last(keys: readonly string[], stage: Stage): void {
    for (const lease of this.#those(keys)) {
      lease.resting += stage === "begins" ? 1 : -1;
      if (stage === "begins" || !holds(lease)) continue;
      if (stage === "committed") this.#end(lease);
      else if (stage === "in doubt") this.#giveBack(lease, true);
      else [lease.beatAt, lease.isEnding] = [this.#now, stage === "inner"];
    }
  }

  /** A transaction that has written the rows of row leases: nobody else can claim them until it has
   * ended. */
  touches(keys: readonly string[], begins: boolean): void {
    for (const lease of this.#those(keys)) {
      lease.touched += begins ? 1 : -1;
      if (begins) continue;
      lease.beatAt = Math.min(lease.beatAt, this.#now);
      this.#endByClock();
    }
  }

  suspect(keys: readonly string[]): void {
    for (const lease of this.#those(keys)) lease.beatAt = this.#now;
  }

  check(key: string): void {
    const lease = this.#leases.get(key);
    if (lease && holds(lease)) this.#effects.push({ reply: key });
    else {
      const { reason, advice } = lease?.state === "lost" ? lease : { reason: "released" as const };
      this.#effects.push({ reply: key, error: "LeaseLost", reason, advice });
    }
  }

  close(): void {
    this.#closedAt = Math.min(this.#closedAt, this.#now);
    const isOpen = ({ isAnswered }: LeaseState) => !isAnswered;
    for (const lease of this.#all().filter(isOpen)) this.#finish(lease, { error: "Closed" });
    for (const lease of this.#all().filter(holds)) this.#giveBack(lease);
  }

  // What the connections say.

  sent(number: number): void {
    const call = this.#calls.get(number);
    if (!call || call.sent !== undefined) return;
    [call.sent, call.until] = [this.#now, this.#now + call.limit];
    this.#isSent(call);
  }

  answered(number: number, rows: readonly Rows[Verb][], taken?: Taken): void {
    const call = this.#calls.get(number);
    if (!call) return;
    this.#over(call);
    this.#isOut = this.#isLossLogged = false;
    call.link.errors = 0;
    this.#endUnused(call.link);
    if (call.undo) this.#undoAnswered(call.undo, rows[0] as Rows["undo"]);
    else if (call.do === "acquire") this.#acquireAnswered(call, rows[0] as Rows["acquire"], taken);
    else if (call.do === "release") this.#releaseAnswered(call, rows as Rows["release"][]);
    else this.#keepAnswered(call, rows as Rows["keep"][]);
  }

  /** The code is an SQLSTATE; or `connect`: it could not be opened; `misconfigured`: it never can;
   * `unsent`: it had ended before; `ended`, `no answer`, `unreadable`, `panicked`. Broken: the
   * session is of no use any more. */
  failed(number: number, code: string, isBroken = false): void {
    const call = this.#calls.get(number);
    if (call) this.#callFailed(call, code, isBroken);
  }

  disconnected(connection: number): void {
    const link = this.#links.get(connection);
    if (link?.call) this.#callFailed(link.call, "ended", true);
    else if (link) this.#leave(link);
  }

  died(): void {
    for (const lease of this.#all()) if (holds(lease)) this.#lose(lease, "heartbeat", lease.names);
  }

  // What can be asked at any time.

  lease(key: string): Readonly<LeaseState> | undefined {
    return this.#leases.get(key);
  }

  remaining(now: number, key: string): number {
    const lease = this.#leases.get(key);
    if (!(lease && holds(lease))) return 0;
    const left = lease.deadline - now;
    return Math.max(0, Math.min(lease.touched > 0 ? Math.max(1, left) : left, lease.endsAt - now));
  }

  /** Somebody waits for what is under way. */
  get isWaitedFor(): boolean {
    if (this.#calls.size > 0) return true;
    for (const { state, giving } of this.#leases.values()) {
      if (state === "asking" || state === "confirming" || giving) return true;
    }
    return false;
  }

  /** When to tick, at the latest. */
  wake(now: number): number {
    let next = NEVER;
    const at = (time: number) => (next = Math.min(next, time));
    const isFree = !this.link?.call;
    for (const call of this.#calls.values()) at(call.until);
    for (const undo of this.#undos) if (!undo.link?.call) at(undo.at);
    for (const lease of this.#leases.values()) {
      const waiting = lease.call?.do === "release" ? undefined : lease.giving;
      if (waiting) at(isFree ? Math.min(waiting.until, waiting.at) : waiting.until);
      if (isAsking(lease)) at(lease.until + LONGEST_QUEUE);
      if (isAsking(lease) && (waits(lease) || isFree)) at(lease.at);
      if (!lives(lease)) continue;
      at(Math.min(lease.endsAt, now + LOOK_AGAIN));
      if (lease.touched === 0) at(lease.deadline);
      if (isRenewable(lease) && (isApart(lease) || isFree)) at(lease.beatAt);
    }
    if (this.#closedAt < NEVER && !this.#isDone) at(this.#closedAt + CLOSING);
    return next === NEVER ? NEVER : Math.max(now, Math.min(next, now + LOOK_AGAIN));
  }

  // The clock goes first, whatever comes.

  /** An input. The call that it is the answer to, if any, is not past its limit. */
  step(now: number, decide: () => void, answered?: number): readonly Effect[] {
    [this.#now, this.#effects, this.#logs] = [now, [], []];
    this.#endByClock(answered);
    decide();
    this.#send();
    for (const line of this.#logs) {
      // An outage is one line of the log, and so are the losses by it.
      const isOfOutage = this.#isOut && line.reason === "deadline";
      if (!isOfOutage || !this.#isLossLogged) this.#effects.push(line);
      this.#isLossLogged ||= isOfOutage;
    }
    return this.#effects;
  }

  /** One line for all of an input that are alike. */
  #log(log: string, reason?: Reason): void {
    const like = this.#logs.find((line) => line.log === log && line.reason === reason);
    if (like) like.count = (like.count ?? 0) + 1;
    else this.#logs.push({ log, reason, count: 1 });
  }

  #endByClock(answered?: number): void {
    const now = this.#now;
    for (const lease of this.#leases.values()) {
      if (holds(lease) && lease.endsAt <= now) this.#lose(lease, "at_most", lease.names);
      else if (lives(lease) && lease.deadline <= now && lease.touched === 0) {
        // A renewal without an answer may have come through all the same.
        this.#lose(lease, "deadline", lease.isBeatAnswered ? [] : lease.names);
      }
    }
    const isLate = !this.#isDone && now >= this.#closedAt + CLOSING;
    for (const call of [...this.#calls.values()]) {
      const isOver = call.number !== answered && call.until <= now;
      if (isLate || isOver) this.#callFailed(call, "no answer", true);
    }
    if (isLate) this.#undos.clear();
    for (const lease of this.#leases.values()) {
      const { giving } = lease;
      if (giving && lease.call?.do !== "release" && (isLate || giving.until <= now)) {
        this.#givenBack(lease);
      }
    }
    for (const lease of this.#leases.values()) {
      const isTooLate = isAsking(lease) && lease.until + LONGEST_QUEUE <= now;
      if (isTooLate) this.#finish(lease, { error: "NoConnection" });
    }
  }

  // Calls: one at a time on the connection that all share, where none waits for anybody.

  #send(): void {
    const leases = this.#all();
    for (const lease of leases) if (waits(lease) && this.#isDue(lease)) this.#ask(lease);
    for (const undo of this.#undos) {
      const { names, holder, ttl, at, link } = undo;
      if (!link?.call && at <= this.#now)
        this.#start("undo", [], undo, ownLimit(ttl), { names, holder });
    }
    for (const lease of leases) {
      if (isApart(lease) && !lease.call && lease.beatAt <= this.#now) this.#keep([lease], lease);
    }
    if (!this.link?.call) this.#sendShared(leases);
    this.#endIdle();
  }

  #isDue(lease: LeaseState): boolean {
    return isAsking(lease) && lease.at <= this.#now;
  }

  #sendShared(leases: readonly LeaseState[]): void {
    const isBeat = (lease: LeaseState, by: number) =>
      isRenewable(lease) && !isApart(lease) && lease.beatAt <= by;
    const beats = leases.filter((lease) => isBeat(lease, this.#now));
    const gives = leases.find((lease) => this.#isReleaseDue(lease));
    const asks = leases.find((lease) => !waits(lease) && this.#isDue(lease));
    // Heartbeats go first; after two of them something else has its turn.
    if (beats.length > 0 && (this.#beats < MOST_BEATS || !(gives || asks))) {
      this.#beats++;
      const first = beats.reduce((first, lease) => (lease.beatAt < first.beatAt ? lease : first));
      const goesAlong = (lease: LeaseState) =>
        lease.ask.table === first.ask.table &&
        !confirmsRow(lease) &&
        isBeat(lease, this.#now + Math.floor(lease.ttl / 6));
      const along = leases.filter(goesAlong).sort((one, other) => one.beatAt - other.beatAt);
      this.#keep(confirmsRow(first) ? [first] : within(MOST_PAIRS, along), this);
      return;
    }
    this.#beats = 0;
    if (gives) this.#sendRelease(gives, leases);
    else if (asks) this.#ask(asks);
  }

  #keep(leases: readonly LeaseState[], place: Place): void {
    const verb = leases[0]?.ask.table === undefined ? "keep" : "keep_row";
    this.#start(verb, leases, place, this.#limit());
  }

  /** Sends a call on the connection of a place, which may have to be opened. */
  #start(
    verb: Verb,
    leases: readonly LeaseState[],
    place: Place,
    limit: number,
    more: Partial<CallEffect> = {},
  ): void {
    const open = !place.link;
    place.link ??= { number: ++this.#lastLink, place, call: undefined, errors: 0 };
    const { link } = place;
    this.#links.set(link.number, link);
    const sent = open ? undefined : this.#now;
    const until = this.#now + (open ? Math.max(limit, SHORTEST_OPENING) : limit);
    const number = ++this.#lastCall;
    const undo = verb === "undo" ? (place as Undo) : undefined;
    const call: Call = { number, do: verb, link, limit, leases, undo, sent, until };
    this.#calls.set(number, call);
    link.call = call;
    if (!open) this.#isSent(call);
    for (const lease of leases) lease.call = call;
    const each = <T>(of: (lease: LeaseState) => T) =>
      leases.flatMap((lease) => owed(lease).map(() => of(lease)));
    this.#effects.push({
      call: number,
      do: verb,
      connection: link.number,
      open,
      names: leases.flatMap(owed),
      tokens: each(({ token }) => token),
      ttls: each(({ ttl }) => ttl),
      limit,
      table: leases[0]?.ask.table,
      for: leases[0]?.key,
      ...more,
    });
  }

  #isSent({ do: verb, leases }: Call): void {
    if (verb.startsWith("keep")) for (const lease of leases) lease.isBeatAnswered = false;
  }

  /** A third of the smallest ttl of all that are held, and of what is asked for. */
  #limit(least = NEVER): number {
    for (const lease of this.#leases.values()) if (lives(lease)) least = Math.min(least, lease.ttl);
    return Math.min(LONGEST_CALL, Math.floor(least / 3));
  }

  /** How long conflicts and releases are tried again. */
  #patience(ttl: number): number {
    return Math.max(LEAST_PATIENCE, this.#limit(ttl));
  }

  #pause(ttl: number): number {
    const pause = Math.min(Math.max(Math.floor(ttl / 12), SHORTEST_PAUSE), LONGEST_PAUSE);
    return spreads(pause, this.spread);
  }

  #all(): LeaseState[] {
    return [...this.#leases.values()];
  }

  #those(keys: readonly string[]): LeaseState[] {
    return keys.flatMap((key) => this.#leases.get(key) ?? []);
  }

  #over(call: Call): void {
    this.#calls.delete(call.number);
    call.link.call = undefined;
    for (const lease of call.leases) if (lease.call === call) lease.call = undefined;
  }

  // Connections.

  #callFailed(call: Call, code: string, isBroken: boolean): void {
    this.#over(call);
    const isOpening = call.sent === undefined;
    if (isOpening && code === "no answer") code = "connect";
    const { link } = call;
    if (!isConflict(code) && code !== "55P03") link.errors++;
    const isOfUse = !isOpening && !isBroken && !isOfConnection(code) && code !== "panicked";
    // After a second error in a row, another connection.
    if (!isOfUse || link.errors > 1 || !link.place) {
      this.#effects.push({ cut: link.number });
      this.#leave(link);
    }
    if (call.undo) this.#undoFailed(call.undo, code);
    else if (call.do === "acquire") this.#acquireFailed(call, code, isOpening);
    else if (call.do === "release") this.#releaseFailed(call, code, isOpening);
    else this.#keepFailed(call, code, isOpening);
  }

  /** Forgets a connection, which has ended. A session lease ends with it. */
  #leave({ number, place }: Link): void {
    this.#links.delete(number);
    if (!place) return;
    place.link = undefined;
    const isLost = place instanceof LeaseState && place.ask.session && lives(place);
    if (isLost) this.#lose(place, "session");
  }

  /** Gives up the connection of a place. */
  #hangUp(place: Place): void {
    const { link } = place;
    if (!link) return;
    place.link = link.place = undefined;
    this.#endUnused(link);
  }

  #endUnused({ number, place, call }: Link): void {
    if (place || call) return;
    this.#effects.push({ hangUp: number });
    this.#links.delete(number);
  }

  /** The shared connection ends with the last lease. Tells when a closed fence is done. */
  #endIdle(): void {
    const isOver = ({ state, giving }: LeaseState) => state === "lost" && !giving;
    if (this.#calls.size > 0) return;
    for (const lease of this.#leases.values()) if (!isOver(lease)) return;
    if (this.#closedAt < NEVER && !this.#isDone) {
      this.#isDone = true;
      this.#undos.clear();
      for (const { place } of [...this.#links.values()]) if (place) this.#hangUp(place);
      this.#effects.push({ closed: true });
    } else if (this.#undos.size === 0) {
      this.#hangUp(this);
    }
  }

  // Renewals.

  #keepAnswered(call: Call, outcomes: readonly Outcome[]): void {
    const all = byLease(call, outcomes);
    const gotOn = all.some(([, of]) => of.every(([outcome]) => outcome === "kept"));
    for (const [lease, of] of all) this.#renewal(lease, of, call, gotOn);
  }

  /** Takes the outcomes of the names of a lease. */
  #renewal(lease: LeaseState, of: readonly Outcome[], { sent }: Call, gotOn: boolean): void {
    let [kept, gone, refused, remaining, again] = [0, 0, 0, NEVER, NEVER];
    for (const [outcome, left, againIn] of of) {
      if (outcome === "kept") kept++;
      else if (outcome === "lost") gone++;
      else if (outcome === "refused") refused++;
      remaining = Math.min(remaining, left ?? NEVER);
      again = Math.min(again, againIn ?? NEVER);
    }
    lease.isBeatAnswered = true;
    if (!lives(lease) || (gone + refused > 0 && lease.resting > 0)) return;
    if (kept === of.length) return this.#renewed(lease, sent as number, remaining, again);
    if (lease.isEnding && gone === of.length) return this.#end(lease);
    if (gone + refused > 0) {
      const isOthers = ([outcome, , , code]: Outcome) => outcome === "refused" && code === "42501";
      if (gone === 0 && !lease.ask.table && of.some(isOthers)) lease.advice = "other role";
      const isRest = (_: string, i: number) => ["kept", "later"].includes(of[i]?.[0] ?? "");
      return this.#lose(lease, gone > 0 ? "gone" : "refused", lease.names.filter(isRest));
    }
    const least = leastOf(lease, lease.deadline - this.#now);
    const isUnclear = again === NEVER || (again === 0 && !gotOn);
    const pause = Math.max(isUnclear ? this.#pause(lease.ttl) : again, least);
    lease.beatAt = this.#now + (again === 0 && gotOn ? 0 : pause);
  }

  #renewed(lease: LeaseState, sent: number, remaining: number, again: number): void {
    const [deadline, least] = [sent + trusted(remaining), leastOf(lease, remaining)];
    lease.beatAt = sent + Math.min(Math.max(again, least), Math.floor(remaining / BEATS_PER_TTL));
    if (deadline <= this.#now) return;
    const wasHeld = holds(lease);
    [lease.deadline, lease.state, lease.isEnding] = [deadline, "held", false];
    if (wasHeld) return this.#event("renewed", lease);
    if (!lease.ask.session) this.#hangUp(lease);
    this.#acquired(lease);
  }

  #keepFailed({ leases }: Call, code: string, isOpening: boolean): void {
    // What confirms a row may be wrong in itself: a name, or a value of the key.
    const isWrong = leases.some(confirmsRow) && !passes(code);
    const isRefused = isWrong || (!isOpening && ["42501", "42883", "3F000"].includes(code));
    let again = this.#now + this.#pause(smallest(leases));
    if (code === "unsent") again = this.#now;
    else if (code === "panicked") this.died();
    else if (!isRefused && !this.#isOut && leases.some(lives)) {
      this.#effects.push({ log: "not renewed", code });
      this.#isOut = true;
      if (isOfConnection(code)) again = this.#now;
    }
    for (const lease of leases.filter(lives)) {
      lease.beatAt = again;
      if (isRefused && lease.resting === 0) this.#lose(lease, "refused");
    }
  }

  // Acquires.

  #ask(lease: LeaseState): void {
    const own = ownLimit(lease.ttl);
    // A longer one would hold back vacuum.
    const left = Math.max(0, Math.min(lease.until - this.#now, PORTION));
    const wait = waits(lease) && isOne(lease) ? left : 0;
    const limit = waits(lease) ? own : Math.min(own, this.#limit());
    const reclaim = !!lease.ask.reclaim || (lease.doubt !== undefined && reclaims(lease));
    const place = waits(lease) ? lease : this;
    this.#start("acquire", [lease], place, limit + wait, {
      wait,
      holder: lease.ask.holder,
      reclaim,
    });
  }

  #acquireAnswered(call: Call, grant: Rows["acquire"] | undefined, taken: Taken = {}): void {
    const [lease] = call.leases as [LeaseState];
    lease.isOut = false;
    if (grant) {
      lease.doubt = undefined;
      return this.#granted(lease, grant[1], call.sent as number);
    }
    const { doubt } = lease;
    const isOwn = doubt !== undefined && taken.holder === lease.ask.holder;
    if (doubt && !isOwn && this.#now >= doubt.until) lease.doubt = undefined;
    if (lease.isAnswered) return this.#leaveAcquire(lease);
    // What its own first call was granted, whose answer was lost, is not committed yet.
    const until = isOwn ? Math.max(lease.until, doubt.until) : lease.until;
    if (this.#now < until) {
      const isQueued = waits(lease) && isOne(lease) && !isOwn;
      const soon = Math.max((call.sent as number) + AFTER_PORTION, this.#now);
      lease.at = Math.min(isQueued ? soon : this.#now + TRY_AGAIN, until);
    } else if (isOwn) this.#finish(lease, { error: "NoAnswer", inDoubt: true });
    else {
      const { holder, remaining, state } = taken;
      const byTime = (remaining ?? 0) > 0 ? "ttl" : "guard";
      const waitsFor = state ? (state === "uncommitted" ? "commit" : byTime) : undefined;
      this.#finish(lease, { error: "LeaseTaken", holder, remaining, waitsFor });
    }
  }

  #granted(lease: LeaseState, token: number, sent: number): void {
    [lease.token, lease.state] = [token, "confirming"];
    [lease.deadline, lease.beatAt] = [this.#now + lease.ttl, this.#now];
    if (lease.isAnswered) return this.#giveBack(lease);
    // The server counts from a later moment: if that was long ago, a renewal confirms it.
    const firstBeat = sent + Math.floor(lease.ttl / BEATS_PER_TTL);
    if (this.#now >= firstBeat) return;
    [lease.state, lease.deadline, lease.beatAt] = ["held", sent + trusted(lease.ttl), firstBeat];
    this.#acquired(lease);
  }

  #acquired(lease: LeaseState): void {
    lease.isTold = true;
    lease.endsAt = this.#now + (lease.ask.atMost || NEVER);
    this.#event("acquired", lease);
    this.#finish(lease, { leases: [lease.key] });
  }

  /** Answers an acquire, once. What was granted, or may be, and is nobody's, is given back. */
  #finish(lease: LeaseState, reply: Omit<Reply, "reply">): void {
    lease.isAnswered = true;
    const isFailed = reply.error !== undefined;
    const isInDoubt = isFailed && lease.doubt !== undefined && reply.error !== "LeaseTaken";
    const inDoubt = !!reply.inDoubt || isInDoubt;
    this.#effects.push({ ...reply, inDoubt, reply: lease.key });
    if (isFailed && lives(lease)) this.#giveBack(lease);
    if (lease.state === "asking") this.#leases.delete(lease.key);
    if (lease.call?.do !== "acquire") this.#leaveAcquire(lease);
  }

  #leaveAcquire(lease: LeaseState): void {
    this.#undoDoubt(lease);
    if (lease.state === "asking" || !lease.ask.session) this.#hangUp(lease);
  }

  #acquireFailed(call: Call, code: string, isOpening: boolean): void {
    const [lease] = call.leases as [LeaseState];
    const { until, ask } = lease;
    const isDoubt = !isOpening && !ask.session && isDoubtful(code);
    if (isDoubt) lease.doubt = { sent: call.sent as number, until: (call.sent ?? 0) + call.limit };
    if (lease.isAnswered) return this.#leaveAcquire(lease);
    lease.at = this.#now;
    if (code === "unsent") return;
    lease.tries++;
    const { tries, doubt } = lease;
    const patient = Math.max(until, lease.begun + this.#patience(lease.ttl));
    const end = isConflict(code) ? patient : until;
    const longest = isConflict(code) ? TRY_AGAIN : longestWait(lease.ttl);
    // Nobody else's grant would be taken over: what there may be is undone, or ends at its ttl.
    const isStuck = doubt !== undefined && !reclaims(lease);
    const mayPass = isConflict(code) || isOfConnection(code);
    if (doubt && reclaims(lease) && tries === 1 && isOfConnection(code)) return;
    if (!mayPass || isStuck || this.#now >= end) {
      this.#finish(lease, notGranted(code, isOpening && !doubt));
      return;
    }
    if (!isConflict(code)) {
      // An outage is told once, however many wait for its end.
      const isKnown = this.#all().some(({ isOut }) => isOut);
      if (!isKnown) this.#effects.push({ log: "not acquired", key: lease.key, code });
      lease.isOut = true;
    }
    const pause = spreads(growing(FIRST_RETRY, tries - 1, longest), this.spread);
    lease.at = this.#now + Math.min(pause, Math.max(1, end - this.#now));
  }

  /** Has what may have been granted be released, if the holder is nobody else's. */
  #undoDoubt(lease: LeaseState): void {
    const { doubt, names, ttl, ask } = lease;
    if (!doubt || ask.named || this.#isDone) return;
    const [at, tries, link] = [this.#now, 0, undefined];
    this.#undos.add({ ...doubt, names, holder: ask.holder, ttl, at, tries, link });
    lease.doubt = undefined;
  }

  #undoAnswered(undo: Undo, released: number): void {
    undo.tries++;
    // The call that it is about may still come.
    undo.at = Math.min(this.#now + TRY_AGAIN, undo.until);
    if (released > 0 || this.#now >= undo.until) this.#forget(undo);
  }

  #undoFailed(undo: Undo, code: string): void {
    undo.tries++;
    const pause = spreads(growing(FIRST_RETRY, undo.tries - 1, LONGEST_PAUSE), this.spread);
    undo.at = this.#now + (code === "unsent" ? 0 : pause);
    const mayPass = passes(code) || code === "panicked";
    if (!mayPass || undo.at >= undo.sent + undo.ttl) this.#forget(undo);
  }

  #forget(undo: Undo): void {
    this.#undos.delete(undo);
    this.#hangUp(undo);
  }

  // What is given back, in the order in which it was asked for.

  #giveBack(lease: LeaseState, isInDoubt = lease.isEnding || rests(lease)): void {
    const until = this.#now + this.#patience(lease.ttl);
    lease.giving = { at: this.#now, until, tries: 0, isInDoubt, isAlone: isInDoubt };
    if (lease.state !== "lost") lease.state = "releasing";
    this.#queue(lease);
    if (!lease.ask.session) this.#hangUp(lease);
  }

  /** Puts it behind the others. */
  #queue(lease: LeaseState): void {
    this.#leases.delete(lease.key);
    this.#leases.set(lease.key, lease);
  }

  #sendRelease(first: LeaseState, leases: readonly LeaseState[]): void {
    const isLike = ({ giving, ask }: LeaseState) =>
      !giving?.isAlone && ask.table === first.ask.table;
    const isDue = (lease: LeaseState) => this.#isReleaseDue(lease) && isLike(lease);
    const all = first.giving?.isAlone ? [first] : within(MOST_RELEASED, leases.filter(isDue));
    // From here on they are tried again together.
    const givings = all.flatMap(({ giving }) => giving ?? []);
    const until = Math.min(...givings.map((giving) => giving.until));
    const isInDoubt = givings.some((giving) => giving.isInDoubt);
    for (const giving of givings)
      Object.assign(giving, { until, isInDoubt, tries: first.giving?.tries });
    // If it is tried again, others go first.
    for (const lease of all) this.#queue(lease);
    // The connection of a session lease serves if there is no shared one.
    const isIdle = first.ask.session && first.link && !first.link.call;
    const isOwn = isIdle && !this.link && all.length === 1;
    const limit = Math.min(this.#limit(), ownLimit(smallest(all)));
    this.#start("release", all, isOwn ? first : this, limit);
  }

  #isReleaseDue({ giving, call }: LeaseState): boolean {
    return giving !== undefined && giving.at <= this.#now && call?.do !== "release";
  }

  #releaseAnswered(call: Call, closing: readonly Rows["release"][]): void {
    for (const [lease, of] of byLease(call, closing)) {
      const isGone = of.includes(null);
      const isKnown = !lease.giving?.isInDoubt && lease.ask.table === undefined;
      const isLoss = isGone && isKnown && this.#now < lease.deadline;
      lease.giving = undefined;
      if (lease.state === "lost") this.#forgetLease(lease);
      else if (isLoss && (!lease.ask.session || lease.link)) {
        this.#lose(lease, "gone");
        this.#forgetLease(lease);
      } else this.#end(lease);
    }
  }

  /** The server keeps the lease until its ttl. */
  #givenBack(lease: LeaseState): void {
    lease.giving = undefined;
    if (lease.state === "lost") return this.#forgetLease(lease);
    this.#log("not released");
    this.#end(lease, "unconfirmed");
  }

  #releaseFailed({ leases }: Call, code: string, isOpening: boolean): void {
    const isLost = isOfConnection(code);
    // An error of the statement may be of one of them.
    const isOfOne = leases.length > 1 && !isOpening && !isLost;
    const mayPass = isOfOne || isLost || code === "55P03" || isConflict(code);
    for (const lease of leases) {
      const giving = lease.giving as Giving;
      giving.isInDoubt ||= !isOpening && isDoubtful(code);
      if (!mayPass || this.#now >= giving.until) {
        this.#givenBack(lease);
        continue;
      }
      // At once if the connection had only ended before, and one by one if one is in the way.
      if (isOfOne) {
        giving.isAlone = true;
        this.#queue(lease);
      }
      const isFirst = ++giving.tries === 1 && isLost;
      const quarter = Math.floor((giving.until - this.#now) / 4);
      const isSoon = isFirst || isOfOne || code === "unsent";
      giving.at = this.#now + (isSoon ? 0 : Math.max(SHORTEST_PAUSE, quarter));
    }
  }

  // Ends.

  #lose(lease: LeaseState, reason: Reason, rest: readonly string[] = []): void {
    [lease.state, lease.reason, lease.rest] = ["lost", reason, rest];
    if (lease.isTold) {
      this.#log("lost", reason);
      return this.#event("lost", lease);
    }
    if (rest.length > 0) this.#giveBack(lease);
    else this.#forgetLease(lease);
    const { advice } = lease;
    if (!lease.isAnswered) this.#finish(lease, { error: "LeaseLost", reason, advice });
  }

  #end(lease: LeaseState, reason?: Reason): void {
    [lease.state, lease.reason] = ["released", reason];
    this.#forgetLease(lease);
    if (lease.isTold) this.#event("released", lease);
  }

  #forgetLease(lease: LeaseState): void {
    this.#leases.delete(lease.key);
    this.#hangUp(lease);
  }

  #event(event: EventEffect["event"], lease: LeaseState): void {
    const { key, token, reason, advice } = lease;
    const remaining = holds(lease) ? lease.deadline - this.#now : 0;
    this.#effects.push({ event, key, token, remaining, reason, advice });
  }
}

/** The rows of an answer, one for each name. */
function byLease<R>({ leases }: Call, rows: readonly R[]) {
  let at = 0;
  return leases.map((lease) => {
    const from = at;
    at += owed(lease).length;
    return [lease, rows.slice(from, at)] as const;
  });
}

const smallest = (leases: readonly LeaseState[]) =>
  leases.reduce((least, { ttl }) => Math.min(least, ttl), NEVER);

/** As many as have no more names than that together, and one in any case. */
function within(most: number, leases: readonly LeaseState[]): readonly LeaseState[] {
  let count = 0;
  const isOver = (lease: LeaseState, i: number) => {
    count += owed(lease).length;
    return count > most && i > 0;
  };
  const end = leases.findIndex(isOver);
  return end < 0 ? leases : leases.slice(0, end);
}

/** The part of a span that is believed: the server counts from a later moment, by another clock. */
const trusted = (span: number) => span - Math.ceil(span / 50);
/** The limit of an acquire, a release or an undo that has no shorter lease beside it. */
const ownLimit = (ttl: number) =>
  Math.min(Math.max(Math.floor(ttl / 3), LEAST_PATIENCE), LONGEST_CALL);
const growing = (first: number, tries: number, longest: number) =>
  Math.min(first * 2 ** tries, longest);
const longestWait = (ttl: number) =>
  Math.min(Math.max(Math.floor(ttl / 3), SHORTEST_WAIT), LONGEST_PAUSE);
const spreads = (pause: number, spread: number) => pause - Math.floor((pause * spread) / 4000);

/** Another connection may help. */
const isOfConnection = (code: string) =>
  /^(connect|unsent|ended|no answer|25006|53300|08.*|57P0.*)$/.test(code);
/** The statement may have been carried out all the same. */
const isDoubtful = (code: string) =>
  /^(unreadable|panicked)$/.test(code) ||
  (isOfConnection(code) && !/^(unsent|25006|53300)$/.test(code));
/** A statement fails for no longer than a while, as on a standby. */
export const passes = (code: string) =>
  /^(25|40|53|55P03|57|58)/.test(code) || isOfConnection(code);
const isConflict = (code: string) => code === "40001" || code === "40P01";

function notGranted(code: string, isOpening: boolean): Told {
  const sqlstate = /^[0-9A-Z]{5}$/.test(code) ? code : undefined;
  if (isOpening) return { error: "NoConnection", sqlstate };
  if (isOfConnection(code) || isDoubtful(code)) return { error: "NoAnswer", sqlstate };
  const errors: Record<string, string> = {
    42501: "NotGranted",
    42883: "NotInstalled",
    "3F000": "NotInstalled",
  };
  return { error: errors[code] ?? "Refused", sqlstate };
}

export type LeadEffect =
  | { readonly lead: "acquire" | "work" }
  | { readonly lead: "pause"; readonly pause: number }
  | { readonly lead: "end"; readonly code: string }
  | { readonly log: string; readonly code: string }
  | { readonly event: "interrupted"; readonly code: string };

const PASSES =
  /^(LeaseLost|LeaseTaken|TransactionLost|ConnectionLost|NoAnswer|NoConnection|transient)$/;

/** One who leads, or waits to. */
export class LeadState {
  #state: "asking" | "leading" | "pausing" | "ended" = "asking";
  #failures = 0;
  #at = 0;
  #since = 0;

  constructor(
    readonly ttl: number,
    readonly spread: number,
  ) {}

  start(): LeadEffect[] {
    this.#state = "asking";
    return [{ lead: "acquire" }];
  }

  granted(now: number): LeadEffect[] {
    [this.#state, this.#since] = ["leading", now];
    return [{ lead: "work" }];
  }

  workDone(): LeadEffect[] {
    return this.#end("");
  }

  /** The cause is the kind of the error. Lost: the lease is, whatever the error says. */
  workFailed(now: number, cause: string, isLost: boolean): LeadEffect[] {
    if (!isLost && !PASSES.test(cause)) return this.#end("work failed");
    if (now - this.#since >= Math.min(this.ttl, 60_000)) this.#failures = 0;
    return this.#again(now, cause, true);
  }

  notGranted(now: number, cause: string): LeadEffect[] {
    return PASSES.test(cause) ? this.#again(now, cause, false) : this.#end(cause);
  }

  /** Lets the work end by itself. */
  stop(): LeadEffect[] {
    return this.#state === "leading" ? [] : this.#end("");
  }

  tick(now: number): LeadEffect[] {
    return this.#state === "pausing" && now >= this.#at ? this.start() : [];
  }

  /** After a pause, which grows. An outage is one line of the log, and an event if it has led. */
  #again(now: number, code: string, hasLed: boolean): LeadEffect[] {
    const told: LeadEffect[] = this.#failures > 0 ? [] : [{ log: "leads no more", code }];
    if (told.length > 0 && hasLed) told.push({ event: "interrupted", code });
    const shortest = Math.max(Math.floor(this.ttl / 12), SHORTEST_PAUSE);
    const pause = spreads(growing(shortest, this.#failures++, longestWait(this.ttl)), this.spread);
    [this.#state, this.#at] = ["pausing", now + pause];
    return [...told, { lead: "pause", pause }];
  }

  #end(code: string): LeadEffect[] {
    this.#state = "ended";
    return [{ lead: "end", code }];
  }
}
