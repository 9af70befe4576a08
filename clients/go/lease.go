package pgfence

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"
)

// Lease is held until it is released or lost. Its methods may be called from any goroutine.
//
// All leases of a [Fence] are kept by the same two goroutines, on one connection. Only one with Options.Session has a
// connection of its own, which is its session, and a goroutine that waits for that to end.
type Lease struct {
	holding
	options Options
	// row is that of the query which it was claimed by.
	row map[string]any
	// turn is taken by the keeper while it renews the lease, and by a transaction that releases it.
	turn chan struct{}
	// quit is closed when the lease is lost, or its release begins.
	quit chan struct{}
	// released is closed once all is done after its release.
	released chan struct{}
	// session is that of a lease which is bound to it.
	session *session

	ctx    context.Context
	cancel context.CancelCauseFunc

	// These are guarded by mu.
	quitting bool
	// isApart: its renewal failed while those of others did not.
	isApart bool
	// deadline and nextBeat are times of now(), as acquiredAt; from renewUntil on it is not renewed any more.
	deadline, nextBeat, acquiredAt, renewUntil time.Duration
	// asked are those who wait for the next renewal.
	asked []chan<- renewal

	leaving sync.Once
	// keeperOver is closed when the keeper has ended, if this was its last lease.
	keeperOver <-chan struct{}
}

// renewal is the outcome of one.
type renewal struct {
	token int64
	err   error
}

func (f *Fence) newLease(ctx context.Context, names []string, options Options) *Lease {
	lease := &Lease{
		holding: holding{
			fence: f, names: names, limit: options.TTL / 3, logTo: options.Logf, atLoss: map[*interruption]struct{}{},
		},
		options:    options,
		turn:       make(chan struct{}, 1),
		quit:       make(chan struct{}),
		released:   make(chan struct{}),
		renewUntil: math.MaxInt64,
	}
	lease.ctx, lease.cancel = context.WithCancelCause(ctx)
	return lease
}

// Context ends with the lease, and with the context that it was acquired with. After a loss context.Cause tells it: an
// *Error of the kind ErrLeaseLost.
func (l *Lease) Context() context.Context { return l.ctx }

// Row is what a query of [Fence.Claim] has said beside the name, by column; nil for any other lease.
func (l *Lease) Row() map[string]any { return l.row }

// Held tells whether it is ours at this moment, by our own clock.
func (l *Lease) Held() bool { return l.Remaining() > 0 }

// Remaining is how long it is ours if no renewal comes through any more.
func (l *Lease) Remaining() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.quitting {
		return 0
	}
	return max(l.deadline-now(), 0)
}

// Check returns an error of the kind ErrLeaseLost when the lease is ours no more. Call it in long steps between
// transactions, and before each call to the outside.
func (l *Lease) Check() error {
	if now() >= l.endsAt() {
		l.lose(Deadline, nil)
	}
	if lost := l.lost(nil); lost != nil {
		return lost
	}
	return nil
}

