package pgfence

import (
	"cmp"
	"slices"
	"strings"
)

// The state machine of the client's leases. Its specification is ../spec/lease_state.md, and the
// tests play the vectors of ../spec/vectors. The machine has no clock, goroutine or socket: each
// input comes with the time, in milliseconds of a monotonic clock, and returns effects, which the
// heartbeat carries out in their order.

const (
	longestCall, shortestOpening                = 10_000, 2_000
	shortestPause, shortestWait, longestPause   = 10, 250, 10_000
	waitPortion, retryInterval, portionInterval = 2_000, 250, 50
	firstRetry, shortestRetryTime, queueTimeout = 20, 1_000, 20_000
	checkInterval, closeTimeout                 = 1_000, 5_000
	maxPairs, maxReleasedNames                  = 10_000, 200
	beatsPerTTL, maxBeatsInARow                 = 3, 2
	never                                       = int64(1) << 60
)

// effect is one action of the heartbeat. Which fields are set depends on its kind.
type effect struct {
	// Call is the number of a statement to send on a Connection, which is opened first if the call
	// is Open. For is the id of the acquire that it serves; a renewal has the key of its first
	// lease, whose acquire may have no reply yet.
	Call, Connection int
	Open             bool
	Do, For, Table   string
	Names            []string
	Tokens           []int64
	Wait, Limit      int64
	Reclaim          bool
	// Cut ends a connection at once, whatever hangs in it, and HangUp ends it as it should be.
	Cut, HangUp int
	// Event is acquired, renewed, lost or released, of the lease Key.
	Event, Key       string
	Token, Remaining int64
	Reason           Reason
	Advice           string
	// Reply answers an acquire, with Leases or an Error.
	Reply                      string
	Leases                     []string
	Error                      Kind
	SQLState, Holder, WaitsFor string
	InDoubt                    bool
	// Log is a line of the log.
	Log, Code string
	Count     int
	// Closed is the end of a close: everything is released, or the time for it is over.
	Closed bool
	// Lead is the next step of a leader: pause, or end.
	Lead  string
	Pause int64
	// Last is the stage of a last transaction after the error of a guard. Suspect has the leases
	// renewed at once, and Again has the guard begin once more.
	Last           string
	Suspect, Again bool
}

// state is the state of a lease. A lease that is confirming or held is live.
type state int

const (
	acquiring state = iota
	confirming
	held
	releasing
	lost
	released
)

// connectionState is a connection, its owner, and the errors in a row on it.
type connectionState struct {
	number, errors int
	owner          *sender
	isBusy         bool
}

// sender is what sends calls: a lease, an undo or a release. The machine itself sends the calls on
// the shared connection.
type sender struct {
	// dueAt is the time of the next call, until the end of the retries, and tries the number of
	// calls so far.
	dueAt, until int64
	tries        int
	// connection is the one that the sender owns, or nil.
	connection          *connectionState
	isCalling, hasEnded bool
}

func (o *sender) setCalling(isCalling bool) { o.isCalling = isCalling }

// isFree reports whether the sender has no connection, or no call is under way on it.
func (o *sender) isFree() bool { return o.connection == nil || !o.connection.isBusy }

// acquireArgs are what the program requests.
type acquireArgs struct {
	ID                      string
	Names                   []string
	TTL, Wait               int64
	Holder                  string // unique for this acquire, unless it is Named by the program
	Named, Reclaim, Session bool
	Shared                  bool
	Slots                   int
	AtMost                  int64
	Metadata                any // the machine only passes it on
	// Table is the table of a row lease, whose row the program has claimed with Token. Its only
	// name is the row's key.
	Table string
	Token int64
}

// leaseState is one lease, from its acquire on. A separate connection may acquire and confirm it. A
// session lease keeps that connection, and ends with it.
type leaseState struct {
	sender
	acquireArgs
	state state

	// These are used until the grant. inOutage is true while the lease waits for the end of an
	// outage.
	requestedAt int64
	doubt       *doubt
	inOutage    bool

	// These are used after the grant.
	reason           Reason
	advice           string
	deadline, beatAt int64
	// endsAt is the time at which AtMost is over, and the lease is lost.
	endsAt int64
	// lastTransactions and rowLocks are the numbers of last transactions under way, and of the
	// worker's transactions that have locked the row.
	lastTransactions, rowLocks int
	// hasUncommittedRelease is set after a release in a savepoint: the program's transaction has
	// not committed yet.
	hasUncommittedRelease bool
	// isReported is set once the event acquired was emitted.
	isReported bool
	// isRenewalAnswered is false while the last renewal that was sent has no answer.
	isRenewalAnswered bool
	// unreleased are the names that the server may still hold for a lost lease.
	unreleased []string
}

// doubt is the time at which a call was sent that got no answer, and until which the server may
// carry it out.
type doubt struct{ sent, until int64 }

func (l *leaseState) hasOneName() bool { return len(l.Names) == 1 }

// acquiresSeparately reports whether a separate connection acquires the lease.
func (l *leaseState) acquiresSeparately() bool { return l.Session || l.Wait > 0 && l.hasOneName() }

func (l *leaseState) mayReclaim() bool {
	isExclusive := !l.Shared && l.Slots <= 1
	return l.Reclaim || l.hasOneName() && isExclusive && !l.Named
}

// isQueued reports whether the lease waits to send its next acquire.
func (l *leaseState) isQueued() bool { return l.state == acquiring && !l.isCalling }

func (l *leaseState) isHeld() bool { return l.state == held }
func (l *leaseState) isLive() bool { return l.state == confirming || l.isHeld() }

// confirmsRow reports whether the next call of the lease confirms a row. That call has no other
// leases: its error is returned by KeepRow, as a name or a value of the key may be wrong.
func (l *leaseState) confirmsRow() bool { return l.Table != "" && l.state == confirming }

// confirmsSeparately reports whether the connection that has acquired the lease confirms it.
func (l *leaseState) confirmsSeparately() bool {
	return l.state == confirming && l.connection != nil
}

// isBusy reports whether the lease must not be renewed now.
func (l *leaseState) isBusy() bool {
	return l.isCalling || l.lastTransactions > 0 || l.rowLocks > 0
}

// isRenewable reports whether the shared connection renews the lease at beatAt.
func (l *leaseState) isRenewable() bool {
	return l.isLive() && !l.isBusy() && !l.confirmsSeparately()
}

