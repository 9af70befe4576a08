package pgfence

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Pgx begins transactions of pgx: a *pgx.Conn, a *pgxpool.Pool, a *pgxpool.Conn, or a type of the
// program, whose transactions take one more round trip. A pgx.Tx begins a savepoint.
type Pgx interface {
	Begin(context.Context) (pgx.Tx, error)
}

// SQL begins transactions of database/sql: an *sql.DB, an *sql.Conn, or a type of the program with
// their BeginTx. In an *sql.Tx it is a savepoint.
type SQL interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// PgxWork and SQLWork are functions that work in a transaction. Their context ends with the
// caller's, and at a loss of a lease: use it for every statement.
type (
	PgxWork = func(context.Context, pgx.Tx) error
	SQLWork = func(context.Context, *sql.Tx) error
)

// transaction is an open transaction, or a savepoint in a transaction of the program (isInner).
type transaction struct {
	isInner bool
	role    string
	// conn is the connection of pgx. It is nil for database/sql, which may use the connection in a
	// goroutine of its own.
	conn *pgx.Conn
	// socket is the connection, to be cut at a loss, or nil if the driver does not show it.
	socket *pgconn.PgConn
	// hasEnded is true if database/sql has refused to begin on a connection that has ended.
	hasEnded bool
	work     func(context.Context) error
	text     func(context.Context, statement) (*string, error)
	// verify returns an error if the transaction has failed or ended, and the work has hidden that.
	// If the work has ended it, that is pgx.ErrTxClosed.
	verify, commit, rollback func(context.Context) error
	// end returns the connection to its pool, if it has one.
	end func()
}

// session returns whether the session is open, as guardFailed takes it.
func (t *transaction) session() string {
	switch {
	case t.hasEnded, t.conn != nil && t.conn.IsClosed():
		return "closed"
	case t.conn == nil:
		return "unknown"
	}
	return "open"
}

// verifySetting asks the server if the transaction is still the guard's.
func (t *transaction) verifySetting(ctx context.Context) error {
	set, err := t.text(ctx, statement{
		sql: "SELECT nullif(current_setting(" + setting(t.isInner) + ", true), '')",
	})
	if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil || err == nil && set == nil {
		return pgx.ErrTxClosed
	}
	return err
}

// checkedCommit commits only the guard's transaction: otherwise the division fails.
var checkedCommit = "SELECT 1 / count(*) WHERE current_setting(" + setting(false) + ", true) = 'on';" +
	" COMMIT"

var errInTransaction = errors.New("pgfence: the connection is in a transaction already: " +
	"guard its pgx.Tx or *sql.Tx, by a savepoint")

// beginFunc begins a transaction. After an error it has set end, and conn if it has one.
type beginFunc func(context.Context, *transaction) error

