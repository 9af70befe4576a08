package pgfence

import (
	"cmp"
	"slices"
	"strings"
)

// What a client decides about its leases. The specification is ../spec/lease_state.md, and the
// tests play its vectors. There is no clock, goroutine or socket here: each input has the time, in
// milliseconds of a monotonic clock, and returns effects to be carried out in their order.

const (
	longestCall, shortestOpening              = 10_000, 2_000
	shortestPause, shortestWait, longestPause = 10, 250, 10_000
	portion, tryAgain, afterPortion           = 2_000, 250, 50
	firstRetry, leastPatience, longestQueue   = 20, 1_000, 20_000
	lookAgain, closing                        = 1_000, 5_000
	mostPairs, mostReleased                   = 10_000, 200
	beatsPerTTL, mostBeats                    = 3, 2
	never                                     = int64(1) << 60
)

// effect is what the shell carries out. The fields that are set say of which kind it is.
type effect struct {
	// Call is the number of a statement to be sent on a Connection, which is to be opened before; it
	// may be For an acquire, or confirm what that has got.
	Call, Connection int
	Open             bool
	Do, For, Table   string
	Names            []string
	Tokens           []int64
	Wait, Limit      int64
	Reclaim          bool
	// Cut and HangUp end a connection: at once, whatever hangs in it; or as it should be.
	Cut, HangUp int
	// Event is acquired, renewed, lost or released, of the lease Key.
	Event, Key       string
	Token, Remaining int64
	Reason           Reason
	Advice           string
	// Reply answers an acquire, or a check, with Leases or an Error.
	Reply                             string
	Leases                            []string
	Error, SQLState, Holder, WaitsFor string
	InDoubt                           bool
	// Log is a line of the log.
	Log, Code string
	Count     int
	// Closed: everything is given back, or its time is over.
	Closed bool
	// Lead is what a leader does: acquire, work, pause, or end.
	Lead  string
	Pause int64
}

// state is that of a lease, which lives in the first two.
type state int

const (
	confirming state = iota
	held
	releasing
	lost
	released
)

// link is a connection, whose it is, and its errors in a row.
type link struct {
	number, errors int
	owner          *caller
	isBusy         bool
}

// caller is who calls over a connection: an acquire, a lease, an undo, a release, or all of them.
type caller struct {
	link              *link
	isCalling, isOver bool
}

func (c *caller) calls(is bool) { c.isCalling = is }

// isFree tells that nothing is called over its connection, or that it has none.
func (c *caller) isFree() bool { return c.link == nil || !c.link.isBusy }

// leaseState is one lease. The connection that it owns is the one over which it is confirmed; of a
// session lease, the one that it ends with.
type leaseState struct {
	caller
	key              string
	names            []string
	token, ttl       int64
	table            string
	request          *request
	state            state
	reason           Reason
	advice           string
	deadline, beatAt int64
	atMost           int64
	resting          int // last transactions under way
	touched          int // transactions of a row lease's own worker that hold the row
	isEnding         bool
	isTold           bool
	isAnswered       bool // whether the last renewal that was sent has had an answer
	rest             []string
}

func (l *leaseState) holds() bool { return l.state == held }
func (l *leaseState) lives() bool { return l.state <= held }

// waits tells that it is not to be renewed now.
func (l *leaseState) waits() bool { return l.isCalling || l.resting > 0 || l.touched > 0 }

// isOwn tells that it is confirmed over a connection of its own.
func (l *leaseState) isOwn() bool { return l.state == confirming && l.link != nil }

// confirmsRow tells that its next call does.
func (l *leaseState) confirmsRow() bool { return l.table != "" && l.state == confirming }

// least is the shortest time until the next renewal, where that much is left.
func (l *leaseState) least(left int64) int64 {
	return min(max(shortestPause, l.ttl/60), left/4)
}

// ask is what an acquire asks for.
type ask struct {
	ID                      string
	Names                   []string
	TTL, Wait               int64
	Holder                  string // unique for this acquire, unless it is Named by the caller
	Named, Reclaim, Session bool
	Shared                  bool // or of slots
	AtMost                  int64
}

type request struct {
	caller
	ask
	number           int // of the acquires, in their order
	begun, until, at int64
	tries            int
	isOut            bool // it waits for the end of an outage
	doubt            *doubt
	lease            *leaseState
}

// doubt is of a call that was sent, and has had no answer: until then it may still be carried out.
type doubt struct{ sent, until int64 }

func (r *request) isOne() bool    { return len(r.Names) == 1 }
func (r *request) isOwn() bool    { return r.Session || r.Wait > 0 && r.isOne() }
func (r *request) asks() bool     { return !r.isCalling && r.lease == nil }
func (r *request) reclaims() bool { return r.Reclaim || r.isOne() && !r.Shared && !r.Named }

// undo releases what an acquire in doubt may have been granted.
type undo struct {
	caller
	doubt
	of    *request
	at    int64
	tries int
}

// giveBack is a release: of leases, until it is over.
type giveBack struct {
	caller
	leases             []*leaseState
	at, until          int64
	tries              int
	isInDoubt, isAlone bool
}

// call is one that is under way: Open until its connection is there.
type call struct {
	effect
	link        *link
	sent, until int64
	of          interface{ calls(bool) } // a request, an undo or a giveBack; nil of renewals
	leases      []*leaseState
}