// shortestInterval is the shortest time until the next renewal, if left remains until the deadline.
func (l *leaseState) shortestInterval(left int64) int64 {
	return min(max(shortestPause, l.TTL/60), left/4)
}

// undo releases what the server may have granted to an acquire that got no answer.
type undo struct {
	sender
	lease     *leaseState
	givesUpAt int64
}

// release is a release of some leases, from its queueing to its answer or its end without one.
type release struct {
	sender
	leases    []*leaseState
	isInDoubt bool // an earlier attempt may have released the leases
	isAlone   bool // no other release joins its call
}

// call is one statement on one connection. If it is Open, the connection is opened first.
type call struct {
	effect
	connection *connectionState
	// sent is the time of the sending, and until the limit of the call.
	sent, until int64
	// sender is what waits for the answer: a lease, an undo or a release. A renewal has nil: its
	// answer is for leases.
	sender interface{ setCalling(bool) }
	leases []*leaseState
}

// leaseStates is the machine of all leases of a fence. The connection that it owns is the shared
// connection.
type leaseStates struct {
	sender
	// jitter (0 to 1000) shortens the machine's pauses, so that clients do not retry at the same
	// time.
	jitter, now   int64
	effects, logs []effect
	// requests are the leases whose acquire has no reply yet. They and all leases are in the order
	// of the acquires.
	requests       []*leaseState
	leases         []*leaseState
	undos          []*undo
	releases       []*release
	calls          []*call
	connections    []*connectionState
	lastCall       int
	lastConnection int
	beatsInARow    int
	inOutage       bool
	isLossLogged   bool
	closedAt       int64
	hasClosed      bool
}

func newLeaseStates(jitter int64) *leaseStates {
	return &leaseStates{jitter: jitter, closedAt: never}
}

// Inputs from the program. Each is passed to step.

func (s *leaseStates) acquire(args acquireArgs) {
	l := &leaseState{
		acquireArgs: args, requestedAt: s.now, endsAt: never, isRenewalAnswered: true,
	}
	l.dueAt, l.until = s.now, s.now+l.Wait
	s.requests, s.leases = append(s.requests, l), append(s.leases, l)
	if s.closedAt < never {
		s.reply(l, effect{Error: Closed})
	} else if l.Table != "" {
		// The program has claimed the row at an unknown time, so a renewal confirms it first.
		s.granted(l, l.Token, s.now-l.TTL)
	}
}

func (s *leaseStates) giveUp(id string) {
	if l := find(s.requests, func(l *leaseState) bool { return l.ID == id }); l != nil {
		s.reply(l, effect{Error: "given up"})
	}
}

func (s *leaseStates) release(key string) {
	switch l := s.lease(key); {
	case l == nil:
	case l.isHeld():
		s.queueRelease(l, false)
	case l.state == lost:
		s.releaseAfterLoss(l)
	}
}

// lastTransaction is an input of a transaction that releases the leases. The stage "begins" comes
// before its release statement, and then one of "committed", "rolled back", "in doubt" (the commit
// got no answer) and "inner" (a savepoint was released, and the program's transaction goes on).
func (s *leaseStates) lastTransaction(keys []string, stage string) {
	for _, l := range s.known(keys) {
		if stage == "begins" {
			l.lastTransactions++
			continue
		}
		l.lastTransactions--
		switch {
		case !l.isHeld():
		case stage == "committed":
			s.markReleased(l, "")
		case stage == "in doubt":
			s.queueRelease(l, true)
		default:
			l.beatAt, l.hasUncommittedRelease = s.now, stage == "inner"
		}
	}
}

// rowLocked is the input that the worker's transaction has locked the row, which nobody else can
// claim meanwhile.
func (s *leaseStates) rowLocked(key string) {
	if l := s.lease(key); l != nil {
		l.rowLocks++
	}
}

// rowUnlocked is the input that a transaction of rowLocked has ended.
func (s *leaseStates) rowUnlocked(key string) {
	if l := s.lease(key); l != nil {
		l.rowLocks--
		l.beatAt = min(l.beatAt, s.now)
		s.endByClock(0)
	}
}

// suspect has the leases renewed at once: a guard was refused.
func (s *leaseStates) suspect(keys []string) {
	for _, l := range s.known(keys) {
		l.beatAt = s.now
	}
}

func (s *leaseStates) close() {
	s.closedAt = min(s.closedAt, s.now)
	for _, l := range s.requests {
		s.reply(l, effect{Error: Closed})
	}
	for _, l := range s.leases {
		if l.isHeld() {
			s.queueRelease(l, false)
		}
	}
}

// Inputs from the connections

// sent is the input that the connection of a call with Open is established, and the call is sent
// next.
func (s *leaseStates) sent(number int) {
	if c := s.call(number); c != nil && c.Open {
		s.markSent(c)
	}
}

// outcome is a row of a renewal: kept, lost, refused or later. A time below 0 is missing.
type outcome struct {
	kind               string
	remaining, againIn int64
	code               string
}

// taken is the answer of an acquire without a grant: who holds the lease, and for how long.
type taken struct {
	Holder    string
	Remaining int64
	State     string
}

// answer is the answer to a call. An acquire has a token, or taken.
type answer struct {
	token    int64
	taken    *taken
	outcomes []outcome
	// released has an element for each name of a release, true if the server has released it.
	released []bool
	// undone is the number of leases that an undo has released.
	undone int64
}

func (s *leaseStates) answered(number int, a answer) {
	c := s.call(number)
	if c == nil {
		return
	}
	s.endCall(c)
	s.inOutage, s.isLossLogged, c.connection.errors = false, false, 0
	switch sender := c.sender.(type) {
	case *leaseState:
		s.acquireAnswered(c, sender, a)
	case *undo:
		s.undoAnswered(sender, a.undone)
	case *release:
		s.releaseAnswered(sender, a.released)
	default:
		s.keepAnswered(c, a.outcomes)
	}
}

// failed is the input that a call has failed, with a code of ../spec/errors.md. A broken connection
// cannot be used again.
func (s *leaseStates) failed(number int, code string, broken bool) {
	if c := s.call(number); c != nil {
		s.callFailed(c, code, broken)
	}
}

