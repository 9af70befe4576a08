package pgfence

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/jackc/pgx/v5"
)

// Last is an option of the last transaction under a lease.
type Last bool

// Releasing gives the lease back in the transaction, after its work.
const Releasing Last = true

// Holding is what guards transactions: a [Lease], or a lease that somebody else grants, under the number that it has there.
type Holding struct {
	k     *keeper
	names []string
	token int64
	// holder is whose the number is, where it is adopted.
	holder string
	// leases are what it is of; none where it is adopted.
	leases Leases
}

// Names are those that it was asked for by.
func (h *Holding) Names() []string { return h.names }

// Token is the acquire's: it serves for as long as the lease is held.
func (h *Holding) Token() int64 { return h.token }

// Options are for code that knows nothing of fences: the value of "options" in a connection string, or of PGOPTIONS, with
// which a connection presents the token in all its transactions. Not through a pooler in transaction mode.
func (h *Holding) Options() string { return "-c pg_fence.token=" + strconv.FormatInt(h.token, 10) }

// Guard runs a transaction of pgx during which nobody else is granted the lease, and whose writes present its token. It does
// not begin when the lease is lost. An error or a panic of the work rolls back. In a pgx.Tx, which somebody has begun, it is a
// savepoint. Of an adopted lease it is [LeaseTaken] while a transaction guards an older number and where another holder has
// adopted this one, and [Refused] with PF001 where a greater one is known; with [Releasing] its number is refused from then on.
func (h *Holding) Guard(ctx context.Context, conn Pgx, work PgxWork, last ...Last) error {
	return (&guard{Holding: h, ctx: ctx, open: onPgx(conn, work)}).run(last)
}

// GuardSQL is Guard with database/sql; in an *sql.Tx it is a savepoint.
func (h *Holding) GuardSQL(ctx context.Context, db SQL, work SQLWork, last ...Last) error {
	return (&guard{Holding: h, ctx: ctx, open: onSQL(db, work)}).run(last)
}

// Guard is [Holding.Guard] by several leases at once.
func (f *Fence) Guard(ctx context.Context, conn Pgx, leases Leases, work PgxWork, last ...Last) error {
	return (&Holding{k: f.k, leases: leases}).Guard(ctx, conn, work, last...)
}

// GuardSQL is [Holding.GuardSQL] by several leases at once.
func (f *Fence) GuardSQL(ctx context.Context, db SQL, leases Leases, work SQLWork, last ...Last) error {
	return (&Holding{k: f.k, leases: leases}).GuardSQL(ctx, db, work, last...)
}

// guard is a transaction under leases. The context until ends with the caller's, and at a loss.
type guard struct {
	*Holding
	ctx, until context.Context
	open       opening
	releases   bool
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
	isInner, err := g.once()
	if g.at == beginning && stateOf(err) == "PF004" && !isInner && len(g.leases) > 0 {
		// After a failover no token speaks until its holder has renewed.
		g.k.keep(g.leases)
		_, err = g.once()
	}
	if state := stateOf(err); state == "PF001" || state == "PF004" {
		// The next renewal tells whether they are lost, when the connection, which is sound, has left the guard.
		g.k.change(g.leases, func(of *Lease) { of.beatAt = 0 })
	}
	return err
}

func (g *guard) check() (err error) {
	for _, lease := range g.leases {
		err = cmp.Or(err, lease.Check())
	}
	return err
}

func (g *guard) once() (isInner bool, err error) {
	if err := cmp.Or(g.ctx.Err(), g.check()); err != nil {
		return false, err
	}
	until, leave := untilLoss(g.ctx, g.leases)
	defer leave()
	g.at, g.until = beginning, until
	t, err := g.open(until)
	if err != nil {
		return false, g.told(err, false, "")
	}
	defer t.end()
	// From here on a loss breaks the connection off, where it hangs, too, also after the end of the caller's context.
	defer atLoss(g.leases, func(*Lease) {
		if t.socket != nil {
			cut(t.socket)
		}
	})()
	isDone := false
	// Also where the work panics.
	defer func() {
		if !isDone {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(g.ctx), longestPortion)
			defer cancel()
			// Where it fails the driver ends the connection.
			_ = t.rollback(ctx)
		}
	}()
	if err = g.does(t); err != nil {
		return t.isInner, g.told(err, t.isBroken(err), t.role)
	}
	isDone = true
	return t.isInner, nil
}

