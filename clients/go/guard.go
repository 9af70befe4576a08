package pgfence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Last is an option of the last transaction under a lease.
type Last bool

// Releasing gives the lease back in the transaction, after its work.
const Releasing Last = true

// Guard runs a transaction during which nobody else is granted any of these leases, and whose writes present their tokens. It
// does not begin when one of them is lost. An error or a panic of the work rolls back. In a pgx.Tx, which somebody has begun,
// it is a savepoint.
func (f *Fence) Guard(ctx context.Context, conn Pgx, leases Leases, work PgxWork, last ...Last) error {
	return guard(ctx, under(f.k, leases, last), onPgx(conn), work)
}

// GuardSQL is Guard with database/sql; in an *sql.Tx it is a savepoint.
func (f *Fence) GuardSQL(ctx context.Context, db SQL, leases Leases, work SQLWork, last ...Last) error {
	return guard(ctx, under(f.k, leases, last), onSQL(db), work)
}

// guarding is what a transaction is guarded by: statements after its begin, and before its end.
type guarding struct {
	k            *keeper
	names        []string
	grants       []*grant
	begins, ends []call
	// limit is how long our own statements may take.
	limit time.Duration
}

func under(k *keeper, leases Leases, last []Last) guarding {
	g := guarding{k: k, limit: longest}
	tokens := map[string]int64{}
	for _, lease := range leases {
		for _, name := range lease.g.names {
			g.names, tokens[name] = append(g.names, name), lease.g.token
		}
		if slices.Contains(last, Releasing) {
			g.ends = append(g.ends, k.releasing(lease.g.names, lease.g.token))
		}
		g.grants, g.limit = append(g.grants, lease.g), min(g.limit, lease.g.keeping.ttl/3)
	}
	// In the same order everywhere, so that no two wait for each other.
	slices.Sort(g.names)
	for _, name := range g.names {
		g.begins = append(g.begins, k.call("SELECT lease_guard($1::text, $2::bigint)", name, tokens[name]))
	}
	return g
}

func underAdopted(a *Adopted, last []Last) guarding {
	// Each transaction makes the number known.
	const adopts = "SELECT lease_guard($1::text, (SELECT lease_adopt($1::text, $2::bigint)))"
	g := guarding{k: a.k, names: []string{a.name}, begins: []call{a.k.call(adopts, a.name, a.token)}, limit: longest}
	if slices.Contains(last, Releasing) {
		g.ends = []call{a.k.releasing(g.names, a.token)}
	}
	return g
}

// releasing is within a transaction of the work. Its arguments are such as every driver can send.
func (k *keeper) releasing(names []string, token int64) call {
	if len(names) == 1 {
		return k.call("SELECT lease_release($1::text, $2::bigint)", names[0], token)
	}
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(name) + `"`
	}
	return k.call("SELECT lease_release_all($1::text::text[], $2::bigint)", "{"+strings.Join(quoted, ",")+"}", token)
}

func (g guarding) check() error {
	for _, one := range g.grants {
		if err := g.k.check(one); err != nil {
			return err
		}
	}
	return nil
}

// scope is one attempt. Its context until ends with the caller's, at a loss, and when a statement of ours takes too long.
type scope struct {
	guarding
	ctx, until context.Context
	cancel     context.CancelCauseFunc
	mu         sync.Mutex
	socket     *pgconn.PgConn
}

func guard[Tx any](ctx context.Context, g guarding, open opening[Tx], work func(context.Context, Tx) error) error {
	if len(g.names) == 0 {
		return errors.New("pgfence: a transaction under no lease")
	}
	isStale, err := guardOnce(&scope{guarding: g, ctx: ctx}, open, work)
	if isStale {
		// After a failover no token speaks until its holder has renewed.
		g.k.keep(g.grants)
		_, err = guardOnce(&scope{guarding: g, ctx: ctx}, open, work)
	}
	return err
}