// leaseStates are all leases of a fence. The connection that they own is the one that all share.
type leaseStates struct {
	caller
	// spread is between 0 and 1000, and makes the pauses of clients differ.
	spread, now   int64
	effects, logs []effect
	leases        []*leaseState
	requests      []*request
	undos         []*undo
	giveBacks     []*giveBack
	calls         []*call
	links         []*link
	lastRequest   int
	lastCall      int
	lastLink      int
	beats         int // in a row
	isOut         bool
	isLossLogged  bool
	closedAt      int64
	isDone        bool
}

func newLeaseStates(spread int64) *leaseStates {
	return &leaseStates{spread: spread, closedAt: never}
}

// What the program asks. Each of these is an input, within a step

func (s *leaseStates) acquire(a ask) *request {
	s.lastRequest++
	r := &request{ask: a, number: s.lastRequest, begun: s.now, at: s.now}
	r.until = s.now + min(a.Wait, never)
	r.TTL, r.AtMost = min(r.TTL, never), cmp.Or(r.AtMost, never)
	s.requests = append(s.requests, r)
	if s.closedAt < never {
		s.finish(r, effect{Error: "Closed"})
	}
	return r
}

// keepRow keeps the row whose key is the name that is asked for: the worker's own statement has
// claimed it, at a time that is not known.
func (s *leaseStates) keepRow(a ask, table string, token int64) {
	if r := s.acquire(a); !r.isOver {
		s.granted(r, token, s.now-r.TTL, table)
	}
}

func (s *leaseStates) giveUp(id string) {
	if r := find(s.requests, func(r *request) bool { return r.ID == id }); r != nil {
		s.finish(r, effect{Error: "GivenUp"})
	}
}

func (s *leaseStates) release(key string) {
	switch l := s.lease(key); {
	case l == nil:
	case l.holds():
		s.giveBack(l, false)
	case l.state == lost:
		s.giveBackRest(l)
	}
}

// last is a transaction that releases: it "begins" to; "committed", "rolled back", "in doubt", or
// "inner": a savepoint, after which the program's own transaction goes on.
func (s *leaseStates) last(keys []string, stage string) {
	for _, l := range s.those(keys) {
		if stage == "begins" {
			l.resting++
			continue
		}
		l.resting--
		switch {
		case !l.holds():
		case stage == "committed":
			s.end(l, "")
		case stage == "in doubt":
			s.giveBack(l, true)
		default:
			l.beatAt, l.isEnding = s.now, stage == "inner"
		}
	}
}

// touches tells of a transaction that has written the row of a row lease: until it has ended nobody
// else can claim the row.
func (s *leaseStates) touches(key string, begins bool) {
	switch l := s.lease(key); {
	case l == nil:
	case begins:
		l.touched++
	default:
		l.touched--
		l.beatAt = min(l.beatAt, s.now)
		s.endByClock(0)
	}
}

func (s *leaseStates) suspect(keys []string) {
	for _, l := range s.those(keys) {
		l.beatAt = s.now
	}
}

func (s *leaseStates) check(key string) {
	e := effect{Reply: key}
	if l := s.lease(key); l == nil || !l.holds() {
		e.Error, e.Reason = "LeaseLost", ReasonReleased
		if l != nil && l.state == lost {
			e.Reason, e.Advice = l.reason, l.advice
		}
	}
	s.effects = append(s.effects, e)
}

func (s *leaseStates) close() {
	s.closedAt = min(s.closedAt, s.now)
	for _, r := range s.requests {
		s.finish(r, effect{Error: "Closed"})
	}
	for _, l := range s.leases {
		if l.holds() {
			s.giveBack(l, false)
		}
	}
}

// What the connections say

// sent tells that the connection of a call with Open is there, and that it is sent next.
func (s *leaseStates) sent(number int) {
	if c := s.call(number); c != nil && c.Open {
		s.isSent(c)
	}
}

func (s *leaseStates) isSent(c *call) {
	c.Open, c.sent, c.until = false, s.now, s.now+c.Limit
	if c.of == nil {
		for _, l := range c.leases {
			l.isAnswered = false
		}
	}
}

// outcome is a row of a renewal. Below 0 nothing is told of a time.
type outcome struct {
	is                 string
	remaining, againIn int64
	code               string
}

// taken is of whoever has the lease that was asked for.
type taken struct {
	Holder    string
	Remaining int64
	State     string
}

// answer is what a call is answered with: an acquire with a token, or taken.
type answer struct {
	token    int64
	taken    *taken
	outcomes []outcome
	released []bool
	undone   int64
}

func (s *leaseStates) answered(number int, a answer) {
	c := s.call(number)
	if c == nil {
		return
	}
	s.over(c)
	s.isOut, s.isLossLogged, c.link.errors = false, false, 0
	switch of := c.of.(type) {
	case *request:
		s.acquireAnswered(c, of, a)
	case *undo:
		s.undoAnswered(of, a.undone)
	case *giveBack:
		s.releaseAnswered(of, a.released)
	default:
		s.keepAnswered(c, a.outcomes)
	}
}

// failed has an SQLSTATE; or "connect": the connection could not be opened; "unsent": it had ended
// before; "ended", "no answer"; "unreadable"; "panicked". broken: it is of no use any more.
func (s *leaseStates) failed(number int, code string, broken bool) {
	if c := s.call(number); c != nil {
		s.callFailed(c, code, broken)
	}
}