// lost is the loss, to be told with what has shown it; nil while the lease is held.
func (l *Lease) lost(cause error) *Error {
	if loss := l.loss.Load(); loss != nil {
		return loss.copyOf(cause)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.quitting {
		return &Error{Kind: ErrLeaseLost, Reason: Released, Names: l.names, cause: cause}
	}
	return nil
}

// Renew has it renewed at once and returns the new token, which a strict table asks for when a row is written again.
// An error that is not of the kind ErrLeaseLost is no loss yet. It returns within two thirds of the ttl.
func (l *Lease) Renew(ctx context.Context) (int64, error) {
	if err := l.Check(); err != nil {
		return 0, err
	}
	answer := make(chan renewal, 1)
	l.mu.Lock()
	if now() >= l.renewUntil {
		l.mu.Unlock()
		return 0, errors.New("pgfence: the lease is not renewed any more: it has been held for as long as it was to be at most")
	}
	l.asked = append(l.asked, answer)
	l.nextBeat = 0
	l.mu.Unlock()
	l.fence.kept.wake()
	select {
	case told := <-answer:
		if lost := l.Check(); lost != nil {
			return 0, lost
		}
		return told.token, told.err
	case <-l.quit:
		return 0, l.Check()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// Release gives it back, and returns an error of the kind ErrLeaseLost where it was lost before. Otherwise it fails
// silently: the lease then ends at its ttl. It takes no context, so that it works after one has ended, and returns within
// two thirds of the ttl.
func (l *Lease) Release() error {
	if l.startQuitting() {
		if !l.giveBack() {
			l.lose(Gone, nil)
		}
		l.end()
	}
	l.untilNothingIsLeft()
	if loss := l.loss.Load(); loss != nil {
		return loss.copyOf(nil)
	}
	return nil
}

// Detach stops keeping the lease without releasing it, and returns the token by which another process may go on: see
// [Fence.Resume]. What remains of its ttl is the time for that.
func (l *Lease) Detach() (int64, error) {
	if l.session != nil {
		return 0, errors.New("pgfence: a lease that ends with its session cannot be handed over")
	}
	if err := l.Check(); err != nil {
		return 0, err
	}
	// A renewal that is under way ends in time.
	if err := l.takeTurn(context.Background()); err != nil {
		return 0, err
	}
	l.giveTurn()
	if l.startQuitting() {
		l.end()
	}
	l.untilNothingIsLeft()
	if loss := l.loss.Load(); loss != nil {
		return 0, loss.copyOf(nil)
	}
	return l.token, nil
}

// untilNothingIsLeft returns when no goroutine and no connection is there because of this lease.
func (l *Lease) untilNothingIsLeft() {
	if l.loss.Load() == nil {
		<-l.released
	}
	l.leave()
	<-l.keeperOver
	if l.session != nil {
		<-l.session.over
	}
}

func (l *Lease) startQuitting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.quitting {
		return false
	}
	l.quitting = true
	close(l.quit)
	return true
}

// giveBack tells whether it was still there, as far as it knows. What somebody else's open transaction holds up is tried
// again, so that it holds up no other lease.
func (l *Lease) giveBack() bool {
	until := now() + 2*l.limit
	answer := make(chan bool, 1)
	mayBeDone := false
	l.fence.kept.enqueue(&job{do: func(k *keeper) (time.Duration, func()) {
		for mayRepeat := k.own.isOpen(); ; mayRepeat = false {
			query, args := l.releasing()
			closing, err := number(k.rows(l.options.TTL, query, args...))
			if err == nil {
				return 0, func() { answer <- closing != nil || mayBeDone }
			}
			mayBeDone = mayBeDone || !k.own.isOpen()
			state, _ := sqlState(err)
			switch again := l.options.TTL / 12; {
			case mayRepeat && k.hasEndedUnseen(err):
				continue
			case state == "55P03" && now()+again < until:
				return again, nil
			}
			l.logf("the lease %s was not released, and ends at its ttl: %v", l.names[0], err)
			return 0, func() { answer <- true }
		}
	}})
	return <-answer
}

// releasing is the statement that ends it, with its arguments: at once, or when it has been held for as long as it is to be
// at least.
func (l *Lease) releasing() (string, []any) {
	l.mu.Lock()
	rest := l.acquiredAt + l.options.HoldAtLeast - now()
	l.mu.Unlock()
	if rest > 0 {
		return l.onNames("lease_renew", "$3::text::interval"), []any{l.name(), l.token, interval(rest)}
	}
	return l.holding.releasing()
}

// end leaves nothing behind.
func (l *Lease) end() {
	l.cancel(nil)
	l.leave()
	close(l.released)
}

func (l *Lease) leave() {
	l.leaving.Do(func() {
		l.keeperOver = l.fence.kept.leave(l)
		if l.session != nil {
			l.session.stop()
		}
	})
}

// hasBeenReleased by a transaction of its holder's. The caller has the turn.
func (l *Lease) hasBeenReleased() {
	if l.startQuitting() {
		l.end()
	}
}

// For the keeper

// endsAt is its deadline.
func (l *Lease) endsAt() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.quitting {
		return math.MaxInt64
	}
	return l.deadline
}

// beatsAt is when it is to be renewed. One that stands apart does not come with others before its time.
func (l *Lease) beatsAt(window time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.quitting || now() >= l.renewUntil || len(l.turn) > 0:
		return math.MaxInt64
	case l.isApart:
		return l.nextBeat + window
	default:
		return l.nextBeat
	}
}

