package pgfence

import (
	"cmp"
	"context"
	"errors"
	"math"
	"sync/atomic"
	"time"
)

// Lease is one that is held, until it is released or lost, also where nobody refers to it any more. Its methods may be called
// from any goroutine.
type Lease struct {
	Holding
	ttl time.Duration
	// session is the connection that a session lease lives on; below 0 for other leases.
	session int64
	// over is why it is: lost, or released. At a loss, loss ends.
	over atomic.Pointer[Error]
	loss context.Context
	lose context.CancelCauseFunc
	// The keeper's lock guards these.
	deadline, beatAt time.Duration
	// resting are the transactions that are about to release it: it is not renewed meanwhile.
	resting int
}

// newLease is by a call that began before, from where the ttl counts.
func (k *keeper) newLease(names []string, token any, before, ttl time.Duration, session int64) *Lease {
	ttl = min(ttl, forever)
	l := &Lease{Holding: Holding{k: k, names: names, token: token.(int64)}, ttl: ttl, session: session}
	l.leases, l.deadline, l.beatAt = Leases{l}, before+ttl, before+ttl/3
	l.loss, l.lose = context.WithCancelCause(context.Background())
	return l
}

// Held tells whether it is ours at this moment, by our own clock.
func (l *Lease) Held() bool { return l.Remaining() > 0 }

// Remaining is how long it is ours if no renewal comes through any more.
func (l *Lease) Remaining() time.Duration {
	l.k.mu.Lock()
	defer l.k.mu.Unlock()
	if l.over.Load() != nil {
		return 0
	}
	return max(0, l.deadline-now())
}

// Check is an [Error] of the kind [LeaseLost] once the lease is ours no more, whatever the heartbeat does: for long steps, and
// before each call to the outside.
func (l *Lease) Check() error {
	if l.Held() {
		return nil
	}
	l.k.end(l.leases, ReasonDeadline)
	return l.over.Load()
}

// Lost is closed at a loss, by the deadline at the latest.
func (l *Lease) Lost() <-chan struct{} { return l.loss.Done() }

// Do does the work, and gives the lease back. The work's context ends with ctx, and at a loss. The error is the work's; where
// that has none, or only tells the end of its context, it is [LeaseLost] if the lease was lost.
func (l *Lease) Do(ctx context.Context, work Work) (err error) {
	until, end := untilLoss(ctx, l.leases)
	// Also where the work panics.
	defer func() {
		end()
		loss := l.Release()
		if err == nil || errors.Is(err, context.Canceled) && ctx.Err() == nil && loss != nil {
			err = loss
		}
	}()
	return work(until, l)
}

// Release gives it back, and is an [Error] of the kind [LeaseLost] if it was lost. It takes no context, so that it works when
// yours has ended. It is no error where the server cannot be reached: then the lease ends at its ttl.
func (l *Lease) Release() error {
	l.k.release(l.leases)
	return l.lost()
}

// lost is nil where it is not lost.
func (l *Lease) lost() error {
	if over := l.over.Load(); over != nil && over.Reason != ReasonReleased {
		return over
	}
	return nil
}

// Leases are several that are held: those of a [Fence.Claim], or for [Fence.Guard].
type Leases []*Lease

// Release gives back what is left of them, and is an [Error] of the kind [LeaseLost] for the first that was lost.
func (l Leases) Release() (err error) {
	for _, lease := range l {
		err = cmp.Or(err, lease.Release())
	}
	return err
}

// When a lease is renewed, and when it is over: decisions from times and answers alone. Times are those of now().

// forever is what spans are cut to, so that no sum of two times overflows.
const forever = time.Duration(math.MaxInt64 / 4)

// answered takes the answers of lease_keep, one for each name (outcome, remaining, again_in), to a call that began before;
// gotOn: it has kept something. It returns why the lease is lost, if it is, and whether it was renewed.
func (l *Lease) answered(answers [][]any, before time.Duration, gotOn bool) (lost Reason, renewed bool) {
	remaining, againIn, renewed := forever, forever, true
	for _, one := range answers {
		switch one[0] {
		case "lost":
			lost = ReasonGone
		case "refused":
			lost = cmp.Or(lost, ReasonRefused)
		}
		renewed = renewed && one[0] == "kept"
		remaining, againIn = min(remaining, span(one[1], 0)), min(againIn, span(one[2], l.ttl/12))
	}
	switch {
	case lost != "" && l.resting > 0:
		return "", false
	case lost != "":
		return lost, false
	case renewed:
		l.deadline, l.beatAt = before+remaining, before+againIn
	case gotOn || againIn > 0:
		l.beatAt = now() + againIn
	default:
		// Out of locks: at once, in another transaction, as long as that helps.
		l.beatAt = now() + l.ttl/12
	}
	return "", renewed
}

func (l *Lease) dueAt() time.Duration {
	if l.resting > 0 {
		return forever
	}
	return l.beatAt
}

// span is of seconds, which may not be told.
func span(seconds any, otherwise time.Duration) time.Duration {
	if seconds, is := seconds.(float64); is {
		return time.Duration(min(seconds*float64(time.Second), float64(forever)))
	}
	return otherwise
}