func beginPgx(from Pgx, work PgxWork) beginFunc {
	return func(ctx context.Context, t *transaction) error {
		source := from
		switch pool := from.(type) {
		case *pgxpool.Pool:
			pooled, err := pool.Acquire(ctx)
			if err != nil {
				return err
			}
			source, t.end = pooled.Conn(), pooled.Release
		case *pgxpool.Conn:
			source = pool.Conn()
		}
		begin, isChecked := source.Begin, true
		switch source := source.(type) {
		case *pgx.Conn:
			if t.conn = source; !source.IsClosed() && source.PgConn().TxStatus() != 'I' {
				return errInTransaction
			}
			begin = func(ctx context.Context) (pgx.Tx, error) {
				return source.BeginTx(ctx, pgx.TxOptions{CommitQuery: checkedCommit})
			}
		case pgx.Tx:
			t.conn, t.isInner = source.Conn(), true
		default:
			isChecked = false
		}
		tx, err := begin(ctx)
		if err != nil {
			return err
		}
		conn := tx.Conn().PgConn()
		t.conn, t.socket, t.role = tx.Conn(), conn, conn.ParameterStatus("session_authorization")
		t.work = func(ctx context.Context) error { return work(ctx, tx) }
		t.text = func(ctx context.Context, s statement) (text *string, err error) {
			args := append([]any{pgx.QueryExecModeExec}, s.args...)
			err = tx.QueryRow(ctx, s.sql, args...).Scan(&text)
			return text, err
		}
		t.verify = func(ctx context.Context) error {
			switch {
			case conn.IsClosed():
				return net.ErrClosed
			case conn.IsBusy():
				return errors.New("pgfence: the work has not closed its rows")
			case conn.TxStatus() == 'E':
				return pgx.ErrTxCommitRollback
			case conn.TxStatus() == 'I':
				return pgx.ErrTxClosed
			case isChecked:
				return nil
			}
			return t.verifySetting(ctx)
		}
		t.commit = func(ctx context.Context) error {
			err := tx.Commit(ctx)
			// A COMMIT that fails ends the transaction, and the driver then leaves the session open.
			if codeOf(err) == "22012" && conn.IsClosed() {
				err = fmt.Errorf("%w: %w", pgx.ErrTxClosed, err)
			}
			return err
		}
		t.rollback = func(ctx context.Context) error {
			err := tx.Rollback(ctx)
			isLeft := err != nil && !errors.Is(err, pgx.ErrTxClosed)
			if !t.isInner {
				// The work may have begun another one.
				isLeft = !conn.IsClosed() && conn.TxStatus() != 'I'
			}
			if isLeft {
				// What it has done would be committed with what comes next.
				err = tx.Conn().Close(ctx)
			}
			return err
		}
		return nil
	}
}

func beginSQL(from SQL, work SQLWork) beginFunc {
	return func(ctx context.Context, t *transaction) (err error) {
		source := from
		if pool, ok := from.(*sql.DB); ok {
			conn, err := pool.Conn(ctx)
			if err != nil {
				return err
			}
			source, t.end = conn, func() { _ = conn.Close() }
		}
		if conn, ok := source.(*sql.Conn); ok {
			_ = conn.Raw(func(raw any) error {
				if conn, ok := raw.(interface{ Conn() *pgx.Conn }); ok {
					t.socket = conn.Conn().PgConn()
				}
				return nil
			})
		}
		if t.socket != nil && !t.socket.IsClosed() && t.socket.TxStatus() != 'I' {
			return errInTransaction
		}
		tx, isInner := source.(*sql.Tx)
		beginner, canBegin := source.(interface {
			BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
		})
		exec := func(sql string) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := tx.ExecContext(ctx, sql)
				return err
			}
		}
		switch {
		case isInner:
			err = exec("SAVEPOINT pg_fence")(ctx)
			t.commit = exec("RELEASE SAVEPOINT pg_fence")
			t.rollback = func(ctx context.Context) error {
				// A savepoint outlives the rollback to it, and would hide an outer one of the same name.
				err := cmp.Or(exec("ROLLBACK TO SAVEPOINT pg_fence")(ctx), t.commit(ctx))
				if err != nil {
					// What it has done would be committed with the program's transaction.
					err = tx.Rollback()
				}
				return err
			}
		case canBegin:
			tx, err = beginner.BeginTx(ctx, nil)
			t.commit = func(context.Context) error { return tx.Commit() }
			t.rollback = func(context.Context) error { return tx.Rollback() }
		default:
			err = fmt.Errorf("pgfence: %T begins no transactions: "+
				"this takes an *sql.DB, *sql.Conn or *sql.Tx", from)
		}
		t.hasEnded = isAnyOf(err, driver.ErrBadConn, sql.ErrConnDone)
		t.isInner, t.work = isInner, func(ctx context.Context) error { return work(ctx, tx) }
		t.text = func(ctx context.Context, s statement) (text *string, err error) {
			err = tx.QueryRowContext(ctx, s.sql, s.args...).Scan(&text)
			return text, err
		}
		t.verify = t.verifySetting
		return err
	}
}

// Last is an option of a guard: [Releasing] for the last transaction under a lease.
type Last bool

// Releasing releases the lease in the transaction, after its work.
const Releasing Last = true