func (s *leaseStates) disconnected(number int) {
	if c := find(s.calls, func(c *call) bool { return c.Connection == number }); c != nil {
		s.callFailed(c, "ended", true)
		return
	}
	isEnded := func(c *connectionState) bool { return c.number == number }
	if connection := find(s.connections, isEnded); connection != nil {
		s.forgetConnection(connection)
	}
}

func (s *leaseStates) heartbeatDied() {
	for _, l := range s.leases {
		if l.isHeld() {
			s.markLost(l, ReasonHeartbeat, l.Names)
		}
	}
}

// Time. Each step first ends what has ended by its time.

// step takes the input decide and returns the effects, which are valid until the next step. If the
// input answers a call, its number is answerTo, and the limit of that call is not applied.
func (s *leaseStates) step(now int64, answerTo int, decide func()) []effect {
	s.now, s.effects, s.logs = now, s.effects[:0], nil
	s.endByClock(answerTo)
	decide()
	s.closeUnusedConnections()
	s.sendDueCalls()
	for _, line := range s.logs {
		// An outage writes one line to the log, and all losses by it write one more.
		isOfOutage := line.Reason == ReasonDeadline && s.inOutage
		if !isOfOutage || !s.isLossLogged {
			s.effects = append(s.effects, line)
		}
		s.isLossLogged = s.isLossLogged || isOfOutage
	}
	return s.effects
}

// remaining returns how long the client may believe that it holds the lease, without an input.
func (s *leaseStates) remaining(now int64, key string) int64 {
	l := s.lease(key)
	if l == nil || !l.isHeld() {
		return 0
	}
	return max(0, min(l.deadline, l.endsAt)-now)
}

// isOver reports whether the window of a lease is over, but the lease is not lost: a transaction has
// locked its row.
func (s *leaseStates) isOver(now int64, key string) bool {
	l := s.lease(key)
	return l != nil && l.isHeld() && s.remaining(now, key) == 0
}

// wake returns the latest time of the next step, or never if there is nothing to do.
func (s *leaseStates) wake(now int64) int64 {
	next := never
	add := func(time int64, matters bool) {
		if matters {
			next = min(next, time)
		}
	}
	for _, c := range s.calls {
		add(c.until, true)
	}
	for _, rel := range s.releases {
		add(rel.until, !rel.isCalling)
		add(rel.dueAt, !rel.isCalling && s.isFree())
	}
	for _, u := range s.undos {
		add(u.dueAt, !u.isCalling)
	}
	for _, l := range s.requests {
		add(l.until+queueTimeout, l.isQueued())
		add(l.dueAt, l.isQueued() && (l.acquiresSeparately() || s.isFree()))
	}
	for _, l := range s.leases {
		add(min(l.endsAt, now+checkInterval), l.isLive())
		add(l.deadline, l.isLive() && l.rowLocks == 0)
		add(l.beatAt, l.isLive() && !l.isBusy() && (l.confirmsSeparately() || s.isFree()))
	}
	add(s.closedAt+closeTimeout, s.closedAt < never && !s.hasClosed)
	if next == never {
		return never
	}
	return max(now, min(next, now+checkInterval))
}

func (s *leaseStates) endByClock(answerTo int) {
	for _, l := range s.leases {
		switch {
		case l.isHeld() && l.endsAt <= s.now:
			s.markLost(l, ReasonAtMost, l.Names)
		case l.isLive() && l.deadline <= s.now && l.rowLocks == 0:
			// The server may have received a renewal that got no answer.
			var unreleased []string
			if !l.isRenewalAnswered {
				unreleased = l.Names
			}
			s.markLost(l, ReasonDeadline, unreleased)
		}
	}
	isLate := s.now >= s.closedAt+closeTimeout
	for _, c := range s.calls {
		if isLate || c.Call != answerTo && c.until <= s.now {
			s.callFailed(c, "no answer", true)
		}
	}
	for _, u := range s.undos {
		u.hasEnded = u.hasEnded || isLate
	}
	for _, rel := range s.releases {
		if !rel.isCalling && (isLate || rel.until <= s.now) {
			s.abandonRelease(rel)
		}
	}
	for _, l := range s.requests {
		if l.isQueued() && s.now >= l.until+queueTimeout {
			s.reply(l, effect{Error: NoConnection})
		}
	}
}

// Calls. The shared connection has one call at a time, and none of them waits in the server.

func (s *leaseStates) sendDueCalls() {
	for _, l := range s.requests {
		if l.acquiresSeparately() && l.isQueued() && l.dueAt <= s.now {
			s.sendAcquire(l)
		}
	}
	s.undos = slices.DeleteFunc(s.undos, func(u *undo) bool { return u.hasEnded })
	for _, u := range s.undos {
		if l := u.lease; !u.isCalling && u.dueAt <= s.now {
			s.sendCall(&call{sender: u, effect: effect{
				Do: "undo", Names: l.Names, Holder: l.Holder, Limit: ownLimit(l.TTL),
			}}, &u.sender)
		}
	}
	for _, l := range s.leases {
		if l.confirmsSeparately() && !l.isCalling && l.beatAt <= s.now {
			s.sendRenewal([]*leaseState{l}, &l.sender)
		}
	}
	if s.isFree() {
		s.sendOnSharedConnection()
	}
	s.endIfIdle()
}

func (s *leaseStates) sendOnSharedConnection() {
	var first *leaseState
	for _, l := range s.leases {
		if l.beatAt <= s.now && l.isRenewable() && (first == nil || l.beatAt < first.beatAt) {
			first = l
		}
	}
	rel := find(s.releases, s.isReleaseDue)
	request := find(s.requests, func(l *leaseState) bool {
		return !l.acquiresSeparately() && l.isQueued() && l.dueAt <= s.now
	})
	// Heartbeats go first, but after two in a row another call has its turn.
	switch isOthersTurn := s.beatsInARow >= maxBeatsInARow && (rel != nil || request != nil); {
	case first != nil && !isOthersTurn:
		s.beatsInARow++
		s.sendRenewal(s.renewableWith(first), &s.sender)
		return
	case rel != nil:
		s.joinReleases(rel)
		s.sendRelease(rel)
	case request != nil:
		s.sendAcquire(request)
	}
	s.beatsInARow = 0
}

