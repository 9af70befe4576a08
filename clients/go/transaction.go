package pgfence

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Pgx is a *pgx.Conn, a *pgxpool.Pool or *pgxpool.Conn, or whatever else begins transactions of
// pgx; or a pgx.Tx.
type Pgx interface {
	Begin(context.Context) (pgx.Tx, error)
}

// SQL is an *sql.DB, an *sql.Conn, or whatever else begins transactions of database/sql; or an
// *sql.Tx.
type SQL interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// PgxWork and SQLWork are what is done in a transaction. Its context ends with the caller's, and at
// a loss: use it for every statement.
type (
	PgxWork = func(context.Context, pgx.Tx) error
	SQLWork = func(context.Context, *sql.Tx) error
)

// transaction is one that is open. Within one that somebody else ends it is a savepoint (isInner).
type transaction struct {
	isInner bool
	role    string
	// socket is where it hangs; nil where the driver does not show it.
	socket *pgconn.PgConn
	work   func(context.Context) error
	text   func(context.Context, statement) (*string, error)
	// whole is an error where the work swallowed one that undid it, or ended it.
	whole, commit, rollback func(context.Context) error
	// isBroken tells, after that error, whether the session has ended.
	isBroken func(error) bool
	// end gives the connection back.
	end func()
}

// opening begins one.
type opening func(context.Context) (*transaction, error)

func onPgx(from Pgx, work PgxWork) opening {
	return func(ctx context.Context) (*transaction, error) {
		on, end := from, func() {}
		switch pool := from.(type) {
		case *pgxpool.Pool:
			pooled, err := pool.Acquire(ctx)
			if err != nil {
				return nil, err
			}
			on, end = pooled.Conn(), pooled.Release
		case *pgxpool.Conn:
			on = pool.Conn()
		}
		if conn, is := on.(*pgx.Conn); is && !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' {
			end()
			return nil, errors.New("pgfence: the connection is in a transaction already: " +
				"guard its pgx.Tx, by a savepoint")
		}
		tx, err := on.Begin(ctx)
		if err != nil {
			end()
			return nil, err
		}
		conn := tx.Conn().PgConn()
		_, isInner := on.(pgx.Tx)
		return &transaction{
			isInner: isInner, role: conn.ParameterStatus("session_authorization"), socket: conn,
			work: func(ctx context.Context) error { return work(ctx, tx) },
			text: func(ctx context.Context, s statement) (text *string, err error) {
				args := append([]any{pgx.QueryExecModeExec}, s.args...)
				err = tx.QueryRow(ctx, s.sql, args...).Scan(&text)
				return text, err
			},
			whole: func(context.Context) error {
				switch {
				case conn.IsClosed():
					return tell(TransactionLost, nil, "the session has ended under the transaction")
				case conn.TxStatus() == 'E':
					return failedInside(nil)
				case conn.TxStatus() == 'I':
					return endedInside()
				}
				return nil
			},
			commit: tx.Commit, rollback: tx.Rollback, end: end,
			isBroken: func(error) bool { return conn.IsClosed() },
		}, nil
	}
}

