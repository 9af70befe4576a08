package pgfence

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"strconv"
	"sync"
	"time"
)

// Event is what has become of a lease: "acquired", "renewed", "lost", which has a Reason, or
// "released", whose Reason is "unconfirmed" where the server has not answered. "interrupted" is of
// [Fence.Lead]: it leads no more, and goes on.
type Event struct {
	Kind      string
	Names     []string
	Token     int64
	Remaining time.Duration
	Reason    Reason
}

// heartbeat keeps all leases of a fence. It gives the inputs to leaseStates, which decides, and
// carries out the effects: it has the clock, the timer and the connections.
type heartbeat struct {
	schema  schema
	open    func(context.Context) (Conn, error)
	onEvent func(Event)

	mu          sync.Mutex
	states      *leaseStates
	leases      map[string]*Lease
	acquires    map[string]*acquire
	connections map[int]*connection
	timer       *time.Timer
	lookedAt    time.Duration
	lastID      int
	closed      chan struct{}
	// toTell are events, answers and the log, which are told in their order, without the lock.
	toTell    []func()
	isTelling bool
}

// acquire is one that is under way.
type acquire struct {
	acquireArgs
	names   []string
	options Options
	// table and token are of a row, whose names are the table and the key.
	table  string
	token  int64
	answer chan effect
	lease  *Lease
	// cause is the error of its last call, for which failed waits.
	cause     error
	role      string
	isOpening bool
	failed    chan struct{}
}

func newHeartbeat(open func(context.Context) (Conn, error)) *heartbeat {
	h := &heartbeat{
		open: open, states: newLeaseStates(rand.Int64N(1001)),
		leases: map[string]*Lease{}, acquires: map[string]*acquire{},
		connections: map[int]*connection{}, closed: make(chan struct{}),
	}
	h.timer = time.AfterFunc(time.Hour, h.look)
	h.timer.Stop()
	return h
}

// clock is now() in whole milliseconds.
func clock() int64 { return now().Milliseconds() }

// span is of milliseconds, of which a session lease may have more than Go can tell.
func span(ms int64) time.Duration {
	return time.Duration(min(ms, int64(1)<<62/int64(time.Millisecond))) * time.Millisecond
}

// input gives one to the states, and carries out what comes of it: the answer to a call, or 0.
func (h *heartbeat) input(call int, decide func()) {
	h.mu.Lock()
	for _, e := range h.states.step(clock(), call, decide) {
		h.carryOut(e)
	}
	at := clock()
	if next := h.states.wake(at); next < never {
		h.timer.Reset(span(next - at))
	} else {
		h.timer.Stop()
	}
	h.mu.Unlock()
	h.tell()
}

// tell is by one goroutine at a time, so that the order stays.
func (h *heartbeat) tell() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.isTelling {
		return
	}
	h.isTelling = true
	for len(h.toTell) > 0 {
		next := h.toTell
		h.toTell = nil
		h.mu.Unlock()
		for _, tell := range next {
			tell()
		}
		h.mu.Lock()
	}
	h.isTelling = false
}

// look is called by the timer. Nothing else tells that an idle connection has ended.
func (h *heartbeat) look() {
	h.input(0, func() {})
	h.mu.Lock()
	defer h.mu.Unlock()
	if at := now(); at-h.lookedAt >= checkInterval*time.Millisecond/2 {
		h.lookedAt = at
		for _, c := range h.connections {
			go h.lookAt(c)
		}
	}
}

func (h *heartbeat) lookAt(c *connection) {
	if !c.use.TryLock() {
		return
	}
	hasEnded := c.hasEnded(0)
	c.use.Unlock()
	if hasEnded {
		h.input(0, func() {
			delete(h.connections, c.number)
			h.states.disconnected(c.number)
		})
		c.hangUp()
	}
}

func (h *heartbeat) carryOut(e effect) {
	switch {
	case e.Call > 0:
		h.send(e)
	case e.Cut > 0 || e.HangUp > 0:
		c := h.connections[e.Cut+e.HangUp]
		delete(h.connections, e.Cut+e.HangUp)
		if c != nil && e.Cut > 0 {
			c.cut()
		} else if c != nil {
			go c.hangUp()
		}
	case e.Event != "":
		h.event(e)
	case e.Reply != "":
		if a := h.acquires[e.Reply]; a != nil {
			delete(h.acquires, e.Reply)
			// A copy: else all effects would be on the heap, of which a renewed lease has one.
			answer := e
			h.toTell = append(h.toTell, func() { a.answer <- answer })
		}
	case e.Log != "":
		line, reason := "leases are "+e.Log, any(cmp.Or(e.Code, string(e.Reason)))
		if a := h.acquires[e.Key]; a != nil {
			line = "no lease could be acquired"
			if a.cause != nil && e.Code != "no answer" {
				reason = a.cause
			}
		}
		if e.Code != "" {
			line += ", and it is tried again"
		}
		args := []any{"reason", reason}
		if e.Count > 0 {
			args = append(args, "count", e.Count)
		}
		h.toTell = append(h.toTell, func() { slog.Warn("pgfence: "+line, args...) })
	case e.Closed:
		close(h.closed)
	}
}