// renewableWith returns the leases to renew in one call with first: the earliest first.
func (s *leaseStates) renewableWith(first *leaseState) []*leaseState {
	if first.confirmsRow() {
		return []*leaseState{first}
	}
	var soon []*leaseState
	for _, l := range s.leases {
		isSoon := l.beatAt <= s.now+l.TTL/6
		if isSoon && l.Table == first.Table && l.isRenewable() && !l.confirmsRow() {
			soon = append(soon, l)
		}
	}
	byBeat := func(a, b *leaseState) int { return cmp.Compare(a.beatAt, b.beatAt) }
	slices.SortStableFunc(soon, byBeat)
	return soon[:countWithin(maxPairs, soon, func(l *leaseState) int { return len(l.Names) })]
}

func (s *leaseStates) sendRenewal(leases []*leaseState, owner *sender) {
	do := "keep"
	if leases[0].Table != "" {
		do = "keep_row"
	}
	s.sendCall(&call{leases: leases, effect: effect{
		Do: do, For: leases[0].ID, Limit: s.limit(never),
	}}, owner)
}

// sendCall sends a call on its owner's connection, which is opened if there is none.
func (s *leaseStates) sendCall(c *call, owner *sender) {
	s.lastCall++
	c.Call = s.lastCall
	c.Names, c.Tokens = slices.Grow(c.Names, len(c.leases)), make([]int64, 0, len(c.leases))
	for _, l := range c.leases {
		names := l.Names
		if c.sender != nil && len(l.unreleased) > 0 {
			names = l.unreleased
		}
		c.Names, c.Table, l.isCalling = append(c.Names, names...), l.Table, true
		c.Tokens = append(c.Tokens, slices.Repeat([]int64{l.Token}, len(names))...)
	}
	if c.sender != nil {
		c.sender.setCalling(true)
	}
	if owner.connection != nil {
		s.markSent(c)
	} else {
		s.lastConnection++
		owner.connection = &connectionState{number: s.lastConnection, owner: owner}
		s.connections = append(s.connections, owner.connection)
		c.Open, c.until = true, s.now+max(c.Limit, shortestOpening)
	}
	c.connection, c.Connection = owner.connection, owner.connection.number
	c.connection.isBusy = true
	s.calls = append(s.calls, c)
	s.effects = append(s.effects, c.effect)
}

func (s *leaseStates) markSent(c *call) {
	c.Open, c.sent, c.until = false, s.now, s.now+c.Limit
	if c.sender == nil {
		for _, l := range c.leases {
			l.isRenewalAnswered = false
		}
	}
}

// limit returns the limit of a call: a third of ttl and of each live lease's ttl.
func (s *leaseStates) limit(ttl int64) int64 {
	for _, l := range s.leases {
		if l.isLive() {
			ttl = min(ttl, l.TTL)
		}
	}
	return min(longestCall, ttl/3)
}

// retryTime returns how long conflicts and releases are retried.
func (s *leaseStates) retryTime(ttl int64) int64 { return max(shortestRetryTime, s.limit(ttl)) }

func (s *leaseStates) pause(ttl int64) int64 {
	return s.jittered(min(max(ttl/12, shortestPause), longestPause))
}

func (s *leaseStates) jittered(pause int64) int64 { return pause - pause*s.jitter/4000 }

func (s *leaseStates) call(number int) *call {
	return find(s.calls, func(c *call) bool { return c.Call == number })
}

func (s *leaseStates) lease(key string) *leaseState {
	return find(s.leases, func(l *leaseState) bool { return l.ID == key })
}

func (s *leaseStates) known(keys []string) (leases []*leaseState) {
	for _, key := range keys {
		if l := s.lease(key); l != nil {
			leases = append(leases, l)
		}
	}
	return leases
}

func (s *leaseStates) endCall(c *call) {
	s.calls, c.connection.isBusy = without(s.calls, c), false
	for _, l := range c.leases {
		l.isCalling = false
	}
	if c.sender != nil {
		c.sender.setCalling(false)
	}
}

// Connections

func (s *leaseStates) callFailed(c *call, code string, isBroken bool) {
	s.endCall(c)
	if c.Open && code == "no answer" {
		code = "connect"
	}
	connection := c.connection
	if !isLockError(code) {
		connection.errors++
	}
	isUseless := c.Open || isBroken || isConnectionError(code) || code == "panicked"
	// After a second error in a row the next call opens another connection.
	if isUseless || connection.errors > 1 || connection.owner.connection != connection {
		s.effects = append(s.effects, effect{Cut: c.Connection})
		s.forgetConnection(connection)
	}
	switch sender := c.sender.(type) {
	case *leaseState:
		s.acquireFailed(c, sender, code)
	case *undo:
		s.undoFailed(sender, code)
	case *release:
		s.releaseFailed(sender, code, c.Open)
	default:
		s.keepFailed(c, code)
	}
}

// forgetConnection forgets a connection that has ended. The session lease on it is lost.
func (s *leaseStates) forgetConnection(connection *connectionState) {
	s.connections = without(s.connections, connection)
	owner := connection.owner
	if owner.connection != connection {
		return
	}
	owner.connection = nil
	l := find(s.leases, func(l *leaseState) bool { return &l.sender == owner })
	if l != nil && l.Session && l.isLive() {
		s.markLost(l, ReasonSession, nil)
	}
}

// closeUnusedConnections closes the connections without a call whose owner has ended or has
// another.
func (s *leaseStates) closeUnusedConnections() {
	for _, connection := range s.connections {
		owner := connection.owner
		if !connection.isBusy && (owner.connection != connection || owner.hasEnded) {
			s.effects = append(s.effects, effect{HangUp: connection.number})
			s.forgetConnection(connection)
		}
	}
}

// endIfIdle closes the shared connection after the last lease, and reports the end of close.
func (s *leaseStates) endIfIdle() {
	if len(s.calls)+len(s.releases)+len(s.requests) > 0 ||
		slices.ContainsFunc(s.leases, (*leaseState).isLive) {
		return
	}
	endsClose := s.closedAt < never && !s.hasClosed
	if endsClose {
		s.undos = nil
		for _, connection := range s.connections {
			connection.owner.hasEnded = true
		}
	} else if len(s.undos) == 0 {
		s.connection = nil
	}
	s.closeUnusedConnections()
	if endsClose {
		s.hasClosed = true
		s.effects = append(s.effects, effect{Closed: true})
	}
}

// Renewals

