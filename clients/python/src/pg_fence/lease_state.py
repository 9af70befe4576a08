"""What a client decides about its leases. The specification is clients/spec/lease_state.md, and the
tests play its vectors. There is no clock, thread or socket here: each input comes with the time, in
milliseconds of a monotonic clock, and returns effects that are to be carried out in their order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

NEVER = 1 << 60
LONGEST_CALL, SHORTEST_OPENING = 10_000, 2_000
SHORTEST_PAUSE, SHORTEST_WAIT, LONGEST_PAUSE = 10, 250, 10_000
PORTION, TRY_AGAIN, AFTER_PORTION = 2_000, 250, 50
FIRST_RETRY, LEAST_PATIENCE, LONGEST_QUEUE = 20, 1_000, 20_000
LOOK_AGAIN, CLOSING = 1_000, 5_000
MOST_PAIRS, MOST_RELEASED = 10_000, 200
BEATS_PER_TTL, MOST_BEATS = 3, 2

#: A dict with the fields of clients/spec/README.md; that of a call has the Call.
Effect: TypeAlias = dict[str, Any]


#: The states of a lease. It lives when it is confirming or held.
ASKING, CONFIRMING, HELD, RELEASING, LOST, RELEASED = range(6)


@dataclass(slots=True, eq=False, kw_only=True)
class Caller:
    """Whoever has calls sent: a lease, an undo, a release; and, over the connection that they
    share, all of them."""

    #: When it calls next, until when, and how often it has.
    at: int = 0
    until: int = 0
    tries: int = 0
    #: The number of its connection, if it has one, and the errors in a row there.
    on: int = 0
    errors: int = 0
    #: The call that is under way.
    call: "Call | None" = None
    is_over: bool = False


@dataclass(slots=True, eq=False)
class LeaseState(Caller):
    """One lease, from the acquire on. Over a connection of its own it is acquired and confirmed;
    a session lease ends with it."""

    # What is asked for. The holder is unique, unless it is `named` by the caller.
    id: str
    names: tuple[str, ...]
    ttl: int
    wait: int = 0
    holder: str = ""
    named: bool = False
    reclaim: bool = False
    session: bool = False
    shared: bool = False
    slots: int = 1
    at_most: int = 0
    #: Sent along, and not looked at.
    metadata: str | None = None
    #: The table of a row, which was claimed under the token; a named lease has none.
    table: Any = None
    token: int = 0

    # While it is asked for.
    begun: int = 0
    #: When a call was sent that has had no answer, and until when it may be carried out.
    doubt: tuple[int, int] | None = None
    #: It waits for the end of an outage.
    is_out: bool = False

    # Afterwards.
    state: int = ASKING
    deadline: int = 0
    beat_at: int = 0
    #: When it is lost by `at_most`.
    ends_at: int = NEVER
    reason: str = ""
    advice: str = ""
    #: How many last transactions are under way, and how many of its worker's hold its row.
    resting: int = 0
    touched: int = 0
    #: It was released in a transaction that the program goes on with.
    is_ending: bool = False
    is_told: bool = False
    #: Whether the last renewal that was sent has had an answer.
    is_answered: bool = True
    #: The names that the server may still hold for it after a loss.
    rest: tuple[str, ...] = ()

    @property
    def is_one(self) -> bool:
        return len(self.names) == 1

    @property
    def asks_aside(self) -> bool:
        """Whether it is acquired over a connection of its own."""
        return self.session or (self.wait > 0 and self.is_one)

    @property
    def reclaims(self) -> bool:
        is_exclusive = not self.shared and self.slots == 1
        return self.reclaim or (self.is_one and is_exclusive and not self.named)

    @property
    def holds(self) -> bool:
        return self.state == HELD

    @property
    def lives(self) -> bool:
        return CONFIRMING <= self.state <= HELD

    @property
    def confirms_row(self) -> bool:
        """By itself, for the error is its caller's: a name, or a value of the key, may be wrong."""
        return bool(self.table) and self.state == CONFIRMING

    @property
    def confirms_aside(self) -> bool:
        return self.state == CONFIRMING and self.on > 0

    @property
    def is_queued(self) -> bool:
        """Whether it is to be acquired still, and no call is under way for that."""
        return self.state == ASKING and not self.call

    @property
    def is_busy(self) -> bool:
        """Whether it is not to be renewed now."""
        return bool(self.call or self.resting or self.touched)

    @property
    def is_kept(self) -> bool:
        """Whether it is renewed when that is due, on the connection that all share."""
        return self.lives and not (self.is_busy or self.confirms_aside)

    def remaining(self, now: int) -> int:
        """How long it is believed in if nothing else comes. This may be asked at any time."""
        left = max(1, self.deadline - now) if self.touched else self.deadline - now
        return max(0, min(left, self.ends_at - now)) if self.holds else 0

    def over(self, now: int) -> str:
        """Why it is held no more; nothing if it is held."""
        if self.remaining(now) > 0:
            return ""
        if self.lives:
            return "at_most" if self.ends_at <= now else "deadline"
        return self.reason if self.state == LOST else "released"

    def least(self, left: int) -> int:
        """The shortest time until the next renewal, if that much is left."""
        return min(max(SHORTEST_PAUSE, self.ttl // 60), left // 4)


@dataclass(slots=True, eq=False)
class Undo(Caller):
    """Releases what an acquire in doubt may have been granted."""

    lease: LeaseState
    gives_up_at: int


@dataclass(slots=True, eq=False)
class Release(Caller):
    """Gives leases back, until it is over."""

    leases: list[LeaseState]
    is_in_doubt: bool
    is_alone: bool


@dataclass(slots=True, eq=False)
class Call:
    """A statement to be sent on a connection, which is opened before if it is `open`."""

    do: str
    limit: int
    leases: Sequence[LeaseState] = ()
    #: Who waits for its answer; of renewals, the leases.
    of: LeaseState | Undo | Release | None = None
    names: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    holder: str = ""
    reclaim: bool = False
    wait: int = 0
    number: int = 0
    #: The number of the connection, and whose it is.
    on: int = 0
    owner: Caller | None = None
    open: bool = False
    #: When it was sent; while its connection is being opened, when that began.
    sent: int = 0
    until: int = 0

    @property
    def table(self) -> Any:
        return self.leases[0].table if self.leases else None

    @property
    def callers(self) -> list[Caller]:
        return [one for one in (self.owner, self.of, *self.leases) if one]


class LeaseStates(Caller):
    """All leases of a fence. `spread` (0 to 1000) makes the pauses of clients differ."""

    def __init__(self, spread: int = 0):
        super().__init__()
        self.spread, self.now = spread, 0
        self.effects: list[Effect] = []
        self.logs: dict[tuple[str, str], Effect] = {}
        #: Those whose acquire has no reply yet; and all, in the order in which they were asked for.
        self.requests: dict[str, LeaseState] = {}
        self.leases: dict[str, LeaseState] = {}
        self.undos: list[Undo] = []
        self.releases: list[Release] = []
        self.calls: dict[int, Call] = {}
        #: Whose the connections are, by their numbers.
        self.links: dict[int, Caller] = {}
        self.last_call = self.last_link = 0
        #: How many heartbeats in a row there were.
        self.beats = 0
        self.is_out = self.is_loss_logged = self.is_done = False
        self.closed_at = NEVER

    # What the program asks. Each of these is an input, within a step.

    def acquire(self, lease: LeaseState) -> None:
        lease.begun = lease.at = self.now
        lease.until = self.now + lease.wait
        self.requests[lease.id] = self.leases[lease.id] = lease
        if self.closed_at < NEVER:
            self._finish(lease, "Closed")
        elif lease.table:
            # The worker's own statement has claimed the row, at a time that is not known here.
            self._granted(lease, lease.token, self.now - lease.ttl)

    def give_up(self, id: str) -> None:
        if id in self.requests:
            self._finish(self.requests[id], "GivenUp")

    def release(self, key: str) -> None:
        lease = self.leases.get(key)
        if lease and lease.holds:
            self._give_back(lease)
        elif lease and lease.state == LOST:
            self._forget(lease)

    def last(self, keys: Sequence[str], stage: str) -> None:
        """A transaction that releases: it `begins` to; then `committed`, `rolled back`, `in doubt`,
        or `inner`: a savepoint, after which the program's own transaction goes on."""
        for lease in self._those(keys):
            lease.resting += 1 if stage == "begins" else -1
            if stage == "begins" or not lease.holds:
                continue
            if stage == "committed":
                self._end(lease)
            elif stage == "in doubt":
                self._give_back(lease, is_in_doubt=True)
            else:
                lease.beat_at, lease.is_ending = self.now, stage == "inner"

    def touches(self, key: str) -> None:
        """A transaction has written the row: nobody else can claim it before it ends."""
        for lease in self._those([key]):
            lease.touched += 1

    def ended(self, key: str) -> None:
        for lease in self._those([key]):
            lease.touched -= 1
            lease.beat_at = min(lease.beat_at, self.now)
        self._end_by_clock(0)

    def suspect(self, keys: Sequence[str]) -> None:
        for lease in self._those(keys):
            lease.beat_at = self.now

    def close(self) -> None:
        self.closed_at = min(self.closed_at, self.now)
        for lease in list(self.requests.values()):
            self._finish(lease, "Closed")
        for lease in list(self.leases.values()):
            if lease.holds:
                self._give_back(lease)

    # What the connections say.

    def sent(self, number: int) -> None:
        """The connection of a call with `open` is there, and the call is sent next."""
        call = self.calls.get(number)
        if call and call.open:
            self._is_sent(call)

    def answered(
        self, number: int, rows: Sequence[Any], taken: Mapping[str, Any] | None = None
    ) -> None:
        """The rows are as in clients/spec/README.md; an acquire has none if it is `taken`."""
        call = self.calls.get(number)
        if call is None:
            return
        self._over(call)
        self.is_out = self.is_loss_logged = False
        self.links[call.on].errors = 0
        match call.of:
            case LeaseState():
                self._acquire_answered(call, call.of, rows, taken)
            case Undo():
                self._undo_answered(call.of, rows[0])
            case Release():
                self._release_answered(call.of, rows)
            case None:
                self._keep_answered(call, rows)

    def failed(self, number: int, code: str, broken: bool = False) -> None:
        """The code is an SQLSTATE; or `connect`: it could not be opened; `unsent`: the connection
        had ended before; `ended`, `unreadable`, `panicked`. `broken`: it is of no use any more."""
        if number in self.calls:
            self._call_failed(self.calls[number], code, broken)

    def disconnected(self, on: int) -> None:
        for call in self.calls.values():
            if call.on == on:
                self._call_failed(call, "ended", True)
                return
        self._leave(on)

    def died(self) -> None:
        for lease in list(self.leases.values()):
            if lease.holds:
                self._lose(lease, "keeper", lease.names)

    # The clock goes first, whatever comes.

    def step(self, now: int, decide: Callable[[], object], answer_to: int = 0) -> list[Effect]:
        """One input at a time. The call that it answers, if it does, is not past its limit."""
        self.now, self.effects, self.logs = now, [], {}
        self._end_by_clock(answer_to)
        decide()
        self._end_links()
        self._send()
        for log in self.logs.values():
            # An outage is one line of the log, and so are the losses by it.
            is_of_outage = log.get("reason") == "deadline" and self.is_out
            if not (is_of_outage and self.is_loss_logged):
                self.effects.append(log)
            self.is_loss_logged = self.is_loss_logged or is_of_outage
        return self.effects

    def wake(self, now: int) -> int:
        """When to give the next input at the latest; NEVER if there is nothing to do."""
        is_free = self.call is None
        times = [call.until for call in self.calls.values()]
        for release in self.releases:
            if not release.call:
                times += [release.until, release.at] if is_free else [release.until]
        times += [undo.at for undo in self.undos if not undo.call]
        for lease in self.requests.values():
            if lease.is_queued:
                times.append(lease.until + LONGEST_QUEUE)
                if lease.asks_aside or is_free:
                    times.append(lease.at)
        lives = [lease for lease in self.leases.values() if lease.lives]
        times += [lease.ends_at for lease in lives]
        times += [lease.deadline for lease in lives if not lease.touched]
        idle = [lease for lease in lives if not lease.is_busy]
        times += [lease.beat_at for lease in idle if is_free or lease.confirms_aside]
        if self.closed_at < NEVER and not self.is_done:
            times.append(self.closed_at + CLOSING)
        return max(now, min(*times, now + LOOK_AGAIN)) if times else NEVER

    def _end_by_clock(self, answer_to: int) -> None:
        for lease in list(self.leases.values()):
            if lease.ends_at <= self.now and lease.holds:
                self._lose(lease, "at_most", lease.names)
            elif lease.deadline <= self.now and lease.lives and not lease.touched:
                # A renewal without an answer may have come through all the same.
                self._lose(lease, "deadline", () if lease.is_answered else lease.names)
        is_late = self.now >= self.closed_at + CLOSING
        for call in list(self.calls.values()):
            if is_late or (call.until <= self.now and call.number != answer_to):
                self._call_failed(call, "no answer", True)
        for undo in self.undos if is_late else ():
            undo.is_over = True
        for release in list(self.releases):
            if not release.call and (is_late or release.until <= self.now):
                self._given_back(release)
        for lease in list(self.requests.values()):
            if lease.is_queued and self.now >= lease.until + LONGEST_QUEUE:
                self._finish(lease, "NoConnection")

    # Calls: one at a time on the connection that all share, where none waits for anybody.

    def _send(self) -> None:
        for lease in list(self.requests.values()):
            if lease.asks_aside and lease.is_queued and lease.at <= self.now:
                self._try(lease)
        self.undos = [undo for undo in self.undos if not undo.is_over]
        for undo in self.undos:
            if not undo.call and undo.at <= self.now:
                call = Call("undo", _own_limit(undo.lease.ttl), of=undo)
                call.names, call.holder = list(undo.lease.names), undo.lease.holder
                self._start(call, undo)
        for lease in self.leases.values():
            if lease.beat_at <= self.now and lease.confirms_aside and not lease.call:
                self._keep([lease], lease)
        if self.call is None:
            self._send_shared()
        self._rest()

    def _send_shared(self) -> None:
        due = (lease for lease in self.leases.values() if lease.beat_at <= self.now)
        kept = (lease for lease in due if lease.is_kept)
        beat = min(kept, key=lambda lease: lease.beat_at, default=None)
        gives = (one for one in self.releases if one.at <= self.now and not one.call)
        release = next(gives, None)
        asks = (one for one in self.requests.values() if one.is_queued and one.at <= self.now)
        request = next((one for one in asks if not one.asks_aside), None)
        # Heartbeats go first; after two of them something else has its turn.
        if beat and not (self.beats >= MOST_BEATS and (release or request)):
            self.beats += 1
            self._keep(self._go_along(beat), self)
            return
        self.beats = 0
        if release:
            self._send_release(release)
        elif request:
            self._try(request)

    def _go_along(self, first: LeaseState) -> list[LeaseState]:
        """The leases that are due soon, the due ones first."""
        if first.confirms_row:
            return [first]
        soon, now = self.leases.values(), self.now
        due = [lease for lease in soon if lease.beat_at <= now + lease.ttl // 6 and lease.is_kept]
        due = [lease for lease in due if lease.table == first.table and not lease.confirms_row]
        due.sort(key=lambda lease: lease.beat_at)
        return due[: _how_many(MOST_PAIRS, (len(lease.names) for lease in due))]

    def _keep(self, leases: list[LeaseState], owner: Caller) -> None:
        self._start(Call("keep_row" if leases[0].table else "keep", self._limit(), leases), owner)

    def _start(self, call: Call, owner: Caller) -> None:
        """Sends a call on the connection of its owner."""
        self.last_call += 1
        call.number, call.owner = self.last_call, owner
        self.calls[call.number] = call
        for one in call.callers:
            one.call = call
        for lease in call.leases:
            names = lease.rest if call.do == "release" and lease.rest else lease.names
            call.names += names
            call.tokens += [lease.token] * len(names)
        if owner.on:
            self._is_sent(call)
        else:
            self.last_link += 1
            self.links[self.last_link] = owner
            owner.on, owner.errors = self.last_link, 0
            call.open, call.sent = True, self.now
            call.until = self.now + max(call.limit, SHORTEST_OPENING)
        call.on = owner.on
        # The same call is not open any more once it was sent.
        self.effects.append({"call": call, "open": call.open})

    def _is_sent(self, call: Call) -> None:
        call.open, call.sent, call.until = False, self.now, self.now + call.limit
        for lease in call.leases:
            lease.is_answered = False

    def _limit(self, ttl: int = NEVER) -> int:
        """A third of the smallest ttl of all that are held, and of what is asked for."""
        ttls = (lease.ttl for lease in self.leases.values() if lease.lives)
        return min(LONGEST_CALL, min([ttl, *ttls]) // 3)

    def _patience(self, ttl: int) -> int:
        """How long conflicts and releases are tried again."""
        return max(LEAST_PATIENCE, self._limit(ttl))

    def _pause(self, ttl: int) -> int:
        return self._spread(min(max(ttl // 12, SHORTEST_PAUSE), LONGEST_PAUSE))

    def _spread(self, pause: int) -> int:
        return pause - pause * self.spread // 4000

    def _those(self, keys: Iterable[str]) -> list[LeaseState]:
        return [self.leases[key] for key in keys if key in self.leases]

    def _over(self, call: Call) -> None:
        del self.calls[call.number]
        for one in call.callers:
            if one.call is call:
                one.call = None

    # Connections.

    def _call_failed(self, call: Call, code: str, is_broken: bool) -> None:
        self._over(call)
        if call.open and code == "no answer":
            code = "connect"
        owner = self.links[call.on]
        if not _is_locked(code):
            owner.errors += 1
        is_useless = call.open or is_broken or _is_of_connection(code) or code == "panicked"
        # A second error in a row: another connection.
        if is_useless or owner.errors > 1 or owner.on != call.on:
            self.effects.append({"cut": call.on})
            self._leave(call.on)
        match call.of:
            case LeaseState():
                self._acquire_failed(call, call.of, code)
            case Undo():
                self._undo_failed(call.of, code)
            case Release():
                self._release_failed(call, call.of, code)
            case None:
                self._keep_failed(call, code)

    def _leave(self, on: int) -> None:
        """Forgets a connection, which has ended. Session leases end with theirs."""
        if owner := self.links.pop(on, None):
            owner.on = 0
            if isinstance(owner, LeaseState) and owner.lives and owner.session:
                self._lose(owner, "session")

    def _end_links(self) -> None:
        """Ends the connections that nobody needs any more."""
        busy = {call.on for call in self.calls.values()}
        for on, owner in list(self.links.items()):
            is_needed = owner.on == on and not owner.is_over
            if not is_needed and on not in busy:
                self.effects.append({"hang_up": on})
                self._leave(on)

    def _rest(self) -> None:
        """Ends the shared connection with the last lease, and tells when a closed fence is done."""
        if self.calls or self.releases or self.requests:
            return
        if any(lease.lives for lease in self.leases.values()):
            return
        is_done = self.closed_at < NEVER and not self.is_done
        if is_done:
            self.undos.clear()
            for owner in self.links.values():
                owner.is_over = True
        elif not self.undos:
            self.on = 0
        self._end_links()
        if is_done:
            self.is_done = True
            self.effects.append({"closed": True})

    # Renewals.

    def _keep_answered(self, call: Call, rows: Sequence[Any]) -> None:
        left = iter(rows)
        parts = [list(islice(left, len(lease.names))) for lease in call.leases]
        got_on = any(all(row[0] == "kept" for row in part) for part in parts)
        for lease, part in zip(call.leases, parts, strict=True):
            self._renewal(lease, part, call, got_on)

    def _renewal(self, lease: LeaseState, rows: Sequence[Any], call: Call, got_on: bool) -> None:
        """Takes the outcomes of the names of a lease."""
        told, lefts, agains, codes = zip(*rows, strict=True)
        outcomes = set(told)
        again = min([one for one in agains if one is not None], default=None)
        is_over = "lost" in outcomes or "refused" in outcomes
        lease.is_answered = True
        if not lease.lives or (is_over and lease.resting):
            return
        if lease.is_ending and outcomes == {"lost"}:
            self._end(lease)
        elif is_over:
            named = zip(lease.names, told, strict=True)
            rest = tuple(name for name, outcome in named if outcome in {"kept", "later"})
            reason = "gone" if "lost" in outcomes else "refused"
            if reason == "refused" and not lease.table and "42501" in codes:
                lease.advice = "other role"
            self._lose(lease, reason, rest)
        elif outcomes == {"kept"}:
            self._renewed(lease, call.sent, min(lefts), again)
        else:
            least = lease.least(lease.deadline - self.now)
            pause = max(again or self._pause(lease.ttl), least)
            # Out of locks: at once, in another transaction, as long as that helps.
            lease.beat_at = self.now + (0 if again == 0 and got_on else pause)

    def _renewed(self, lease: LeaseState, sent: int, left: int, again: int | None) -> None:
        deadline, least = sent + _window(left), lease.least(left)
        again = NEVER if again is None else again
        lease.beat_at = sent + min(max(again, least), left // BEATS_PER_TTL)
        if deadline <= self.now:
            return
        lease.deadline, lease.is_ending = deadline, False
        if lease.holds:
            self._tell("renewed", lease)
        else:
            if not lease.session:
                lease.on = 0
            self._end_links()
            self._acquired(lease)

    def _keep_failed(self, call: Call, code: str) -> None:
        is_refused = code in {"42501", "42883", "3F000"} and not call.open
        is_wrong = call.leases[0].confirms_row and not passes(code)
        reason = "refused" if is_refused or is_wrong else ""
        pause = self._pause(min(lease.ttl for lease in call.leases))
        if code == "unsent":
            pause = 0
        elif code == "panicked":
            self.died()
        elif not reason and not self.is_out and any(lease.lives for lease in call.leases):
            self.effects.append({"log": "not renewed", "code": code})
            self.is_out = True
            pause = 0 if _is_of_connection(code) else pause
        for lease in call.leases:
            if lease.lives:
                lease.beat_at = self.now + pause
                if reason and not lease.resting:
                    self._lose(lease, reason)

    # Acquires.

    def _try(self, lease: LeaseState) -> None:
        wait, limit = 0, _own_limit(lease.ttl)
        if not lease.asks_aside:
            limit = min(limit, self._limit())
        elif lease.is_one:
            # A longer one would hold back vacuum.
            wait = max(0, min(lease.until - self.now, PORTION))
        call = Call("acquire", limit + wait, of=lease, names=list(lease.names), wait=wait)
        call.holder, call.reclaim = lease.holder, lease.reclaim or lease.doubt is not None
        self._start(call, lease if lease.asks_aside else self)

    def _acquire_answered(
        self, call: Call, lease: LeaseState, rows: Sequence[Any], taken: Mapping[str, Any] | None
    ) -> None:
        lease.is_out = False
        if taken is None:
            lease.doubt = None
            self._granted(lease, rows[0][1], call.sent)
            return
        holder, remaining = taken.get("holder"), taken.get("remaining", 0)
        until, is_by_itself = lease.until, False
        if lease.doubt and holder == lease.holder:
            # By its own first call, whose answer was lost.
            until, is_by_itself = max(until, lease.doubt[1]), True
        elif lease.doubt and self.now >= lease.doubt[1]:
            lease.doubt = None
        if lease.is_over:
            self._undo_doubt(lease)
        elif self.now < until:
            is_portion = call.wait and not is_by_itself
            again = call.sent + AFTER_PORTION if is_portion else self.now + TRY_AGAIN
            lease.at = min(max(again, self.now), until)
        elif is_by_itself:
            self._finish(lease, "NoAnswer")
        else:
            by_state = {None: None, "uncommitted": "commit"}
            waits_for = by_state.get(taken.get("state"), "ttl" if remaining > 0 else "guard")
            more = {"holder": holder, "remaining": remaining, "waits_for": waits_for}
            self._finish(lease, "LeaseTaken", **more)

    def _granted(self, lease: LeaseState, token: int, sent: int) -> None:
        is_given_up, lease.is_over = lease.is_over, False
        lease.token, lease.state = token, CONFIRMING
        # The server counts from a later moment: a renewal confirms it over the same connection.
        lease.deadline, lease.beat_at = self.now + lease.ttl, self.now
        first_beat = sent + lease.ttl // BEATS_PER_TTL
        if is_given_up:
            self._give_back(lease)
        elif self.now < first_beat:
            if not lease.session:
                lease.on = 0
            lease.deadline, lease.beat_at = sent + _window(lease.ttl), first_beat
            self._acquired(lease)

    def _acquired(self, lease: LeaseState) -> None:
        lease.state, lease.is_told = HELD, True
        lease.ends_at = self.now + (lease.at_most or NEVER)
        self._tell("acquired", lease)
        self._finish(lease, leases=[lease.id])

    def _finish(self, lease: LeaseState, error: str = "", **more: Any) -> None:
        """Answers an acquire, once. A grant that is nobody's, or may be there, is given back."""
        del self.requests[lease.id]
        if lease.doubt and error != "LeaseTaken":
            more["in_doubt"] = True
        self.effects.append({"reply": lease.id, "error": error, **more})
        if lease.state == ASKING:
            lease.is_over = True
            del self.leases[lease.id]
        elif lease.state == CONFIRMING:
            self._give_back(lease)
        if not lease.call:
            self._undo_doubt(lease)
        self._end_links()

    def _acquire_failed(self, call: Call, lease: LeaseState, code: str) -> None:
        if not call.open and not lease.session and _is_doubtful(code):
            lease.doubt = (call.sent, call.sent + call.limit)
        if lease.is_over:
            self._undo_doubt(lease)
            return
        if code == "unsent":
            # It is due still.
            return
        lease.tries += 1
        until, longest = lease.until, _longest_wait(lease.ttl)
        is_conflict, is_outage = _is_conflict(code), _is_of_connection(code)
        if is_conflict:
            until, longest = max(until, lease.begun + self._patience(lease.ttl)), TRY_AGAIN
        if lease.doubt and lease.reclaims and lease.tries == 1 and is_outage:
            return
        # Nobody else's grant would be taken over: what there may be is undone, or ends at its ttl.
        may_pass = (is_conflict or is_outage) and (lease.reclaims or not lease.doubt)
        if not may_pass or self.now >= until:
            self._finish(lease, **_not_granted(code, call.open and not lease.doubt))
            return
        if is_outage:
            # An outage is told once, however many wait for its end.
            if not any(one.is_out for one in self.requests.values()):
                self.effects.append({"log": "not acquired", "key": lease.id, "code": code})
            lease.is_out = True
        pause = self._spread(_growing(lease.tries, longest))
        lease.at = self.now + min(pause, max(1, until - self.now))

    def _undo_doubt(self, lease: LeaseState) -> None:
        """Has what may have been granted be released, if the holder is nobody else's."""
        if lease.doubt is None or lease.named:
            return
        (sent, until), lease.doubt = lease.doubt, None
        self.undos.append(Undo(lease, sent + lease.ttl, at=self.now, until=until))

    def _undo_answered(self, undo: Undo, released: int) -> None:
        undo.tries += 1
        # The call that it is about may still come.
        undo.is_over = released > 0 or self.now >= undo.until
        undo.at = min(self.now + TRY_AGAIN, undo.until)

    def _undo_failed(self, undo: Undo, code: str) -> None:
        undo.tries += 1
        pause = 0 if code == "unsent" else self._spread(_growing(undo.tries, LONGEST_PAUSE))
        undo.at = self.now + pause
        may_pass = passes(code) or code == "panicked"
        undo.is_over = not may_pass or undo.at >= undo.gives_up_at

    # What is given back.

    def _give_back(self, lease: LeaseState, is_in_doubt: bool = False) -> None:
        is_in_doubt = is_in_doubt or lease.is_ending or lease.resting > 0 or lease.touched > 0
        until = self.now + self._patience(lease.ttl)
        if not lease.session:
            lease.on = 0
        if lease.state != LOST:
            lease.state = RELEASING
        self.releases.append(Release([lease], is_in_doubt, is_in_doubt, at=self.now, until=until))

    def _send_release(self, release: Release) -> None:
        """Those that are queued go together; those of rows, in one call for each table."""
        first, due = release.leases[0], [one for one in self.releases if one.at <= self.now]
        some = [one for one in due if not (one.is_alone or one.call)]
        some = [one for one in some if one.leases[0].table == first.table]
        counts = (sum(len(lease.names) for lease in one.leases) for one in some)
        for one in some[1 : _how_many(MOST_RELEASED, counts)] if not release.is_alone else ():
            release.leases += one.leases
            release.until = min(release.until, one.until)
            release.is_in_doubt = release.is_in_doubt or one.is_in_doubt
            self.releases.remove(one)
        # If it is tried again, others go first.
        self.releases.remove(release)
        self.releases.append(release)
        smallest, is_one = min(lease.ttl for lease in release.leases), len(release.leases) == 1
        limit = min(self._limit(), _own_limit(smallest))
        # The connection of a session lease serves if there is no shared one. A renewal, by which the
        # lease was to be confirmed, may be on its way there.
        is_busy = any(call.on == first.on for call in self.calls.values())
        is_own = is_one and first.on and not is_busy and not self.on
        call = Call("release", limit, release.leases, of=release)
        self._start(call, first if is_own else self)

    def _release_answered(self, release: Release, rows: Sequence[Any]) -> None:
        self.releases.remove(release)
        left = iter(rows)
        for lease in release.leases:
            is_gone = None in list(islice(left, len(lease.rest or lease.names)))
            has_session = not lease.session or lease.on
            is_known = not release.is_in_doubt and not lease.table and has_session
            if lease.state != LOST and is_gone and is_known and self.now < lease.deadline:
                self._lose(lease, "gone")
                self._forget(lease)
            else:
                self._end(lease)

    def _given_back(self, release: Release) -> None:
        """Ends it without an answer: the server keeps the leases until their ttl."""
        self.releases.remove(release)
        for lease in release.leases:
            if lease.state != LOST:
                self._log("not released")
            self._end(lease, "unconfirmed")

    def _release_failed(self, call: Call, release: Release, code: str) -> None:
        if not call.open and _is_doubtful(code):
            release.is_in_doubt = True
        is_of_connection = _is_of_connection(code)
        # An error of the statement may be of one of them.
        is_of_one = len(release.leases) > 1 and not call.open and not is_of_connection
        if not (is_of_one or _is_locked(code) or is_of_connection) or self.now >= release.until:
            self._given_back(release)
            return
        release.tries += 1
        # At once if the connection had only ended before; and one by one if one is in the way.
        is_first = release.tries == 1 and is_of_connection
        pause = max(SHORTEST_PAUSE, (release.until - self.now) // 4)
        release.at = self.now + (0 if is_first or is_of_one or code == "unsent" else pause)
        if is_of_one:
            self.releases.remove(release)
            alone = [replace(release, leases=[one], is_alone=True) for one in release.leases]
            self.releases += alone

    # Ends.

    def _lose(self, lease: LeaseState, reason: str, rest: tuple[str, ...] = ()) -> None:
        lease.state, lease.reason, lease.rest = LOST, reason, rest
        if lease.is_told:
            self._log("lost", reason)
            self._tell("lost", lease)
            return
        self._forget(lease)
        if lease.id in self.requests:
            self._finish(lease, "LeaseLost", reason=reason, advice=lease.advice)

    def _forget(self, lease: LeaseState) -> None:
        """After a loss: gives back what the server may still hold."""
        self.leases.pop(lease.id, None)
        if lease.rest and not self.is_done:
            self._give_back(lease)
        lease.is_over = not lease.rest
        self._end_links()

    def _end(self, lease: LeaseState, reason: str = "") -> None:
        lease.is_over, was_lost = True, lease.state == LOST
        if not was_lost:
            lease.state, lease.reason = RELEASED, reason
            self.leases.pop(lease.id, None)
        self._end_links()
        if lease.is_told and not was_lost:
            self._tell("released", lease)

    def _tell(self, event: str, lease: LeaseState) -> None:
        left = lease.deadline - self.now if lease.holds else 0
        told = {"event": event, "key": lease.id, "token": lease.token, "remaining": left}
        self.effects.append({**told, "reason": lease.reason, "advice": lease.advice})

    def _log(self, what: str, reason: str = "") -> None:
        """One line for all of an input that are alike."""
        line = self.logs.setdefault((what, reason), {"log": what, "reason": reason, "count": 0})
        line["count"] += 1


class Leader:
    """One who leads, or waits to. What it does next is acquire, work, pause or end."""

    def __init__(self, ttl: int, spread: int = 0):
        self.ttl, self.spread = ttl, spread
        self.failures = self.at = self.since = 0
        self.state = ""

    def start(self) -> list[Effect]:
        self.state = "asking"
        return [{"lead": "acquire"}]

    def granted(self, now: int) -> list[Effect]:
        self.state, self.since = "leading", now
        return [{"lead": "work"}]

    def work_done(self) -> list[Effect]:
        return self._end()

    def work_failed(self, now: int, cause: str, is_lost: bool) -> list[Effect]:
        """After a loss of the lease it goes on, whatever the work's error says."""
        if not is_lost and cause not in _PASSING:
            return self._end("work failed")
        if now - self.since >= min(self.ttl, 60_000):
            self.failures = 0
        return self._again(now, cause, has_led=True)

    def not_granted(self, now: int, cause: str) -> list[Effect]:
        return self._again(now, cause, has_led=False) if cause in _PASSING else self._end(cause)

    def stop(self) -> list[Effect]:
        """Lets the work end by itself."""
        return [] if self.state == "leading" else self._end()

    def tick(self, now: int) -> list[Effect]:
        return self.start() if self.state == "pausing" and now >= self.at else []

    def _again(self, now: int, cause: str, has_led: bool) -> list[Effect]:
        """After a pause, which grows. An outage is one line of the log, and one event."""
        effects: list[Effect] = []
        if self.failures == 0:
            effects.append({"log": "leads no more", "code": cause})
            if has_led:
                effects.append({"event": "interrupted", "code": cause})
        shortest = max(self.ttl // 12, SHORTEST_PAUSE)
        pause = min(shortest << min(self.failures, 20), _longest_wait(self.ttl))
        pause -= pause * self.spread // 4000
        self.failures += 1
        self.state, self.at = "pausing", now + pause
        return [*effects, {"lead": "pause", "pause": pause}]

    def _end(self, why: str = "") -> list[Effect]:
        self.state = "ended"
        return [{"lead": "end", "code": why}]


#: What a leader goes on after.
_PASSING = {
    *("LeaseLost", "LeaseTaken", "TransactionLost", "ConnectionLost"),
    *("NoAnswer", "NoConnection", "passing"),
}


def _window(span: int) -> int:
    """What is believed of a span that the server counts from a later moment, by another clock."""
    return span - (span + 49) // 50


def _own_limit(ttl: int) -> int:
    """The limit of an acquire, a release or an undo that has no shorter lease beside it."""
    return min(max(ttl // 3, LEAST_PATIENCE), LONGEST_CALL)


def _growing(tries: int, longest: int) -> int:
    return min(FIRST_RETRY << min(tries - 1, 20), longest)


def _longest_wait(ttl: int) -> int:
    return min(max(ttl // 3, SHORTEST_WAIT), LONGEST_PAUSE)


def _how_many(most: int, counts: Iterable[int]) -> int:
    """How many of them have no more than that together; one in any case."""
    total = n = 0
    for n, count in enumerate(counts, 1):
        total += count
        if total > most:
            return max(1, n - 1)
    return n


def _is_of_connection(code: str) -> bool:
    """Whether another connection may help."""
    words = {"connect", "unsent", "ended", "no answer", "25006", "53300"}
    return code in words or code.startswith(("08", "57P0"))


def _is_doubtful(code: str) -> bool:
    """Whether the statement may have been carried out all the same."""
    is_known = code in {"unsent", "25006", "53300"}
    return not is_known and (code in {"unreadable", "panicked"} or _is_of_connection(code))


def _is_conflict(code: str) -> bool:
    return code in {"40001", "40P01"}


def passes(code: str) -> bool:
    """Whether a statement of an acquire fails for no longer than a while, as on a standby."""
    return code.startswith(("25", "40", "53", "55P03", "57", "58")) or _is_of_connection(code)


def _is_locked(code: str) -> bool:
    return code == "55P03" or _is_conflict(code)


def _not_granted(code: str, is_opening: bool) -> dict[str, str]:
    by_code = {"42501": "NotGranted", "42883": "NotInstalled", "3F000": "NotInstalled"}
    has_no_answer = _is_doubtful(code) or _is_of_connection(code)
    error = "NoAnswer" if has_no_answer else by_code.get(code, "Refused")
    # Words of our own are no SQLSTATE.
    state = "" if code.islower() else code
    return {"error": "NoConnection" if is_opening else error, "sqlstate": state}