func (l *Lease) standsApart() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.isApart
}

// countsFrom counts the ttl from before the call that granted or renewed.
func (l *Lease) countsFrom(before time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deadline = l.fence.hooks.CountsFrom(before, now()) + l.options.TTL
	l.nextBeat = before + l.limit
	l.isApart = false
}

// wasRenewed by a call that began then; nil is that it is lost.
func (l *Lease) wasRenewed(before time.Duration, token *int64) {
	if token == nil {
		l.lose(Gone, nil)
		l.answer(renewal{})
		return
	}
	l.countsFrom(before)
	l.fence.hooks.Renewed(l.names[0], *token, l.Remaining)
	l.answer(renewal{token: *token})
}

// wasNotRenewed is no loss where trying again can help: the deadline tells.
func (l *Lease) wasNotRenewed(err error, isApart bool) {
	l.logf("the lease %s was not renewed: %v", l.names[0], err)
	if isPermanent(err) {
		l.lose(Denied, err)
	}
	l.mu.Lock()
	l.nextBeat = now() + l.options.TTL/12
	l.isApart = isApart
	l.mu.Unlock()
	l.answer(renewal{err: installed(err)})
}

func (l *Lease) answer(told renewal) {
	l.mu.Lock()
	asked := l.asked
	l.asked = nil
	l.mu.Unlock()
	for _, one := range asked {
		one <- told
	}
}

// lose tells a loss, once.
func (l *Lease) lose(reason Reason, cause error) {
	loss := &Error{Kind: ErrLeaseLost, Reason: reason, Names: l.names, cause: cause}
	l.mu.Lock()
	isReleased := false
	select {
	case <-l.released:
		isReleased = true
	default:
	}
	if isReleased || l.loss.Load() != nil {
		l.mu.Unlock()
		return
	}
	l.loss.Store(loss)
	if !l.quitting {
		l.quitting = true
		close(l.quit)
	}
	l.interrupt()
	l.mu.Unlock()
	l.cancel(loss)
	l.leave()
	l.logf("%v", loss)
	l.fence.telemetry.Lost(reason)
	if l.options.OnLost != nil {
		go l.options.OnLost(loss)
	}
}

// For the transactions under it

func (l *Lease) each() []holder { return []holder{l} }

func (l *Lease) refuseIfOver() error { return l.Check() }

func (l *Lease) canMend(err error) bool { return errors.Is(err, ErrNotSpeaking) }

func (l *Lease) mend(ctx context.Context) error {
	_, err := l.Renew(ctx)
	return err
}

// beatSoon is called where the server refused a write: the next renewal tells whether the lease is lost.
func (l *Lease) beatSoon() {
	l.mu.Lock()
	l.nextBeat = 0
	l.mu.Unlock()
	l.fence.kept.wake()
}

// The turn

// takeTurn waits for a renewal that is under way.
func (l *Lease) takeTurn(ctx context.Context) error {
	select {
	case l.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-l.quit:
		return l.lost(nil)
	}
}

func (l *Lease) triesTurn() bool {
	select {
	case l.turn <- struct{}{}:
		return true
	default:
		return false
	}
}

func (l *Lease) giveTurn() {
	<-l.turn
	l.fence.kept.wake()
}

// session is the connection that a lease is bound to.
type session struct {
	own  connection
	ctx  context.Context
	stop context.CancelFunc
	over chan struct{}
}

// newSession takes the connection over.
func newSession(own *connection) *session {
	made := &session{over: make(chan struct{})}
	made.ctx, made.stop = context.WithCancel(context.Background())
	made.own.config, made.own.conn, made.own.mayDial = own.config, own.conn, own.mayDial
	own.conn = nil
	return made
}

// watch waits for its end: the socket tells it, and no heartbeat has to.
func (s *session) watch(l *Lease) {
	err := s.own.untilItEnds(s.ctx)
	if s.ctx.Err() == nil {
		l.lose(Session, err)
	}
	s.own.close()
	close(s.over)
}