func (s *leaseStates) disconnected(on int) {
	if c := find(s.calls, func(c *call) bool { return c.Connection == on }); c != nil {
		s.callFailed(c, "ended", true)
	} else if of := find(s.links, func(l *link) bool { return l.number == on }); of != nil {
		s.leave(of)
	}
}

func (s *leaseStates) died() {
	for _, l := range s.leases {
		if l.holds() {
			s.lose(l, ReasonHeartbeat, l.names)
		}
	}
}

// What can be asked at any time

func (s *leaseStates) remaining(now int64, key string) int64 {
	l := s.lease(key)
	if l == nil || !l.holds() {
		return 0
	}
	left := l.deadline - now
	if l.touched > 0 {
		left = max(1, left)
	}
	return max(0, min(left, l.atMost-now))
}

// wake is when to tick, at the latest; never where there is nothing to do.
func (s *leaseStates) wake(now int64) int64 {
	next := never
	at := func(time int64, isSo bool) {
		if isSo {
			next = min(next, time)
		}
	}
	for _, c := range s.calls {
		at(c.until, true)
	}
	for _, g := range s.giveBacks {
		at(g.until, !g.isCalling)
		at(g.at, !g.isCalling && s.isFree())
	}
	for _, u := range s.undos {
		at(u.at, !u.isCalling)
	}
	for _, r := range s.requests {
		at(r.until+longestQueue, r.asks())
		at(r.at, r.asks() && (r.isOwn() || s.isFree()))
	}
	for _, l := range s.leases {
		at(min(l.atMost, now+lookAgain), l.lives())
		at(l.deadline, l.lives() && l.touched == 0)
		at(l.beatAt, l.lives() && !l.waits() && (l.isOwn() || s.isFree()))
	}
	at(s.closedAt+closing, s.closedAt < never && !s.isDone)
	if next == never {
		return never
	}
	return max(now, min(next, now+lookAgain))
}

// The clock goes first, whatever comes

// step is an input at a time. The call that it is an answer to, if any, is not past its limit.
// The effects are good until the next step.
func (s *leaseStates) step(now int64, answered int, decide func()) []effect {
	s.now, s.effects, s.logs = now, s.effects[:0], nil
	s.endByClock(answered)
	decide()
	s.endLinks()
	s.send()
	for _, l := range s.logs {
		// An outage is one line of the log, and so are the losses by it.
		isOfOutage := l.Reason == ReasonDeadline && s.isOut
		if !isOfOutage || !s.isLossLogged {
			s.effects = append(s.effects, l)
		}
		s.isLossLogged = s.isLossLogged || isOfOutage
	}
	return s.effects
}

// log is one line for all of an input that are alike.
func (s *leaseStates) log(what string, reason Reason) {
	like := func(e effect) bool { return e.Log == what && e.Reason == reason }
	if i := slices.IndexFunc(s.logs, like); i >= 0 {
		s.logs[i].Count++
	} else {
		s.logs = append(s.logs, effect{Log: what, Reason: reason, Count: 1})
	}
}

func (s *leaseStates) endByClock(answered int) {
	for _, l := range s.leases {
		switch {
		case l.holds() && l.atMost <= s.now:
			s.lose(l, ReasonAtMost, l.names)
		case l.lives() && l.deadline <= s.now && l.touched == 0:
			// A renewal without an answer may have come through all the same.
			var rest []string
			if !l.isAnswered {
				rest = l.names
			}
			s.lose(l, ReasonDeadline, rest)
		}
	}
	isLate := !s.isDone && s.now >= s.closedAt+closing
	for _, c := range s.calls {
		if isLate || c.Call != answered && c.until <= s.now {
			s.callFailed(c, "no answer", true)
		}
	}
	for _, u := range s.undos {
		u.isOver = u.isOver || isLate
	}
	for _, g := range s.giveBacks {
		if !g.isCalling && (isLate || g.until <= s.now) {
			s.givenBack(g)
		}
	}
	for _, r := range s.requests {
		if r.asks() && s.now >= r.until+longestQueue {
			s.finish(r, effect{Error: "NoConnection"})
		}
	}
}

// Calls: one at a time on the connection that all share, where none waits for anybody

func (s *leaseStates) send() {
	for _, r := range s.requests {
		if r.isOwn() && r.asks() && r.at <= s.now {
			s.try(r)
		}
	}
	s.undos = slices.DeleteFunc(s.undos, func(u *undo) bool { return u.isOver })
	for _, u := range s.undos {
		if !u.isCalling && u.at <= s.now {
			s.start(&call{of: u, effect: effect{
				Do: "undo", Names: u.of.Names, Holder: u.of.Holder, Limit: ownLimit(u.of.TTL),
			}}, &u.caller)
		}
	}
	for _, l := range s.leases {
		if l.isOwn() && !l.isCalling && l.beatAt <= s.now {
			s.keep([]*leaseState{l}, &l.caller)
		}
	}
	if s.isFree() {
		s.sendShared()
	}
	s.rest()
}

