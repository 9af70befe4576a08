package pgfence

import (
	"context"
	"errors"
	"sync"
	"time"

	"pgfence/internal/hooks"
)

// lookAgain is after how long a wait looks at the clock again: Go's timers do not count the time that the machine
// slept.
const lookAgain = time.Second

// Lease is held until it is released or lost. Its methods may be called from any goroutine.
//
// Two goroutines keep it: one renews it, on a connection of its own, and the other tells a loss at the deadline, so that
// it does not matter where the first one hangs.
type Lease struct {
	holding
	options Options
	hooks   hooks.Hooks
	// third of the ttl: between two renewals, and how long a call may take.
	third time.Duration

	own ownConnection
	// turn is taken by whoever uses own.
	turn chan struct{}
	// calls is the context of what own does.
	calls     context.Context
	stopCalls context.CancelFunc
	// beatNow has the heartbeat look again when its next time is.
	beatNow chan struct{}
	// quit is closed when the lease is lost, or its release begins: the keepers end.
	quit    chan struct{}
	keepers sync.WaitGroup

	ctx *leaseContext

	// These are guarded by mu.
	quitting bool
	// released is true once all is done after its release.
	released bool
	// deadline and nextBeat are times of now().
	deadline, nextBeat time.Duration
}

func (f *Fence) newLease(ctx context.Context, names []string, options Options) *Lease {
	lease := &Lease{
		holding: holding{
			fence: f, names: names, limit: options.TTL / 3, logTo: options.Logf, atLoss: map[*interruption]struct{}{},
		},
		options: options,
		hooks:   f.hooks,
		third:   options.TTL / 3,
		own:     ownConnection{config: f.config},
		turn:    make(chan struct{}, 1),
		beatNow: make(chan struct{}, 1),
		quit:    make(chan struct{}),
	}
	lease.calls, lease.stopCalls = context.WithCancel(context.Background())
	lease.ctx, _ = lease.under(ctx)
	return lease
}

// Context ends with the lease, and with the context that it was acquired with. After a loss its Err is an *Error of the
// kind ErrLeaseLost.
func (l *Lease) Context() context.Context { return l.ctx }

// Held tells whether it is ours at this moment, by our own clock.
func (l *Lease) Held() bool { return l.Remaining() > 0 }

// Remaining is how long it is ours if no renewal comes through any more.
func (l *Lease) Remaining() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := l.deadline - now()
	if left < 0 || l.quitting {
		return 0
	}
	return left
}

// Check returns an error of the kind ErrLeaseLost when the lease is ours no more. Call it in long steps between
// transactions, and before each call to the outside.
func (l *Lease) Check() error {
	if l.isOver() {
		l.lose(Deadline, nil)
	}
	if lost := l.lost(nil); lost != nil {
		return lost
	}
	return nil
}

func (l *Lease) isOver() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return now() >= l.deadline && !l.quitting
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
	if err := l.takeTurn(ctx); err != nil {
		return 0, err
	}
	token, err := l.renew()
	l.giveTurn()
	if lost := l.Check(); lost != nil {
		return 0, lost
	}
	return token, err
}