func (s *leaseStates) keepAnswered(c *call, outcomes []outcome) {
	isNotKept := func(o outcome) bool { return o.kind != "kept" }
	parts, keptAny := make([][]outcome, len(c.leases)), false
	for i, l := range c.leases {
		parts[i], outcomes = outcomes[:len(l.Names)], outcomes[len(l.Names):]
		keptAny = keptAny || !slices.ContainsFunc(parts[i], isNotKept)
	}
	for i, l := range c.leases {
		s.takeOutcomes(l, parts[i], c.sent, keptAny)
	}
}

// takeOutcomes applies the outcomes of the names of one lease.
func (s *leaseStates) takeOutcomes(l *leaseState, outcomes []outcome, sent int64, keptAny bool) {
	left, again, advice := never, never, ""
	kept, gone, refused := 0, 0, 0
	for _, o := range outcomes {
		switch o.kind {
		case "kept":
			kept++
		case "lost":
			gone++
		case "refused":
			refused++
			if o.code == "42501" && l.Table == "" {
				advice = "other role"
			}
		}
		left = min(left, o.remaining)
		if o.againIn >= 0 {
			again = min(again, o.againIn)
		}
	}
	isLost := gone+refused > 0
	l.isRenewalAnswered = true
	switch {
	case !l.isLive(), isLost && l.lastTransactions > 0:
	case l.hasUncommittedRelease && gone == len(outcomes):
		s.markReleased(l, "")
	case gone > 0:
		s.markLost(l, ReasonGone, unreleased(l, outcomes))
	case isLost:
		l.advice = advice
		s.markLost(l, ReasonRefused, unreleased(l, outcomes))
	case kept == len(outcomes):
		s.extend(l, sent, left, again)
	case again == 0 && keptAny:
		// The server was out of locks: the next transaction has them again, as this call has
		// renewed another lease.
		l.beatAt = s.now
	default:
		if again == 0 || again == never {
			again = s.pause(l.TTL)
		}
		l.beatAt = s.now + max(again, l.shortestInterval(l.deadline-s.now))
	}
}

// unreleased returns the names that the server may still hold after these outcomes.
func unreleased(l *leaseState, outcomes []outcome) (names []string) {
	for i, o := range outcomes {
		if o.kind == "kept" || o.kind == "later" {
			names = append(names, l.Names[i])
		}
	}
	return names
}

func (s *leaseStates) extend(l *leaseState, sent, left, again int64) {
	l.beatAt = sent + min(max(again, l.shortestInterval(left)), left/beatsPerTTL)
	deadline := sent + window(left)
	if deadline <= s.now {
		return
	}
	l.deadline, l.hasUncommittedRelease = deadline, false
	if l.isHeld() {
		s.emit("renewed", l)
		return
	}
	s.acquired(l)
}

func (s *leaseStates) keepFailed(c *call, code string) {
	isRefused := !c.Open && hasAnyPrefix(code, "42501", "42883", "3F000") ||
		c.leases[0].confirmsRow() && !isTransient(code)
	again := s.now + s.pause(smallestTTL(c.leases))
	switch {
	case code == "unsent":
		again = s.now
	case code == "panicked":
		s.heartbeatDied()
	case !isRefused && !s.inOutage && slices.ContainsFunc(c.leases, (*leaseState).isLive):
		s.effects = append(s.effects, effect{Log: "not renewed", Code: code})
		if s.inOutage = true; isConnectionError(code) {
			again = s.now
		}
	}
	for _, l := range c.leases {
		if l.isLive() {
			l.beatAt = again
			if isRefused && l.lastTransactions == 0 {
				if l.state == confirming {
					l.state = lost
					s.reply(l, notGranted(code, c.Open, l.Table != ""))
				}
				s.markLost(l, ReasonRefused, nil)
			}
		}
	}
}

// Acquires

func (s *leaseStates) sendAcquire(l *leaseState) {
	owner, limit, wait := &l.sender, ownLimit(l.TTL), int64(0)
	if !l.acquiresSeparately() {
		owner, limit = &s.sender, min(limit, s.limit(never))
	} else if l.hasOneName() {
		// The snapshot of a longer wait would hold back vacuum.
		wait = max(0, min(l.until-s.now, waitPortion))
	}
	s.sendCall(&call{sender: l, effect: effect{
		Do: "acquire", For: l.ID, Names: l.Names, Wait: wait, Holder: l.Holder, Limit: limit + wait,
		Reclaim: l.Reclaim || l.doubt != nil,
	}}, owner)
}

func (s *leaseStates) acquireAnswered(c *call, l *leaseState, a answer) {
	l.inOutage = false
	if a.taken == nil {
		l.doubt = nil
		s.granted(l, a.token, c.sent)
		return
	}
	until := l.until
	// The lease is taken by its own first call, whose answer was lost.
	isByItself := l.doubt != nil && a.taken.Holder == l.Holder
	if isByItself {
		until = max(until, l.doubt.until)
	} else if l.doubt != nil && s.now >= l.doubt.until {
		l.doubt = nil
	}
	switch {
	case l.hasEnded:
		s.queueUndo(l)
	case s.now < until && c.Wait > 0 && !isByItself:
		l.dueAt = min(c.sent+portionInterval, until)
	case s.now < until:
		l.dueAt = min(s.now+retryInterval, until)
	case isByItself:
		s.reply(l, effect{Error: NoAnswer})
	default:
		waitsFor := "ttl"
		switch {
		case a.taken.State == "":
			waitsFor = ""
		case a.taken.State == "uncommitted":
			waitsFor = "commit"
		case a.taken.Remaining <= 0:
			waitsFor = "guard"
		}
		s.reply(l, effect{Error: LeaseTaken, Holder: a.taken.Holder,
			Remaining: a.taken.Remaining, WaitsFor: waitsFor})
	}
}

func (s *leaseStates) granted(l *leaseState, token, sent int64) {
	isGivenUp := l.hasEnded
	l.hasEnded, l.Token, l.state = false, token, confirming
	// If the answer was late, a renewal on the same connection confirms the lease, and until then
	// it may last no longer than a ttl from now.
	l.deadline, l.beatAt = s.now+l.TTL, s.now
	firstBeat := sent + l.TTL/beatsPerTTL
	if isGivenUp {
		s.queueRelease(l, false)
	} else if s.now < firstBeat {
		l.deadline, l.beatAt = sent+window(l.TTL), firstBeat
		s.acquired(l)
	}
}