func (s *leaseStates) sendShared() {
	var beat *leaseState
	for _, l := range s.leases {
		if s.isBeatDue(l, s.now) && (beat == nil || l.beatAt < beat.beatAt) {
			beat = l
		}
	}
	g := find(s.giveBacks, s.isReleaseDue)
	r := find(s.requests, func(r *request) bool { return !r.isOwn() && r.asks() && r.at <= s.now })
	// Heartbeats go first; after two of them something else has its turn.
	switch isOthersTurn := s.beats >= mostBeats && (g != nil || r != nil); {
	case beat != nil && !isOthersTurn:
		s.beats++
		s.keep(s.goAlong(beat), &s.caller)
		return
	case g != nil:
		s.sendRelease(s.together(g))
	case r != nil:
		s.try(r)
	}
	s.beats = 0
}

func (s *leaseStates) isBeatDue(l *leaseState, by int64) bool {
	return l.lives() && !l.waits() && !l.isOwn() && l.beatAt <= by
}

// goAlong are the leases that are due soon, the due ones first, in whole leases. A row is confirmed
// by itself: its error is its caller's.
func (s *leaseStates) goAlong(first *leaseState) []*leaseState {
	if first.confirmsRow() {
		return []*leaseState{first}
	}
	var due []*leaseState
	for _, l := range s.leases {
		if l.table == first.table && !l.confirmsRow() && s.isBeatDue(l, s.now+l.ttl/6) {
			due = append(due, l)
		}
	}
	slices.SortStableFunc(due, func(a, b *leaseState) int { return cmp.Compare(a.beatAt, b.beatAt) })
	return within(mostPairs, due, func(l *leaseState) int { return len(l.names) })
}

// within are as many as have no more than that together, and one in any case.
func within[T any](most int, some []T, of func(T) int) []T {
	count := 0
	for i, one := range some {
		if count += of(one); i > 0 && count > most {
			return some[:i]
		}
	}
	return some
}

func (s *leaseStates) keep(leases []*leaseState, by *caller) {
	do := "keep"
	if leases[0].table != "" {
		do = "keep_row"
	}
	s.start(&call{leases: leases, effect: effect{
		Do: do, For: leases[0].key, Limit: s.limit(never),
	}}, by)
}

// start sends a call, on the connection of its owner.
func (s *leaseStates) start(c *call, by *caller) {
	s.lastCall++
	c.Call = s.lastCall
	c.Names, c.Tokens = slices.Grow(c.Names, len(c.leases)), make([]int64, 0, len(c.leases))
	for _, l := range c.leases {
		names := l.names
		if c.of != nil && len(l.rest) > 0 {
			names = l.rest
		}
		c.Names, c.Table, l.isCalling = append(c.Names, names...), l.table, true
		c.Tokens = append(c.Tokens, slices.Repeat([]int64{l.token}, len(names))...)
	}
	if c.of != nil {
		c.of.calls(true)
	}
	if by.link != nil {
		s.isSent(c)
	} else {
		s.lastLink++
		by.link = &link{number: s.lastLink, owner: by}
		s.links = append(s.links, by.link)
		c.Open, c.until = true, s.now+max(c.Limit, shortestOpening)
	}
	c.link, c.Connection, by.link.isBusy = by.link, by.link.number, true
	s.calls = append(s.calls, c)
	s.effects = append(s.effects, c.effect)
}

// limit is a third of the smallest ttl of all that are held, and of what is asked for.
func (s *leaseStates) limit(ttl int64) int64 {
	for _, l := range s.leases {
		if l.lives() {
			ttl = min(ttl, l.ttl)
		}
	}
	return min(longestCall, ttl/3)
}

// ownLimit is that of an acquire, a release or an undo that has no shorter lease beside it.
func ownLimit(ttl int64) int64 { return min(max(ttl/3, leastPatience), longestCall) }

// patience is how long conflicts and releases are tried again.
func (s *leaseStates) patience(ttl int64) int64 { return max(leastPatience, s.limit(ttl)) }

func (s *leaseStates) pause(ttl int64) int64 {
	return s.spreads(min(max(ttl/12, shortestPause), longestPause))
}

func (s *leaseStates) spreads(pause int64) int64 { return pause - pause*s.spread/4000 }

func growing(tries int, longest int64) int64 { return min(firstRetry<<min(tries-1, 20), longest) }

func longestWait(ttl int64) int64 { return min(max(ttl/3, shortestWait), longestPause) }

func smallestTTL(leases []*leaseState) int64 {
	smallest := never
	for _, l := range leases {
		smallest = min(smallest, l.ttl)
	}
	return smallest
}

func (s *leaseStates) call(number int) *call {
	return find(s.calls, func(c *call) bool { return c.Call == number })
}

func (s *leaseStates) lease(key string) *leaseState {
	return find(s.leases, func(l *leaseState) bool { return l.key == key })
}

func (s *leaseStates) those(keys []string) (leases []*leaseState) {
	for _, key := range keys {
		if l := s.lease(key); l != nil {
			leases = append(leases, l)
		}
	}
	return leases
}

// find is the first of them that is so, or nil.
func find[T any](some []*T, is func(*T) bool) *T {
	if i := slices.IndexFunc(some, is); i >= 0 {
		return some[i]
	}
	return nil
}

// without leaves some as they are: whoever walks over them goes on.
func without[T comparable](some []T, one T) []T {
	return slices.DeleteFunc(slices.Clone(some), func(other T) bool { return other == one })
}

