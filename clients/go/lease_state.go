package pgfence

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
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
	// Call is the number of a statement to be sent On a connection, which is to be opened before.
	Call    int      `json:"call,omitempty"`
	Do      string   `json:"do,omitempty"`
	On      int      `json:"on,omitempty"`
	Open    bool     `json:"open,omitempty"`
	For     string   `json:"for,omitempty"`
	Names   []string `json:"names,omitempty"`
	Tokens  []int64  `json:"tokens,omitempty"`
	Wait    int64    `json:"wait,omitempty"`
	Limit   int64    `json:"limit,omitempty"`
	Reclaim bool     `json:"reclaim,omitempty"`
	Table   string   `json:"table,omitempty"`
	// Cut and HangUp end a connection: at once, whatever hangs in it; or as it should be.
	Cut    int `json:"cut,omitempty"`
	HangUp int `json:"hang_up,omitempty"`
	// Event is acquired, renewed, lost or released, of the lease Key.
	Event     string `json:"event,omitempty"`
	Key       string `json:"key,omitempty"`
	Token     int64  `json:"token,omitempty"`
	Remaining int64  `json:"remaining,omitempty"`
	Reason    Reason `json:"reason,omitempty"`
	Advice    string `json:"advice,omitempty"`
	// Reply answers an acquire, or a check, with Leases or an Error.
	Reply    string   `json:"reply,omitempty"`
	Leases   []string `json:"leases,omitempty"`
	Error    string   `json:"error,omitempty"`
	SQLState string   `json:"sqlstate,omitempty"`
	Holder   string   `json:"holder,omitempty"`
	WaitsFor string   `json:"waits_for,omitempty"`
	InDoubt  bool     `json:"in_doubt,omitempty"`
	// Log is a line of the log.
	Log   string `json:"log,omitempty"`
	Code  string `json:"code,omitempty"`
	Count int    `json:"count,omitempty"`
	// Closed: everything is given back, or its time is over.
	Closed bool `json:"closed,omitempty"`
	// Of a leader: acquire, work, pause, or end.
	Lead  string `json:"lead,omitempty"`
	Pause int64  `json:"pause,omitempty"`
}

type state string

const (
	confirming state = "confirming"
	held       state = "held"
	unsure     state = "unsure"
	releasing  state = "releasing"
	lost       state = "lost"
	released   state = "released"
)

// leaseState is one lease.
type leaseState struct {
	key         string
	names       []string
	token, ttl  int64
	table       string
	request     *request
	state       state
	reason      Reason
	advice      string
	deadline    int64
	beatAt      int64
	atMost      int64
	isSession   bool
	session, on int // the connection that it ends with; that over which it is confirmed
	call        int
	resting     int // last transactions under way
	touched     int // transactions of a row lease's own worker that hold the row
	isEnding    bool
	isTold      bool
	isAnswered  bool // whether the last renewal that was sent has had an answer
	rest        []string
}

func (l *leaseState) holds() bool { return l.state == held || l.state == unsure }
func (l *leaseState) lives() bool { return l.state == confirming || l.holds() }
func (l *leaseState) rests() bool { return l.resting > 0 || l.touched > 0 }

// confirmsRow tells that its next call does.
func (l *leaseState) confirmsRow() bool { return l.table != "" && l.state == confirming }

// own is the connection over which it is confirmed, where that is its own.
func (l *leaseState) own() int {
	if l.state != confirming {
		return 0
	}
	return max(l.on, l.session)
}

// least is the shortest time until the next renewal, where that much is left.
func (l *leaseState) least(left int64) int64 {
	return min(max(shortestPause, l.ttl/60), left/4)
}

// ask is what an acquire asks for.
type ask struct {
	ID      string   `json:"id"`
	Names   []string `json:"names"`
	TTL     int64    `json:"ttl"`
	Wait    int64    `json:"wait"`
	Holder  string   `json:"holder"` // unique for this acquire, unless it is Named by the caller
	Named   bool     `json:"named"`
	Reclaim bool     `json:"reclaim"`
	Session bool     `json:"session"`
	Shared  bool     `json:"shared"` // or of slots
	AtMost  int64    `json:"at_most"`
}

type request struct {
	ask
	table            string
	begun, until, at int64
	on, series       int
	isAsking, isOver bool
	// isOut: it waits for the end of an outage.
	isOut   bool
	tries   int
	doubt   *doubt
	undoing *undo
	leases  []*leaseState
}

// doubt is of a call that was sent, and has had no answer: until then it may still be carried out.
type doubt struct{ sent, until int64 }

func (r *request) isOne() bool    { return len(r.Names) == 1 }
func (r *request) own() bool      { return r.Session || r.Wait > 0 && r.isOne() }
func (r *request) reclaims() bool { return r.Reclaim || r.isOne() && !r.Shared && !r.Named }

func (r *request) holder() string {
	if r.series < 2 {
		return r.Holder
	}
	return r.Holder + "/" + strconv.Itoa(r.series)
}