func (h *heartbeat) event(e effect) {
	l := h.leases[e.Key]
	switch e.Event {
	case "acquired":
		l = h.newLease(h.acquires[e.Key], e)
		h.leases[e.Key] = l
	case "renewed":
		if l.renewed != nil {
			close(l.renewed)
			l.renewed = nil
		}
	case "lost":
		l.ends(lostBy(e.Reason, e.Advice, l.names...))
	case "released":
		l.ends(lostBy(ReasonReleased, "", l.names...))
		delete(h.leases, e.Key)
	}
	h.tells(Event{e.Event, l.names, e.Token, span(e.Remaining), e.Reason})
}

func (h *heartbeat) tells(event Event) {
	if h.onEvent == nil {
		return
	}
	h.toTell = append(h.toTell, func() {
		defer func() {
			if what := recover(); what != nil {
				slog.Error("pgfence: the function of OnEvent has panicked", "panic", what)
			}
		}()
		h.onEvent(event)
	})
}

// send has a call be sent by a goroutine of its own. The statement is made under the lock.
func (h *heartbeat) send(e effect) {
	c := h.connections[e.Connection]
	if e.Open {
		c = &connection{number: e.Connection}
		c.open, c.end = context.WithCancel(context.Background())
		h.connections[e.Connection] = c
	}
	a := h.acquires[e.For]
	if a == nil {
		a = &acquire{}
	}
	go h.run(e, c, a, h.statement(e, a))
}

// statement is that of a call.
func (h *heartbeat) statement(e effect, a *acquire) statement {
	switch {
	case e.Do == "acquire":
		return h.schema.acquire(e, a.options)
	case e.Do == "keep":
		return h.schema.keep(e)
	case e.Do == "keep_row":
		ttls := []string{}
		for _, l := range h.states.call(e.Call).leases {
			ttls = append(ttls, interval(l.ttl))
		}
		return h.schema.keepRows(e, ttls)
	case e.Do == "undo":
		return h.schema.undo(e)
	case e.Table != "":
		return h.schema.releaseRows(e)
	}
	return h.schema.release(e)
}

// run sends a call, and gives its answer to the states.
func (h *heartbeat) run(e effect, c *connection, a *acquire, s statement) {
	c.use.Lock()
	code, result := "", answer{}
	err := func() (err error) {
		defer func() {
			if what := recover(); what != nil {
				code = "panicked"
				err = fmt.Errorf("panic: %v\n%s", what, debug.Stack())
			}
		}()
		if e.Open {
			if err := c.opens(h.open); err != nil {
				code = codeOfOpening(err)
				return err
			}
			h.input(e.Call, func() { h.states.sent(e.Call) })
		} else if c.hasEnded(retryInterval * time.Millisecond) {
			code = "unsent"
			return nil
		}
		result, err = c.query(e, s)
		switch {
		case err == nil:
		case c.isBroken():
			code = cmp.Or(stateOf(err), "ended")
		default:
			code = cmp.Or(stateOf(err), "unreadable")
		}
		return err
	}()
	isOpening, isBroken, role := c.opened() == nil, c.isBroken(), c.role()
	c.use.Unlock()
	h.input(e.Call, func() {
		a.cause, a.role, a.isOpening = err, role, isOpening
		if code == "" {
			h.states.answered(e.Call, result)
			return
		}
		select {
		case a.failed <- struct{}{}:
		default:
		}
		h.states.failed(e.Call, code, isBroken)
	})
}

// What a program asks for

// acquire waits for a lease, or for why there is none. A caller who gives up does not wait for a
// call.
func (h *heartbeat) acquire(ctx context.Context, a *acquire) (*Lease, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	a.answer, a.failed = make(chan effect, 1), make(chan struct{}, 1)
	h.input(0, func() {
		h.lastID++
		a.ID = strconv.Itoa(h.lastID)
		h.acquires[a.ID] = a
		if a.table == "" {
			h.states.acquire(a.acquireArgs)
		} else {
			h.states.keepRow(a.acquireArgs, a.table, a.token)
		}
	})
	var e effect
	select {
	case e = <-a.answer:
	case <-ctx.Done():
		h.input(0, func() { h.states.giveUp(a.ID) })
		e = <-a.answer
	}
	if e.Error == "NoConnection" || e.Error == "NoAnswer" {
		// The call was cut; its error says where it hung.
		select {
		case <-a.failed:
		case <-time.After(retryInterval * time.Millisecond):
		}
	}
	switch {
	case ctx.Err() != nil:
		if e.Error == "" {
			go func() { _ = a.lease.Release() }()
		}
		return nil, ctx.Err()
	case e.Error != "":
		h.mu.Lock()
		defer h.mu.Unlock()
		return nil, a.refusal(e)
	}
	// It may have ended already.
	if err := a.lease.Check(); err != nil {
		return nil, err
	}
	return a.lease, nil
}

// renew waits for the next renewal of these, or their loss.
func (h *heartbeat) renew(ctx context.Context, leases Leases) {
	h.mu.Lock()
	renewed := []<-chan struct{}{}
	for _, l := range leases {
		if l.renewed == nil {
			l.renewed = make(chan struct{})
		}
		renewed = append(renewed, l.renewed)
	}
	h.mu.Unlock()
	h.suspect(leases)
	for i, l := range leases {
		select {
		case <-renewed[i]:
		case <-l.ended:
		case <-ctx.Done():
		case <-time.After(longestCall * time.Millisecond):
		}
	}
}

func (h *heartbeat) suspect(leases Leases) {
	h.input(0, func() { h.states.suspect(leases.keys()) })
}

// last tells how far the transaction has come that releases them.
func (h *heartbeat) last(leases Leases, stage string) {
	h.input(0, func() { h.states.lastTransaction(leases.keys(), stage) })
}