func (s *leaseStates) acquired(l *leaseState) {
	l.state, l.isReported, l.endsAt = held, true, s.now+cmp.Or(l.AtMost, never)
	if !l.Session {
		l.connection = nil
	}
	s.emit("acquired", l)
	s.reply(l, effect{Leases: []string{l.ID}})
}

// reply replies to an acquire. A grant that is not confirmed, or in doubt, is released.
func (s *leaseStates) reply(l *leaseState, e effect) {
	s.requests = without(s.requests, l)
	e.Reply, e.InDoubt = l.ID, l.doubt != nil && e.Error != LeaseTaken
	s.effects = append(s.effects, e)
	switch l.state {
	case acquiring:
		l.hasEnded = true
		s.leases = without(s.leases, l)
	case confirming:
		s.queueRelease(l, false)
	}
	if !l.isCalling {
		s.queueUndo(l)
	}
}

func (s *leaseStates) acquireFailed(c *call, l *leaseState, code string) {
	wasInDoubt := l.doubt != nil
	if !c.Open && !l.Session && leavesDoubt(code) {
		l.doubt = &doubt{c.sent, c.sent + c.Limit}
	}
	if l.hasEnded {
		s.queueUndo(l)
		return
	}
	if code == "unsent" {
		// The lease is still due, and is sent on another connection.
		return
	}
	l.tries++
	until, longest := l.until, longestBackoff(l.TTL)
	if isConflict(code) {
		until, longest = max(until, l.requestedAt+s.retryTime(l.TTL)), retryInterval
	}
	isFirst := l.tries == 1 || s.now >= until && !wasInDoubt
	if l.doubt != nil && l.mayReclaim() && isFirst && isConnectionError(code) {
		return
	}
	// A retry in doubt reclaims, so it must not take over the grant of another client.
	mayPass := (isConflict(code) || isConnectionError(code)) && (l.doubt == nil || l.mayReclaim())
	if !mayPass || s.now >= until {
		s.reply(l, notGranted(code, c.Open && l.doubt == nil, false))
		return
	}
	if !isConflict(code) {
		// One line of the log for an outage, however many acquires wait for its end.
		if !slices.ContainsFunc(s.requests, func(l *leaseState) bool { return l.inOutage }) {
			s.effects = append(s.effects, effect{Log: "not acquired", Key: l.ID, Code: code})
		}
		l.inOutage = true
	}
	l.dueAt = s.now + min(s.jittered(backoff(l.tries, longest)), until-s.now)
}

// queueUndo queues the release of a grant in doubt, if no other client can have the same holder.
func (s *leaseStates) queueUndo(l *leaseState) {
	if l.doubt == nil || l.Named {
		return
	}
	u := &undo{lease: l, givesUpAt: l.doubt.sent + l.TTL}
	u.dueAt, u.until, l.doubt = s.now, l.doubt.until, nil
	s.undos = append(s.undos, u)
}

func (s *leaseStates) undoAnswered(u *undo, released int64) {
	u.tries++
	// Until then the server may still carry out the acquire.
	u.hasEnded = released > 0 || s.now >= u.until
	u.dueAt = min(s.now+retryInterval, u.until)
}

func (s *leaseStates) undoFailed(u *undo, code string) {
	u.tries++
	if u.dueAt = s.now; code != "unsent" {
		u.dueAt += s.jittered(backoff(u.tries, longestPause))
	}
	mayPass := isTransient(code) || code == "panicked"
	u.hasEnded = !mayPass || u.dueAt >= u.givesUpAt
}

// Releases

func (s *leaseStates) queueRelease(l *leaseState, isInDoubt bool) {
	isInDoubt = isInDoubt || l.hasUncommittedRelease || l.lastTransactions > 0 || l.rowLocks > 0
	if !l.Session {
		l.connection = nil
	}
	if l.state != lost {
		l.state = releasing
	}
	rel := &release{leases: []*leaseState{l}, isInDoubt: isInDoubt, isAlone: isInDoubt}
	rel.dueAt, rel.until = s.now, s.now+s.retryTime(l.TTL)
	s.releases = append(s.releases, rel)
}

func (s *leaseStates) isReleaseDue(rel *release) bool {
	return rel.dueAt <= s.now && !rel.isCalling
}

// joinReleases makes the queued releases part of the first: those of rows, of the same table.
func (s *leaseStates) joinReleases(first *release) {
	if first.isAlone {
		return
	}
	var joined []*release
	for _, rel := range s.releases {
		if !rel.isAlone && s.isReleaseDue(rel) && rel.leases[0].Table == first.leases[0].Table {
			joined = append(joined, rel)
		}
	}
	names := func(rel *release) (count int) {
		for _, l := range rel.leases {
			count += cmp.Or(len(l.unreleased), len(l.Names))
		}
		return count
	}
	for _, rel := range joined[1:countWithin(maxReleasedNames, joined, names)] {
		first.leases = append(first.leases, rel.leases...)
		first.until = min(first.until, rel.until)
		first.isInDoubt = first.isInDoubt || rel.isInDoubt
		s.releases = without(s.releases, rel)
	}
}

func (s *leaseStates) sendRelease(rel *release) {
	// A retry comes after the other releases.
	s.releases = append(without(s.releases, rel), rel)
	// Without a shared connection a session lease is released on its own, unless a renewal that
	// confirms the lease is under way there.
	owner, first := &s.sender, rel.leases[0]
	hasOwn := first.connection != nil && first.isFree()
	if hasOwn && s.connection == nil && len(rel.leases) == 1 {
		owner = &first.sender
	}
	limit := min(s.limit(never), ownLimit(smallestTTL(rel.leases)))
	s.sendCall(&call{
		sender: rel, leases: rel.leases, effect: effect{Do: "release", Limit: limit},
	}, owner)
}

// releaseAnswered takes true for each name that the server has released.
func (s *leaseStates) releaseAnswered(rel *release, isReleased []bool) {
	s.releases = without(s.releases, rel)
	for _, l := range rel.leases {
		count := cmp.Or(len(l.unreleased), len(l.Names))
		isGone := slices.Contains(isReleased[:count], false)
		isReleased = isReleased[count:]
		hasSession := !l.Session || l.connection != nil
		isKnown := !rel.isInDoubt && l.Table == "" && s.now < l.deadline && hasSession
		if isGone && isKnown && l.state != lost {
			s.markLost(l, ReasonGone, nil)
			s.releaseAfterLoss(l)
		} else {
			s.markReleased(l, "")
		}
	}
}