func (s *leaseStates) over(c *call) {
	s.calls, c.link.isBusy = without(s.calls, c), false
	for _, l := range c.leases {
		l.isCalling = false
	}
	if c.of != nil {
		c.of.calls(false)
	}
}

// Connections

// isOf tells whether the code is one of these, or of one of these classes.
func isOf(code string, these ...string) bool {
	return slices.ContainsFunc(these, func(one string) bool { return strings.HasPrefix(code, one) })
}

// isOfConnection tells whether another connection may help.
func isOfConnection(code string) bool {
	return isOf(code, "connect", "unsent", "ended", "no answer", "25006", "53300", "08", "57P0")
}

// isDoubtful tells whether the statement may have been carried out all the same.
func isDoubtful(code string) bool {
	isSent := isOfConnection(code) && !isOf(code, "unsent", "25006", "53300")
	return isSent || isOf(code, "unreadable", "panicked")
}

// passes tells whether a statement fails for no longer than a while, as on a standby.
func passes(code string) bool {
	return isOf(code, "25", "40", "53", "55P03", "57", "58") || isOfConnection(code)
}

func isConflict(code string) bool { return isOf(code, "40001", "40P01") }
func isLocked(code string) bool   { return isOf(code, "55P03") || isConflict(code) }

func (s *leaseStates) callFailed(c *call, code string, isBroken bool) {
	s.over(c)
	if c.Open && code == "no answer" {
		code = "connect"
	}
	if !isLocked(code) {
		c.link.errors++
	}
	// A second error in a row: another connection.
	isUseless := c.Open || isBroken || isOfConnection(code) || code == "panicked" || c.link.errors > 1
	if isUseless || c.link.owner.link != c.link {
		s.effects = append(s.effects, effect{Cut: c.Connection})
		s.leave(c.link)
	}
	switch of := c.of.(type) {
	case *request:
		s.acquireFailed(c, of, code)
	case *undo:
		s.undoFailed(of, code)
	case *giveBack:
		s.releaseFailed(of, code, c.Open)
	default:
		s.keepFailed(c, code)
	}
}

// leave forgets a connection, which has ended. Session leases end with theirs.
func (s *leaseStates) leave(of *link) {
	if s.links = without(s.links, of); of.owner.link != of {
		return
	}
	of.owner.link = nil
	l := find(s.leases, func(l *leaseState) bool { return &l.caller == of.owner })
	if l != nil && l.request.Session && l.lives() {
		s.lose(l, ReasonSession, nil)
	}
}

// endLinks ends the connections that nobody needs any more.
func (s *leaseStates) endLinks() {
	for _, one := range s.links {
		if !one.isBusy && (one.owner.link != one || one.owner.isOver) {
			s.effects = append(s.effects, effect{HangUp: one.number})
			s.leave(one)
		}
	}
}

// rest ends the shared connection with the last lease, and tells when a closed fence is done.
func (s *leaseStates) rest() {
	if len(s.calls)+len(s.giveBacks)+len(s.requests) > 0 ||
		slices.ContainsFunc(s.leases, (*leaseState).lives) {
		return
	}
	isDone := s.closedAt < never && !s.isDone
	if isDone {
		s.undos = nil
		for _, one := range s.links {
			one.owner.isOver = true
		}
	} else if len(s.undos) == 0 {
		s.link = nil
	}
	s.endLinks()
	if isDone {
		s.isDone = true
		s.effects = append(s.effects, effect{Closed: true})
	}
}

// Renewals

func (s *leaseStates) keepAnswered(c *call, outcomes []outcome) {
	isNotKept := func(o outcome) bool { return o.is != "kept" }
	parts, gotOn := make([][]outcome, len(c.leases)), false
	for i, l := range c.leases {
		parts[i], outcomes = outcomes[:len(l.names)], outcomes[len(l.names):]
		gotOn = gotOn || !slices.ContainsFunc(parts[i], isNotKept)
	}
	for i, l := range c.leases {
		s.renewal(l, parts[i], c.sent, gotOn)
	}
}

// renewal takes the outcomes of the names of a lease.
func (s *leaseStates) renewal(l *leaseState, of []outcome, sent int64, gotOn bool) {
	remaining, again, advice := never, never, ""
	count, rest := map[string]int{}, []string(nil)
	for i, o := range of {
		count[o.is]++
		remaining = min(remaining, o.remaining)
		if o.againIn >= 0 {
			again = min(again, o.againIn)
		}
		if o.is == "kept" || o.is == "later" {
			rest = append(rest, l.names[i])
		}
		if o.code == "42501" && l.table == "" {
			advice = "other role"
		}
	}
	isOver := count["lost"]+count["refused"] > 0
	l.isAnswered = true
	switch {
	case !l.lives(), isOver && l.resting > 0:
	case l.isEnding && count["lost"] == len(of):
		s.end(l, "")
	case count["lost"] > 0:
		s.lose(l, ReasonGone, rest)
	case isOver:
		l.advice = advice
		s.lose(l, ReasonRefused, rest)
	case count["kept"] == len(of):
		s.renewed(l, sent, remaining, again)
	case again == 0 && gotOn:
		// Out of locks: at once, in another transaction, as long as that helps.
		l.beatAt = s.now
	default:
		if again == 0 || again == never {
			again = s.pause(l.ttl)
		}
		l.beatAt = s.now + max(again, l.least(l.deadline-s.now))
	}
}