func (g *guard) does(t *transaction) error {
	_, err := t.text(g.until, g.begins())
	if err = cmp.Or(err, g.check()); err != nil {
		return err
	}
	g.at = working
	if err = t.work(g.until); err != nil {
		return err
	}
	g.at = ending
	if g.releases {
		// The heartbeat leaves out what is about to be released.
		g.k.change(g.leases, func(of *Lease) { of.resting++ })
		defer g.k.change(g.leases, func(of *Lease) { of.resting-- })
	}
	if err = cmp.Or(g.until.Err(), t.whole(g.until)); err != nil {
		return err
	}
	if g.releases {
		if name, err := t.text(g.until, g.ends()); err != nil {
			return err
		} else if name != nil {
			isOther := func(of *Lease) bool { return !slices.Contains(of.names, *name) }
			g.k.end(slices.DeleteFunc(slices.Clone(g.leases), isOther), ReasonGone)
			return cmp.Or(g.check(), error(lostBy(ReasonGone, *name)))
		}
	}
	g.at = committing
	if err = t.commit(g.until); err == nil && g.releases {
		g.k.tell("released", g.k.end(g.leases, ReasonReleased))
	}
	return err
}

// recordset is of pairs, and of the holder of an adopted one.
const recordset = `jsonb_to_recordset($1::text::jsonb) AS x(name text, token bigint, holder text)`

func (g *guard) begins() statement {
	token := "x.token"
	if len(g.leases) == 0 {
		// Each transaction makes the number known, and whose it is.
		token = "(SELECT lease_adopt(x.name, x.token, x.holder))"
	}
	// In the same order everywhere, so that no two wait for each other.
	return g.k.call(`SELECT count(lease_guard(x.name, `+token+`))::text
		FROM (SELECT * FROM `+recordset+` ORDER BY name COLLATE "C") AS x`, g.pairs())
}

// ends returns a name under which there is nothing to be released, or NULL.
func (g *guard) ends() statement {
	return g.k.call(`SELECT min(x.name) FILTER (WHERE lease_release(x.name, x.token) IS NULL) FROM `+recordset, g.pairs())
}

// pairs are names and tokens in a form that every driver can send.
func (g *guard) pairs() string {
	names, tokens, _ := pairs(g.leases)
	if len(g.leases) == 0 {
		names, tokens = g.names, []int64{g.token}
	}
	all := make([]map[string]any, len(names))
	for i, name := range names {
		all[i] = map[string]any{"name": name, "token": tokens[i], "holder": g.holder}
	}
	text, _ := json.Marshal(all)
	return string(text)
}

// told is what an error means, in a transaction that was broken off by it, or not. One of a commit may hide that it has landed.
func (g *guard) told(err error, isBroken bool, role string) error {
	state, own := stateOf(err), g.ctx.Err()
	// The server has ended an idle transaction before it read the commit.
	inDoubt := g.at == committing && state != "25P03" && state != "25P04"
	var told *Error
	switch {
	case errors.As(err, &told):
	case errors.Is(err, pgx.ErrTxCommitRollback), g.at > working && state == "25P02":
		return failedInside(err)
	case (isBroken || isInterrupted(err)) && errors.As(errors.Join(g.check(), context.Cause(g.until)), &told):
		again := *told
		again.cause, again.InDoubt = err, inDoubt
		return &again
	case inDoubt && (isBroken || isInterrupted(err)), isBroken && own == nil && !isAnyOf(err, context.Canceled, context.DeadlineExceeded):
		// Else it is by a context of the work's own.
		told = tell(TransactionLost, errors.Join(own, err), "the session has ended under the transaction: %v", err)
		told.InDoubt = inDoubt
		return told
	case isBroken || isInterrupted(err):
		if own != nil && !errors.Is(err, own) {
			return fmt.Errorf("%w: %w", own, err)
		}
	case g.at == beginning && len(g.leases) == 0 && (state == "22004" || state == "PF004"):
		// NULL from lease_adopt: an older number is guarded. PF004 from it: another holder has adopted this number.
		holder, _ := refused(err, state).Detail["holder"].(string)
		return takenBy(holder, 0, err, g.names...)
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

// atLoss has the function called at the loss of each, unless what it returns is called before. That waits for the calls.
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