// abandonRelease ends a release without an answer: the server keeps the leases until their ttl.
func (s *leaseStates) abandonRelease(rel *release) {
	s.releases = without(s.releases, rel)
	for _, l := range rel.leases {
		if l.state != lost {
			s.log("not released", "")
		}
		s.markReleased(l, "unconfirmed")
	}
}

func (s *leaseStates) releaseFailed(rel *release, code string, isOpening bool) {
	rel.isInDoubt = rel.isInDoubt || !isOpening && leavesDoubt(code)
	// The error of a statement may be caused by one lease of several.
	splits := len(rel.leases) > 1 && !isOpening && !isConnectionError(code)
	if !splits && !isLockError(code) && !isConnectionError(code) || s.now >= rel.until {
		s.abandonRelease(rel)
		return
	}
	pause := max(shortestPause, (rel.until-s.now)/4)
	// Retried at once if the connection had ended, and one by one if a lease caused the error.
	if rel.tries++; splits || rel.tries == 1 && isConnectionError(code) || code == "unsent" {
		pause = 0
	}
	if rel.dueAt = s.now + pause; splits {
		s.releases = without(s.releases, rel)
		for _, l := range rel.leases {
			alone := *rel
			alone.leases, alone.isAlone = []*leaseState{l}, true
			s.releases = append(s.releases, &alone)
		}
	}
}

// Ends

func (s *leaseStates) markLost(l *leaseState, reason Reason, unreleased []string) {
	l.state, l.reason, l.unreleased = lost, reason, unreleased
	if l.isReported {
		s.log("lost", reason)
		s.emit("lost", l)
		return
	}
	s.releaseAfterLoss(l)
	if slices.Contains(s.requests, l) {
		s.reply(l, effect{Error: LeaseLost, Reason: reason, Advice: l.advice})
	}
}

// releaseAfterLoss forgets a lost lease, and releases the names that the server may still hold.
func (s *leaseStates) releaseAfterLoss(l *leaseState) {
	s.leases = without(s.leases, l)
	if l.hasEnded = len(l.unreleased) == 0; !l.hasEnded && !s.hasClosed {
		s.queueRelease(l, false)
	}
}

func (s *leaseStates) markReleased(l *leaseState, reason Reason) {
	wasLost := l.state == lost
	if l.hasEnded, l.connection = true, nil; !wasLost {
		l.state, l.reason = released, reason
		s.leases = without(s.leases, l)
	}
	if l.isReported && !wasLost {
		s.emit("released", l)
	}
}

func (s *leaseStates) emit(event string, l *leaseState) {
	e := effect{Event: event, Key: l.ID, Token: l.Token, Reason: l.reason, Advice: l.advice}
	if l.isHeld() {
		e.Remaining = l.deadline - s.now
	}
	s.effects = append(s.effects, e)
}

// log writes one line for all equal ones of a step, with their count.
func (s *leaseStates) log(what string, reason Reason) {
	isEqual := func(e effect) bool { return e.Log == what && e.Reason == reason }
	if i := slices.IndexFunc(s.logs, isEqual); i >= 0 {
		s.logs[i].Count++
	} else {
		s.logs = append(s.logs, effect{Log: what, Reason: reason, Count: 1})
	}
}

// leadState is the state of one Lead. Its last effect after an error is a pause, before it acquires
// again, or its end.
type leadState struct {
	ttl, jitter  int64
	failures     int
	leads        bool
	leadingSince int64
}

func (l *leadState) granted(now int64) { l.leads, l.leadingSince = true, now }

// leadFailure is an error of the acquire or of the work. Its Kind is "" if this package has none for
// it. IsLost: the lease is lost, and the error does not matter. IsClosed: the fence is closed.
type leadFailure struct {
	Kind                        Kind
	Code                        string
	IsLost, IsStopped, IsClosed bool
}

// failed returns what follows from an error. An outage writes one line to the log, and emits one
// event if this process has led.
func (l *leadState) failed(now int64, f leadFailure) (effects []effect) {
	hasLed := l.leads
	l.leads = false
	why := cause(f.Kind, f.Code, !hasLed)
	switch {
	case why == "own" && !f.IsLost:
		return []effect{{Lead: "end", Code: why}}
	case f.IsStopped:
		return []effect{{Lead: "end", Code: "stopped"}}
	case f.IsClosed:
		return []effect{{Lead: "end", Code: "closed"}}
	case hasLed && now-l.leadingSince >= min(l.ttl, 60_000):
		l.failures = 0
	}
	if l.failures == 0 {
		effects = append(effects, effect{Log: "leads no more", Code: why})
		if hasLed {
			effects = append(effects, effect{Event: "interrupted", Code: why})
		}
	}
	shortest := max(l.ttl/12, shortestPause)
	pause := min(shortest<<min(l.failures, 20), longestBackoff(l.ttl))
	pause -= pause * l.jitter / 4000
	l.failures++
	return append(effects, effect{Lead: "pause", Pause: pause})
}

// cause returns why a leader acquires again, or "own" if it does not.
func cause(kind Kind, code string, isOfAcquire bool) string {
	switch {
	case slices.Contains([]Kind{LeaseLost, LeaseTaken, TransactionLost, NoAnswer}, kind):
		return string(kind)
	case hasAnyPrefix(code, "PF001", "PF004"):
		// The lease may be lost: the next acquire shows it.
		return string(LeaseLost)
	case kind == NoConnection && (code == "" || isTransient(code)):
		return string(kind)
	case endsSession(code), code == "53300": // the server has no connection left for the work
		return "connection lost"
	case isOfAcquire && isTransient(code):
		return "transient"
	}
	return "own"
}

// guardFailure is an error in a guarded transaction, whose Stage, Code and Session are those of
// ../spec/errors.md. IsFatal: by its severity. Of is "names", "rows" (of a table alone) or
// "adopted". IsInner: it is a savepoint. IsLost: a lease of it is lost.
type guardFailure struct {
	Stage, Code, Session, Of string
	IsFatal, IsInner, IsLost bool
}