func (s *leaseStates) renewed(l *leaseState, sent, remaining, again int64) {
	l.beatAt = sent + min(max(again, l.least(remaining)), remaining/beatsPerTTL)
	was, deadline := l.state, sent+window(remaining)
	if deadline <= s.now {
		return
	}
	l.deadline, l.state, l.isEnding = deadline, held, false
	if was != confirming {
		s.event("renewed", l)
		return
	}
	if !l.request.Session {
		l.link = nil
	}
	s.endLinks()
	s.event("acquired", l)
	s.settle(l.request)
}

// window is what is believed of a span that the server counts from a later moment, by another
// clock.
func window(span int64) int64 { return span - (span+49)/50 }

func (s *leaseStates) keepFailed(c *call, code string) {
	isNeverKept := !c.Open && isOf(code, "42501", "42883", "3F000")
	// What confirms a row may be wrong in itself: a name, or a value of the key.
	isRefused := isNeverKept || c.leases[0].confirmsRow() && !passes(code)
	again := s.now + s.pause(smallestTTL(c.leases))
	switch {
	case code == "unsent":
		again = s.now
	case code == "panicked":
		s.died()
	case !isRefused && !s.isOut && slices.ContainsFunc(c.leases, (*leaseState).lives):
		s.effects = append(s.effects, effect{Log: "not renewed", Code: code})
		if s.isOut = true; isOfConnection(code) {
			again = s.now
		}
	}
	for _, l := range c.leases {
		if l.lives() {
			l.beatAt = again
			if isRefused && l.resting == 0 {
				s.lose(l, ReasonRefused, nil)
			}
		}
	}
}

// Acquires

func (s *leaseStates) try(r *request) {
	by, limit, wait := &r.caller, ownLimit(r.TTL), int64(0)
	if !r.isOwn() {
		by, limit = &s.caller, min(limit, s.limit(never))
	} else if r.isOne() {
		// A longer one would hold back vacuum.
		wait = max(0, min(r.until-s.now, portion))
	}
	s.start(&call{of: r, effect: effect{
		Do: "acquire", For: r.ID, Names: r.Names, Wait: wait, Holder: r.Holder, Limit: limit + wait,
		Reclaim: r.Reclaim || r.doubt != nil && r.reclaims(),
	}}, by)
}

func (s *leaseStates) acquireAnswered(c *call, r *request, a answer) {
	r.isOut = false
	if a.taken == nil {
		s.granted(r, a.token, c.sent, "")
		r.doubt = nil
		s.settle(r)
		return
	}
	until := r.until
	// By its own first call, whose answer was lost.
	isOwn := r.doubt != nil && a.taken.Holder == r.Holder
	if isOwn {
		until = max(until, r.doubt.until)
	} else if r.doubt != nil && s.now >= r.doubt.until {
		r.doubt = nil
	}
	switch {
	case r.isOver:
		s.undoDoubt(r)
	case s.now < until && r.isOwn() && r.isOne() && !isOwn:
		r.at = min(max(c.sent+afterPortion, s.now), until)
	case s.now < until:
		r.at = min(s.now+tryAgain, until)
	case isOwn:
		s.finish(r, effect{Error: "NoAnswer", InDoubt: true})
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
		s.finish(r, effect{Error: "LeaseTaken", Holder: a.taken.Holder,
			Remaining: a.taken.Remaining, WaitsFor: waitsFor})
	}
}

func (s *leaseStates) granted(r *request, token, sent int64, table string) {
	l := &leaseState{
		key: r.ID, names: r.Names, token: token, ttl: r.TTL, table: table, request: r, state: confirming,
		atMost: never, isAnswered: true, deadline: s.now + r.TTL, beatAt: s.now,
	}
	after := func(one *leaseState, number int) int { return one.request.number - number }
	at, _ := slices.BinarySearchFunc(s.leases, r.number, after)
	s.leases = slices.Insert(s.leases, at, l)
	firstBeat := sent + r.TTL/beatsPerTTL
	isInTime := s.now < firstBeat
	if r.link != nil && (r.Session || !r.isOver && !isInTime) {
		// The server counts from a later moment: a renewal confirms it, over the same connection.
		l.link, r.link = r.link, nil
		l.link.owner = &l.caller
	}
	if r.isOver {
		s.giveBack(l, false)
		return
	}
	if r.lease = l; isInTime {
		l.state, l.deadline, l.beatAt = held, sent+window(r.TTL), firstBeat
		s.event("acquired", l)
	}
}

// settle answers an acquire when it is known whether its lease is held.
func (s *leaseStates) settle(r *request) {
	switch l := r.lease; {
	case r.isOver || l == nil || l.state == confirming:
	case l.holds():
		s.finish(r, effect{Leases: []string{l.key}})
	default:
		s.finish(r, effect{Error: "LeaseLost", Reason: l.reason, Advice: l.advice})
	}
}

// finish answers an acquire, once. What was granted, or may be, and is nobody's, is given back.
func (s *leaseStates) finish(r *request, reply effect) {
	s.requests, r.isOver = without(s.requests, r), true
	isFailed := reply.Error != ""
	reply.Reply = r.ID
	reply.InDoubt = reply.InDoubt || r.doubt != nil && isFailed && reply.Error != "LeaseTaken"
	s.effects = append(s.effects, reply)
	if isFailed && r.lease != nil && r.lease.lives() {
		s.giveBack(r.lease, false)
	}
	if !r.isCalling {
		s.undoDoubt(r)
	}
	s.endLinks()
}