// undo releases what an acquire in doubt may have been granted.
type undo struct {
	names               []string
	holder              string
	ttl                 int64
	at, until, gaveUpAt int64
	tries, on, call     int
}

// giveBack is a release: of leases, until it is over.
type giveBack struct {
	leases             []*leaseState
	at, until          int64
	tries, call        int
	isInDoubt, isAlone bool
}

type call struct {
	number, on  int
	do          string
	sent, until int64
	limit       int64
	request     *request
	undo        *undo
	giveBack    *giveBack
	leases      []*leaseState
	isReclaim   bool
}

// link is a connection: where its number is kept, and its errors in a row. One that isLeaving ends
// after the call on it.
type link struct {
	place     *int
	errors    int
	isLeaving bool
}

// leaseStates are all leases of a fence.
type leaseStates struct {
	// spread is between 0 and 1000, and makes the pauses of clients differ.
	spread         int64
	now            int64
	effects        []effect
	logs           []effect
	leases         []*leaseState
	requests       []*request
	undos          []*undo
	giveBacks      []*giveBack
	calls          []*call
	links          map[int]*link
	shared         int
	calling        *call // on the connection that all share
	lastCall       int
	lastConnection int
	beats          int // in a row
	isOut          bool
	isLossLogged   bool
	closedAt       int64
	isDone         bool
}

func newLeaseStates(spread int64) *leaseStates {
	return &leaseStates{spread: spread, closedAt: never, links: map[int]*link{}}
}

// What the program asks. Each of these is an input, within a step

func (s *leaseStates) acquire(a ask) *request {
	r := &request{ask: a, begun: s.now, until: s.now + min(a.Wait, never), at: s.now, series: 1}
	r.TTL, r.AtMost = min(r.TTL, never), cmp.Or(r.AtMost, never)
	s.requests = append(s.requests, r)
	if s.closedAt < never {
		s.finish(r, effect{Error: "Closed"})
	}
	return r
}

// row is the claim of a row lease by the worker's own statement, whose time is not known.
type row struct {
	ID     string `json:"id"`
	Table  string `json:"table"`
	Key    string `json:"key"`
	Token  int64  `json:"token"`
	TTL    int64  `json:"ttl"`
	AtMost int64  `json:"at_most"`
}

func (s *leaseStates) keepRow(c row) {
	r := s.acquire(ask{ID: c.ID, Names: []string{c.Key}, TTL: c.TTL, AtMost: c.AtMost, Named: true})
	if !r.isOver {
		r.table = c.Table
		s.granted(r, r.Names, c.Token, s.now-c.TTL)
	}
}

func (s *leaseStates) giveUp(id string) {
	for _, r := range s.requests {
		if r.ID == id {
			s.finish(r, effect{Error: "GivenUp"})
			return
		}
	}
}