func onSQL(from SQL, work SQLWork) opening {
	return func(ctx context.Context) (_ *transaction, err error) {
		on, t := from, &transaction{isBroken: sessionEnded, end: func() {}}
		if pool, is := from.(*sql.DB); is {
			conn, err := pool.Conn(ctx)
			if err != nil {
				return nil, err
			}
			on, t.end = conn, func() { _ = conn.Close() }
		}
		if conn, is := on.(*sql.Conn); is {
			_ = conn.Raw(func(raw any) error {
				if onPgx, is := raw.(interface{ Conn() *pgx.Conn }); is {
					t.socket = onPgx.Conn().PgConn()
				}
				return nil
			})
		}
		tx, isInner := on.(*sql.Tx)
		begins, canBegin := on.(interface {
			BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
		})
		does := func(sql string) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := tx.ExecContext(ctx, sql)
				return err
			}
		}
		switch {
		case isInner:
			err = does("SAVEPOINT pg_fence")(ctx)
			t.commit, t.rollback = does("RELEASE SAVEPOINT pg_fence"), does("ROLLBACK TO SAVEPOINT pg_fence")
		case canBegin:
			tx, err = begins.BeginTx(ctx, nil)
			t.commit = func(context.Context) error { return tx.Commit() }
			t.rollback = func(context.Context) error { return tx.Rollback() }
		default:
			err = fmt.Errorf("pgfence: %T begins no transactions: "+
				"this takes an *sql.DB, *sql.Conn or *sql.Tx", from)
		}
		if err != nil {
			t.end()
			return nil, err
		}
		t.isInner, t.work = isInner, func(ctx context.Context) error { return work(ctx, tx) }
		t.text = func(ctx context.Context, s statement) (text *string, err error) {
			err = tx.QueryRowContext(ctx, s.sql, s.args...).Scan(&text)
			return text, err
		}
		t.whole = func(ctx context.Context) error {
			// The token was set for that transaction alone.
			token, err := t.text(ctx, statement{
				sql: "SELECT nullif(current_setting('pg_fence.token', true), '')",
			})
			if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil || err == nil && token == nil {
				return endedInside()
			}
			return err
		}
		return t, nil
	}
}

// Last is an option of the last transaction under a lease.
type Last bool

// Releasing gives the lease back in the transaction, after its work.
const Releasing Last = true

// Holding is what guards transactions: a [Lease], or a lease that somebody else grants, under the
// number that it has there.
type Holding struct {
	h     *heartbeat
	names []string
	token int64
	// holder is whose the number is, where it is adopted.
	holder string
	// leases are what it is of; none where it is adopted.
	leases Leases
}

// Names are those that it was asked for by; of a row lease, its table and its key.
func (o *Holding) Names() []string { return o.names }

// Token is the acquire's: it serves for as long as the lease is held.
func (o *Holding) Token() int64 { return o.token }

// Options are for code that knows nothing of fences: the value of "options" in a connection string,
// or of PGOPTIONS, with which a connection presents the token in all its transactions. Not through
// a pooler in transaction mode.
func (o *Holding) Options() string { return "-c pg_fence.token=" + strconv.FormatInt(o.token, 10) }

// Guard runs a transaction of pgx during which nobody else is granted the lease, and whose writes
// present its token. It does not begin when the lease is lost. An error or a panic of the work
// rolls back. In a pgx.Tx, which somebody has begun, it is a savepoint; with [Releasing] the lease
// is released when that transaction has committed, and lives on where it has not.
//
// Of a row lease it writes the row first, so that all further writes of the row in this transaction
// are its holder's; with [Releasing] it gives the row up, unless the work has.
//
// Of an adopted lease it is [LeaseTaken] while a transaction guards an older number and where
// another holder has adopted this one, and [Refused] with PF001 where a greater one is known; with
// [Releasing] its number is refused from then on.
func (o *Holding) Guard(ctx context.Context, conn Pgx, work PgxWork, last ...Last) error {
	return (&guard{Holding: o, ctx: ctx, open: onPgx(conn, work)}).run(last)
}

// GuardSQL is Guard with database/sql; in an *sql.Tx it is a savepoint.
func (o *Holding) GuardSQL(ctx context.Context, db SQL, work SQLWork, last ...Last) error {
	return (&guard{Holding: o, ctx: ctx, open: onSQL(db, work)}).run(last)
}

// Guard is [Holding.Guard] by several leases at once.
func (f *Fence) Guard(
	ctx context.Context, conn Pgx, leases Leases, work PgxWork, last ...Last,
) error {
	return (&Holding{h: f.h, leases: leases}).Guard(ctx, conn, work, last...)
}

// GuardSQL is [Holding.GuardSQL] by several leases at once.
func (f *Fence) GuardSQL(
	ctx context.Context, db SQL, leases Leases, work SQLWork, last ...Last,
) error {
	return (&Holding{h: f.h, leases: leases}).GuardSQL(ctx, db, work, last...)
}

