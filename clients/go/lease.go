package pgfence

import (
	"context"
	"errors"
	"strconv"
	"time"
)

// Lease is one that is held, until it is released or lost, also where nobody refers to it any more. Its methods may be called from any goroutine.
type Lease struct {
	k *keeper
	g *grant
}

// Names are those that it was asked for by.
func (l *Lease) Names() []string { return l.g.names }

// Token is the acquire's: it serves for as long as the lease is held.
func (l *Lease) Token() int64 { return l.g.token }

// Held tells whether it is ours at this moment, by our own clock.
func (l *Lease) Held() bool { return l.Remaining() > 0 }

// Remaining is how long it is ours if no renewal comes through any more.
func (l *Lease) Remaining() time.Duration { return l.k.remaining(l.g) }

// Check is an [Error] of the kind [LeaseLost] once the lease is ours no more: for long steps, and before each call to the
// outside.
func (l *Lease) Check() error { return l.k.check(l.g) }

// Lost is closed at a loss, by the deadline at the latest.
func (l *Lease) Lost() <-chan struct{} { return l.g.loss.Done() }

// Do does the work, and gives the lease back. The work's context ends with ctx, and at a loss. The error is the work's; where
// that has none, or only tells the end of its context, it is [LeaseLost] if the lease was lost.
func (l *Lease) Do(ctx context.Context, work Work) (err error) {
	until, _, end := untilLoss(ctx, []*grant{l.g}, func() {})
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
	l.k.release([]*grant{l.g})
	return l.g.lost()
}

// Guard runs a transaction of pgx under the lease: see [Fence.Guard].
func (l *Lease) Guard(ctx context.Context, conn Pgx, work PgxWork, last ...Last) error {
	return guard(ctx, under(l.k, Leases{l}, last), onPgx(conn), work)
}

// GuardSQL runs a transaction of database/sql under the lease: see [Fence.GuardSQL].
func (l *Lease) GuardSQL(ctx context.Context, db SQL, work SQLWork, last ...Last) error {
	return guard(ctx, under(l.k, Leases{l}, last), onSQL(db), work)
}

// Options are for code that knows nothing of fences: the value of "options" in a connection string, or of PGOPTIONS, with
// which a connection presents the token in all its transactions. Not through a pooler in transaction mode.
func (l *Lease) Options() string { return "-c pg_fence.token=" + strconv.FormatInt(l.g.token, 10) }

// Leases are several that are held: those of a [Fence.Claim], or for [Fence.Guard].
type Leases []*Lease

// Release gives back what is left of them, and is an [Error] of the kind [LeaseLost] for the first that was lost.
func (l Leases) Release() (err error) {
	for _, lease := range l {
		if lost := lease.Release(); err == nil {
			err = lost
		}
	}
	return err
}

// Adopted is a lease that somebody else grants, under the number that it has there: see [Fence.Adopted].
type Adopted struct {
	k     *keeper
	name  string
	token int64
}

// Guard is [Lease.Guard]. It is an [Error] of the kind [LeaseTaken] while a transaction guards an older number, and [Refused]
// with PF001 where a greater one is known. With [Releasing] the number is refused from then on.
func (a *Adopted) Guard(ctx context.Context, conn Pgx, work PgxWork, last ...Last) error {
	return guard(ctx, underAdopted(a, last), onPgx(conn), work)
}

// GuardSQL is [Lease.GuardSQL], for a number that somebody else grants.
func (a *Adopted) GuardSQL(ctx context.Context, db SQL, work SQLWork, last ...Last) error {
	return guard(ctx, underAdopted(a, last), onSQL(db), work)
}