func (s *leaseStates) release(key string) {
	switch l := s.lease(key); {
	case l == nil:
	case l.holds():
		s.giveBack(l, false)
	case l.state == lost && len(l.rest) > 0 && !s.isDone:
		s.remove(l)
		s.giveBack(l, false)
	case l.state == lost:
		s.remove(l)
		s.hangUp(&l.session)
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
	for _, r := range slices.Clone(s.requests) {
		s.finish(r, effect{Error: "Closed"})
	}
	for _, l := range slices.Clone(s.leases) {
		if l.holds() {
			s.giveBack(l, false)
		}
	}
}

// What the connections say

// sent tells that the connection of a call with Open is there, and that it is sent next.
func (s *leaseStates) sent(number int) {
	if c := s.call(number); c != nil && c.sent < 0 {
		c.sent, c.until = s.now, s.now+c.limit
		s.isSent(c)
	}
}

func (s *leaseStates) isSent(c *call) {
	for _, l := range c.leases {
		if strings.HasPrefix(c.do, "keep") {
			l.isAnswered = false
		}
	}
}

// grant, outcome, and so on are what a call is answered with, each the rows of its statement.
type (
	grant struct {
		names []string
		token int64
	}
	taken struct {
		Holder    string `json:"holder"`
		Remaining int64  `json:"remaining"`
		State     string `json:"state"`
	}
	outcome struct {
		is                 string
		remaining, againIn int64 // below 0: none is told
		code               string
	}
	answer struct {
		grants   []grant
		taken    *taken
		outcomes []outcome
		released []bool
		undone   int64
	}
)

func (s *leaseStates) answered(number int, a answer) {
	c := s.call(number)
	if c == nil {
		return
	}
	s.over(c)
	s.isOut, s.isLossLogged = false, false
	if link := s.links[c.on]; link != nil {
		if link.errors = 0; link.isLeaving {
			s.hangUp(&c.on)
		}
	}
	switch c.do {
	case "acquire":
		s.acquireAnswered(c, a)
	case "keep", "keep_row":
		s.keepAnswered(c, a.outcomes)
	case "release":
		s.releaseAnswered(c, a.released)
	case "undo":
		s.undoAnswered(c, a.undone)
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
	for _, c := range s.calls {
		if c.on == on {
			s.callFailed(c, "ended", true)
			return
		}
	}
	s.leave(on)
}

func (s *leaseStates) died() {
	for _, l := range slices.Clone(s.leases) {
		if l.holds() {
			s.lose(l, ReasonKeeper, l.names)
		}
	}
}

// What can be asked at any time

func (s *leaseStates) held(now int64, key string) bool { return s.remaining(now, key) > 0 }

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
	at := func(times ...int64) { next = min(next, slices.Min(times)) }
	for _, c := range s.calls {
		at(c.until)
	}
	for _, g := range s.giveBacks {
		at(g.until)
		if s.calling == nil && g.call == 0 {
			at(g.at)
		}
	}
	for _, u := range s.undos {
		if u.call == 0 {
			at(u.at)
		}
	}
	for _, r := range s.requests {
		if !r.isAsking && len(r.leases) == 0 {
			at(r.until + longestQueue)
			if r.undoing == nil && (r.own() || s.calling == nil) {
				at(r.at)
			}
		}
	}
	for _, l := range s.leases {
		if l.lives() {
			at(l.atMost, now+lookAgain)
			if l.touched == 0 {
				at(l.deadline)
			}
			if !l.rests() && l.call == 0 && (l.own() > 0 || s.calling == nil) {
				at(l.beatAt)
			}
		}
	}
	if s.closedAt < never && !s.isDone {
		at(s.closedAt + closing)
	}
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
	for _, l := range slices.Clone(s.leases) {
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
	for _, c := range slices.Clone(s.calls) {
		if isLate || c.number != answered && c.until <= s.now {
			s.callFailed(c, "no answer", true)
		}
	}
	if isLate {
		s.undos = nil
	}
	for _, g := range slices.Clone(s.giveBacks) {
		if g.call == 0 && (isLate || g.until <= s.now) {
			s.givenBack(g, "unconfirmed")
		}
	}
	for _, r := range slices.Clone(s.requests) {
		isStuck := r.undoing != nil && s.now >= r.until || s.now >= r.until+longestQueue
		switch {
		case r.isAsking || len(r.leases) > 0 || !isStuck:
		case r.undoing != nil:
			s.finish(r, effect{Error: "NoAnswer", InDoubt: true})
		default:
			s.finish(r, effect{Error: "NoConnection"})
		}
	}
}

// Calls: one at a time on the connection that all share, where none waits for anybody

func (s *leaseStates) send() {
	for _, r := range slices.Clone(s.requests) {
		if r.own() && s.isDue(r) {
			s.try(r)
		}
	}
	for _, u := range s.undos {
		if u.call == 0 && u.at <= s.now {
			c := &call{do: "undo", undo: u, limit: ownLimit(u.ttl)}
			s.start(c, &u.on, effect{Names: u.names, Holder: u.holder})
			u.call = c.number
		}
	}
	for _, l := range s.leases {
		if l.own() > 0 && l.call == 0 && l.beatAt <= s.now {
			on := &l.on
			if l.isSession {
				on = &l.session
			}
			s.keep([]*leaseState{l}, on)
		}
	}
	if s.calling == nil {
		s.sendShared()
	}
	s.rest()
}

func (s *leaseStates) isDue(r *request) bool {
	return !r.isAsking && r.undoing == nil && len(r.leases) == 0 && r.at <= s.now
}

func (s *leaseStates) sendShared() {
	var beat *leaseState
	for _, l := range s.leases {
		if s.isBeatDue(l, s.now) && (beat == nil || l.beatAt < beat.beatAt) {
			beat = l
		}
	}
	isDue := func(g *giveBack) bool { return g.at <= s.now && g.call == 0 }
	gives := slices.IndexFunc(s.giveBacks, isDue)
	asks := slices.IndexFunc(s.requests, func(r *request) bool { return !r.own() && s.isDue(r) })
	// Heartbeats go first; after two of them something else has its turn.
	switch isOthersTurn := s.beats >= mostBeats && (gives >= 0 || asks >= 0); {
	case beat != nil && !isOthersTurn:
		s.beats++
		s.keep(s.goAlong(beat), &s.shared)
		return
	case gives >= 0:
		s.sendRelease(s.together(s.giveBacks[gives]))
	case asks >= 0:
		s.try(s.requests[asks])
	}
	s.beats = 0
}

func (s *leaseStates) isBeatDue(l *leaseState, by int64) bool {
	return l.lives() && !l.rests() && l.call == 0 && l.own() == 0 && l.beatAt <= by
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

func (s *leaseStates) keep(leases []*leaseState, on *int) {
	c := &call{do: "keep", leases: leases, limit: s.limit(never)}
	if leases[0].table != "" {
		c.do = "keep_row"
	}
	s.start(c, on, effect{Table: leases[0].table})
}

// start sends a call, on the connection whose number is kept there.
func (s *leaseStates) start(c *call, on *int, e effect) {
	s.lastCall++
	c.number, c.sent, c.until = s.lastCall, s.now, s.now+c.limit
	if *on == 0 {
		s.lastConnection++
		*on, e.Open = s.lastConnection, true
		s.links[*on] = &link{place: on}
		c.sent, c.until = -1, s.now+max(c.limit, shortestOpening)
	} else {
		s.isSent(c)
	}
	if c.on = *on; on == &s.shared {
		s.calling = c
	}
	s.calls = append(s.calls, c)
	e.Call, e.Do, e.On, e.Limit = c.number, c.do, c.on, c.limit
	for _, l := range c.leases {
		l.call = c.number
		names := l.names
		if c.do == "release" && len(l.rest) > 0 {
			names = l.rest
		}
		for _, name := range names {
			e.Names, e.Tokens = append(e.Names, name), append(e.Tokens, l.token)
		}
	}
	s.effects = append(s.effects, e)
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

func (s *leaseStates) call(number int) *call {
	for _, c := range s.calls {
		if c.number == number {
			return c
		}
	}
	return nil
}

func (s *leaseStates) lease(key string) *leaseState {
	for _, l := range s.leases {
		if l.key == key {
			return l
		}
	}
	return nil
}

func (s *leaseStates) those(keys []string) (leases []*leaseState) {
	for _, key := range keys {
		if l := s.lease(key); l != nil {
			leases = append(leases, l)
		}
	}
	return leases
}

func without[T comparable](some []T, one T) []T {
	return slices.DeleteFunc(slices.Clone(some), func(other T) bool { return other == one })
}

func (s *leaseStates) remove(l *leaseState) { s.leases = without(s.leases, l) }

func (s *leaseStates) over(c *call) {
	if s.calls = without(s.calls, c); s.calling == c {
		s.calling = nil
	}
	for _, l := range c.leases {
		l.call = 0
	}
	if c.request != nil {
		c.request.isAsking = false
	}
	if c.undo != nil {
		c.undo.call = 0
	}
	if c.giveBack != nil {
		c.giveBack.call = 0
	}
}

// Connections

// isOfConnection tells whether another connection may help.
func isOfConnection(code string) bool {
	return slices.Contains([]string{"connect", "unsent", "ended", "no answer", "25006", "53300"}, code) ||
		strings.HasPrefix(code, "08") || strings.HasPrefix(code, "57P0")
}

// isDoubtful tells whether the statement may have been carried out all the same.
func isDoubtful(code string) bool {
	return code == "unreadable" || code == "panicked" ||
		isOfConnection(code) && code != "unsent" && code != "25006" && code != "53300"
}

// passes tells whether a statement fails for no longer than a while, as on a standby.
func passes(code string) bool {
	isOfClass := len(code) == 5 && slices.Contains([]string{"25", "40", "53", "57", "58"}, code[:2])
	return isOfClass || code == "55P03" || isOfConnection(code)
}

func isConflict(code string) bool { return code == "40001" || code == "40P01" }

// isSQLState tells it from our own words.
func isSQLState(code string) bool {
	return len(code) == 5 && strings.ToUpper(code) == code
}

func (s *leaseStates) callFailed(c *call, code string, isBroken bool) {
	s.over(c)
	isOpening := c.sent < 0
	if isOpening && code == "no answer" {
		code = "connect"
	}
	if link := s.links[c.on]; link != nil {
		if !isConflict(code) && code != "55P03" {
			link.errors++
		}
		// A second error in a row: another connection.
		if isOpening || isBroken || isOfConnection(code) || code == "panicked" ||
			link.errors > 1 || link.isLeaving {
			s.effects = append(s.effects, effect{Cut: c.on})
			s.leave(c.on)
		}
	}
	switch {
	case c.request != nil:
		s.acquireFailed(c, c.request, code, isOpening)
	case c.undo != nil:
		s.undoFailed(c.undo, code)
	case c.giveBack != nil:
		s.releaseFailed(c.giveBack, code, isOpening)
	default:
		s.keepFailed(c, code, isOpening)
	}
}

// leave forgets a connection, which has ended. Session leases end with theirs.
func (s *leaseStates) leave(on int) {
	link := s.links[on]
	if link == nil {
		return
	}
	*link.place = 0
	delete(s.links, on)
	for _, l := range slices.Clone(s.leases) {
		if l.isSession && l.session == 0 && l.lives() {
			s.lose(l, ReasonSession, nil)
		}
	}
}

// hangUp ends a connection that nobody needs any more.
func (s *leaseStates) hangUp(on *int) {
	isBusy := slices.ContainsFunc(s.calls, func(c *call) bool { return c.on == *on })
	switch {
	case *on == 0:
	case isBusy:
		s.links[*on] = &link{place: new(int), isLeaving: true}
	default:
		s.effects = append(s.effects, effect{HangUp: *on})
		delete(s.links, *on)
	}
	*on = 0
}

// move has another place keep the number.
func (s *leaseStates) move(from, to *int) {
	if *to, *from = *from, 0; *to > 0 {
		s.links[*to].place = to
	}
}

// rest ends the shared connection with the last lease, and tells when a closed fence is done.
func (s *leaseStates) rest() {
	isIdle := len(s.calls)+len(s.giveBacks)+len(s.requests) == 0 &&
		!slices.ContainsFunc(s.leases, (*leaseState).lives)
	switch {
	case isIdle && s.closedAt < never && !s.isDone:
		s.isDone, s.undos = true, nil
		for _, on := range slices.Sorted(maps.Keys(s.links)) {
			s.hangUp(s.links[on].place)
		}
		s.effects = append(s.effects, effect{Closed: true})
	case isIdle && len(s.undos) == 0:
		s.hangUp(&s.shared)
	}
}

// Renewals

func (s *leaseStates) keepAnswered(c *call, outcomes []outcome) {
	kept := 0 // whole leases
	isKept := func(of []outcome) bool {
		return !slices.ContainsFunc(of, func(o outcome) bool { return o.is != "kept" })
	}
	for at, i := 0, 0; i < len(c.leases); i++ {
		count := len(c.leases[i].names)
		if isKept(outcomes[at : at+count]) {
			kept++
		}
		at += count
	}
	for _, l := range c.leases {
		mine := outcomes[:len(l.names)]
		outcomes = outcomes[len(l.names):]
		s.renewal(l, mine, c.sent, kept > 0)
	}
}

// renewal takes the outcomes of the names of a lease.
func (s *leaseStates) renewal(l *leaseState, of []outcome, sent int64, gotOn bool) {
	remaining, again, isAgainTold := never, never, false
	kept, gone, refused := 0, 0, 0
	var rest []string
	advice, isMixed := "", len(of) > 1
	for i, o := range of {
		remaining = min(remaining, o.remaining)
		if o.againIn >= 0 {
			again, isAgainTold = min(again, o.againIn), true
		}
		switch o.is {
		case "kept":
			kept++
		case "lost":
			gone++
		case "refused":
			if refused++; o.code == "42501" && l.table == "" {
				advice = "other role"
			}
		}
		if isMixed && (o.is == "kept" || o.is == "later") {
			rest = append(rest, l.names[i])
		}
	}
	isKept, isOver := kept == len(of), gone+refused > 0
	l.isAnswered = true
	switch {
	case !l.lives(), isOver && l.resting > 0:
	case l.isEnding && gone == len(of):
		s.end(l, "")
	case isOver:
		reason := ReasonGone
		if gone == 0 {
			reason, l.advice = ReasonRefused, advice
		}
		s.lose(l, reason, rest)
	case isKept:
		s.renewed(l, sent, remaining, again)
	default:
		l.state = l.shaken()
		switch least := l.least(l.deadline - s.now); {
		case !isAgainTold, again == 0 && !gotOn:
			l.beatAt = s.now + max(s.pause(l.ttl), least)
		case again == 0:
			l.beatAt = s.now
		default:
			l.beatAt = s.now + max(again, least)
		}
	}
}

// shaken is the state after an answer that was none, or neither yes nor no.
func (l *leaseState) shaken() state {
	if l.holds() {
		return unsure
	}
	return l.state
}

func (s *leaseStates) renewed(l *leaseState, sent, remaining, again int64) {
	deadline, was, least := sent+window(remaining), l.state, l.least(remaining)
	l.beatAt = sent + min(max(again, least), remaining/beatsPerTTL)
	if deadline <= s.now {
		return
	}
	l.deadline, l.state, l.isEnding = deadline, held, false
	if was == confirming {
		s.hangUp(&l.on)
		s.event("acquired", l)
		s.settle(l.request)
	} else {
		s.event("renewed", l)
	}
}

// window is what is believed of a span that the server counts from a later moment, by another
// clock.
func window(span int64) int64 { return span - (span+49)/50 }

func (s *leaseStates) keepFailed(c *call, code string, isOpening bool) {
	reason := Reason("")
	isOfStatement := !isOpening && slices.Contains([]string{"42501", "42883", "3F000"}, code)
	// What confirms a row may be wrong in itself: a name, or a value of the key.
	if isOfStatement || c.leases[0].confirmsRow() && !passes(code) {
		reason = ReasonRefused
	}
	smallest := never
	for _, l := range c.leases {
		smallest = min(smallest, l.ttl)
	}
	again := s.now + s.pause(smallest)
	switch {
	case code == "unsent":
		again = s.now
	case code == "panicked":
		s.died()
	case reason == "" && !s.isOut && slices.ContainsFunc(c.leases, (*leaseState).lives):
		s.effects = append(s.effects, effect{Log: "not renewed", Code: code})
		if s.isOut = true; isOfConnection(code) {
			again = s.now
		}
	}
	for _, l := range c.leases {
		if l.lives() {
			l.beatAt, l.state = again, l.shaken()
			if reason != "" && l.resting == 0 {
				s.lose(l, reason, nil)
			}
		}
	}
}

// Acquires

func (s *leaseStates) try(r *request) {
	if !r.isAsking {
		r.isAsking = true
		s.asked(r)
	}
}

func (s *leaseStates) asked(r *request) {
	on, limit, wait := &r.on, ownLimit(r.TTL), int64(0)
	if !r.own() {
		on, limit = &s.shared, min(limit, s.limit(never))
	} else if r.isOne() {
		// A longer one would hold back vacuum.
		wait = max(0, min(r.until-s.now, portion))
	}
	c := &call{do: "acquire", request: r, limit: limit + wait}
	c.isReclaim = r.Reclaim || r.doubt != nil && r.reclaims()
	s.start(c, on, effect{
		For: r.ID, Names: r.Names, Wait: wait, Holder: r.holder(), Reclaim: c.isReclaim,
	})
}

func (s *leaseStates) acquireAnswered(c *call, a answer) {
	r := c.request
	r.isOut = false
	for _, g := range a.grants {
		s.granted(r, g.names, g.token, c.sent)
	}
	if a.taken == nil {
		r.doubt = nil
		s.settle(r)
		s.leaveRequest(r)
		return
	}
	isOwn := r.doubt != nil && a.taken.Holder == r.holder()
	if r.doubt != nil && !isOwn && s.now >= r.doubt.until {
		r.doubt = nil
	}
	until := r.until
	if isOwn {
		// By its own first call, whose answer was lost.
		until = max(until, r.doubt.until)
	}
	switch {
	case r.isOver:
		s.undoDoubt(r)
		s.leaveRequest(r)
	case s.now < until && r.own() && r.isOne() && !isOwn:
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

func (s *leaseStates) granted(r *request, names []string, token, sent int64) {
	l := &leaseState{
		key: r.ID, names: names, token: token, ttl: r.TTL, table: r.table, request: r, state: confirming,
		atMost: never, isAnswered: true, isSession: r.Session,
	}
	l.deadline, l.beatAt = s.now+r.TTL, s.now
	s.leases = append(s.leases, l)
	if r.Session {
		s.move(&r.on, &l.session)
	}
	if r.isOver {
		s.giveBack(l, false)
		return
	}
	r.leases = append(r.leases, l)
	if firstBeat := sent + r.TTL/beatsPerTTL; s.now < firstBeat {
		l.state, l.deadline, l.beatAt = held, sent+window(r.TTL), firstBeat
		s.event("acquired", l)
	} else if r.on > 0 {
		// The server counts from a later moment: a renewal confirms it, over the same connection.
		s.move(&r.on, &l.on)
	}
}

// settle answers an acquire when it is known of each lease whether it is held.
func (s *leaseStates) settle(r *request) {
	isOpen := func(l *leaseState) bool { return l.state == confirming }
	if r.isOver || r.isAsking || slices.ContainsFunc(r.leases, isOpen) {
		return
	}
	keys := []string{}
	for _, l := range r.leases {
		if l.holds() {
			keys = append(keys, l.key)
		}
	}
	switch {
	case len(keys) > 0:
		s.finish(r, effect{Leases: keys})
	case len(r.leases) > 0:
		s.finish(r, effect{Error: "LeaseLost", Reason: r.leases[0].reason})
	}
}

// finish answers an acquire, once. What was granted, or may be, and is nobody's, is given back.
func (s *leaseStates) finish(r *request, reply effect) {
	s.requests, r.isOver = without(s.requests, r), true
	isFailed := reply.Error != ""
	reply.Reply = r.ID
	reply.InDoubt = reply.InDoubt || r.doubt != nil && isFailed && reply.Error != "LeaseTaken"
	s.effects = append(s.effects, reply)
	for _, l := range slices.Clone(r.leases) {
		if isFailed && l.lives() {
			s.giveBack(l, false)
		}
	}
	if !r.isAsking {
		s.undoDoubt(r)
		s.leaveRequest(r)
	}
}

func (s *leaseStates) leaveRequest(r *request) {
	if r.isOver && !r.isAsking {
		s.hangUp(&r.on)
	}
}

func (s *leaseStates) acquireFailed(c *call, r *request, code string, isOpening bool) {
	if code == "unsent" {
		r.at = s.now
		if r.isOver {
			s.leaveRequest(r)
		}
		return
	}
	if !isOpening && !r.Session && isDoubtful(code) && r.doubt == nil {
		r.doubt = &doubt{c.sent, c.sent + c.limit}
	}
	if r.isOver {
		s.undoDoubt(r)
		s.leaveRequest(r)
		return
	}
	r.tries++
	mayPass := isConflict(code) || isOfConnection(code)
	until, longest := r.until, longestWait(r.TTL)
	if isConflict(code) {
		until, longest = max(until, r.begun+s.patience(r.TTL)), tryAgain
	}
	pause := min(s.spreads(growing(r.tries, longest)), max(1, until-s.now))
	isStuck := r.doubt != nil && r.Named && !r.Reclaim
	if r.doubt != nil && r.reclaims() && r.tries == 1 && isOfConnection(code) {
		r.at = s.now
		return
	}
	if !mayPass || isStuck || s.now >= until {
		s.finish(r, notGranted(code, isOpening && r.doubt == nil))
		return
	}
	if !isConflict(code) {
		s.waitsForOutage(r, code)
	}
	if r.doubt != nil && !r.reclaims() {
		// Undone before the next try, which has another holder: an undo that comes late does not
		// meet its grant.
		r.at = s.now
		r.undoing = s.undoDoubt(r)
		r.series++
	} else {
		r.at = s.now + pause
	}
}

// waitsForOutage tells an outage once, however many wait for its end.
func (s *leaseStates) waitsForOutage(r *request, code string) {
	if !slices.ContainsFunc(s.requests, func(r *request) bool { return r.isOut }) {
		s.effects = append(s.effects, effect{Log: "not acquired", Key: r.ID, Code: code})
	}
	r.isOut = true
}

func notGranted(code string, isOpening bool) effect {
	e := effect{Error: "Refused"}
	if isSQLState(code) {
		e.SQLState = code
	}
	switch {
	case isOpening:
		e.Error = "NoConnection"
	case isOfConnection(code), isDoubtful(code):
		e.Error = "NoAnswer"
	case code == "42501":
		e.Error = "NotGranted"
	case code == "42883", code == "3F000":
		e.Error = "NotInstalled"
	}
	return e
}

// undoDoubt has what may have been granted be released, where the holder is nobody else's.
func (s *leaseStates) undoDoubt(r *request) *undo {
	if r.doubt == nil || r.Named || s.isDone {
		return nil
	}
	u := &undo{
		names: r.Names, holder: r.holder(), ttl: r.TTL, at: s.now,
		until: r.doubt.until, gaveUpAt: r.doubt.sent + r.TTL,
	}
	s.undos, r.doubt = append(s.undos, u), nil
	return u
}

func (s *leaseStates) undoAnswered(c *call, released int64) {
	u := c.undo
	if u.tries++; released > 0 || s.now >= u.until {
		s.forget(u)
	} else {
		// The call that it is about may still come.
		u.at = min(s.now+tryAgain, u.until)
	}
	for _, r := range s.requests {
		if r.undoing == u {
			r.undoing, r.at = nil, s.now
		}
	}
}

func (s *leaseStates) undoFailed(u *undo, code string) {
	if u.tries++; code == "unsent" {
		u.at = s.now
	} else {
		u.at = s.now + s.spreads(growing(u.tries, longestPause))
	}
	mayPass := isOfConnection(code) || isConflict(code) || code == "55P03" || code == "panicked"
	if !mayPass || u.at >= u.gaveUpAt {
		s.forget(u)
	}
}

func (s *leaseStates) forget(u *undo) {
	s.undos = without(s.undos, u)
	s.hangUp(&u.on)
}

// What is given back

func (s *leaseStates) giveBack(l *leaseState, isInDoubt bool) {
	g := &giveBack{
		leases: []*leaseState{l}, at: s.now, until: s.now + s.patience(l.ttl),
		isInDoubt: isInDoubt || l.isEnding || l.rests(),
	}
	g.isAlone = g.isInDoubt || l.table != ""
	s.hangUp(&l.on)
	if l.state != lost {
		l.state = releasing
	}
	s.giveBacks = append(s.giveBacks, g)
}

// together are the releases that go in one call.
func (s *leaseStates) together(first *giveBack) *giveBack {
	if first.isAlone {
		return first
	}
	some := []*giveBack{}
	for _, g := range s.giveBacks {
		if !g.isAlone && g.at <= s.now && g.call == 0 {
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
	smallest := never
	for _, l := range g.leases {
		smallest = min(smallest, l.ttl)
	}
	limit := min(s.limit(never), ownLimit(smallest))
	c := &call{do: "release", giveBack: g, leases: g.leases, limit: limit}
	s.start(c, s.releasesOn(g), effect{Table: g.leases[0].table})
	g.call = c.number
}

// releasesOn is the connection of a session lease where there is no shared one.
func (s *leaseStates) releasesOn(g *giveBack) *int {
	own := &g.leases[0].session
	isBusy := func(c *call) bool { return c.on == *own }
	if s.shared > 0 || *own == 0 || len(g.leases) > 1 || slices.ContainsFunc(s.calls, isBusy) {
		return &s.shared
	}
	return own
}

func (s *leaseStates) releaseAnswered(c *call, is []bool) {
	s.giveBacks = without(s.giveBacks, c.giveBack)
	for _, l := range c.leases {
		count := len(l.names)
		if len(l.rest) > 0 {
			count = len(l.rest)
		}
		isGone := slices.Contains(is[:count], false)
		is = is[count:]
		hasSession := !l.isSession || l.session > 0
		isKnown := !c.giveBack.isInDoubt && l.table == "" && s.now < l.deadline && hasSession
		switch {
		case l.state == lost:
		case isGone && isKnown:
			s.lose(l, ReasonGone, nil)
			s.remove(l)
		default:
			s.end(l, "")
		}
		s.hangUp(&l.session)
	}
}

// givenBack ends it without an answer: the server keeps the leases until their ttl.
func (s *leaseStates) givenBack(g *giveBack, reason Reason) {
	s.giveBacks = without(s.giveBacks, g)
	for _, l := range g.leases {
		if l.state != lost {
			s.log("not released", "")
			s.end(l, reason)
		}
		s.hangUp(&l.session)
	}
}

func (s *leaseStates) releaseFailed(g *giveBack, code string, isOpening bool) {
	isLocked := code == "55P03" || isConflict(code)
	mayPass := isLocked || isOfConnection(code)
	g.isInDoubt = g.isInDoubt || !isOpening && isDoubtful(code)
	if !mayPass || s.now >= g.until {
		s.givenBack(g, "unconfirmed")
		return
	}
	pause := max(shortestPause, (g.until-s.now)/4)
	// At once where the connection had only ended before, and one by one where a lock is in the
	// way.
	if g.tries++; g.tries == 1 && (!isLocked || len(g.leases) > 1) || code == "unsent" {
		pause = 0
	}
	if isLocked {
		s.giveBacks = without(s.giveBacks, g)
		for _, l := range g.leases {
			one := *g
			one.leases, one.at, one.isAlone = []*leaseState{l}, s.now+pause, true
			s.giveBacks = append(s.giveBacks, &one)
		}
		return
	}
	g.at = s.now + pause
}

// Ends

func (s *leaseStates) lose(l *leaseState, reason Reason, rest []string) {
	l.state, l.reason, l.rest = lost, reason, rest
	if l.isTold {
		s.log("lost", reason)
		s.event("lost", l)
		return
	}
	s.remove(l)
	s.hangUp(&l.on)
	if len(rest) > 0 {
		s.giveBack(l, false)
	} else {
		s.hangUp(&l.session)
	}
	s.settle(l.request)
}

func (s *leaseStates) end(l *leaseState, reason Reason) {
	l.state, l.reason = released, reason
	s.remove(l)
	s.hangUp(&l.session)
	if l.isTold {
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
	state       string
	at, since   int64
}

func (d *leadState) start() []effect {
	d.state = "asking"
	return []effect{{Lead: "acquire"}}
}

func (d *leadState) granted(now int64) []effect {
	d.state, d.since = "leading", now
	return []effect{{Lead: "work"}}
}

func (d *leadState) workDone() []effect { return d.end("") }

// workFailed has the kind of the error; isLost: the lease is lost, whatever the error says.
func (d *leadState) workFailed(now int64, cause string, isLost bool) []effect {
	if !isLost && !goesOn(cause) {
		return d.end("work failed")
	}
	if now-d.since >= min(d.ttl, 60_000) {
		d.failures = 0
	}
	return d.again(now, cause, true)
}

func (d *leadState) notGranted(now int64, cause string) []effect {
	if !goesOn(cause) {
		return d.end(cause)
	}
	return d.again(now, cause, false)
}

// goesOn tells what a leader goes on after.
func goesOn(cause string) bool {
	return slices.Contains([]string{
		"LeaseLost", "LeaseTaken", "TransactionLost", "ConnectionLost", "NoAnswer", "NoConnection", "passing",
	}, cause)
}

// stop lets the work end by itself.
func (d *leadState) stop() []effect {
	if d.state == "leading" {
		return nil
	}
	return d.end("")
}

func (d *leadState) tick(now int64) []effect {
	if d.state == "pausing" && now >= d.at {
		return d.start()
	}
	return nil
}

// again is after a pause, which grows. An outage is one line of the log; a candidate that has not
// led tells no event.
func (d *leadState) again(now int64, cause string, hasLed bool) (effects []effect) {
	if d.failures == 0 {
		effects = append(effects, effect{Log: "leads no more", Code: cause})
		if hasLed {
			effects = append(effects, effect{Event: "interrupted", Code: cause})
		}
	}
	shortest := max(d.ttl/12, shortestPause)
	pause := min(shortest<<min(d.failures, 20), longestWait(d.ttl))
	pause -= pause * d.spread / 4000
	d.failures++
	d.state, d.at = "pausing", now+pause
	return append(effects, effect{Lead: "pause", Pause: pause})
}

func (d *leadState) end(why string) []effect {
	d.state = "ended"
	return []effect{{Lead: "end", Code: why}}
}