func (s *leaseStates) acquireFailed(c *call, r *request, code string) {
	if !c.Open && !r.Session && isDoubtful(code) {
		r.doubt = &doubt{c.sent, c.sent + c.Limit}
	}
	if r.isOver {
		s.undoDoubt(r)
		return
	}
	if code == "unsent" {
		r.at = s.now
		return
	}
	r.tries++
	until, longest := r.until, longestWait(r.TTL)
	if isConflict(code) {
		until, longest = max(until, r.begun+s.patience(r.TTL)), tryAgain
	}
	// Nobody else's grant would be taken over: what there may be is undone, or ends at its ttl.
	isStuck := r.doubt != nil && !r.reclaims()
	if r.doubt != nil && r.reclaims() && r.tries == 1 && isOfConnection(code) {
		r.at = s.now
		return
	}
	if !isConflict(code) && !isOfConnection(code) || isStuck || s.now >= until {
		s.finish(r, notGranted(code, c.Open && r.doubt == nil))
		return
	}
	// An outage is told once, however many wait for its end.
	if !isConflict(code) {
		if !slices.ContainsFunc(s.requests, func(r *request) bool { return r.isOut }) {
			s.effects = append(s.effects, effect{Log: "not acquired", Key: r.ID, Code: code})
		}
		r.isOut = true
	}
	r.at = s.now + min(s.spreads(growing(r.tries, longest)), max(1, until-s.now))
}

func notGranted(code string, isOpening bool) effect {
	by := map[string]string{
		"42501": "NotGranted", "42883": "NotInstalled", "3F000": "NotInstalled",
	}
	e := effect{Error: cmp.Or(by[code], "Refused")}
	// Our own words are in lower case.
	if len(code) == 5 && strings.ToUpper(code) == code {
		e.SQLState = code
	}
	if isOpening {
		e.Error = "NoConnection"
	} else if isOfConnection(code) || isDoubtful(code) {
		e.Error = "NoAnswer"
	}
	return e
}

// undoDoubt has what may have been granted be released, where the holder is nobody else's.
func (s *leaseStates) undoDoubt(r *request) {
	if r.doubt == nil || r.Named || s.isDone {
		return
	}
	s.undos, r.doubt = append(s.undos, &undo{doubt: *r.doubt, of: r, at: s.now}), nil
}

func (s *leaseStates) undoAnswered(u *undo, released int64) {
	u.tries++
	// The call that it is about may still come.
	u.isOver, u.at = released > 0 || s.now >= u.until, min(s.now+tryAgain, u.until)
}

func (s *leaseStates) undoFailed(u *undo, code string) {
	u.tries++
	if u.at = s.now; code != "unsent" {
		u.at += s.spreads(growing(u.tries, longestPause))
	}
	mayPass := passes(code) || code == "panicked"
	u.isOver = !mayPass || u.at >= u.sent+u.of.TTL
}

// What is given back

func (s *leaseStates) giveBack(l *leaseState, isInDoubt bool) {
	isInDoubt = isInDoubt || l.isEnding || l.resting > 0 || l.touched > 0
	if !l.request.Session {
		l.link = nil
	}
	if l.state != lost {
		l.state = releasing
	}
	s.giveBacks = append(s.giveBacks, &giveBack{
		leases: []*leaseState{l}, at: s.now, until: s.now + s.patience(l.ttl),
		isInDoubt: isInDoubt, isAlone: isInDoubt,
	})
}

func (s *leaseStates) isReleaseDue(g *giveBack) bool { return g.at <= s.now && !g.isCalling }

// together are the releases that go in one call; those of rows, in one for each table.
func (s *leaseStates) together(first *giveBack) *giveBack {
	if first.isAlone {
		return first
	}
	var some []*giveBack
	for _, g := range s.giveBacks {
		if !g.isAlone && s.isReleaseDue(g) && g.leases[0].table == first.leases[0].table {
			some = append(some, g)
		}
	}
	some = within(mostReleased, some, func(g *giveBack) (count int) {
		for _, l := range g.leases {
			count += len(l.names)
		}
		return count
	})
	for _, g := range some[1:] {
		first.leases = append(first.leases, g.leases...)
		first.until = min(first.until, g.until)
		first.isInDoubt = first.isInDoubt || g.isInDoubt
		s.giveBacks = without(s.giveBacks, g)
	}
	return first
}

func (s *leaseStates) sendRelease(g *giveBack) {
	// If it is tried again, others go first.
	s.giveBacks = append(without(s.giveBacks, g), g)
	// The connection of a session lease serves where there is no shared one.
	by, first := &s.caller, g.leases[0]
	isOwn := first.request.Session && first.link != nil && first.isFree()
	if isOwn && s.link == nil && len(g.leases) == 1 {
		by = &first.caller
	}
	limit := min(s.limit(never), ownLimit(smallestTTL(g.leases)))
	s.start(&call{of: g, leases: g.leases, effect: effect{Do: "release", Limit: limit}}, by)
}