// Release gives it back, and returns an error of the kind ErrLeaseLost where it was lost before. Otherwise it fails
// silently: the lease then ends at its ttl. It takes no context, so that it works after one has ended, and returns within
// two thirds of the ttl.
func (l *Lease) Release() error {
	isFirst := l.startQuitting()
	// A renewal that is under way ends in time.
	l.turn <- struct{}{}
	if isFirst && l.loss.Load() == nil && !l.giveBack() {
		l.lose(Gone, nil)
	}
	l.end()
	l.giveTurn()
	l.keepers.Wait()
	if loss := l.loss.Load(); loss != nil {
		return loss.copyOf(nil)
	}
	return nil
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

// giveBack tells whether it was still there, as far as it knows.
func (l *Lease) giveBack() bool {
	closing, err := l.own.callWithin(l.calls, l.third, l.onNames("lease_release"), l.name(), l.token)
	if err != nil {
		l.logf("the lease %s was not released, and ends at its ttl: %v", l.names[0], err)
		return true
	}
	return closing != nil
}

// end leaves nothing behind. The caller has the turn.
func (l *Lease) end() {
	l.mu.Lock()
	l.released = true
	l.mu.Unlock()
	l.stopCalls()
	l.ctx.cancel()
	l.own.close()
}

// hasBeenReleased by a transaction of its holder's. The caller has the turn.
func (l *Lease) hasBeenReleased() {
	l.startQuitting()
	l.end()
}

// Acquire

// take acquires it. The caller is the only one to know of it yet.
func (l *Lease) take() error {
	before := now()
	token, err := l.ask()
	if err == nil && token != nil {
		l.token = *token
		// After a wait in line the server counts from a later moment than we do: a renewal mends that.
		for err == nil && token != nil && now() >= before+l.third {
			before = now()
			token, err = l.askToRenew()
		}
	}
	if err != nil {
		return err
	}
	if token == nil {
		return &Error{Kind: ErrLeaseTaken, Names: l.names}
	}
	l.countsFrom(before)
	return nil
}

func (l *Lease) ask() (*int64, error) {
	o := l.options
	if len(l.names) == 1 {
		const call = "lease_acquire($1::text, $2::text, $3::interval, $4::interval, $5::jsonb, " +
			"$6::boolean, $7::integer, $8::boolean, $9::boolean)"
		return l.own.call(l.calls, l.third+o.Wait, l.fence.call(call), l.names[0], o.Holder, o.TTL, o.Wait,
			o.metadata, o.Shared, o.Slots, o.Reclaim, o.Session)
	}
	const call = "lease_acquire_all($1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)"
	for until := now() + o.Wait; ; {
		token, err := l.own.call(l.calls, l.third, l.fence.call(call), l.names, o.Holder, o.TTL, o.metadata, o.Session)
		if err != nil || token != nil || now() >= until {
			return token, err
		}
		// The server has no line to wait in for several at once.
		select {
		case <-time.After(250 * time.Millisecond):
		case <-l.quit:
			return nil, context.Canceled
		}
	}
}

// giveUp ends an acquire whose answer nobody waits for any more. A grant that comes all the same is given back.
func (l *Lease) giveUp(answer <-chan error) {
	l.startQuitting()
	defer l.end()
	if l.own.giveUp(l.calls, l.third, l.stopCalls, answer) == nil {
		l.giveBack()
	}
}

// The goroutines that keep it

func (l *Lease) start() {
	l.keepers.Add(2)
	go func() {
		defer l.keepers.Done()
		for l.waitUntil(&l.nextBeat) {
			l.hooks.Beat(l.beat, l.quit)
		}
		l.turn <- struct{}{}
		l.own.close()
		l.giveTurn()
	}()
	go func() {
		defer l.keepers.Done()
		l.hooks.Watch(func() {
			if l.waitUntil(&l.deadline) {
				l.lose(Deadline, nil)
			}
		})
	}()
}

// waitUntil tells whether that time, which may change meanwhile, has come before the end.
func (l *Lease) waitUntil(due *time.Duration) bool {
	for {
		l.mu.Lock()
		left, isOver := *due-now(), l.quitting
		l.mu.Unlock()
		if left <= 0 || isOver {
			return !isOver
		}
		if left > lookAgain {
			left = lookAgain
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-l.beatNow:
		case <-l.quit:
		}
		timer.Stop()
	}
}

// beat is what the heartbeat does when it is time.
func (l *Lease) beat() {
	if l.takeTurn(context.Background()) != nil {
		return
	}
	defer l.giveTurn()
	l.mu.Lock()
	isDue := now() >= l.nextBeat && !l.quitting
	l.mu.Unlock()
	if isDue {
		_, _ = l.renew()
	}
}

// renew does so once, or twice where the first attempt only showed that the connection had ended unseen since the last
// time. The caller has the turn.
func (l *Lease) renew() (int64, error) {
	for mayRepeat := l.own.isOpen() && !l.options.Session; ; mayRepeat = false {
		before := now()
		token, err := l.askToRenew()
		switch {
		case err == nil && token == nil:
			l.lose(Gone, nil)
			return 0, l.Check()
		case err == nil:
			l.countsFrom(before)
			l.hooks.Renewed(*token, l.Remaining)
			return *token, nil
		case mayRepeat && !l.own.isOpen() && !isPermanent(err) && !errors.Is(err, context.DeadlineExceeded):
			continue
		}
		l.renewalFailed(err)
		return 0, err
	}
}

func (l *Lease) askToRenew() (*int64, error) {
	return l.hooks.Renew(func() (*int64, error) {
		return l.own.callWithin(l.calls, l.third, l.onNames("lease_renew"), l.name(), l.token)
	}, l.names[0], l.token)
}

// countsFrom counts the ttl from before the call that granted or renewed.
func (l *Lease) countsFrom(before time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deadline = l.hooks.CountsFrom(before, now()) + l.options.TTL
	l.nextBeat = before + l.third
}

// renewalFailed is no loss where trying again can help: the deadline tells.
func (l *Lease) renewalFailed(err error) {
	l.logf("the lease %s was not renewed: %v", l.names[0], err)
	if isPermanent(err) {
		l.lose(Denied, err)
	} else if l.options.Session && !l.own.isOpen() {
		l.lose(Session, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.nextBeat = now() + l.third/4
}

// beatSoon is called where the server refused a write: the next renewal tells whether the lease is lost.
func (l *Lease) beatSoon() {
	l.mu.Lock()
	l.nextBeat = 0
	l.mu.Unlock()
	select {
	case l.beatNow <- struct{}{}:
	default:
	}
}

// lose tells a loss, once.
func (l *Lease) lose(reason Reason, cause error) {
	loss := &Error{Kind: ErrLeaseLost, Reason: reason, Names: l.names, cause: cause}
	l.mu.Lock()
	if l.released || l.loss.Load() != nil {
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
	l.stopCalls()
	l.logf("%v", loss)
	if l.options.OnLost != nil {
		go l.options.OnLost(loss)
	}
}

// For the transactions under it

func (l *Lease) refuseIfOver() error { return l.Check() }

func (l *Lease) canMend(err error) bool { return errors.Is(err, ErrNotSpeaking) }

func (l *Lease) mend(ctx context.Context) error {
	_, err := l.Renew(ctx)
	return err
}

// The turn

// takeTurn waits for whoever uses the lease's own connection, whose calls end in time.
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

func (l *Lease) giveTurn() { <-l.turn }
