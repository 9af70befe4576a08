package pgfence

import (
	"context"
	"errors"
	"sync"
	"time"
)

// lookForLeader is how often an observer looks.
const lookForLeader = time.Second

// Hold does work under the lease, and releases it. It returns the error of the work; where that has none, an error of
// the kind ErrLeaseLost if the lease was lost. The context of the work is the lease's.
func (f *Fence) Hold(
	ctx context.Context, name string, options Options, work func(context.Context, *Lease) error,
) error {
	lease, err := f.Acquire(ctx, name, options)
	if err != nil {
		return err
	}
	return lease.during(work)
}

func (l *Lease) during(work func(context.Context, *Lease) error) error {
	// Also where the work panics.
	defer func() { _ = l.Release() }()
	err := work(l.Context(), l)
	if err == nil {
		return l.Release()
	}
	if loss := l.loss.Load(); loss != nil && errors.Is(err, context.Canceled) {
		// It is by the loss that its context has ended.
		return loss.copyOf(err)
	}
	return err
}

// Lead does work while leading, and again after each loss. It ends when the work returns nil or an error that is no
// loss, when the server refuses for good, or with the context. Then the lease is given back at once, so that what work goes on
// to do that does not look at its context is refused. Options need no Holder, Wait or Reclaim.
func (f *Fence) Lead(
	ctx context.Context, name string, options Options, work func(context.Context, *Lease) error,
) error {
	if options.TTL == 0 {
		options.TTL = 30 * time.Second
	}
	// If the answer to an acquire was lost, the unique name takes the grant over.
	options.Holder, options.Reclaim = uniqueHolder(), true
	options.Wait = max(time.Second, min(options.TTL/3, 10*time.Second))
	if _, err := options.complete([]string{name}); err != nil {
		return err
	}
	if options.OnLeader != nil {
		observing, stop := context.WithCancel(ctx)
		var observer sync.WaitGroup
		observer.Go(func() { _ = f.Observe(observing, name, options.OnLeader) })
		defer observer.Wait()
		defer stop()
	}
	for {
		lease, err := f.Acquire(ctx, name, options)
		if err == nil {
			forget := context.AfterFunc(ctx, func() { _ = lease.Release() })
			err = lease.during(work)
			forget()
			if !errors.Is(err, ErrLeaseLost) && lease.loss.Load() == nil && !isStale(err) {
				return err
			}
		} else if f.err != nil || isPermanent(err) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !errors.Is(err, ErrLeaseTaken) {
			pause(ctx, options.TTL/12)
		}
	}
}

func isStale(err error) bool {
	told := Classify(err)
	return told != nil && (told.Kind == ErrStaleToken || told.Kind == ErrNotSpeaking)
}

// Leader is who holds a lease that is observed.
type Leader struct {
	// Holder and Token are of the grant, whose first token it is: renewals change neither. Nobody leads: empty, and 0.
	Holder string
	Token  int64
	// Since is when it was granted, by the server's clock.
	Since time.Time
}

// Observe tells who holds the lease, at first and at each change, by looking each second or so. It returns when the context
// ends, or when the server refuses for good; until then it has a connection of its own. Where several hold the lease, it
// tells the one that came first.
func (f *Fence) Observe(ctx context.Context, name string, tell func(Leader)) error {
	if f.err != nil {
		return f.err
	}
	own := &connection{config: &f.config.Config}
	defer own.close()
	var last Leader
	for isFirst := true; ; {
		leader, err := f.leader(ctx, own, name)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if isPermanent(err) {
			return installed(err)
		}
		if err == nil && (isFirst || leader != last) {
			tell(leader)
			last, isFirst = leader, false
		}
		pause(ctx, lookForLeader)
	}
}

func (f *Fence) leader(ctx context.Context, own *connection, name string) (Leader, error) {
	query := "SELECT holder, first_token, to_char(acquired_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') FROM " + f.schema +
		"lease_info($1::text) WHERE state = 'held' ORDER BY first_token LIMIT 1"
	rows, err := own.rows(ctx, bounds{limit: adoptLimit}, query, name)
	if err != nil || len(rows) == 0 {
		return Leader{}, err
	}
	token, err := whole(rows[0][1])
	if err != nil || token == nil {
		return Leader{}, err
	}
	since, err := time.Parse("2006-01-02 15:04:05.999999", string(rows[0][2]))
	return Leader{Holder: string(rows[0][0]), Token: *token, Since: since}, err
}