// Holding guards transactions. It is a [Lease], or an adopted lease, which another system grants
// (see [Fence.Adopted]).
type Holding struct {
	h     *heartbeat
	names []string
	token int64
	// holder is the holder of an adopted number.
	holder string
	// leases are the leases that guard. An adopted lease has none.
	leases Leases
}

// Names returns the names of the lease; of a row lease, its table and its key.
func (o *Holding) Names() []string { return o.names }

// Token returns the fencing token of the lease. It stays the same for as long as the lease is held.
func (o *Holding) Token() int64 { return o.token }

// Options returns a value for "options" in a connection string, or for PGOPTIONS. With it a
// connection presents the token in all its transactions, for code that knows nothing of fences. It
// does not work through a pooler in transaction mode.
func (o *Holding) Options() string { return "-c pg_fence.token=" + strconv.FormatInt(o.token, 10) }

// Guard runs a transaction of pgx. Until it ends nobody else is granted the lease, and its writes
// present the lease's token. It does not begin if the lease is lost. An error or a panic of the
// work rolls it back. In a pgx.Tx of the program it is a savepoint: with [Releasing] the lease is
// released when the program's transaction commits, and stays held if that rolls back.
//
// The error is the work's, or an [Error] of the kinds [LeaseLost] and [TransactionLost], which may
// be InDoubt, [Refused], [NotGranted] and [NotInstalled].
//
// For a row lease Guard writes the row first, so that only its holder can write the row further in
// this transaction. With [Releasing] it releases the row, unless the work has done so.
//
// For an adopted lease Guard returns [LeaseTaken] while a transaction guards an older number, or if
// another holder has adopted this number, and [Refused] with PF001 if a greater number is known.
// With [Releasing] the number is refused from then on.
func (o *Holding) Guard(ctx context.Context, conn Pgx, work PgxWork, last ...Last) error {
	return (&guard{Holding: o, ctx: ctx, open: beginPgx(conn, work)}).run(last)
}

// GuardSQL runs a transaction of database/sql, as [Holding.Guard] runs one of pgx. In an *sql.Tx of
// the program it is a savepoint.
func (o *Holding) GuardSQL(ctx context.Context, db SQL, work SQLWork, last ...Last) error {
	return (&guard{Holding: o, ctx: ctx, open: beginSQL(db, work)}).run(last)
}

// Guard runs a transaction of pgx under several leases at once, as [Holding.Guard] does.
func (f *Fence) Guard(
	ctx context.Context, conn Pgx, leases Leases, work PgxWork, last ...Last,
) error {
	return (&Holding{h: f.h, leases: leases}).Guard(ctx, conn, work, last...)
}

// GuardSQL runs a transaction of database/sql under several leases at once, as [Holding.GuardSQL]
// does.
func (f *Fence) GuardSQL(
	ctx context.Context, db SQL, leases Leases, work SQLWork, last ...Last,
) error {
	return (&Holding{h: f.h, leases: leases}).GuardSQL(ctx, db, work, last...)
}

// guard is a guarded transaction. The context until ends with the caller's, and at a loss.
type guard struct {
	*Holding
	ctx, until context.Context
	open       beginFunc
	releases   bool
	// lockedRows are the row leases whose rows the guard has written.
	lockedRows Leases
	// stage is the stage as guardFailed takes it, and isWorkDone is true after the work.
	stage      string
	isWorkDone bool
}

func (g *guard) run(last []Last) error {
	g.releases = slices.Contains(last, Releasing)
	if len(g.names)+len(g.leases) == 0 {
		return errors.New("pgfence: a transaction under no lease")
	}
	if slices.ContainsFunc(g.leases, func(l *Lease) bool { return l.h != g.h }) {
		// Each fence counts its keys, so this key may belong to another lease here.
		return errors.New("pgfence: a lease of another fence")
	}
	failure, err := g.runOnce()
	if failure.Again {
		g.h.renew(g.ctx, g.leases)
		failure, err = g.runOnce()
	}
	if failure.Suspect {
		g.h.suspect(g.leases)
	}
	return err
}

