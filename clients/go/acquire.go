package pgfence

import (
	"context"
	"sync/atomic"
	"time"
)

// retryAll is how often several names at once are tried: the server has no line to wait in for them.
const retryAll = 250 * time.Millisecond

// Acquire takes the lease, or returns an error of the kind ErrLeaseTaken. Its holder calls Release in the end. The
// context ends a wait in line, and later the lease's Context; the lease itself ends by Release alone.
func (f *Fence) Acquire(ctx context.Context, name string, options Options) (*Lease, error) {
	return f.AcquireAll(ctx, []string{name}, options)
}

// AcquireAll takes several at once, all or none.
func (f *Fence) AcquireAll(ctx context.Context, names []string, options Options) (lease *Lease, err error) {
	if f.err != nil {
		return nil, f.err
	}
	if options, err = options.complete(names); err != nil {
		return nil, err
	}
	spanned, end := f.telemetry.Start(ctx, "pg_fence.acquire", names)
	defer func() { end(err) }()
	if err = ctx.Err(); err != nil {
		return nil, err
	}
	lease = f.newLease(ctx, append([]string(nil), names...), options)
	if options.Wait > 0 || options.Session {
		err = lease.waitFor(spanned)
	} else {
		err = lease.try(spanned)
	}
	if err != nil {
		lease.cancel(err)
		return nil, asked(err, names)
	}
	return lease, nil
}

// asked is the error of a call that grants.
func asked(err error, names []string) error {
	if isOverdue(err) {
		return &Error{Kind: ErrAcquireTimeout, Names: names, cause: err}
	}
	return installed(err)
}

// try takes it through the keeper, which does not wait. A grant that nobody waits for any more is given back.
func (l *Lease) try(ctx context.Context) error {
	return l.throughKeeper(ctx, l.take, func() { go l.giveBack() })
}

// throughKeeper has the keeper ask the server for the lease, and keep it from then on; abandoned is what becomes of it
// where the context has ended meanwhile.
func (l *Lease) throughKeeper(ctx context.Context, ask func(*keeper) error, abandoned func()) error {
	answer := make(chan error, 1)
	// isTold: either the caller has the answer, or has left without it.
	var isTold atomic.Bool
	l.fence.kept.enqueue(&job{do: func(k *keeper) (time.Duration, func()) {
		if isTold.Load() {
			return 0, nil
		}
		err := ask(k)
		isWanted := isTold.CompareAndSwap(false, true)
		switch {
		case err == nil && isWanted:
			l.fence.kept.join(l)
		case err == nil:
			abandoned()
		}
		return 0, func() { answer <- err }
	}})
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		if isTold.CompareAndSwap(false, true) {
			return ctx.Err()
		}
		return <-answer
	}
}

// take tries once, or twice where the connection had ended unseen: what came of the first attempt is then reclaimed.
func (l *Lease) take(k *keeper) error {
	isRepeated, first := false, error(nil)
	for {
		wasOpen, before := k.own.isOpen(), now()
		query, args := l.acquiring(isRepeated && l.options.mayReclaim)
		token, err := k.own.call(k.calls, k.kept.smallestTTL(l.options.TTL)/3, query, args...)
		mayRepeat := wasOpen && !isRepeated && (l.options.mayReclaim || len(l.names) > 1)
		switch {
		case err == nil && token != nil:
			l.token, l.acquiredAt = *token, now()
			l.begins(before)
			return nil
		case err == nil && isRepeated && !l.options.mayReclaim:
			// Taken by the first attempt, for all we know.
			return first
		case err == nil:
			return &Error{Kind: ErrLeaseTaken, Names: l.names}
		case mayRepeat && k.hasEndedUnseen(err):
			isRepeated, first = true, err
			continue
		}
		return err
	}
}

// begins counts from before the call that granted it.
func (l *Lease) begins(before time.Duration) {
	if l.options.HoldAtMost > 0 {
		l.renewUntil = l.acquiredAt + l.options.HoldAtMost
	}
	l.countsFrom(before)
}

// acquiring is the statement that grants it, with its arguments.
func (l *Lease) acquiring(reclaims bool) (string, []any) {
	o := l.options
	if len(l.names) == 1 {
		const call = "lease_acquire($1::text, $2::text, $3::interval, $4::interval, $5::jsonb, " +
			"$6::boolean, $7::integer, $8::boolean, $9::boolean)"
		return l.fence.call(call), []any{l.names[0], o.Holder, o.TTL, o.Wait, o.metadata, o.Shared, o.Slots,
			o.Reclaim || reclaims, o.Session}
	}
	const call = "lease_acquire_all($1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)"
	return l.fence.call(call), []any{l.names, o.Holder, o.TTL, o.metadata, o.Session}
}

// waiting is an acquire on a connection of its own: it waits in line, or is to be bound to that session.
type waiting struct {
	lease *Lease
	own   connection
	// ctx is the caller's, and calls that of what own does.
	ctx, calls context.Context
	stop       context.CancelFunc
}

func (l *Lease) waitFor(ctx context.Context) error {
	w := &waiting{lease: l, ctx: ctx, own: connection{config: &l.fence.config.Config}}
	w.calls, w.stop = context.WithCancel(context.Background())
	answer := make(chan error, 1)
	go func() { answer <- w.acquire() }()
	select {
	case err := <-answer:
		defer w.end()
		if err != nil {
			return err
		}
		if l.options.Session {
			l.session = newSession(&w.own)
		}
		l.fence.kept.join(l)
		if l.session != nil {
			go l.session.watch(l)
		}
		return nil
	case <-ctx.Done():
		go w.giveUp(answer)
		return ctx.Err()
	}
}

func (w *waiting) acquire() error {
	l, before := w.lease, now()
	token, err := w.ask()
	if err != nil {
		return err
	}
	if token == nil {
		return &Error{Kind: ErrLeaseTaken, Names: l.names}
	}
	l.token, l.acquiredAt = *token, now()
	// After a wait in line the server counts from a later moment than we do: a renewal mends that.
	for now() >= before+l.limit {
		before = now()
		token, err = number(w.own.rows(w.calls, bounds{limit: l.limit}, l.onNames("lease_renew"), l.name(), l.token))
		if err != nil {
			return err
		}
		if token == nil {
			return &Error{Kind: ErrLeaseTaken, Names: l.names}
		}
	}
	l.begins(before)
	return nil
}

func (w *waiting) ask() (*int64, error) {
	l := w.lease
	query, args := l.acquiring(false)
	if len(l.names) == 1 {
		return w.own.call(w.calls, l.limit+l.options.Wait, query, args...)
	}
	for until := now() + l.options.Wait; ; {
		token, err := w.own.call(w.calls, l.limit, query, args...)
		if err != nil || token != nil || now() >= until {
			return token, err
		}
		if pause(w.ctx, retryAll); w.ctx.Err() != nil {
			return nil, w.ctx.Err()
		}
	}
}

// giveUp ends an acquire whose answer nobody waits for any more. A grant that comes all the same is given back.
func (w *waiting) giveUp(answer <-chan error) {
	defer w.end()
	if w.own.giveUp(w.calls, w.lease.limit, w.stop, answer) == nil {
		query, args := w.lease.releasing()
		_, _ = w.own.rows(w.calls, bounds{limit: w.lease.limit}, query, args...)
	}
}

func (w *waiting) end() {
	w.stop()
	w.own.close()
}

func pause(ctx context.Context, span time.Duration) {
	timer := time.NewTimer(span)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
