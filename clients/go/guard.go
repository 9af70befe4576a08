package pgfence

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Last is an option of the last transaction under a lease.
type Last bool

// Releasing gives the lease back in the transaction, after its work.
const Releasing Last = true

// Guard is [Holding.Guard] by several leases at once.
func (f *Fence) Guard(ctx context.Context, conn Pgx, leases Leases, work PgxWork, last ...Last) error {
	return guard(ctx, under(f.k, leases, last), onPgx(conn, work))
}

// GuardSQL is [Holding.GuardSQL] by several leases at once.
func (f *Fence) GuardSQL(ctx context.Context, db SQL, leases Leases, work SQLWork, last ...Last) error {
	return guard(ctx, under(f.k, leases, last), onSQL(db, work))
}

// guarding is what a transaction is guarded by.
type guarding struct {
	k    *keeper
	held []*Holding
	// leases are the same; none where it is adopted.
	leases   []*Lease
	releases bool
}

func under(k *keeper, leases Leases, last []Last) guarding {
	g := guarding{k: k, leases: leases, releases: slices.Contains(last, Releasing)}
	for _, lease := range leases {
		g.held = append(g.held, &lease.Holding)
	}
	return g
}

func (g guarding) check() (err error) {
	for _, lease := range g.leases {
		err = cmp.Or(err, lease.Check())
	}
	return err
}

// begins and ends are statements after the begin, and before the end. Each returns a name that is not held, or NULL.
func (g guarding) begins() call {
	if one := g.held[0]; one.lease == nil {
		// Each transaction makes the number known.
		return g.k.call(`SELECT CASE WHEN lease_guard($1::text, (SELECT lease_adopt($1::text, $2::bigint))) IS NULL
			THEN $1::text END`, one.names[0], one.token)
	}
	// In the same order everywhere, so that no two wait for each other.
	return g.k.call(`SELECT min(x.name) FILTER (WHERE lease_guard(x.name, x.token) IS NULL)
		FROM (SELECT * FROM jsonb_to_recordset($1::text::jsonb) AS x(name text, token bigint) ORDER BY name COLLATE "C") AS x`,
		g.pairs())
}

func (g guarding) ends() call {
	return g.k.call(`SELECT min(x.name) FILTER (WHERE lease_release(x.name, x.token) IS NULL)
		FROM jsonb_to_recordset($1::text::jsonb) AS x(name text, token bigint)`, g.pairs())
}

// pairs are names and tokens in a form that every driver can send.
func (g guarding) pairs() string {
	pairs := []map[string]any{}
	for _, one := range g.held {
		for _, name := range one.names {
			pairs = append(pairs, map[string]any{"name": name, "token": one.token})
		}
	}
	text, _ := json.Marshal(pairs)
	return string(text)
}

// gone is what a release means that finds nothing under a name.
func (g guarding) gone(name string) error {
	at := slices.IndexFunc(g.held, func(one *Holding) bool { return slices.Contains(one.names, name) })
	if lease := g.held[at].lease; lease != nil {
		g.k.end([]*Lease{lease}, ReasonGone)
		return lease.over.Load()
	}
	return lostBy(ReasonGone, name)
}

// scope is one attempt. Its context until ends with the caller's, and at a loss.
type scope struct {
	guarding
	ctx, until context.Context
	mu         sync.Mutex
	socket     *pgconn.PgConn
}

// stage is how far an attempt has come.
type stage int

const (
	beginning stage = iota
	working
	ending
	committing
)

func guard(ctx context.Context, g guarding, open opening) error {
	if len(g.held) == 0 {
		return errors.New("pgfence: a transaction under no lease")
	}
	isStale, err := guardOnce(&scope{guarding: g, ctx: ctx}, open)
	if isStale {
		// After a failover no token speaks until its holder has renewed.
		g.k.keep(g.leases)
		_, err = guardOnce(&scope{guarding: g, ctx: ctx}, open)
	}
	if state := stateOf(err); state == "PF001" || state == "PF004" {
		// The next renewal tells whether they are lost, when the connection, which is sound, has left the guard.
		g.k.change(g.leases, func(of *Lease) { of.beatAt = 0 })
	}
	return err
}

