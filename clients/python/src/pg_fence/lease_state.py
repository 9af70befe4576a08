"""The state machine of the client's leases. Its specification is clients/spec/lease_state.md, and the
tests play the vectors of clients/spec/vectors. The machine has no clock, thread or socket: each input
comes with the time, in milliseconds of a monotonic clock, and returns effects, which the heartbeat
carries out in their order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from typing import Any, TypeAlias

NEVER = 1 << 60
LONGEST_CALL, SHORTEST_OPENING = 10_000, 2_000
SHORTEST_PAUSE, SHORTEST_WAIT, LONGEST_PAUSE = 10, 250, 10_000
WAIT_PORTION, RETRY_INTERVAL, PORTION_INTERVAL = 2_000, 250, 50
FIRST_RETRY, SHORTEST_RETRY_TIME, QUEUE_TIMEOUT = 20, 1_000, 20_000
CHECK_INTERVAL, CLOSE_TIMEOUT = 1_000, 5_000
MAX_PAIRS, MAX_RELEASED_NAMES = 10_000, 200
BEATS_PER_TTL, MAX_BEATS_IN_A_ROW = 3, 2

#: A dict with the fields that clients/spec/README.md lists. The effect `call` has the Call itself.
Effect: TypeAlias = dict[str, Any]


#: The states of a lease. A lease that is CONFIRMING or HELD is live.
ACQUIRING, CONFIRMING, HELD, RELEASING, LOST, RELEASED = range(6)

_BEAT_AT = attrgetter("beat_at")


@dataclass(slots=True, eq=False, kw_only=True)
class Sender:
    """What sends calls: a lease, an undo or a release. The machine itself sends the calls on the
    shared connection."""

    #: The time of the next call, the end of the retries, and the number of calls so far.
    due_at: int = 0
    until: int = 0
    tries: int = 0
    #: The number of the connection that it owns, or 0, and the errors in a row on it.
    connection: int = 0
    errors: int = 0
    #: The call that has no answer yet.
    call: "Call | None" = None
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class LeaseState(Sender):
    """One lease, from its acquire on. A separate connection may acquire and confirm it. A session
    lease keeps that connection, and ends with it."""

    # What the program requests. The holder is unique, unless the program has `named` it.
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
    #: The machine only passes it on.
    metadata: str | None = None
    #: The table of a row lease, whose row the program has claimed with `token`.
    table: Any = None
    token: int = 0

    # Used until the grant.
    requested_at: int = 0
    #: When a call was sent that got no answer, and until when the server may carry it out.
    doubt: tuple[int, int] | None = None
    #: True while it waits for the end of an outage.
    in_outage: bool = False

    # Used after the grant.
    state: int = ACQUIRING
    deadline: int = 0
    beat_at: int = 0
    #: When `at_most` is over, and the lease is lost.
    ends_at: int = NEVER
    reason: str = ""
    advice: str = ""
    #: The number of last transactions under way, and of the worker's transactions that have
    #: locked the row.
    last_transactions: int = 0
    row_locks: int = 0
    #: True after a release in a savepoint: the program's transaction has not committed yet.
    has_uncommitted_release: bool = False
    #: True once the event `acquired` was emitted.
    is_reported: bool = False
    #: False while the last renewal that was sent has no answer.
    is_renewal_answered: bool = True
    #: After a loss: the names that the server may still hold for this lease.
    unreleased: tuple[str, ...] = ()

    @property
    def has_one_name(self) -> bool:
        return len(self.names) == 1

    @property
    def acquires_separately(self) -> bool:
        """True if a separate connection acquires it."""
        return self.session or (self.wait > 0 and self.has_one_name)

    @property
    def may_reclaim(self) -> bool:
        is_exclusive = not self.shared and self.slots == 1
        return self.reclaim or (self.has_one_name and is_exclusive and not self.named)

    @property
    def is_held(self) -> bool:
        return self.state == HELD

    @property
    def is_live(self) -> bool:
        return CONFIRMING <= self.state <= HELD

    @property
    def confirms_row(self) -> bool:
        """True if its next call confirms a row. That call is sent alone, so that `keep_row` can
        raise its error: a name or a value of the key may be wrong."""
        return bool(self.table) and self.state == CONFIRMING

    @property
    def confirms_separately(self) -> bool:
        """True if the connection that has acquired it confirms it."""
        return self.state == CONFIRMING and self.connection > 0

    @property
    def is_queued(self) -> bool:
        """True if it waits to send its next acquire."""
        return self.state == ACQUIRING and not self.call

    @property
    def is_busy(self) -> bool:
        """True if it must not be renewed now."""
        return bool(self.call or self.last_transactions or self.row_locks)

    @property
    def is_renewable(self) -> bool:
        """True if the shared connection renews it at `beat_at`."""
        is_on_shared = self.state == HELD or (self.state == CONFIRMING and not self.connection)
        return is_on_shared and not self.is_busy

    @property
    def names_to_send(self) -> tuple[str, ...]:
        """The names of its next call: of a lost lease those that are unreleased."""
        return self.unreleased or self.names

    def remaining(self, now: int) -> int:
        """Returns how long the client may believe that it holds the lease, without an input."""
        return max(0, min(self.deadline, self.ends_at) - now) if self.is_held else 0

    def end_reason(self, now: int) -> str:
        """Returns why the lease is not held, or an empty text if it is held."""
        if self.remaining(now) > 0:
            return ""
        if self.is_live:
            return "at_most" if self.ends_at <= now else "deadline"
        return self.reason if self.state == LOST else "released"

    def shortest_interval(self, left: int) -> int:
        """Returns the shortest time until the next renewal, if `left` remains until the deadline."""
        return min(max(SHORTEST_PAUSE, self.ttl // 60), left // 4)


@dataclass(slots=True, eq=False)
class Undo(Sender):
    """Releases what the server may have granted to an acquire that got no answer."""

    lease: LeaseState
    gives_up_at: int


@dataclass(slots=True, eq=False)
class Release(Sender):
    """A release of some leases, from its queueing to its answer or its end without one.
    `is_in_doubt`: an earlier attempt may have released them. `is_alone`: no other joins its call."""

    leases: list[LeaseState]
    is_in_doubt: bool
    is_alone: bool


@dataclass(slots=True, eq=False)
class Call:
    """One statement on one connection. If it is `open`, the connection is opened first."""

    do: str
    limit: int
    leases: Sequence[LeaseState] = ()
    #: What waits for the answer. A renewal has None: its answer is for `leases`.
    sender: LeaseState | Undo | Release | None = None
    names: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    holder: str = ""
    reclaim: bool = False
    wait: int = 0
    number: int = 0
    #: The number of the connection, and its owner.
    connection: int = 0
    owner: Sender | None = None
    open: bool = False
    #: When it was sent, or when the opening of its connection began.
    sent: int = 0
    until: int = 0

    @property
    def table(self) -> Any:
        return self.leases[0].table if self.leases else None

    @property
    def senders(self) -> list[Sender]:
        return [one for one in (self.owner, self.sender, *self.leases) if one]


class LeaseStates(Sender):
    """The machine of all leases of a fence. `jitter` (0 to 1000) shortens its pauses, so that
    clients do not retry at the same time."""

    def __init__(self, jitter: int = 0):
        super().__init__()
        self.jitter, self.now = jitter, 0
        self.effects: list[Effect] = []
        self.logs: dict[tuple[str, str], Effect] = {}
        #: The leases whose acquire has no reply yet, and all leases, in the order of the acquires.
        self.requests: dict[str, LeaseState] = {}
        self.leases: dict[str, LeaseState] = {}
        self.undos: list[Undo] = []
        self.releases: list[Release] = []
        self.calls: dict[int, Call] = {}
        #: The owners of the connections, by their numbers.
        self.owners: dict[int, Sender] = {}
        self.last_call = self.last_connection = 0
        self.beats_in_a_row = 0
        self.in_outage = self.is_loss_logged = self.has_closed = False
        self.closed_at = NEVER

    # Inputs from the program. Each is passed to `step`.

    def acquire(self, lease: LeaseState) -> None:
        lease.requested_at = lease.due_at = self.now
        lease.until = self.now + lease.wait
        self.requests[lease.id] = self.leases[lease.id] = lease
        if self.closed_at < NEVER:
            self._reply(lease, "Closed")
        elif lease.table:
            # The program has claimed the row at an unknown time, so a renewal confirms it first.
            self._granted(lease, lease.token, self.now - lease.ttl)

    def give_up(self, id: str) -> None:
        if id in self.requests:
            self._reply(self.requests[id], "GivenUp")

    def release(self, key: str) -> None:
        lease = self.leases.get(key)
        if lease and lease.is_held:
            self._queue_release(lease)
        elif lease and lease.state == LOST:
            self._release_after_loss(lease)

    def last_transaction(self, keys: Sequence[str], stage: str) -> None:
        """A transaction that releases the leases. `begins` comes before its release statement, and
        then one of `committed`, `rolled back`, `in doubt` (the commit got no answer) and `inner` (a
        savepoint was released, and the program's transaction goes on)."""
        for lease in self._known(keys):
            lease.last_transactions += 1 if stage == "begins" else -1
            if stage == "begins" or not lease.is_held:
                continue
            if stage == "committed":
                self._mark_released(lease)
            elif stage == "in doubt":
                self._queue_release(lease, is_in_doubt=True)
            else:
                lease.beat_at, lease.has_uncommitted_release = self.now, stage == "inner"

    def row_locked(self, key: str) -> None:
        """The worker's transaction has locked the row, which nobody else can claim meanwhile."""
        for lease in self._known([key]):
            lease.row_locks += 1

    def row_unlocked(self, key: str) -> None:
        for lease in self._known([key]):
            lease.row_locks -= 1
            lease.beat_at = min(lease.beat_at, self.now)
        self._end_by_clock(0)

    def suspect(self, keys: Sequence[str]) -> None:
        for lease in self._known(keys):
            lease.beat_at = self.now

    def close(self) -> None:
        self.closed_at = min(self.closed_at, self.now)
        for lease in list(self.requests.values()):
            self._reply(lease, "Closed")
        for lease in list(self.leases.values()):
            if lease.is_held:
                self._queue_release(lease)

    # Inputs from the connections.

    def sent(self, number: int) -> None:
        """The connection of a call with `open` is established, and the call is sent next."""
        call = self.calls.get(number)
        if call and call.open:
            self._mark_sent(call)

    def answered(
        self, number: int, rows: Sequence[Any], taken: Mapping[str, Any] | None = None
    ) -> None:
        """`rows` are those of clients/spec/README.md. The answer of an acquire without a grant is
        `taken`."""
        call = self.calls.get(number)
        if call is None:
            return
        self._end_call(call)
        self.in_outage = self.is_loss_logged = False
        self.owners[call.connection].errors = 0
        match call.sender:
            case LeaseState():
                self._acquire_answered(call, call.sender, rows, taken)
            case Undo():
                self._undo_answered(call.sender, rows[0])
            case Release():
                self._release_answered(call.sender, rows)
            case None:
                self._keep_answered(call, rows)

    def failed(self, number: int, code: str, broken: bool = False) -> None:
        """`code` is one of clients/spec/errors.md. `broken`: the connection cannot be used again."""
        if number in self.calls:
            self._call_failed(self.calls[number], code, broken)

    def disconnected(self, connection: int) -> None:
        for call in self.calls.values():
            if call.connection == connection:
                self._call_failed(call, "ended", True)
                return
        self._forget_connection(connection)

    def heartbeat_died(self) -> None:
        for lease in list(self.leases.values()):
            if lease.is_held:
                self._mark_lost(lease, "heartbeat", lease.names)

    # Time. Each step first ends what has ended by its time.

    def step(self, now: int, decide: Callable[[], object], answer_to: int = 0) -> list[Effect]:
        """Takes the input `decide` and returns the effects. If the input answers a call, its number
        is `answer_to`, and the limit of that call is not applied."""
        self.now, self.effects, self.logs = now, [], {}
        self._end_by_clock(answer_to)
        decide()
        self._close_unused_connections()
        self._send_due_calls()
        for log in self.logs.values():
            # An outage writes one line to the log, and all losses by it write one more.
            is_of_outage = log.get("reason") == "deadline" and self.in_outage
            if not (is_of_outage and self.is_loss_logged):
                self.effects.append(log)
            self.is_loss_logged = self.is_loss_logged or is_of_outage
        return self.effects

    def wake(self, now: int) -> int:
        """Returns the latest time of the next step, or NEVER if there is nothing to do."""
        is_free = self.call is None
        times = [call.until for call in self.calls.values()]
        for release in self.releases:
            if not release.call:
                times += [release.until, release.due_at] if is_free else [release.until]
        times += [undo.due_at for undo in self.undos if not undo.call]
        for lease in self.requests.values():
            if lease.is_queued:
                times.append(lease.until + QUEUE_TIMEOUT)
                if lease.acquires_separately or is_free:
                    times.append(lease.due_at)
        next_check = now + CHECK_INTERVAL
        if any(lease.is_live for lease in self.leases.values()):
            times.append(next_check)
        for lease in self.leases.values():
            # The comparisons come first: few of many leases have a time before the next check.
            if lease.ends_at < next_check and lease.is_live:
                times.append(lease.ends_at)
            if lease.deadline < next_check and lease.is_live and not lease.row_locks:
                times.append(lease.deadline)
            may_beat = lease.beat_at < next_check and lease.is_live and not lease.is_busy
            if may_beat and (is_free or lease.confirms_separately):
                times.append(lease.beat_at)
        if self.closed_at < NEVER and not self.has_closed:
            times.append(self.closed_at + CLOSE_TIMEOUT)
        return max(now, min(*times, next_check)) if times else NEVER

    def _end_by_clock(self, answer_to: int) -> None:
        for lease in list(self.leases.values()):
            if lease.ends_at <= self.now and lease.is_held:
                self._mark_lost(lease, "at_most", lease.names)
            elif lease.deadline <= self.now and lease.is_live and not lease.row_locks:
                # The server may have received a renewal that got no answer.
                self._mark_lost(lease, "deadline", () if lease.is_renewal_answered else lease.names)
        is_late = self.now >= self.closed_at + CLOSE_TIMEOUT
        for call in list(self.calls.values()):
            if is_late or (call.until <= self.now and call.number != answer_to):
                self._call_failed(call, "no answer", True)
        for undo in self.undos if is_late else ():
            undo.has_ended = True
        for release in list(self.releases):
            if not release.call and (is_late or release.until <= self.now):
                self._abandon_release(release)
        for lease in list(self.requests.values()):
            if lease.is_queued and self.now >= lease.until + QUEUE_TIMEOUT:
                self._reply(lease, "NoConnection")

    # Calls. The shared connection has one call at a time, and none of them waits in the server.

    def _send_due_calls(self) -> None:
        for lease in list(self.requests.values()):
            if lease.acquires_separately and lease.is_queued and lease.due_at <= self.now:
                self._send_acquire(lease)
        self.undos = [undo for undo in self.undos if not undo.has_ended]
        for undo in self.undos:
            if not undo.call and undo.due_at <= self.now:
                call = Call("undo", _own_limit(undo.lease.ttl), sender=undo)
                call.names, call.holder = list(undo.lease.names), undo.lease.holder
                self._send_call(call, undo)
        for lease in self.leases.values():
            if lease.beat_at <= self.now and lease.confirms_separately and not lease.call:
                self._send_renewal([lease], lease)
        if self.call is None:
            self._send_on_shared_connection()
        self._end_if_idle()

    def _send_on_shared_connection(self) -> None:
        due = [lease for lease in self.leases.values() if lease.beat_at <= self.now]
        due.sort(key=_BEAT_AT)
        first = next((lease for lease in due if lease.is_renewable), None)
        releases = (one for one in self.releases if one.due_at <= self.now and not one.call)
        release = next(releases, None)
        due = (lease for lease in self.requests.values() if lease.due_at <= self.now)
        queued = (one for one in due if one.is_queued and not one.acquires_separately)
        request = next(queued, None)
        # Heartbeats go first, but after two in a row another call has its turn.
        if first and not (self.beats_in_a_row >= MAX_BEATS_IN_A_ROW and (release or request)):
            self.beats_in_a_row += 1
            self._send_renewal(self._renewable_with(first), self)
            return
        self.beats_in_a_row = 0
        if release:
            self._send_release(release)
        elif request:
            self._send_acquire(request)

    def _renewable_with(self, first: LeaseState) -> list[LeaseState]:
        """Returns the leases to renew in one call with `first`: the earliest first."""
        if first.confirms_row:
            return [first]
        soon = [
            one
            for one in self.leases.values()
            if one.beat_at <= self.now + one.ttl // 6
            and one.table == first.table
            and one.is_renewable
            and not one.confirms_row
        ]
        soon.sort(key=_BEAT_AT)
        return soon[: _count_within(MAX_PAIRS, (len(lease.names) for lease in soon))]

    def _send_renewal(self, leases: list[LeaseState], owner: Sender) -> None:
        do = "keep_row" if leases[0].table else "keep"
        self._send_call(Call(do, self._limit(), leases), owner)

    def _send_call(self, call: Call, owner: Sender) -> None:
        """Sends a call on its owner's connection, which is opened if there is none."""
        self.last_call += 1
        call.number, call.owner = self.last_call, owner
        self.calls[call.number] = call
        for one in call.senders:
            one.call = call
        for lease in call.leases:
            call.names += lease.names_to_send
            call.tokens += [lease.token] * len(lease.names_to_send)
        if owner.connection:
            self._mark_sent(call)
        else:
            self.last_connection += 1
            self.owners[self.last_connection] = owner
            owner.connection, owner.errors = self.last_connection, 0
            call.open, call.sent = True, self.now
            call.until = self.now + max(call.limit, SHORTEST_OPENING)
        call.connection = owner.connection
        # `call.open` changes when the call is sent, so the effect has its value of now.
        self.effects.append({"call": call, "open": call.open})

    def _mark_sent(self, call: Call) -> None:
        call.open, call.sent, call.until = False, self.now, self.now + call.limit
        for lease in call.leases:
            lease.is_renewal_answered = False

    def _limit(self, ttl: int = NEVER) -> int:
        """Returns the limit of a call: a third of `ttl` and of each live lease's ttl."""
        ttls = (lease.ttl for lease in self.leases.values() if lease.is_live)
        return min(LONGEST_CALL, min([ttl, *ttls]) // 3)

    def _retry_time(self, ttl: int) -> int:
        """Returns how long conflicts and releases are retried."""
        return max(SHORTEST_RETRY_TIME, self._limit(ttl))

    def _pause(self, ttl: int) -> int:
        return self._jittered(min(max(ttl // 12, SHORTEST_PAUSE), LONGEST_PAUSE))

    def _jittered(self, pause: int) -> int:
        return pause - pause * self.jitter // 4000

    def _known(self, keys: Iterable[str]) -> list[LeaseState]:
        return [self.leases[key] for key in keys if key in self.leases]

    def _end_call(self, call: Call) -> None:
        del self.calls[call.number]
        for one in call.senders:
            if one.call is call:
                one.call = None

    # Connections.

    def _call_failed(self, call: Call, code: str, is_broken: bool) -> None:
        self._end_call(call)
        if call.open and code == "no answer":
            code = "connect"
        owner = self.owners[call.connection]
        if not _is_lock_error(code):
            owner.errors += 1
        is_useless = call.open or is_broken or _is_connection_error(code) or code == "panicked"
        # After a second error in a row the next call opens another connection.
        if is_useless or owner.errors > 1 or owner.connection != call.connection:
            self.effects.append({"cut": call.connection})
            self._forget_connection(call.connection)
        match call.sender:
            case LeaseState():
                self._acquire_failed(call, call.sender, code)
            case Undo():
                self._undo_failed(call.sender, code)
            case Release():
                self._release_failed(call, call.sender, code)
            case None:
                self._keep_failed(call, code)

    def _forget_connection(self, connection: int) -> None:
        """Forgets a connection that has ended. The session lease on it is lost."""
        if owner := self.owners.pop(connection, None):
            owner.connection = 0
            if isinstance(owner, LeaseState) and owner.is_live and owner.session:
                self._mark_lost(owner, "session")

    def _close_unused_connections(self) -> None:
        """Closes the connections without a call whose owner has ended or has another."""
        busy = {call.connection for call in self.calls.values()}
        for number, owner in list(self.owners.items()):
            is_needed = owner.connection == number and not owner.has_ended
            if not is_needed and number not in busy:
                self.effects.append({"hang_up": number})
                self._forget_connection(number)

    def _end_if_idle(self) -> None:
        """Closes the shared connection after the last lease, and reports the end of `close`."""
        if self.calls or self.releases or self.requests:
            return
        if any(lease.is_live for lease in self.leases.values()):
            return
        ends_close = self.closed_at < NEVER and not self.has_closed
        if ends_close:
            self.undos.clear()
            for owner in self.owners.values():
                owner.has_ended = True
        elif not self.undos:
            self.connection = 0
        self._close_unused_connections()
        if ends_close:
            self.has_closed = True
            self.effects.append({"closed": True})

    # Renewals.

    def _keep_answered(self, call: Call, rows: Sequence[Any]) -> None:
        unread = iter(rows)
        parts = [list(islice(unread, len(lease.names))) for lease in call.leases]
        kept_any = any(all(row[0] == "kept" for row in part) for part in parts)
        for lease, part in zip(call.leases, parts, strict=True):
            self._take_outcomes(lease, part, call, kept_any)

    def _take_outcomes(
        self, lease: LeaseState, rows: Sequence[Any], call: Call, kept_any: bool
    ) -> None:
        """Applies the outcomes of the names of one lease."""
        outcomes = {row[0] for row in rows}
        left = again = NEVER
        for outcome, remaining, again_in, _ in rows:
            if outcome == "kept" and remaining < left:
                left = remaining
            if again_in is not None and again_in < again:
                again = again_in
        is_lost = "lost" in outcomes or "refused" in outcomes
        lease.is_renewal_answered = True
        if not lease.is_live or (is_lost and lease.last_transactions):
            return
        if lease.has_uncommitted_release and outcomes == {"lost"}:
            self._mark_released(lease)
        elif is_lost:
            named = zip(lease.names, rows, strict=True)
            unreleased = tuple(name for name, row in named if row[0] in {"kept", "later"})
            reason = "gone" if "lost" in outcomes else "refused"
            is_denied = any(row[0] == "refused" and row[3] == "42501" for row in rows)
            if reason == "refused" and is_denied and not lease.table:
                lease.advice = "other role"
            self._mark_lost(lease, reason, unreleased)
        elif outcomes == {"kept"}:
            self._extend(lease, call.sent, left, again)
        else:
            least = lease.shortest_interval(lease.deadline - self.now)
            pause = max(again if 0 < again < NEVER else self._pause(lease.ttl), least)
            # The server was out of locks: the next transaction has them again, if this call has
            # renewed another lease.
            lease.beat_at = self.now + (0 if again == 0 and kept_any else pause)

    def _extend(self, lease: LeaseState, sent: int, left: int, again: int) -> None:
        deadline, least = sent + _window(left), lease.shortest_interval(left)
        lease.beat_at = sent + min(max(again, least), left // BEATS_PER_TTL)
        if deadline <= self.now:
            return
        lease.deadline, lease.has_uncommitted_release = deadline, False
        if lease.is_held:
            self._emit("renewed", lease)
        else:
            self._acquired(lease)

    def _keep_failed(self, call: Call, code: str) -> None:
        is_wrong = call.leases[0].confirms_row and not is_transient(code)
        is_refused = is_wrong or (code in {"42501", "42883", "3F000"} and not call.open)
        pause = self._pause(min(lease.ttl for lease in call.leases))
        if code == "unsent":
            pause = 0
        elif code == "panicked":
            self.heartbeat_died()
        elif not is_refused and not self.in_outage and any(lease.is_live for lease in call.leases):
            self.effects.append({"log": "not renewed", "code": code})
            self.in_outage = True
            pause = 0 if _is_connection_error(code) else pause
        for lease in call.leases:
            if lease.is_live:
                lease.beat_at = self.now + pause
                if is_refused and not lease.last_transactions:
                    if lease.state == CONFIRMING:
                        lease.state = LOST
                        self._reply(lease, **_not_granted(code, call.open, bool(lease.table)))
                    self._mark_lost(lease, "refused")

    # Acquires.

    def _send_acquire(self, lease: LeaseState) -> None:
        wait, limit = 0, _own_limit(lease.ttl)
        if not lease.acquires_separately:
            limit = min(limit, self._limit())
        elif lease.has_one_name:
            # The snapshot of a longer wait would hold back vacuum.
            wait = max(0, min(lease.until - self.now, WAIT_PORTION))
        call = Call("acquire", limit + wait, sender=lease, names=list(lease.names), wait=wait)
        call.holder, call.reclaim = lease.holder, lease.reclaim or lease.doubt is not None
        self._send_call(call, lease if lease.acquires_separately else self)

    def _acquire_answered(
        self, call: Call, lease: LeaseState, rows: Sequence[Any], taken: Mapping[str, Any] | None
    ) -> None:
        lease.in_outage = False
        if taken is None:
            lease.doubt = None
            self._granted(lease, rows[0][1], call.sent)
            return
        holder, remaining = taken.get("holder"), taken.get("remaining", 0)
        until, is_own_grant = lease.until, False
        if lease.doubt and holder == lease.holder:
            # The lease is taken by its own first call, whose answer was lost.
            until, is_own_grant = max(until, lease.doubt[1]), True
        elif lease.doubt and self.now >= lease.doubt[1]:
            lease.doubt = None
        if lease.has_ended:
            self._queue_undo(lease)
        elif self.now < until:
            is_portion = call.wait and not is_own_grant
            again = call.sent + PORTION_INTERVAL if is_portion else self.now + RETRY_INTERVAL
            lease.due_at = min(again, until)
        elif is_own_grant:
            self._reply(lease, "NoAnswer")
        else:
            by_state = {None: None, "uncommitted": "commit"}
            waits_for = by_state.get(taken.get("state"), "ttl" if remaining > 0 else "guard")
            more = {"holder": holder, "remaining": remaining, "waits_for": waits_for}
            self._reply(lease, "LeaseTaken", **more)

    def _granted(self, lease: LeaseState, token: int, sent: int) -> None:
        is_given_up, lease.has_ended = lease.has_ended, False
        lease.token, lease.state = token, CONFIRMING
        # If the answer was late, a renewal on the same connection confirms the lease, and until
        # then it may last no longer than a ttl from now.
        lease.deadline, lease.beat_at = self.now + lease.ttl, self.now
        first_beat = sent + lease.ttl // BEATS_PER_TTL
        if is_given_up:
            self._queue_release(lease)
        elif self.now < first_beat:
            lease.deadline, lease.beat_at = sent + _window(lease.ttl), first_beat
            self._acquired(lease)

    def _acquired(self, lease: LeaseState) -> None:
        lease.state, lease.is_reported = HELD, True
        if not lease.session:
            lease.connection = 0
        lease.ends_at = self.now + (lease.at_most or NEVER)
        self._emit("acquired", lease)
        self._reply(lease, leases=[lease.id])

    def _reply(self, lease: LeaseState, error: str = "", **more: Any) -> None:
        """Replies to an acquire. A grant that is not confirmed, or in doubt, is released."""
        del self.requests[lease.id]
        if lease.doubt and error != "LeaseTaken":
            more["in_doubt"] = True
        self.effects.append({"reply": lease.id, "error": error, **more})
        if lease.state == ACQUIRING:
            lease.has_ended = True
            del self.leases[lease.id]
        elif lease.state == CONFIRMING:
            self._queue_release(lease)
        if not lease.call:
            self._queue_undo(lease)

    def _acquire_failed(self, call: Call, lease: LeaseState, code: str) -> None:
        was_in_doubt = lease.doubt is not None
        if not call.open and not lease.session and _leaves_doubt(code):
            lease.doubt = (call.sent, call.sent + call.limit)
        if lease.has_ended:
            self._queue_undo(lease)
            return
        if code == "unsent":
            # The lease is still due, and is sent on another connection.
            return
        lease.tries += 1
        until, longest = lease.until, _longest_backoff(lease.ttl)
        is_conflict, is_outage = _is_conflict(code), _is_connection_error(code)
        if is_conflict:
            until = max(until, lease.requested_at + self._retry_time(lease.ttl))
            longest = RETRY_INTERVAL
        is_first = lease.tries == 1 or (self.now >= until and not was_in_doubt)
        if lease.doubt and lease.may_reclaim and is_first and is_outage:
            return
        # A retry in doubt reclaims, so it must not take over the grant of another client.
        is_retryable = (is_conflict or is_outage) and (lease.may_reclaim or not lease.doubt)
        if not is_retryable or self.now >= until:
            self._reply(lease, **_not_granted(code, call.open and not lease.doubt, False))
            return
        if is_outage:
            # One line of the log for an outage, however many acquires wait for its end.
            if not any(one.in_outage for one in self.requests.values()):
                self.effects.append({"log": "not acquired", "key": lease.id, "code": code})
            lease.in_outage = True
        pause = self._jittered(_backoff(lease.tries, longest))
        lease.due_at = self.now + min(pause, until - self.now)

    def _queue_undo(self, lease: LeaseState) -> None:
        """Queues the release of a grant in doubt, if no other client can have the same holder."""
        if lease.doubt is None or lease.named:
            return
        (sent, until), lease.doubt = lease.doubt, None
        self.undos.append(Undo(lease, sent + lease.ttl, due_at=self.now, until=until))

    def _undo_answered(self, undo: Undo, released: int) -> None:
        undo.tries += 1
        # The server may still carry out the acquire.
        undo.has_ended = released > 0 or self.now >= undo.until
        undo.due_at = min(self.now + RETRY_INTERVAL, undo.until)

    def _undo_failed(self, undo: Undo, code: str) -> None:
        undo.tries += 1
        pause = 0 if code == "unsent" else self._jittered(_backoff(undo.tries, LONGEST_PAUSE))
        undo.due_at = self.now + pause
        is_retryable = is_transient(code) or code == "panicked"
        undo.has_ended = not is_retryable or undo.due_at >= undo.gives_up_at

    # Releases.

    def _queue_release(self, lease: LeaseState, is_in_doubt: bool = False) -> None:
        in_transaction = lease.last_transactions > 0 or lease.row_locks > 0
        is_in_doubt = is_in_doubt or lease.has_uncommitted_release or in_transaction
        until = self.now + self._retry_time(lease.ttl)
        if not lease.session:
            lease.connection = 0
        if lease.state != LOST:
            lease.state = RELEASING
        release = Release([lease], is_in_doubt, is_in_doubt, due_at=self.now, until=until)
        self.releases.append(release)

    def _send_release(self, release: Release) -> None:
        """Sends the queued releases in one call, those of rows in one call for each table."""
        first, due = release.leases[0], [one for one in self.releases if one.due_at <= self.now]
        joined = [one for one in due if not (one.is_alone or one.call)]
        joined = [one for one in joined if one.leases[0].table == first.table]
        counts = (sum(len(lease.names_to_send) for lease in one.leases) for one in joined)
        joined = joined[1 : _count_within(MAX_RELEASED_NAMES, counts)]
        for one in joined if not release.is_alone else ():
            release.leases += one.leases
            release.until = min(release.until, one.until)
            release.is_in_doubt = release.is_in_doubt or one.is_in_doubt
            self.releases.remove(one)
        # A retry comes after the other releases.
        self.releases.remove(release)
        self.releases.append(release)
        limit = min(self._limit(), _own_limit(min(lease.ttl for lease in release.leases)))
        # Without a shared connection a session lease is released on its own, unless a renewal
        # that confirms the lease is under way there.
        is_busy = any(call.connection == first.connection for call in self.calls.values())
        has_own = len(release.leases) == 1 and first.connection and not is_busy
        call = Call("release", limit, release.leases, sender=release)
        self._send_call(call, first if has_own and not self.connection else self)

    def _release_answered(self, release: Release, rows: Sequence[Any]) -> None:
        self.releases.remove(release)
        unread = iter(rows)
        for lease in release.leases:
            is_gone = None in list(islice(unread, len(lease.names_to_send)))
            has_session = not lease.session or lease.connection
            is_known = not release.is_in_doubt and not lease.table and has_session
            if lease.state != LOST and is_gone and is_known and self.now < lease.deadline:
                self._mark_lost(lease, "gone")
                self._release_after_loss(lease)
            else:
                self._mark_released(lease)

    def _abandon_release(self, release: Release) -> None:
        """Ends a release without an answer: the server keeps the leases until their ttl."""
        self.releases.remove(release)
        for lease in release.leases:
            if lease.state != LOST:
                self._log("not released")
            self._mark_released(lease, "unconfirmed")

    def _release_failed(self, call: Call, release: Release, code: str) -> None:
        if not call.open and _leaves_doubt(code):
            release.is_in_doubt = True
        is_disconnected = _is_connection_error(code)
        # The error of a statement may be caused by one lease of several.
        splits = len(release.leases) > 1 and not call.open and not is_disconnected
        is_retryable = splits or _is_lock_error(code) or is_disconnected
        if not is_retryable or self.now >= release.until:
            self._abandon_release(release)
            return
        release.tries += 1
        # Retried at once if the connection had ended, and one by one if a lease caused the error.
        is_first = release.tries == 1 and is_disconnected
        pause = max(SHORTEST_PAUSE, (release.until - self.now) // 4)
        release.due_at = self.now + (0 if is_first or splits or code == "unsent" else pause)
        if splits:
            self.releases.remove(release)
            alone = [replace(release, leases=[one], is_alone=True) for one in release.leases]
            self.releases += alone

    # Ends.

    def _mark_lost(self, lease: LeaseState, reason: str, unreleased: tuple[str, ...] = ()) -> None:
        lease.state, lease.reason, lease.unreleased = LOST, reason, unreleased
        if lease.is_reported:
            self._log("lost", reason)
            self._emit("lost", lease)
            return
        self._release_after_loss(lease)
        if lease.id in self.requests:
            self._reply(lease, "LeaseLost", reason=reason, advice=lease.advice)

    def _release_after_loss(self, lease: LeaseState) -> None:
        """Forgets a lost lease, and releases the names that the server may still hold."""
        self.leases.pop(lease.id, None)
        if lease.unreleased and not self.has_closed:
            self._queue_release(lease)
        lease.has_ended = not lease.unreleased

    def _mark_released(self, lease: LeaseState, reason: str = "") -> None:
        was_lost = lease.state == LOST
        lease.has_ended, lease.connection = True, 0
        if not was_lost:
            lease.state, lease.reason = RELEASED, reason
            self.leases.pop(lease.id, None)
        if lease.is_reported and not was_lost:
            self._emit("released", lease)

    def _emit(self, event: str, lease: LeaseState) -> None:
        left = lease.deadline - self.now if lease.is_held else 0
        self.effects.append(
            {
                "event": event,
                "key": lease.id,
                "token": lease.token,
                "remaining": left,
                "reason": lease.reason,
                "advice": lease.advice,
            }
        )

    def _log(self, what: str, reason: str = "") -> None:
        """Writes one line for all equal ones of a step, with their count."""
        line = self.logs.setdefault((what, reason), {"log": what, "reason": reason, "count": 0})
        line["count"] += 1


class LeadState:
    """The state of one `lead`. Its last effect after an error is `pause`, before it acquires again,
    or `end`."""

    def __init__(self, ttl: int, jitter: int = 0):
        self.ttl, self.jitter, self.failures = ttl, jitter, 0
        #: Since when it leads, or NEVER.
        self.leading_since = NEVER

    def granted(self, now: int) -> None:
        self.leading_since = now

    def failed(
        self, now: int, error: str, code: str, is_lost: bool, is_stopped: bool, is_closed: bool
    ) -> list[Effect]:
        """The acquire or the work has failed. `error` is the type of the error, or empty if this
        package has none for it. After a loss of the lease it does not matter. `is_closed`: the
        fence is closed. An outage writes one line to the log, and emits one event if this process
        has led."""
        since, self.leading_since = self.leading_since, NEVER
        cause = _cause(error, code, since == NEVER)
        if cause == "own" and not is_lost:
            return [{"lead": "end", "code": cause}]
        if is_stopped or is_closed:
            return [{"lead": "end", "code": "stopped" if is_stopped else "closed"}]
        if now - since >= min(self.ttl, 60_000):
            self.failures = 0
        effects: list[Effect] = []
        if self.failures == 0:
            effects.append({"log": "leads no more", "code": cause})
            if since < NEVER:
                effects.append({"event": "interrupted", "code": cause})
        shortest = max(self.ttl // 12, SHORTEST_PAUSE)
        pause = min(shortest << min(self.failures, 20), _longest_backoff(self.ttl))
        pause -= pause * self.jitter // 4000
        self.failures += 1
        return [*effects, {"lead": "pause", "pause": pause}]


def _cause(error: str, code: str, is_of_acquire: bool) -> str:
    """Returns why a leader acquires again, or `own` if it does not."""
    if error in {"LeaseLost", "LeaseTaken", "TransactionLost", "NoAnswer"}:
        return error
    if code in {"PF001", "PF004"}:
        # The lease may be lost: the next acquire shows it.
        return "LeaseLost"
    if error == "NoConnection" and (code in {"", "connect"} or is_transient(code)):
        return error
    # 53300: the server has no connection left for the work.
    if _ends_session(code) or code == "53300":
        return "ConnectionLost"
    return "transient" if is_of_acquire and is_transient(code) else "own"


def guard_failed(
    stage: str,
    code: str,
    is_fatal: bool = False,
    session: str = "open",
    of: str = "names",
    is_inner: bool = False,
    is_lost: bool = False,
) -> Effect:
    """Returns what follows from an error in a guarded transaction, whose stages, codes and sessions
    are those of clients/spec/errors.md. `is_fatal`: by its severity. `of`: `names`, `rows` (of a
    table alone) or `adopted`. `is_inner`: it is a savepoint. `is_lost`: a lease of it is lost."""
    # A fatal error ends a session, whatever its SQLSTATE: poolers have some of their own.
    is_end = is_fatal or _ends_session(code)
    # An answer of the server is no end, even if the session has ended after it.
    is_own_end = session == "closed" and (is_end or not code)
    if stage == "open":
        # Without a connection no transaction has begun.
        is_broken = _ends_open_session(code) or is_own_end
    elif stage == "work":
        # The work may use other connections, whose end is not the end of this one.
        is_broken = _ends_open_session(code) or (is_end and session != "open")
    else:
        is_broken = is_end or is_own_end
    has_failed = code == "25P02" and stage in {"check", "release", "commit"}
    # With 25P03 and 25P04 the server has ended an idle transaction before it read the commit.
    is_unknown = stage == "commit" and not is_inner and code not in {"25P03", "25P04"}
    in_doubt = is_unknown if is_broken or not code else code == "no transaction"
    if is_broken:
        error = "LeaseLost" if is_lost else "TransactionLost"
    elif has_failed or code == "no transaction":
        error = "TransactionLost"
    elif of == "adopted" and stage == "begin" and code in {"22004", "PF004"}:
        # 22004: lease_adopt has returned NULL, as a transaction guards an older number. PF004:
        # another holder has adopted this number.
        error = "LeaseTaken"
    elif stage in {"begin", "release"}:
        error = error_type(code, of == "rows")
    else:
        # An error of the work: deferred triggers and constraints run at the commit.
        error = "Refused" if code.startswith("PF") else ""
    is_suspect = of != "adopted" and code in {"PF001", "PF004"}
    return {
        "error": error,
        "in_doubt": in_doubt,
        # The stage of a last transaction.
        "last": "in doubt" if in_doubt and stage == "commit" else "rolled back",
        # The next renewal, which is due at once, shows whether the leases are lost.
        "suspect": is_suspect,
        # After a failover a token is valid only after a renewal: the guard begins once more.
        "again": error == "Refused" and stage == "begin" and code == "PF004" and not is_inner,
    }


def error_type(code: str, is_of_table: bool) -> str:
    """Returns the type of an error of one of the client's statements, or an empty text if it remains
    the driver's. If the statement is about rows of a table, 3F000 may mean the table's schema."""
    if code == "42883" or (code == "3F000" and not is_of_table):
        return "NotInstalled"
    if code == "42501":
        return "NotGranted"
    is_refusal = code.startswith(("PF", "22", "55", "0A", "53")) and code != "55P03"
    return "Refused" if is_refusal else ""


def _window(span: int) -> int:
    """Returns the part of a span that the client trusts: the server counts it by another clock."""
    return span - (span + 49) // 50


def _own_limit(ttl: int) -> int:
    """Returns the limit of an acquire, a release or an undo without regard to other leases."""
    return min(max(ttl // 3, SHORTEST_RETRY_TIME), LONGEST_CALL)


def _backoff(tries: int, longest: int) -> int:
    return min(FIRST_RETRY << min(tries - 1, 20), longest)


def _longest_backoff(ttl: int) -> int:
    return min(max(ttl // 3, SHORTEST_WAIT), LONGEST_PAUSE)


def _count_within(most: int, counts: Iterable[int]) -> int:
    """Returns how many of the first counts add up to at most `most`, and at least 1."""
    total = n = 0
    for n, count in enumerate(counts, 1):
        total += count
        if total > most:
            return max(1, n - 1)
    return n


def _is_connection_error(code: str) -> bool:
    """True if a call on another connection may succeed."""
    words = {"connect", "unsent", "ended", "no answer", "25006", "53300"}
    return code in words or code.startswith(("08", "57P0"))


def _leaves_doubt(code: str) -> bool:
    """True if the server may have carried out the statement."""
    is_known = code in {"unsent", "25006", "53300"}
    return not is_known and (code in {"unreadable", "panicked"} or _is_connection_error(code))


def _is_conflict(code: str) -> bool:
    return code in {"40001", "40P01"}


def is_transient(code: str) -> bool:
    """True if the same statement may succeed later, as on a standby that is promoted."""
    return code.startswith(("25", "40", "53", "55P03", "57", "58")) or _is_connection_error(code)


def _is_lock_error(code: str) -> bool:
    return code == "55P03" or _is_conflict(code)


def _ends_session(code: str) -> bool:
    """True if a session has ended, or could not be opened."""
    return code in {"ended", "57P03"} or code.startswith("08") or _ends_open_session(code)


def _ends_open_session(code: str) -> bool:
    """True if the server has ended an open session: idle in transaction, transaction_timeout,
    terminated, crashed, idle."""
    return code in {"25P03", "25P04", "57P01", "57P02", "57P05"}


def _not_granted(code: str, is_opening: bool, is_of_table: bool) -> dict[str, str]:
    has_no_answer = _leaves_doubt(code) or _is_connection_error(code)
    error = "NoAnswer" if has_no_answer else error_type(code, is_of_table) or "Refused"
    # The codes in lower case are the client's own.
    state = "" if code.islower() else code
    return {"error": "NoConnection" if is_opening else error, "sqlstate": state}