// guardFailed returns what follows from an error in a guarded transaction: Error, InDoubt, Last,
// Suspect and Again. Error is "" if the error remains the driver's or the work's own.
func guardFailed(f guardFailure) (e effect) {
	// A fatal error ends a session, whatever its SQLSTATE: poolers have some of their own.
	hasEnded := f.IsFatal || endsSession(f.Code)
	// An answer of the server is no end, even if the session has ended after it.
	isOwnEnd := f.Session == "closed" && (hasEnded || f.Code == "")
	switch f.Stage {
	case "open":
		// Without a connection no transaction has begun.
		hasEnded = endsOpenSession(f.Code) || isOwnEnd
	case "work":
		// The work may use other connections, whose end is not the end of this one.
		hasEnded = endsOpenSession(f.Code) || hasEnded && f.Session != "open"
	default:
		hasEnded = hasEnded || isOwnEnd
	}
	isCommit, isNoTransaction := f.Stage == "commit", f.Code == "no transaction"
	if hasEnded || f.Code == "" {
		// With 25P03 and 25P04 the server has ended an idle transaction before it read the commit.
		e.InDoubt = isCommit && !f.IsInner && !hasAnyPrefix(f.Code, "25P03", "25P04")
	}
	switch {
	case hasEnded:
		if e.Error = TransactionLost; f.IsLost {
			e.Error = LeaseLost
		}
	case isNoTransaction, f.Code == "25P02" && hasAnyPrefix(f.Stage, "check", "release", "commit"):
		e.Error, e.InDoubt = TransactionLost, isNoTransaction
	case f.Of == "adopted" && f.Stage == "begin" && hasAnyPrefix(f.Code, "22004", "PF004"):
		// 22004: lease_adopt has returned NULL, as a transaction guards an older number. PF004:
		// another holder has adopted this number.
		e.Error = LeaseTaken
	case hasAnyPrefix(f.Stage, "begin", "release"):
		e.Error = errorType(f.Code, f.Of == "rows")
	case hasAnyPrefix(f.Code, "PF"):
		// An error of the work: deferred triggers and constraints run at the commit.
		e.Error = Refused
	}
	if e.Last = "rolled back"; e.InDoubt && isCommit {
		e.Last = "in doubt"
	}
	// The next renewal, which is due at once, shows whether the leases are lost.
	e.Suspect = f.Of != "adopted" && hasAnyPrefix(f.Code, "PF001", "PF004")
	// After a failover a token is valid only after a renewal: the guard begins once more.
	e.Again = e.Error == Refused && f.Stage == "begin" && f.Code == "PF004" && !f.IsInner
	return e
}

// errorType returns the kind of an error of one of the client's statements, or "" if it remains the
// driver's. If the statement is about rows of a table, 3F000 may mean the table's schema.
func errorType(code string, isOfTable bool) Kind {
	switch {
	case code == "42883", code == "3F000" && !isOfTable:
		return NotInstalled
	case code == "42501":
		return NotGranted
	case hasAnyPrefix(code, "PF", "22", "55", "0A", "53") && code != "55P03":
		return Refused
	}
	return ""
}

// window returns the part of a span that the client trusts: the server counts it by another clock.
func window(span int64) int64 { return span - (span+49)/50 }

// ownLimit returns the limit of an acquire, a release or an undo without regard to other leases.
func ownLimit(ttl int64) int64 { return min(max(ttl/3, shortestRetryTime), longestCall) }

func backoff(tries int, longest int64) int64 { return min(firstRetry<<min(tries-1, 20), longest) }

func longestBackoff(ttl int64) int64 { return min(max(ttl/3, shortestWait), longestPause) }

func smallestTTL(leases []*leaseState) int64 {
	smallest := never
	for _, l := range leases {
		smallest = min(smallest, l.TTL)
	}
	return smallest
}

// countWithin returns how many of the first items have sizes that add up to at most limit, and at
// least 1.
func countWithin[T any](limit int, items []T, size func(T) int) int {
	total := 0
	for i, item := range items {
		if total += size(item); i > 0 && total > limit {
			return i
		}
	}
	return len(items)
}

// find returns the first item for which matches is true, or nil.
func find[T any](items []*T, matches func(*T) bool) *T {
	if i := slices.IndexFunc(items, matches); i >= 0 {
		return items[i]
	}
	return nil
}

// without returns a copy, so that a loop over the items goes on.
func without[T comparable](items []T, removed T) []T {
	return slices.DeleteFunc(slices.Clone(items), func(item T) bool { return item == removed })
}

// hasAnyPrefix reports whether the code is one of these SQLSTATEs or words, or of one of these
// classes.
func hasAnyPrefix(code string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(code, p) })
}

// isConnectionError reports whether a call on another connection may succeed.
func isConnectionError(code string) bool {
	return hasAnyPrefix(code,
		"connect", "unsent", "ended", "no answer", "25006", "53300", "08", "57P0")
}

// leavesDoubt reports whether the server may have carried out the statement.
func leavesDoubt(code string) bool {
	isKnown := hasAnyPrefix(code, "unsent", "25006", "53300")
	return !isKnown && (hasAnyPrefix(code, "unreadable", "panicked") || isConnectionError(code))
}

func isConflict(code string) bool { return hasAnyPrefix(code, "40001", "40P01") }

// isTransient reports whether the same statement may succeed later, as on a standby that is
// promoted.
func isTransient(code string) bool {
	return hasAnyPrefix(code, "25", "40", "53", "55P03", "57", "58") || isConnectionError(code)
}

func isLockError(code string) bool { return hasAnyPrefix(code, "55P03") || isConflict(code) }

// endsSession reports whether a session has ended, or could not be opened.
func endsSession(code string) bool {
	return hasAnyPrefix(code, "ended", "57P03", "08") || endsOpenSession(code)
}

// endsOpenSession reports whether the server has ended an open session: idle in transaction,
// transaction_timeout, terminated, crashed, idle.
func endsOpenSession(code string) bool {
	return hasAnyPrefix(code, "25P03", "25P04", "57P01", "57P02", "57P05")
}

func notGranted(code string, isOpening, isOfTable bool) effect {
	e := effect{Error: cmp.Or(errorType(code, isOfTable), Refused)}
	if isOpening {
		e.Error = NoConnection
	} else if isConnectionError(code) || leavesDoubt(code) {
		e.Error = NoAnswer
	}
	// The codes in lower case are the client's own.
	if strings.ToUpper(code) == code {
		e.SQLState = code
	}
	return e
}
