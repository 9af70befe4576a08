package pgfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sort"
	"strings"
)

// Last is an option of the last transaction under a lease.
type Last bool

// Releasing gives the lease back in the transaction, after its work.
const Releasing Last = true

// Guard does work in a transaction during which nobody else is granted the lease, and whose writes present its token. It
// does not begin when the lease is lost.
//
// begin is that of a connection or pool of pgx (conn.Begin), or SQL(db). The work's context ends with ctx and by a loss of
// the lease; use it for every statement. An error of the work rolls back and is returned, typed where it is of pg_fence.
func Guard[Tx any](
	ctx context.Context, lease Holding, begin func(context.Context) (Tx, error),
	work func(context.Context, Tx) error, last ...Last,
) error {
	return under(ctx, &transaction{lease: lease, guards: true, isOurs: true}, begin, work, last)
}

// Present is as Guard, without a lock: the writes present the token, and somebody else may be granted the lease until one
// of them is to a bound table.
func Present[Tx any](
	ctx context.Context, lease Holding, begin func(context.Context) (Tx, error),
	work func(context.Context, Tx) error, last ...Last,
) error {
	return under(ctx, &transaction{lease: lease, isOurs: true}, begin, work, last)
}

// GuardTx is Guard in a transaction that is open: it is guarded from here on, and ended by whoever began it. At
// REPEATABLE READ it must have begun after the lease was acquired (else 40001).
func GuardTx[Tx any](
	ctx context.Context, lease Holding, tx Tx, work func(context.Context, Tx) error, last ...Last,
) error {
	open := func(context.Context) (Tx, error) { return tx, nil }
	return under(ctx, &transaction{lease: lease, guards: true}, open, work, last)
}

// PresentTx is Present in a transaction that is open.
func PresentTx[Tx any](
	ctx context.Context, lease Holding, tx Tx, work func(context.Context, Tx) error, last ...Last,
) error {
	open := func(context.Context) (Tx, error) { return tx, nil }
	return under(ctx, &transaction{lease: lease}, open, work, last)
}

// SQL begins transactions of database/sql: it takes an sql.DB or an sql.Conn.
func SQL(db interface {
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}) func(context.Context) (*sql.Tx, error) {
	return func(ctx context.Context) (*sql.Tx, error) { return db.BeginTx(ctx, nil) }
}

// transaction is one under a lease.
type transaction struct {
	lease  Holding
	guards bool
	// isOurs: it begins and ends here.
	isOurs bool
	// ctx is the work's, and callers what it was made from.
	ctx, callers context.Context
	driver       driverTx
	leave        func()
}

func under[Tx any](
	ctx context.Context, t *transaction, begin func(context.Context) (Tx, error),
	work func(context.Context, Tx) error, last []Last,
) error {
	workCtx, forget := t.lease.common().under(ctx)
	defer forget()
	t.ctx, t.callers = workCtx, ctx
	var tx Tx
	err := t.begin(func() (any, error) {
		var err error
		tx, err = begin(workCtx)
		return tx, err
	})
	if err != nil {
		return err
	}
	defer t.leave()
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
	if len(last) > 0 && bool(last[0]) {
		return t.commitReleasing()
	}
	return t.commit()
}

func (t *transaction) begin(begin func() (any, error)) error {
	for isMended := false; ; isMended = true {
		err := t.tryToBegin(begin)
		if err == nil {
			return nil
		}
		// After a failover no token speaks until its holder has renewed, or adopted again.
		if isMended || !t.isOurs || !t.lease.canMend(err) {
			return err
		}
		if failed := t.lease.mend(t.callers); failed != nil {
			return failed
		}
	}
}

func (t *transaction) tryToBegin(begin func() (any, error)) error {
	if err := t.lease.refuseIfOver(); err != nil {
		return err
	}
	if t.lease.isInDoubt() {
		if err := t.lease.mend(t.callers); err != nil {
			return err
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
	leave, isLost := t.lease.common().interrupts(t.driver.breakOff)
	t.leave = leave
	if isLost {
		err = t.lease.refuseIfOver()
	} else if err = t.speak(); err == nil {
		err = t.lease.refuseIfOver()
	}
	if err != nil {
		err = t.failed(err)
		leave()
	}
	return err
}

// speak has the transaction present the token.
func (t *transaction) speak() error {
	if !t.guards {
		query, token := t.lease.common().presenting()
		_, err := t.driver.value(t.ctx, query, token)
		return err
	}
	names := t.lease.Names()
	sort.Strings(names)
	for _, name := range names {
		query, args := t.lease.guardOf(name)
		if _, err := t.driver.value(t.ctx, query, args...); err != nil {
			return err
		}
	}
	return nil
}

// commitReleasing gives the lease back with the transaction. The heartbeat rests meanwhile: a renewal would wait for it.
func (t *transaction) commitReleasing() error {
	if err := t.lease.takeTurn(t.ctx); err != nil {
		return t.failed(err)
	}
	defer t.lease.giveTurn()
	if err := t.release(); err != nil {
		return t.failed(err)
	}
	if err := t.commit(); err != nil {
		return err
	}
	t.lease.hasBeenReleased()
	return nil
}

func (t *transaction) release() error {
	names, args := t.lease.Names(), []any{t.lease.Token()}
	query := "lease_release($2::text, $1::bigint)::text"
	for _, name := range names {
		args = append(args, name)
	}
	if len(names) > 1 {
		// One by one: drivers disagree on how an array is to be given.
		places := make([]string, len(names))
		for index := range names {
			places[index] = fmt.Sprintf("$%d::text", index+2)
		}
		query = "lease_release_all(ARRAY[" + strings.Join(places, ", ") + "], $1::bigint)::text"
	}
	closing, err := t.driver.value(t.ctx, t.lease.common().fence.call(query), args...)
	if err == nil && closing == nil {
		t.lease.lose(Gone, nil)
		return t.lease.refuseIfOver()
	}
	return err
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
	ctx, cancel := context.WithTimeout(context.Background(), t.lease.common().limit)
	defer cancel()
	_ = t.driver.rollback(ctx)
}

// told is the typed error, where it is one. A transaction that was broken off because of a loss tells the loss.
func (t *transaction) told(err error) error {
	isBroken := t.driver != nil && t.driver.isBroken(err)
	if t.lease.common().loss.Load() != nil && (isBroken || isInterrupted(err)) {
		return t.lease.lost(err)
	}
	found := Classify(err)
	if found != nil && (found.Kind == ErrStaleToken || found.Kind == ErrNotSpeaking) {
		t.lease.beatSoon()
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