// leasesToCheck returns the leases whose loss ends the transaction. A releasing guard does not
// check a row lease whose window is over: the table's trigger checks the last write of the row.
func (g *guard) leasesToCheck() (checked Leases) {
	for _, l := range g.leases {
		endError := l.endError.Load()
		isLate := l.tableJSON != "" && g.releases && endError != nil && endError.Reason == ReasonDeadline
		if !isLate {
			checked = append(checked, l)
		}
	}
	return checked
}

func (g *guard) check(leases Leases) (err error) {
	for _, lease := range leases {
		err = cmp.Or(err, lease.Check())
	}
	return err
}

func (g *guard) runOnce() (failure effect, err error) {
	checked := g.leasesToCheck()
	if err := cmp.Or(g.ctx.Err(), g.check(checked)); err != nil {
		return effect{}, err
	}
	until, leave := untilLoss(g.ctx, checked)
	defer leave()
	g.stage, g.until = "open", until
	t := &transaction{end: func() {}}
	defer func() { t.end() }()
	if err := g.open(until, t); err != nil {
		return g.failed(t, err)
	}
	last, isDone := "rolled back", false
	defer func() {
		if g.isWorkDone && g.releases {
			g.h.lastTransaction(g.leases, last)
		}
		for _, l := range g.lockedRows {
			g.h.input(0, func() { g.h.states.rowUnlocked(l.key) })
		}
		g.lockedRows = nil
	}()
	// From here on a loss cuts the connection, even if a statement hangs, or the caller's context
	// has ended.
	defer atLoss(checked, func(*Lease) {
		if t.socket != nil {
			cut(t.socket)
		}
	})()
	// The rollback also follows a panic of the work.
	defer func() {
		if !isDone {
			ctx := context.WithoutCancel(g.ctx)
			ctx, cancel := context.WithTimeout(ctx, waitPortion*time.Millisecond)
			defer cancel()
			// If the rollback fails, the connection is ended.
			_ = t.rollback(ctx)
		}
	}()
	switch err = g.runStages(t, checked); {
	case err != nil:
		failure, err = g.failed(t, err)
		last = failure.Last
	case t.isInner:
		last, isDone = "inner", true
	default:
		last, isDone = "committed", true
	}
	return failure, err
}

func (g *guard) runStages(t *transaction, checked Leases) error {
	g.stage = "begin"
	guard := g.h.schema.guard
	if len(g.leases) == 0 {
		guard = g.h.schema.guardAdopted
	}
	if err := g.sendEach(t, g.h.schema.guardRow, guard); err != nil {
		return err
	}
	if err := g.check(checked); err != nil {
		return err
	}
	g.stage = "work"
	if err := t.work(g.until); err != nil {
		return err
	}
	g.stage, g.isWorkDone = "check", true
	if g.releases {
		// The heartbeat does not renew leases that are about to be released.
		g.h.lastTransaction(g.leases, "begins")
	}
	if err := cmp.Or(g.until.Err(), t.verify(g.until)); err != nil {
		return err
	}
	if g.releases {
		g.stage = "release"
		if err := g.sendEach(t, g.h.schema.guardedRowRelease, g.h.schema.guardedRelease); err != nil {
			return err
		}
	}
	g.stage = "commit"
	return t.commit(g.until)
}

// sendEach sends a statement for each row, and one for all names. They return a row or a name that
// is lost, or NULL.
func (g *guard) sendEach(
	t *transaction, forRow func(*Lease) statement, forNames func(string) statement,
) error {
	var named Leases
	send := func(s statement) (missing *string, err error) {
		if g.stage == "begin" {
			s = withSetting(s, t.isInner)
		}
		return t.text(g.until, s)
	}
	for _, l := range g.leases {
		if l.tableJSON == "" {
			named = append(named, l)
			continue
		}
		missing, err := send(forRow(l))
		if err != nil {
			return err
		}
		if missing != nil {
			g.h.suspect(Leases{l})
			return newLeaseLost(ReasonGone, "", l.names...)
		}
		if g.stage == "begin" {
			g.lockedRows = append(g.lockedRows, l)
			g.h.input(0, func() { g.h.states.rowLocked(l.key) })
		}
	}
	if len(named) == 0 && len(g.leases) > 0 {
		return nil
	}
	missing, err := send(forNames(g.pairs(named)))
	if err != nil || missing == nil {
		return err
	}
	// The rollback has the leases renewed.
	return newLeaseLost(ReasonGone, "", *missing)
}