// guardOnce also tells whether it was the guard itself that was refused, in a transaction that it began.
func guardOnce[Tx any](s *scope, open opening[Tx], work func(context.Context, Tx) error) (isStale bool, err error) {
	if err := cmp.Or(s.ctx.Err(), s.check()); err != nil {
		return false, err
	}
	var leave func()
	s.until, s.cancel, leave = untilLoss(s.ctx, s.grants, s.cut)
	defer leave()
	t, err := open(s.until, s.inTime)
	if err != nil {
		return false, s.told(err, false, nil, false)
	}
	defer t.end()
	// From here on a loss breaks the connection off, where it hangs, too.
	s.isOn(t.socket)
	defer s.isOn(nil)
	isDone := false
	defer func() {
		if !isDone {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), s.limit)
			defer cancel()
			// Where it fails the driver ends the connection.
			_ = t.rollback(ctx)
		}
	}()
	err = s.inTime(func() error { return each(s.until, t, s.begins, nil) })
	if err = cmp.Or(err, s.check()); err != nil {
		isStale = stateOf(err) == "PF004" && !t.isInner && len(s.grants) > 0
		return isStale, s.told(err, t.isBroken(err), t.conn, false)
	}
	if err = work(s.until, t.tx); err != nil {
		return false, s.told(err, t.isBroken(err), t.conn, true)
	}
	if len(s.ends) > 0 {
		// The heartbeat leaves out what is about to be released.
		s.k.change(s.grants, func(of *keeping) { of.resting++ })
		defer s.k.change(s.grants, func(of *keeping) { of.resting-- })
	}
	err = s.inTime(func() error {
		if err := cmp.Or(s.until.Err(), t.state(s.until)); err != nil {
			return err
		}
		return each(s.until, t, s.ends, s.gone)
	})
	if err != nil {
		return false, s.told(err, t.isBroken(err), t.conn, false)
	}
	if err = t.commit(s.until); err != nil {
		isBroken := t.isBroken(err)
		return false, inDoubt(s.told(err, isBroken, t.conn, false), err, isBroken)
	}
	isDone = true
	if len(s.ends) > 0 {
		s.k.tell("released", s.k.end(s.grants, ReasonReleased))
	}
	return false, nil
}

// each runs them; isNull says what NULL means.
func each[Tx any](ctx context.Context, t *transaction[Tx], calls []call, isNull func(int) error) error {
	for i, call := range calls {
		value, err := t.value(ctx, call)
		if err == nil && value == nil {
			err = isNull(i)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// gone is what a release means that finds nothing.
func (g guarding) gone(i int) error {
	if len(g.grants) == 0 {
		return &Error{Kind: LeaseLost, Reason: ReasonGone, Names: g.names}
	}
	g.k.end(g.grants[i:i+1], ReasonGone)
	return g.grants[i].over.Load()
}

// inTime is for statements of our own.
func (s *scope) inTime(do func() error) error {
	slow := time.AfterFunc(s.limit, func() { s.cancel(noAnswer(s.limit, errors.New("a guard waits"))) })
	defer slow.Stop()
	return do()
}

func (s *scope) isOn(socket *pgconn.PgConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.socket = socket
}

func (s *scope) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.socket != nil {
		cut(s.socket)
	}
}

// told is the typed error, where it is one. A transaction that was broken off because of a loss tells the loss.
func (s *scope) told(err error, isBroken bool, on *pgconn.PgConn, isOfWork bool) error {
	state := stateOf(err)
	if state == "PF001" || state == "PF004" {
		// The next renewal tells whether they are lost.
		s.k.change(s.grants, func(of *keeping) { of.beatAt = 0 })
	}
	var told *Error
	switch {
	case errors.As(err, &told):
	case isBroken || isInterrupted(err):
		switch {
		case errors.As(errors.Join(s.check(), context.Cause(s.until)), &told):
			again := *told
			again.cause = err
			return &again
		case s.ctx.Err() != nil && !errors.Is(err, s.ctx.Err()):
			return fmt.Errorf("%w: %w", s.ctx.Err(), err)
		case isBroken && !isAnyOf(err, context.Canceled, context.DeadlineExceeded):
			// Else it is by a context of the work's own.
			return tell(TransactionLost, err, "the session has ended under the transaction: %v", err)
		}
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return failedInside(err)
	case !isOfWork && len(s.grants) == 0 && state == "22004":
		// NULL from lease_adopt: an older number is guarded.
		return &Error{Kind: LeaseTaken, Names: s.names, cause: err}
	default:
		return typed(err, isOfWork, on)
	}
	return err
}

// inDoubt is what a failed commit is told as.
func inDoubt(told, err error, isBroken bool) error {
	var lost *Error
	switch state := stateOf(err); {
	case errors.As(told, &lost) && (lost.Kind == LeaseLost || lost.Kind == TransactionLost):
		// The server has ended an idle transaction before it read the commit.
		lost.InDoubt = state != "25P03" && state != "25P04" && !errors.Is(err, pgx.ErrTxCommitRollback)
	case isBroken:
		// It was the caller's context that ended.
		return &Error{Kind: TransactionLost, InDoubt: true, cause: told, message: "the commit was broken off: " + told.Error()}
	}
	return told
}

// untilLoss is a context that ends at a loss, too. The function then is called at one, until leave.
func untilLoss(ctx context.Context, grants []*grant, then func()) (context.Context, context.CancelCauseFunc, func()) {
	until, cancel := context.WithCancelCause(ctx)
	stops := make([]func() bool, len(grants))
	for i, one := range grants {
		stops[i] = context.AfterFunc(one.loss, func() {
			cancel(one.lost())
			then()
		})
	}
	return until, cancel, func() {
		for _, stop := range stops {
			stop()
		}
		cancel(nil)
	}
}
