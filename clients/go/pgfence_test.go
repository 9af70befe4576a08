package pgfence_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"pgfence.example/pgfence"
)

// The part that the vectors and the scenarios of all clients do not show: database/sql, pools, what
// errors say, and what is Go's own. DATABASE_URL names a database with the extension that is
// otherwise of no use: tables are made and dropped in it.

var (
	url        = os.Getenv("DATABASE_URL")
	background = context.Background()
	long       = pgfence.Options{TTL: 5 * time.Minute}
	short      = pgfence.Options{TTL: time.Second}
	forever    = pgfence.Options{Wait: time.Hour}
)

const (
	pay  = "UPDATE orders SET status = 'paid'"
	undo = "UPDATE orders SET status = 'undone'"
	held = "SELECT count(*) FROM fence.leases WHERE state IN ('held', 'uncommitted')"
)

// place is what a test has: a table, a fence, and a connection beside it.
type place struct {
	*testing.T
	admin *pgx.Conn
	fence *pgfence.Fence
}

// in makes it, and at the end sees to it that nothing is left: no lease, no goroutine.
func in(t *testing.T) *place {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	p, before := &place{T: t}, runtime.NumGoroutine()
	p.admin = have(pgx.Connect(background, url))
	p.sql(`DROP TABLE IF EXISTS orders;
		CREATE TABLE orders (id bigint PRIMARY KEY, status text, until timestamptz);
		INSERT INTO orders VALUES (7, 'new'); SELECT fence_protect('orders', lease => 'order:{id}')`)
	// A panic there takes nothing from the lease.
	p.fence = pgfence.New(url, pgfence.OnEvent(func(e pgfence.Event) { panic(e) }))
	t.Cleanup(func() {
		p.fence.Close()
		p.is(try(p.fence, long, "late"), pgfence.Closed)
		for tries := 0; p.sql(held) != "0" || runtime.NumGoroutine() > before; tries++ {
			if tries == 100 {
				p.Fatalf("%s leases, %d goroutines after %d", p.sql(held), runtime.NumGoroutine(), before)
			}
			time.Sleep(100 * time.Millisecond)
		}
		must(p.admin.Close(background))
	})
	return p
}

func (p *place) database(driver string) *sql.DB {
	db := have(sql.Open(driver, strings.Replace(url, "?", "?sslmode=disable&", 1)))
	p.Cleanup(func() { _ = db.Close() })
	return db
}

// sql runs statements, and returns the first value of the last one.
func (p *place) sql(statements string) string {
	results := have(p.admin.PgConn().Exec(background, statements).ReadAll())
	if rows := results[len(results)-1].Rows; len(rows) > 0 {
		return string(rows[0][0])
	}
	return ""
}

func (p *place) acquire(options pgfence.Options, names ...string) *pgfence.Lease {
	return have(p.fence.Acquire(background, names, options))
}

// try is the error of an acquire.
func try(fence *pgfence.Fence, options pgfence.Options, names ...string) error {
	return second(fence.Acquire(background, names, options))
}

// keep is the error of keeping a row.
func keep(fence *pgfence.Fence, table string, options pgfence.RowOptions) error {
	return second(fence.KeepRow(background, table, map[string]any{"id": 7}, 1, options))
}

func (p *place) equal(is, should any) {
	p.Helper()
	if is != should {
		p.Fatalf("it is %v and should be %v", is, should)
	}
}

// is looks for a kind, another error or none, and for words of its text.
func (p *place) is(err, target error, words ...string) *pgfence.Error {
	p.Helper()
	for _, word := range append(words, "") {
		if !errors.Is(err, target) || !strings.Contains(fmt.Sprint(err), word) {
			p.Fatalf("it is %v and should be %v: %s", err, target, word)
		}
	}
	var told *pgfence.Error
	errors.As(err, &told)
	return told
}