// pairs returns names and tokens as JSON, a text that every driver can send.
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

// failed returns what follows from an error in the transaction, and the error to return. An [Error]
// remains as it is, such as one of a guard in the work.
func (g *guard) failed(t *transaction, err error) (effect, error) {
	var fenceErr, loss *Error
	isLost := errors.As(errors.Join(g.check(g.leasesToCheck()), context.Cause(g.until)), &loss)
	f := guardFailure{
		Stage: g.stage, Code: codeOf(err), Session: t.session(), Of: "names",
		IsFatal: isFatal(err), IsInner: t.isInner, IsLost: isLost,
	}
	isName := func(l *Lease) bool { return l.tableJSON == "" }
	if len(g.leases) == 0 {
		f.Of = "adopted"
	} else if !slices.ContainsFunc(g.leases, isName) {
		f.Of = "rows"
	}
	ctxErr := g.ctx.Err()
	switch {
	case errors.Is(err, pgx.ErrTxCommitRollback):
		f.Code = "25P02"
	case g.isWorkDone && (errors.Is(err, pgx.ErrTxClosed) ||
		t.isInner && hasAnyPrefix(f.Code, "3B001", "25P01")):
		f.Code = "no transaction"
	case isInterrupted(err) && (isLost || ctxErr != nil):
		// Where a context ends during a statement, the session ends, or its transaction does. If the
		// server has canceled the statement, it has committed nothing, as after a timeout.
		if f.Session = "closed"; f.Code == "57014" {
			f.Code = "25P03"
		} else {
			f.Code = "ended"
		}
	}
	failure := guardFailed(f)
	switch kind := failure.Error; {
	case errors.As(err, &fenceErr):
		return failure, err
	case kind == TransactionLost && ctxErr != nil && !failure.InDoubt:
		if !errors.Is(err, ctxErr) {
			err = fmt.Errorf("%w: %w", ctxErr, err)
		}
		return failure, err
	case kind == LeaseLost:
		lossErr := *loss
		fenceErr, lossErr.cause = &lossErr, err
	case kind == TransactionLost:
		message := "the session has ended under the transaction: " + err.Error()
		switch f.Code {
		case "25P02":
			message = "a statement of the transaction has failed, and all of it is rolled back"
		case "no transaction":
			message = "the work has ended the transaction itself: what it did after that was not guarded"
		}
		fenceErr = newError(kind, errors.Join(ctxErr, err), "%s", message)
	case kind == LeaseTaken:
		holder, _ := newRefused(err).Detail["holder"].(string)
		fenceErr = newLeaseTaken(holder, 0, "", err, g.names...)
	default:
		return failure, typed(err, kind, f.Of == "rows", t.role)
	}
	fenceErr.InDoubt = failure.InDoubt
	return failure, fenceErr
}

// untilLoss returns a context that ends with ctx, at a loss, or when leave is called.
func untilLoss(ctx context.Context, leases Leases) (until context.Context, leave func()) {
	until, cancel := context.WithCancelCause(ctx)
	stop := atLoss(leases, func(l *Lease) { cancel(l.lossError()) })
	return until, func() {
		stop()
		cancel(nil)
	}
}

// atLoss has handle called at the loss of each lease, until stop is called. It waits for the calls
// that have begun.
func atLoss(leases Leases, handle func(*Lease)) (stop func()) {
	var calls sync.WaitGroup
	stops := make([]func() bool, len(leases))
	for i, lease := range leases {
		calls.Add(1)
		stops[i] = context.AfterFunc(lease.loss, func() {
			defer calls.Done()
			handle(lease)
		})
	}
	return func() {
		for _, stop := range stops {
			if stop() {
				calls.Done()
			}
		}
		calls.Wait()
	}
}