// guard is a transaction under leases. The context until ends with the caller's, and at a loss.
type guard struct {
	*Holding
	ctx, until context.Context
	open       opening
	releases   bool
	// touched are the row leases whose rows it has written.
	touched Leases
	// at is how far it has come.
	at stage
}

type stage int

const (
	beginning stage = iota
	working
	ending
	committing
)

func (g *guard) run(last []Last) error {
	g.releases = slices.Contains(last, Releasing)
	if len(g.names)+len(g.leases) == 0 {
		return errors.New("pgfence: a transaction under no lease")
	}
	if slices.ContainsFunc(g.leases, func(l *Lease) bool { return l.h != g.h }) {
		// Its key is another lease's here.
		return errors.New("pgfence: a lease of another fence")
	}
	isInner, err := g.once()
	if g.at == beginning && stateOf(err) == "PF004" && !isInner && len(g.leases) > 0 {
		// After a failover no token speaks until its holder has renewed.
		g.h.renew(g.ctx, g.leases)
		_, err = g.once()
	}
	if hasAnyPrefix(stateOf(err), "PF001", "PF004") {
		// The next renewal tells whether they are lost.
		g.h.suspect(g.leases)
	}
	return err
}

// held are the leases that can be lost under the transaction. Not a row lease whose window is over:
// its last write is checked by the table's trigger.
func (g *guard) held() (held Leases) {
	for _, l := range g.leases {
		over := l.over.Load()
		isLate := l.table != "" && g.releases && over != nil && over.Reason == ReasonDeadline
		if !isLate {
			held = append(held, l)
		}
	}
	return held
}

func (g *guard) check(held Leases) (err error) {
	for _, lease := range held {
		err = cmp.Or(err, lease.Check())
	}
	return err
}

func (g *guard) once() (isInner bool, err error) {
	held := g.held()
	if err := cmp.Or(g.ctx.Err(), g.check(held)); err != nil {
		return false, err
	}
	until, leave := untilLoss(g.ctx, held)
	defer leave()
	g.at, g.until = beginning, until
	t, err := g.open(until)
	if err != nil {
		return false, g.told(err, false, "")
	}
	defer t.end()
	last, isDone := "rolled back", false
	defer func() {
		if g.at >= ending && g.releases {
			g.h.last(g.leases, last)
		}
		for _, l := range g.touched {
			g.h.input(0, func() { g.h.states.rowUnlocked(l.key) })
		}
		g.touched = nil
	}()
	// From here on a loss breaks the connection off, where it hangs, too, also after the end of the
	// caller's context.
	defer atLoss(held, func(*Lease) {
		if t.socket != nil {
			cut(t.socket)
		}
	})()
	// Also where the work panics.
	defer func() {
		if !isDone {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(g.ctx), waitPortion*time.Millisecond)
			defer cancel()
			// Where it fails the driver ends the connection.
			_ = t.rollback(ctx)
		}
	}()
	err = g.does(t, held)
	switch {
	case err == nil && t.isInner:
		last, isDone = "inner", true
	case err == nil:
		last, isDone = "committed", true
	default:
		err = g.told(err, t.isBroken(err), t.role)
		var told *Error
		if errors.As(err, &told) && told.InDoubt {
			last = "in doubt"
		}
	}
	return t.isInner, err
}

func (g *guard) does(t *transaction, held Leases) error {
	guard := g.h.schema.guard
	if len(g.leases) == 0 {
		guard = g.h.schema.guardAdopted
	}
	if err := g.asks(t, g.h.schema.guardRow, guard); err != nil {
		return err
	}
	if err := g.check(held); err != nil {
		return err
	}
	g.at = working
	if err := t.work(g.until); err != nil {
		return err
	}
	g.at = ending
	if g.releases {
		// The heartbeat leaves out what is about to be released.
		g.h.last(g.leases, "begins")
	}
	if err := cmp.Or(g.until.Err(), t.whole(g.until)); err != nil {
		return err
	}
	if g.releases {
		if err := g.asks(t, g.h.schema.lastOfRow, g.h.schema.last); err != nil {
			return err
		}
	}
	g.at = committing
	return t.commit(g.until)
}