// guardOnce also tells whether it was the guard itself that was refused, in a transaction that it began.
func guardOnce(s *scope, open opening) (isStale bool, err error) {
	if err := cmp.Or(s.ctx.Err(), s.check()); err != nil {
		return false, err
	}
	until, leave := untilLoss(s.ctx, s.leases, s.cut)
	defer leave()
	s.until = until
	t, err := open(until)
	if err != nil {
		return false, s.told(err, beginning, &transaction{isBroken: func(error) bool { return false }})
	}
	defer t.end()
	// From here on a loss breaks the connection off, where it hangs, too.
	s.isOn(t.socket)
	defer s.isOn(nil)
	isDone := false
	defer func() {
		if !isDone {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), portion)
			defer cancel()
			// Where it fails the driver ends the connection.
			_ = t.rollback(ctx)
		}
	}()
	at, err := s.does(t)
	if isDone = err == nil; isDone {
		return false, nil
	}
	isStale = at == beginning && stateOf(err) == "PF004" && !t.isInner && len(s.leases) > 0
	return isStale, s.told(err, at, t)
}

func (s *scope) does(t *transaction) (at stage, err error) {
	_, err = t.text(s.until, s.begins())
	if err = cmp.Or(err, s.check()); err != nil {
		return beginning, err
	}
	if err = t.work(s.until); err != nil {
		return working, err
	}
	if s.releases {
		// The heartbeat leaves out what is about to be released.
		s.k.change(s.leases, func(of *Lease) { of.resting++ })
		defer s.k.change(s.leases, func(of *Lease) { of.resting-- })
	}
	if err = cmp.Or(s.until.Err(), t.whole(s.until)); err != nil {
		return ending, err
	}
	if s.releases {
		if name, err := t.text(s.until, s.ends()); err != nil {
			return ending, err
		} else if name != nil {
			return ending, s.gone(*name)
		}
	}
	if err = t.commit(s.until); err == nil && s.releases {
		s.k.tell("released", s.k.end(s.leases, ReasonReleased))
	}
	return committing, err
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

// told is what an error means. One of a commit may hide that it has landed.
func (s *scope) told(err error, at stage, t *transaction) error {
	state, isBroken := stateOf(err), t.isBroken(err)
	told := s.kindOf(err, at, isBroken, t.role)
	var lost *Error
	switch isLoss := errors.As(told, &lost) && (lost.Kind == LeaseLost || lost.Kind == TransactionLost); {
	case at != committing:
	case isLoss:
		// The server has ended an idle transaction before it read the commit.
		lost.InDoubt = state != "25P03" && state != "25P04" && !errors.Is(err, pgx.ErrTxCommitRollback)
	case isBroken:
		// It was the caller's context that ended.
		return &Error{Kind: TransactionLost, InDoubt: true, cause: told, message: "the commit was broken off: " + told.Error()}
	}
	return told
}

// kindOf is the typed error, where it is one. A transaction that was broken off because of a loss tells the loss.
func (s *scope) kindOf(err error, at stage, isBroken bool, role string) error {
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
	case at != working && s.held[0].lease == nil && stateOf(err) == "22004":
		// NULL from lease_adopt: an older number is guarded.
		return takenBy("", 0, err, s.held[0].names...)
	default:
		return typed(err, at == working, role)
	}
	return err
}

// untilLoss is a context that ends at a loss, too. The function then is called at one, until leave.
func untilLoss(ctx context.Context, leases []*Lease, then func()) (until context.Context, leave func()) {
	until, cancel := context.WithCancelCause(ctx)
	stops := make([]func() bool, len(leases))
	for i, one := range leases {
		stops[i] = context.AfterFunc(one.loss, func() {
			cancel(one.lost())
			then()
		})
	}
	return until, func() {
		for _, stop := range stops {
			stop()
		}
		cancel(nil)
	}
}
