package pgfence

import (
	"context"
	"database/sql"
	"errors"
	"strconv"
)

// Last is an option of the last transaction under a lease.
type Last bool

// Releasing gives the lease back in the transaction, after its work.
const Releasing Last = true

// Leases are several at once, for one transaction: Guard(ctx, pgfence.Leases{one, other}, …). They are guarded by one
// statement, in the order of their names, and the transaction ends with the first that is lost.
type Leases []*Lease

// Token is that of the last one: every one of them speaks for its own lease where a transaction is guarded.
func (l Leases) Token() int64 {
	if len(l) == 0 {
		return 0
	}
	return l[len(l)-1].Token()
}

// Names are those of all of them.
func (l Leases) Names() (names []string) {
	for _, lease := range l {
		names = append(names, lease.names...)
	}
	return names
}

// Release gives all of them back, and returns the first error.
func (l Leases) Release() (first error) {
	for _, lease := range l {
		if err := lease.Release(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

func (l Leases) each() (each []holder) {
	for _, lease := range l {
		each = append(each, lease)
	}
	return each
}

// Guard does work in a transaction during which nobody else is granted the lease, and whose writes present its token. It
// does not begin when the lease is lost.
//
// begin is that of a connection or pool of pgx (conn.Begin), or SQL(db). The work's context ends with ctx and by a loss of
// the lease; use it for every statement. An error of the work rolls back and is returned, typed where it is of pg_fence. A
// transaction that was rolled back under its work is an error, too, where the work has none.
func Guard[Tx any](
	ctx context.Context, lease Holding, begin func(context.Context) (Tx, error),
	work func(context.Context, Tx) error, last ...Last,
) error {
	return under(ctx, &transaction{leases: lease.each(), guards: true, isOurs: true}, begin, work, last)
}

// Present is as Guard, without a lock: the writes present the token, and somebody else may be granted the lease until one
// of them is to a bound table.
func Present[Tx any](
	ctx context.Context, lease Holding, begin func(context.Context) (Tx, error),
	work func(context.Context, Tx) error, last ...Last,
) error {
	return under(ctx, &transaction{leases: lease.each(), isOurs: true}, begin, work, last)
}

// GuardTx is Guard in a transaction that is open: it is guarded from here on, and the code that began it ends it. At
// REPEATABLE READ it must have begun after the lease was acquired (else 40001).
func GuardTx[Tx any](
	ctx context.Context, lease Holding, tx Tx, work func(context.Context, Tx) error, last ...Last,
) error {
	open := func(context.Context) (Tx, error) { return tx, nil }
	return under(ctx, &transaction{leases: lease.each(), guards: true}, open, work, last)
}

// PresentTx is Present in a transaction that is open.
func PresentTx[Tx any](
	ctx context.Context, lease Holding, tx Tx, work func(context.Context, Tx) error, last ...Last,
) error {
	open := func(context.Context) (Tx, error) { return tx, nil }
	return under(ctx, &transaction{leases: lease.each()}, open, work, last)
}

// SQL begins transactions of database/sql: it takes an sql.DB or an sql.Conn.
func SQL(db interface {
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}) func(context.Context) (*sql.Tx, error) {
	return func(ctx context.Context) (*sql.Tx, error) { return db.BeginTx(ctx, nil) }
}

// transaction is one under a lease, or several.
type transaction struct {
	leases []holder
	guards bool
	// isOurs: it begins and ends here.
	isOurs bool
	// ctx is the work's, and callers what it was made from.
	ctx, callers context.Context
	driver       driverTx
	// leave has a loss break it off no more.
	leave []func()
}

func under[Tx any](
	ctx context.Context, t *transaction, begin func(context.Context) (Tx, error),
	work func(context.Context, Tx) error, last []Last,
) (err error) {
	if len(t.leases) == 0 {
		return errors.New("pgfence: a transaction under no lease")
	}
	ctx, end := t.fence().telemetry.Start(ctx, "pg_fence.guard", t.names())
	defer func() {
		countRefused(t.fence().telemetry, err)
		end(err)
	}()
	t.callers = ctx
	workCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	t.ctx = workCtx
	for _, lease := range t.leases {
		forget, isLost := lease.common().interrupts(func() { cancel(lease.common().loss.Load()) })
		defer forget()
		if isLost {
			cancel(lease.lost(nil))
		}
	}
	var tx Tx
	err = t.begin(func() (any, error) {
		var err error
		tx, err = begin(workCtx)
		return tx, err
	})
	if err != nil {
		return err
	}
	defer t.forget()
	isDone := false
	defer func() {
		if !isDone {
			// The work has panicked.
			t.rollBack()
		}
	}()
	err = work(workCtx, tx)
	isDone = true
	if err != nil {
		return t.failed(err)
	}
	if err := t.driver.goesOn(workCtx); err != nil {
		return t.failed(err)
	}
	if len(last) > 0 && bool(last[0]) {
		return t.commitReleasing()
	}
	return t.commit()
}

func (t *transaction) fence() *Fence { return t.leases[0].common().fence }

func (t *transaction) last() holder { return t.leases[len(t.leases)-1] }

func (t *transaction) names() (names []string) {
	for _, lease := range t.leases {
		names = append(names, lease.common().names...)
	}
	return names
}

func (t *transaction) forget() {
	for _, leave := range t.leave {
		leave()
	}
	t.leave = nil
}

func (t *transaction) refuseIfOver() error {
	for _, lease := range t.leases {
		if err := lease.refuseIfOver(); err != nil {
			return err
		}
	}
	return nil
}

func (t *transaction) begin(begin func() (any, error)) error {
	for isMended := false; ; isMended = true {
		err := t.tryToBegin(begin)
		if err == nil || isMended || !t.isOurs {
			return err
		}
		// After a failover no token speaks until its holder has renewed, or adopted again.
		mends := false
		for _, lease := range t.leases {
			if lease.canMend(err) {
				mends = true
				if failed := lease.mend(t.callers); failed != nil {
					return failed
				}
			}
		}
		if !mends {
			return err
		}
	}
}

func (t *transaction) tryToBegin(begin func() (any, error)) error {
	if err := t.refuseIfOver(); err != nil {
		return err
	}
	for _, lease := range t.leases {
		if lease.isInDoubt() {
			if err := lease.mend(t.callers); err != nil {
				return err
			}
		}
	}
	tx, err := begin()
	if err != nil {
		return t.told(err)
	}
	if t.driver, err = driverOf(tx); err != nil {
		return err
	}
	// From here on a loss breaks the connection off, where it hangs, too.
	for _, lease := range t.leases {
		leave, _ := lease.common().interrupts(t.driver.breakOff)
		t.leave = append(t.leave, leave)
	}
	if err = t.refuseIfOver(); err == nil {
		if err = t.speak(); err == nil {
			err = t.refuseIfOver()
		}
	}
	if err != nil {
		err = t.failed(err)
		t.forget()
	}
	return err
}

// speak has the transaction present the token.
func (t *transaction) speak() error {
	query, args := t.last().common().presenting()
	if t.guards && len(t.leases) == 1 {
		query, args = t.leases[0].guarding()
	} else if t.guards {
		query, args = t.each("lease_guard", "ORDER BY x.name")
	}
	_, err := t.driver.value(t.ctx, query, args...)
	return err
}

// each is a statement that calls a function for every name of several leases. It answers NULL where one of the calls does.
func (t *transaction) each(function, order string) (string, []any) {
	var names, tokens []string
	for _, lease := range t.leases {
		for _, name := range lease.common().names {
			names = append(names, name)
			tokens = append(tokens, strconv.FormatInt(lease.common().token, 10))
		}
	}
	query := "SELECT nullif(bool_and(" + t.fence().schema + function + "(x.name, x.token::bigint) IS NOT NULL), false) FROM " +
		"(SELECT * FROM unnest($1::text::text[], $2::text::text[]) AS x (name, token) " + order + ") AS x"
	return query, []any{arrayOf(names), arrayOf(tokens)}
}

// commitReleasing gives the lease back with the transaction. The heartbeat rests meanwhile: a renewal would wait for it.
func (t *transaction) commitReleasing() error {
	for _, lease := range t.leases {
		if err := lease.takeTurn(t.ctx); err != nil {
			return t.failed(err)
		}
		defer lease.giveTurn()
	}
	for _, lease := range t.leases {
		query, args := lease.releasing()
		closing, err := t.driver.value(t.ctx, query, args...)
		if err == nil && closing == nil {
			lease.lose(Gone, nil)
			err = lease.refuseIfOver()
		}
		if err != nil {
			return t.failed(err)
		}
	}
	if err := t.commit(); err != nil {
		return err
	}
	for _, lease := range t.leases {
		lease.hasBeenReleased()
	}
	return nil
}

func (t *transaction) commit() error {
	if !t.isOurs {
		return nil
	}
	err := t.driver.commit(t.ctx)
	if err == nil {
		return nil
	}
	told := t.told(err)
	if !t.driver.isBroken(err) {
		t.rollBack()
		return told
	}
	inDoubt := Classify(told)
	if inDoubt == nil {
		// It was the caller's context that ended, in the middle of the commit.
		inDoubt = fromServer(ErrTransactionLost, err, "", nil)
	}
	inDoubt = inDoubt.copyOf(err)
	inDoubt.InDoubt = true
	return inDoubt
}

// failed rolls back, and returns the error that led here.
func (t *transaction) failed(err error) error {
	t.rollBack()
	return t.told(err)
}

func (t *transaction) rollBack() {
	if !t.isOurs {
		return
	}
	// Also where the work's context has ended.
	ctx, cancel := context.WithTimeout(context.Background(), t.leases[0].common().limit)
	defer cancel()
	_ = t.driver.rollback(ctx)
}

// told is the typed error, where it is one. A transaction that was broken off because of a loss tells the loss.
func (t *transaction) told(err error) error {
	isBroken := t.driver != nil && t.driver.isBroken(err)
	found := Classify(err)
	for _, lease := range t.leases {
		if lease.common().loss.Load() != nil && (isBroken || isInterrupted(err)) {
			return lease.lost(err)
		}
		if found != nil && (found.Kind == ErrStaleToken || found.Kind == ErrNotSpeaking) {
			lease.beatSoon()
		}
	}
	var typed *Error
	switch {
	case errors.As(err, &typed):
		return err
	case isBroken && t.callers.Err() != nil:
		return err
	case isBroken:
		state, server := sqlState(err)
		return fromServer(ErrTransactionLost, err, state, server)
	case found == nil || found.Kind == ErrTransactionLost:
		// Where another connection of the work's broke, that is its own business.
		return err
	default:
		return found
	}
}

// isInterrupted tells what comes of a context that has ended. lib/pq returns the server's answer to its cancel.
func isInterrupted(err error) bool {
	state, _ := sqlState(err)
	return errors.Is(err, context.Canceled) || errors.Is(err, sql.ErrTxDone) || state == "57014"
}