// have is what there is without an error.
func have[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func must(err error)                     { have(0, err) }
func second[T any](_ T, err error) error { return err }

// does statements, and other work.
func does(steps ...any) pgfence.SQLWork {
	return func(ctx context.Context, tx *sql.Tx) (err error) {
		for _, step := range steps {
			if statement, is := step.(string); is && err == nil {
				_, err = tx.ExecContext(ctx, statement)
			} else if err == nil {
				err = step.(pgfence.SQLWork)(ctx, tx)
			}
		}
		return err
	}
}

// Those of pgx are the scenarios'.
func TestATransactionOfDatabaseSQLEndsAsItsWorkDoes(t *testing.T) {
	for _, driver := range []string{"pgx", "postgres"} {
		p := in(t)
		// Two of them hang for longer than the ttl.
		lease := p.acquire(pgfence.Options{TTL: 3 * time.Second}, "order:7")
		db, other := p.database(driver), p.acquire(long, "other")
		fails := func(context.Context, *sql.Tx) error { return io.EOF }
		commits := func(_ context.Context, tx *sql.Tx) error { return tx.Commit() }
		swallows := func(ctx context.Context, tx *sql.Tx) error {
			_, _ = tx.ExecContext(ctx, "SELECT 1 / 0")
			return nil
		}
		forgets := func(ctx context.Context, _ *sql.Tx) error { <-ctx.Done(); return nil }
		within := func(ctx context.Context, tx *sql.Tx) error {
			p.is(lease.GuardSQL(ctx, tx, does(undo, fails)), io.EOF)
			p.is(lease.GuardSQL(ctx, tx, does(undo, swallows)), pgfence.TransactionLost)
			return lease.GuardSQL(ctx, tx, does(pay))
		}
		releases := func(ctx context.Context, tx *sql.Tx) error {
			must(lease.GuardSQL(ctx, tx, does(pay), pgfence.Releasing))
			return lease.Check() // until that transaction has committed
		}
		for _, one := range []struct {
			under   *pgfence.Lease
			do      pgfence.SQLWork
			err     error
			status  string
			inDoubt bool
		}{
			{other, does(releases, fails), io.EOF, "new", false},
			{lease, does(undo, swallows), pgfence.TransactionLost, "new", false},
			{other, within, nil, "paid", false},
			{lease, does(undo, "COMMIT"), pgfence.TransactionLost, "undone", true},
			{lease, does(pay, commits), pgfence.TransactionLost, "paid", true},
			{lease, does(undo, forgets), context.DeadlineExceeded, "paid", false},
			{lease, does(undo, "SELECT pg_sleep(300)"), context.DeadlineExceeded, "paid", false},
			{other, does(undo), pgfence.Refused, "paid", false},
		} {
			ctx, cancel := context.WithTimeout(background, 2*time.Second)
			told := p.is(one.under.GuardSQL(ctx, db, one.do), one.err)
			p.equal(told != nil && told.InDoubt, one.inDoubt)
			p.equal(p.sql("SELECT status FROM orders"), one.status)
			cancel()
		}
		func() {
			defer func() { p.equal(recover(), "panic") }()
			panics := func(context.Context, *sql.Tx) error { panic("panic") }
			_ = lease.GuardSQL(background, db, does(undo, panics))
		}()
		p.equal(p.sql("SELECT status FROM orders"), "paid")
		must(other.GuardSQL(background, db, releases))
		must(pgfence.Leases{lease, other}.Release())
	}
}

func TestAGuardOfSeveralIsBrokenOffByEach(t *testing.T) {
	p := in(t)
	for _, driver := range []string{"pgx", "postgres"} {
		db := p.database(driver)
		leases := pgfence.Leases{p.acquire(long, "order:7"), p.acquire(short, "b")}
		err := p.fence.GuardSQL(background, db, leases, func(ctx context.Context, tx *sql.Tx) error {
			p.sql("SELECT lease_revoke('b')")
			if driver == "pgx" {
				ctx = background // its socket is known
			}
			return second(tx.ExecContext(ctx, "UPDATE orders SET status = pg_sleep(300)::text"))
		})
		p.equal(p.is(err, pgfence.LeaseLost).Names[0], "b")
		leases[1] = p.acquire(long, `a "quoted\" name, and {another}`, "c")
		must(p.fence.GuardSQL(background, db, leases, does(pay), pgfence.Releasing))
		must(p.fence.Adopted("elsewhere", 7).GuardSQL(background, db, does()))
		p.sql("SELECT lease_revoke('elsewhere'), lease_forget('elsewhere')")
	}
}

func TestAPoolGetsItsConnectionBack(t *testing.T) {
	p := in(t)
	config := have(pgxpool.ParseConfig(url + "&pool_max_conns=1"))
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		return second(conn.Exec(ctx, "SET application_name = 'alike'"))
	}
	pool := have(pgxpool.NewWithConfig(background, config))
	defer pool.Close()
	fence := pgfence.New(pool)
	defer fence.Close()
	lease := have(fence.Acquire(background, []string{"order:7"}, short))
	says := func(sql string) pgfence.PgxWork {
		return func(ctx context.Context, tx pgx.Tx) error { return second(tx.Exec(ctx, sql)) }
	}
	p.is(lease.Guard(background, pool, says("COMMIT")), pgfence.TransactionLost)
	pooled := have(pool.Acquire(background))
	// For longer than the ttl: the heartbeat does not need the pool.
	must(lease.Guard(background, pooled, says("SELECT pg_sleep(1.5)")))
	p.equal(p.sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'alike'"), "2")
	pooled.Release()
}

func TestWhatMeansNothingIsRefusedByName(t *testing.T) {
	p := in(t)
	silent := have(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	p.sql("BEGIN") // in which a guard is refused before the work
	opens := func(context.Context) (pgfence.Conn, error) { return nil, errors.New("no secret") }
	for words, err := range map[string]error{
		"takes a Holder":      try(p.fence, pgfence.Options{Reclaim: true}, "job"),
		"several":             try(p.fence, pgfence.Options{Slots: 2}, "a", "b"),
		"30ns is below":       try(p.fence, pgfence.Options{TTL: 30}, "job"),
		"Metadata":            try(p.fence, pgfence.Options{Metadata: func() {}}, "job"),
		`"nowhere" does not`:  keep(p.fence, "nowhere.runs", pgfence.RowOptions{}),
		"AtMost":              keep(p.fence, "orders", pgfence.RowOptions{AtMost: 30}),
		"under no lease":      p.fence.Guard(background, p.admin, nil, nil),
		"another fence":       p.fence.Guard(background, p.admin, pgfence.Leases{{}}, nil),
		"by a savepoint":      p.acquire(long, "d").Guard(background, p.admin, nil),
		"port=none":           try(pgfence.New("postgresql://me@?port=none"), long, "a"),
		"127.0.0.1":           try(pgfence.New("postgresql://"+silent.Addr().String()), short, "a"),
		"pg_fence is not":     try(pgfence.New(url, pgfence.InSchema(`no"where`)), long, "a"),
		"no connection":       try(pgfence.New(opens), forever, "a"),
		"refused TLS":         pgfence.New(url+"&sslmode=require").Lead(background, "a", 0, nil),
		`_no" does not exist`: try(pgfence.New(strings.Replace(url, "?", "_no?", 1)), forever, "a"),
	} {
		p.is(err, err, words)
	}
}

func TestALeaseSaysByWhomItIsTakenAndWhoMayUseIt(t *testing.T) {
	p := in(t)
	p.acquire(pgfence.Options{Holder: "it's me", Metadata: map[string]int{"run": 7}}, "a", "b")
	taken := p.is(try(p.fence, long, "b", "c"), pgfence.LeaseTaken, "by it's me", "at the most")
	p.equal(taken.Remaining.Round(10*time.Second), 30*time.Second)
	p.sql("CREATE ROLE monday LOGIN; CREATE ROLE tuesday LOGIN")
	as := func(role string) string { return strings.Replace(url, "user=postgres", "user="+role, 1) }
	monday := pgfence.New(as("monday"))
	p.is(try(monday, long, "job"), pgfence.NotGranted, "fence_grant('monday')")
	err := keep(monday, "orders", pgfence.RowOptions{Deadline: "until"})
	p.is(err, pgfence.NotGranted, "monday may not keep rows of orders")
	p.sql("SELECT fence_grant('monday'), fence_grant('tuesday')")
	lease := have(monday.Acquire(background, []string{"job"}, long))
	conn := have(pgx.Connect(background, as("tuesday")))
	p.is(lease.Guard(background, conn, nil), pgfence.NotGranted, "tuesday", "act as one role")
	must(cmp.Or(conn.Close(background), lease.Release()))
	p.sql("SELECT fence_revoke('monday'), fence_revoke('tuesday'); DROP ROLE monday, tuesday")
}

func TestTheWorksContextSaysTheLoss(t *testing.T) {
	p := in(t)
	for ends, told := range map[error]error{
		context.Canceled: pgfence.LeaseLost, nil: pgfence.LeaseLost, io.EOF: io.EOF,
	} {
		err := p.fence.Lease(background, "job", short, func(ctx context.Context, l *pgfence.Lease) error {
			asks := func(_ []string, a slog.Attr) slog.Attr { _ = l.Check(); return a }
			log := slog.NewTextHandler(io.Discard, &slog.HandlerOptions{ReplaceAttr: asks})
			slog.SetDefault(slog.New(log)) // which may ask the fence
			p.sql("SELECT lease_revoke('job')")
			<-ctx.Done()
			p.equal(context.Cause(ctx).(*pgfence.Error).Reason, pgfence.ReasonGone)
			return ends
		})
		p.is(err, told)
	}
}

// loses is a connection whose acquires are answered to nobody.
type loses struct{ *pgx.Conn }

func (l loses) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := l.Conn.Query(ctx, sql, args...)
	if strings.Contains(sql, "lease_acquire") {
		rows.Close()
		err = errors.Join(io.ErrUnexpectedEOF, l.Close(ctx))
	}
	return rows, err
}

func TestAGrantWhoseAnswerWasLostIsUndone(t *testing.T) {
	p := in(t)
	fence := pgfence.New(func(ctx context.Context) (pgfence.Conn, error) {
		conn, err := pgx.Connect(ctx, url)
		return loses{conn}, err
	})
	defer fence.Close()
	p.equal(p.is(try(fence, forever, "a", "b"), pgfence.NoAnswer).InDoubt, true)
}

// The rest of a row's life is the scenarios'.
func TestARowHasAKeyOfSeveralColumnsAndALastWrite(t *testing.T) {
	p := in(t)
	p.sql(`DROP TABLE IF EXISTS runs;
		CREATE TABLE runs (part text, id bigint, state text, PRIMARY KEY (id, part));
		INSERT INTO runs VALUES ('a', 1), ('b', 1);
		SELECT fence_protect('runs', mode => 'managed', deadline => 'held_until')`)
	db, token := p.database("postgres"), int64(0)
	must(p.admin.QueryRow(background, `UPDATE runs SET held_until = clock_timestamp() + '1 s'
		WHERE part = 'b' RETURNING fence`).Scan(&token))
	key, options := map[string]any{"part": "b", "id": 1}, pgfence.RowOptions{TTL: time.Second}
	lease := have(p.fence.KeepRow(background, "runs", key, token, options))
	// Its transaction has the row: nobody else gets it after the deadline, and it may still finish it.
	must(lease.GuardSQL(background, db, does("SELECT pg_sleep(1.5)")))
	p.is(lease.Check(), pgfence.LeaseLost)
	done := does("UPDATE runs SET state = 'done' WHERE part = 'b'")
	must(lease.GuardSQL(background, db, done, pgfence.Releasing))
	p.equal(p.sql("SELECT concat(state, held_until) FROM runs WHERE part = 'b'"), "done")
}