// asks sends the statement of each row, and that of all names. They return what is not there, or
// NULL.
func (g *guard) asks(
	t *transaction, ofRow func(*Lease) statement, ofNames func(string) statement,
) error {
	var named Leases
	for _, l := range g.leases {
		if l.table == "" {
			named = append(named, l)
			continue
		}
		missing, err := t.text(g.until, ofRow(l))
		if err != nil {
			return err
		}
		if missing != nil {
			g.h.suspect(Leases{l})
			return lostBy(ReasonGone, "", l.names...)
		}
		if g.at == beginning {
			g.touched = append(g.touched, l)
			g.h.input(0, func() { g.h.states.rowLocked(l.key) })
		}
	}
	if len(named) == 0 && len(g.leases) > 0 {
		return nil
	}
	missing, err := t.text(g.until, ofNames(g.pairs(named)))
	if err != nil || missing == nil {
		return err
	}
	g.h.suspect(named)
	return lostBy(ReasonGone, "", *missing)
}

// pairs are names and tokens in a form that every driver can send.
func (g *guard) pairs(leases Leases) string {
	all := []map[string]any{}
	if len(g.leases) == 0 {
		all = append(all, map[string]any{"name": g.names[0], "token": g.token, "holder": g.holder})
	}
	for _, l := range leases {
		for _, name := range l.names {
			all = append(all, map[string]any{"name": name, "token": l.token})
		}
	}
	text, _ := json.Marshal(all)
	return string(text)
}

// told is what an error means, in a transaction that was broken off by it, or not. One of a commit
// may hide that it has landed.
func (g *guard) told(err error, isBroken bool, role string) error {
	state, own := stateOf(err), g.ctx.Err()
	// The server has ended an idle transaction before it read the commit.
	inDoubt := g.at == committing && !hasAnyPrefix(state, "25P03", "25P04")
	loss := errors.Join(g.check(g.held()), context.Cause(g.until))
	var told *Error
	switch {
	case errors.As(err, &told):
	case errors.Is(err, pgx.ErrTxCommitRollback), g.at > working && state == "25P02":
		return failedInside(err)
	case (isBroken || isInterrupted(err)) && errors.As(loss, &told):
		again := *told
		again.cause, again.InDoubt = err, inDoubt
		return &again
	case inDoubt && (isBroken || isInterrupted(err)), isBroken && own == nil && !isOfContext(err):
		// Else it is by a context of the work's own.
		cause := errors.Join(own, err)
		told = tell(TransactionLost, cause, "the session has ended under the transaction: %v", err)
		told.InDoubt = inDoubt
		return told
	case isBroken || isInterrupted(err):
		if own != nil && !errors.Is(err, own) {
			return fmt.Errorf("%w: %w", own, err)
		}
	case g.at == beginning && len(g.leases) == 0 && hasAnyPrefix(state, "22004", "PF004"):
		// NULL from lease_adopt: an older number is guarded. PF004 from it: another holder has
		// adopted this number.
		holder, _ := refused(err, state).Detail["holder"].(string)
		return takenBy(holder, 0, "", err, g.names...)
	default:
		return typed(err, g.at == working, role)
	}
	return err
}

// untilLoss is a context that ends at a loss, too.
func untilLoss(ctx context.Context, leases Leases) (until context.Context, leave func()) {
	until, cancel := context.WithCancelCause(ctx)
	stop := atLoss(leases, func(of *Lease) { cancel(of.lost()) })
	return until, func() {
		stop()
		cancel(nil)
	}
}

// atLoss has the function called at the loss of each, unless what it returns is called before. That
// waits for the calls.
func atLoss(leases Leases, does func(*Lease)) (stop func()) {
	var calls sync.WaitGroup
	stops := make([]func() bool, len(leases))
	for i, one := range leases {
		calls.Add(1)
		stops[i] = context.AfterFunc(one.loss, func() {
			defer calls.Done()
			does(one)
		})
	}
	return func() {
		for _, stops := range stops {
			if stops() {
				calls.Done()
			}
		}
		calls.Wait()
	}
}
