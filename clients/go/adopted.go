package pgfence

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// adoptLimit is how long a call may take beside its wait: a third of the usual ttl, for an adopted lease has none.
const adoptLimit = 10 * time.Second

// AdoptOptions are how a lease is adopted.
type AdoptOptions struct {
	// Wait is how long to wait for transactions that guard an older number.
	Wait time.Duration
	// Holder is shown in the view of all leases; unless it is given, it is unique for each call.
	Holder string
	// Metadata is shown there, too, as JSON.
	Metadata any
	// Logf is told of losses and of releases that failed; log.Printf will do.
	Logf func(format string, args ...any)
}

// Adopted is a lease that somebody else grants, known here under the number that it has there. [Fence.Adopt] makes it. Its
// methods may be called from any goroutine.
//
// There is no heartbeat, no deadline, no goroutine and no connection: nothing has to be closed. Release is the last word
// of a holder that is done: the same number is refused from then on.
type Adopted struct {
	holding
	holder   string
	metadata any
	isOver   atomic.Bool
	doubtful atomic.Bool
}

// Adopt makes a lease known that somebody else has granted (etcd, ZooKeeper, Redis, another database), under the number
// that it has there.
//
// It returns an error of the kind ErrStaleToken where the name has had a greater number, or this one was released; and
// one of the kind ErrLeaseTaken where a transaction guards an older one, and did so for the Wait of the options: then that
// one has ended all the same, and it is to be tried again. The context gives a wait up.
func (f *Fence) Adopt(ctx context.Context, name string, token int64, options AdoptOptions) (*Adopted, error) {
	if f.err != nil {
		return nil, f.err
	}
	if err := checkWait(options.Wait); err != nil {
		return nil, err
	}
	if options.Holder == "" {
		options.Holder = uniqueHolder()
	}
	metadata, err := asJSON(options.Metadata)
	if err != nil {
		return nil, err
	}
	adopted := &Adopted{
		holding: holding{
			fence: f, names: []string{name}, token: token, limit: adoptLimit, logTo: options.Logf,
			atLoss: map[*interruption]struct{}{},
		},
		holder:   options.Holder,
		metadata: metadata,
	}
	if err := adopted.adopt(ctx, options.Wait); err != nil {
		return nil, err
	}
	return adopted, nil
}

func (a *Adopted) adopt(ctx context.Context, wait time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	own := &connection{config: &a.fence.config.Config}
	calls, stop := context.WithCancel(context.Background())
	answer := make(chan error, 1)
	go func() {
		adoption, args := a.adoption(fmt.Sprintf("'%d microseconds'::interval", wait.Microseconds()))
		known, err := a.fence.hooks.Adopt(func() (*int64, error) {
			return own.call(calls, a.limit+wait, a.fence.call(adoption), args...)
		})
		own.close()
		stop()
		if err == nil && known == nil {
			err = &Error{Kind: ErrLeaseTaken, Names: a.names}
		}
		answer <- err
	}()
	select {
	case err := <-answer:
		if told := Classify(err); told != nil && told.Kind == ErrStaleToken {
			a.fence.telemetry.Refused(told.Kind)
			return told
		}
		if err == nil {
			a.doubtful.Store(false)
		}
		return asked(err, a.names)
	case <-ctx.Done():
		// An adoption that comes all the same stays: the service has granted the lease.
		go func() { _ = own.giveUp(calls, a.limit, stop, answer) }()
		return ctx.Err()
	}
}

// adoption is the call, and its arguments.
func (a *Adopted) adoption(wait string) (string, []any) {
	metadata, args := "NULL", []any{a.names[0], a.token, a.holder}
	if a.metadata != nil {
		metadata, args = "$4::text::jsonb", append(args, a.metadata)
	}
	return "lease_adopt($1::text, $2::bigint, $3::text, " + wait + ", " + metadata + ")", args
}

// Release gives it back: the number is refused from then on. It returns an error of the kind ErrLeaseLost where the lease
// was lost before. Otherwise it fails silently: the lease then stays until a greater number is adopted. It takes no
// context, so that it works after one has ended.
func (a *Adopted) Release() error {
	if !a.isOver.Swap(true) {
		own := &connection{config: &a.fence.config.Config}
		query, args := a.releasing()
		closing, err := number(own.rows(context.Background(), bounds{limit: a.limit}, query, args...))
		own.close()
		if err != nil {
			a.logf("the lease %s was not released: %v", a.names[0], err)
		} else if closing == nil {
			a.lose(Gone, nil)
		}
	}
	if loss := a.loss.Load(); loss != nil {
		return loss.copyOf(nil)
	}
	return nil
}

func (a *Adopted) lose(reason Reason, cause error) {
	loss := &Error{Kind: ErrLeaseLost, Reason: reason, Names: a.names, cause: cause}
	if a.loss.CompareAndSwap(nil, loss) {
		a.mu.Lock()
		a.interrupt()
		a.mu.Unlock()
		a.logf("%v", loss)
		a.fence.telemetry.Lost(reason)
	}
}

func (a *Adopted) lost(cause error) *Error {
	if loss := a.loss.Load(); loss != nil {
		return loss.copyOf(cause)
	}
	if a.isOver.Load() {
		return &Error{Kind: ErrLeaseLost, Reason: Released, Names: a.names, cause: cause}
	}
	return nil
}

// For the transactions under it

func (a *Adopted) refuseIfOver() error {
	if lost := a.lost(nil); lost != nil {
		return lost
	}
	return nil
}

func (a *Adopted) each() []holder { return []holder{a} }

// guarding makes the number known in each transaction: a failover may have lost it, and then silences it in any case.
func (a *Adopted) guarding() (string, []any) {
	if !a.fence.hooks.AdoptsAgain() {
		return a.holding.guarding()
	}
	adoption, args := a.adoption("NULL")
	return a.fence.call("lease_guard($1::text, (" + a.fence.call(adoption) + "))"), args
}

func (a *Adopted) isInDoubt() bool { return a.doubtful.Load() && a.fence.hooks.AdoptsAgain() }

// canMend: a guard that cannot begin may after an adoption in a transaction of its own. Its own was NULL (22004), or cannot
// be relied on in the same transaction, at REPEATABLE READ (55000).
func (a *Adopted) canMend(err error) bool {
	state, _ := sqlState(err)
	isMendable := errors.Is(err, ErrNotSpeaking) || state == "22004" || state == "55000"
	return isMendable && a.fence.hooks.AdoptsAgain()
}

func (a *Adopted) mend(ctx context.Context) error { return a.adopt(ctx, 0) }

func (a *Adopted) beatSoon() { a.doubtful.Store(true) }

func (a *Adopted) takeTurn(context.Context) error { return nil }

func (a *Adopted) giveTurn() {}

func (a *Adopted) hasBeenReleased() { a.isOver.Store(true) }