func (s *leaseStates) releaseAnswered(g *giveBack, is []bool) {
	s.giveBacks = without(s.giveBacks, g)
	for _, l := range g.leases {
		count := cmp.Or(len(l.rest), len(l.names))
		isGone := slices.Contains(is[:count], false)
		is = is[count:]
		hasSession := !l.request.Session || l.link != nil
		isKnown := !g.isInDoubt && l.table == "" && s.now < l.deadline && hasSession
		if isGone && isKnown && l.state != lost {
			s.lose(l, ReasonGone, nil)
			s.giveBackRest(l)
		} else {
			s.end(l, "")
		}
	}
}

// givenBack ends it without an answer: the server keeps the leases until their ttl.
func (s *leaseStates) givenBack(g *giveBack) {
	s.giveBacks = without(s.giveBacks, g)
	for _, l := range g.leases {
		if l.state != lost {
			s.log("not released", "")
		}
		s.end(l, "unconfirmed")
	}
}

func (s *leaseStates) releaseFailed(g *giveBack, code string, isOpening bool) {
	g.isInDoubt = g.isInDoubt || !isOpening && isDoubtful(code)
	// An error of the statement may be of one of them.
	isOfOne := len(g.leases) > 1 && !isOpening && !isOfConnection(code)
	if !isOfOne && !isLocked(code) && !isOfConnection(code) || s.now >= g.until {
		s.givenBack(g)
		return
	}
	pause := max(shortestPause, (g.until-s.now)/4)
	// At once where the connection had only ended before, and one by one where one is in the way.
	if g.tries++; isOfOne || g.tries == 1 && isOfConnection(code) || code == "unsent" {
		pause = 0
	}
	if g.at = s.now + pause; isOfOne {
		s.giveBacks = without(s.giveBacks, g)
		for _, l := range g.leases {
			one := *g
			one.leases, one.isAlone = []*leaseState{l}, true
			s.giveBacks = append(s.giveBacks, &one)
		}
	}
}

// Ends

func (s *leaseStates) lose(l *leaseState, reason Reason, rest []string) {
	l.state, l.reason, l.rest = lost, reason, rest
	if l.isTold {
		s.log("lost", reason)
		s.event("lost", l)
		return
	}
	s.giveBackRest(l)
	s.settle(l.request)
}

// giveBackRest forgets a lease that is lost, and gives back what the server may still hold for it.
func (s *leaseStates) giveBackRest(l *leaseState) {
	s.leases = without(s.leases, l)
	if l.isOver = len(l.rest) == 0; !l.isOver && !s.isDone {
		s.giveBack(l, false)
	}
	s.endLinks()
}

// end is that of a release. What was lost before has been told.
func (s *leaseStates) end(l *leaseState, reason Reason) {
	wasLost := l.state == lost
	if l.isOver = true; !wasLost {
		l.state, l.reason = released, reason
		s.leases = without(s.leases, l)
	}
	s.endLinks()
	if l.isTold && !wasLost {
		s.event("released", l)
	}
}

func (s *leaseStates) event(kind string, l *leaseState) {
	if kind == "acquired" {
		l.isTold, l.atMost = true, s.now+l.request.AtMost
	}
	e := effect{Event: kind, Key: l.key, Token: l.token, Reason: l.reason, Advice: l.advice}
	if l.holds() {
		e.Remaining = l.deadline - s.now
	}
	s.effects = append(s.effects, e)
}

// To lead

// leadState is one who leads, or waits to.
type leadState struct {
	ttl, spread int64
	failures    int
	isLeading   bool
	at, since   int64
}

func (d *leadState) start() []effect {
	d.at = never
	return []effect{{Lead: "acquire"}}
}

func (d *leadState) granted(now int64) []effect {
	d.isLeading, d.since = true, now
	return []effect{{Lead: "work"}}
}

func (d *leadState) workDone() []effect { return d.end("") }

// failed is of an acquire, or of the work, and has the kind of the error; isLost: the lease is,
// whatever the work's error says. An outage is one line of the log; a candidate that has not led
// tells no event.
func (d *leadState) failed(now int64, cause string, isLost bool) (effects []effect) {
	goesOn := []string{"LeaseLost", "LeaseTaken", "TransactionLost", "ConnectionLost", "NoAnswer",
		"NoConnection", "transient"}
	switch isOver := !isLost && !slices.Contains(goesOn, cause); {
	case isOver && d.isLeading:
		return d.end("work failed")
	case isOver:
		return d.end(cause)
	case d.isLeading && now-d.since >= min(d.ttl, 60_000):
		d.failures = 0
	}
	if d.failures == 0 {
		effects = append(effects, effect{Log: "leads no more", Code: cause})
		if d.isLeading {
			effects = append(effects, effect{Event: "interrupted", Code: cause})
		}
	}
	shortest := max(d.ttl/12, shortestPause)
	pause := min(shortest<<min(d.failures, 20), longestWait(d.ttl))
	pause -= pause * d.spread / 4000
	d.failures++
	d.isLeading, d.at = false, now+pause
	return append(effects, effect{Lead: "pause", Pause: pause})
}

// stop lets the work end by itself.
func (d *leadState) stop() []effect {
	if d.isLeading {
		return nil
	}
	return d.end("")
}

func (d *leadState) tick(now int64) []effect {
	if now < d.at {
		return nil
	}
	return d.start()
}

func (d *leadState) end(why string) []effect {
	d.at = never
	return []effect{{Lead: "end", Code: why}}
}
