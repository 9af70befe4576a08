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
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"pgfence.example/pgfence"
)

// The tests of what the vectors and the scenarios of all clients do not cover: database/sql, pools,
// the texts of errors, and features of Go. DATABASE_URL names a database with the extension that is
// used for nothing else: the tests create and drop tables in it.

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

// fixture is a table, a fence, and a connection that does not belong to the fence.
type fixture struct {
	*testing.T
	admin *pgx.Conn
	fence *pgfence.Fence
}

// newFixture creates a fixture. After the test it checks that no lease and no goroutine is left.
func newFixture(t *testing.T) *fixture {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	p, before := &fixture{T: t}, runtime.NumGoroutine()
	p.admin = must(pgx.Connect(background, url))
	p.sql(`DROP TABLE IF EXISTS orders;
		CREATE TABLE orders (id bigint PRIMARY KEY, status text, until timestamptz);
		INSERT INTO orders VALUES (7, 'new'); SELECT fence_protect('orders', lease => 'order:{id}')`)
	// A panic of this function must not affect the lease.
	p.fence = pgfence.New(url, pgfence.OnEvent(func(e pgfence.Event) { panic(e) }))
	t.Cleanup(func() {
		p.fence.Close()
		p.isError(acquireErr(p.fence, long, "late"), pgfence.Closed)
		for tries := 0; p.sql(held) != "0" || runtime.NumGoroutine() > before; tries++ {
			if tries == 100 {
				p.Fatalf("%s leases, %d goroutines after %d", p.sql(held), runtime.NumGoroutine(), before)
			}
			time.Sleep(100 * time.Millisecond)
		}
		noError(p.admin.Close(background))
	})
	return p
}

func (p *fixture) database(driver string) *sql.DB {
	db := must(sql.Open(driver, strings.Replace(url, "?", "?sslmode=disable&", 1)))
	p.Cleanup(func() { _ = db.Close() })
	return db
}

// sql runs statements, and returns the first value of the last one.
func (p *fixture) sql(statements string) string {
	results := must(p.admin.PgConn().Exec(background, statements).ReadAll())
	if rows := results[len(results)-1].Rows; len(rows) > 0 {
		return string(rows[0][0])
	}
	return ""
}

func (p *fixture) acquire(options pgfence.Options, names ...string) *pgfence.Lease {
	return must(p.fence.Acquire(background, names, options))
}

// acquireErr returns the error of an acquire.
func acquireErr(fence *pgfence.Fence, options pgfence.Options, names ...string) error {
	return errorOf(fence.Acquire(background, names, options))
}

// keepRowErr returns the error of keeping a row.
func keepRowErr(fence *pgfence.Fence, table string, options pgfence.RowOptions) error {
	return errorOf(fence.KeepRow(background, table, map[string]any{"id": 7}, 1, options))
}

func (p *fixture) equal(actual, expected any) {
	p.Helper()
	if actual != expected {
		p.Fatalf("it is %v and should be %v", actual, expected)
	}
}

// isError checks that err has a kind, is another error or nil, and that its text has the words.
func (p *fixture) isError(err, target error, words ...string) *pgfence.Error {
	p.Helper()
	for _, word := range append(words, "") {
		if !errors.Is(err, target) || !strings.Contains(fmt.Sprint(err), word) {
			p.Fatalf("it is %v and should be %v: %s", err, target, word)
		}
	}
	var fenceErr *pgfence.Error
	errors.As(err, &fenceErr)
	return fenceErr
}

// must returns the value, or panics if there is an error.
func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func noError(err error)                   { must(0, err) }
func errorOf[T any](_ T, err error) error { return err }

// run returns work that executes statements and other work.
func run(steps ...any) pgfence.SQLWork {
	return func(ctx context.Context, tx *sql.Tx) (err error) {
		for _, step := range steps {
			if statement, ok := step.(string); ok && err == nil {
				_, err = tx.ExecContext(ctx, statement)
			} else if err == nil {
				err = step.(pgfence.SQLWork)(ctx, tx)
			}
		}
		return err
	}
}

// exec returns work that executes statements.
func exec(sql string) pgfence.PgxWork {
	return func(ctx context.Context, tx pgx.Tx) error { return errorOf(tx.Exec(ctx, sql)) }
}

// The scenarios of all clients test the transactions of pgx.
func TestATransactionOfDatabaseSQLEndsAsItsWorkDoes(t *testing.T) {
	for _, driver := range []string{"pgx", "postgres"} {
		p := newFixture(t)
		// Two of the transactions hang for longer than the ttl.
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
			p.isError(lease.GuardSQL(ctx, tx, run(undo, fails)), io.EOF)
			p.isError(lease.GuardSQL(ctx, tx, run(undo, swallows)), pgfence.TransactionLost)
			return lease.GuardSQL(ctx, tx, run(pay))
		}
		releases := func(ctx context.Context, tx *sql.Tx) error {
			noError(lease.GuardSQL(ctx, tx, run(pay), pgfence.Releasing))
			return lease.Check() // it is held until the transaction has committed
		}
		// After its COMMIT the session presents the token in all its transactions.
		present := fmt.Sprint("SET pg_fence.token = ", lease.Token())
		for _, c := range []struct {
			under   *pgfence.Lease
			do      pgfence.SQLWork
			err     error
			status  string
			inDoubt bool
		}{
			{other, run(releases, fails), io.EOF, "new", false},
			{lease, run(undo, swallows), pgfence.TransactionLost, "new", false},
			{other, within, nil, "paid", false},
			{lease, run(undo, present, "COMMIT"), pgfence.TransactionLost, "undone", true},
			{lease, run(pay, commits), pgfence.TransactionLost, "paid", true},
			{lease, run(undo, forgets), context.DeadlineExceeded, "paid", false},
			{lease, run(undo, "SELECT pg_sleep(300)"), context.DeadlineExceeded, "paid", false},
			{other, run(undo), pgfence.Refused, "paid", false},
		} {
			ctx, cancel := context.WithTimeout(background, 2*time.Second)
			fenceErr := p.isError(c.under.GuardSQL(ctx, db, c.do), c.err)
			p.equal(fenceErr != nil && fenceErr.InDoubt, c.inDoubt)
			p.equal(p.sql("SELECT status FROM orders"), c.status)
			cancel()
		}
		func() {
			defer func() { p.equal(recover(), "panic") }()
			panics := func(context.Context, *sql.Tx) error { panic("panic") }
			_ = lease.GuardSQL(background, db, run(undo, panics))
		}()
		p.equal(p.sql("SELECT status FROM orders"), "paid")
		noError(other.GuardSQL(background, db, releases))
		conn, pid := must(db.Conn(background)), 0
		noError(conn.QueryRowContext(background, "SELECT pg_backend_pid()").Scan(&pid))
		p.sql(fmt.Sprintf("SELECT pg_terminate_backend(%d, 5000)", pid))
		for range 2 {
			err := other.GuardSQL(background, conn, run("SELECT 1"))
			p.isError(err, pgfence.TransactionLost, "session has ended")
		}
		_ = conn.Close()
		noError(pgfence.Leases{lease, other}.Release())
	}
}

func TestAnErrorOfADeferredTriggerIsTheWorks(t *testing.T) {
	p := newFixture(t)
	lease, db := p.acquire(long, "order:7"), p.database("pgx")
	conn := must(pgx.Connect(background, url))
	for _, state := range []string{"42501", "42883", "22012", "57014"} {
		p.sql(`CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql
				AS 'BEGIN RAISE SQLSTATE ''` + state + `''; END';
			CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON orders
				DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late()`)
		err := lease.GuardSQL(background, db, run(pay))
		p.equal(p.isError(err, err, state) == nil, true)
		err = lease.Guard(background, conn, exec(pay))
		p.equal(p.isError(err, err, state) == nil, true)
		p.sql("DROP FUNCTION late CASCADE")
	}
	noError(conn.Close(background))
}

func TestAGuardUndoesItsWorkAfterAnInnerGuard(t *testing.T) {
	p := newFixture(t)
	lease, db := p.acquire(long, "order:7"), p.database("postgres")
	tx := must(db.Begin())
	fails := func(context.Context, *sql.Tx) error { return io.EOF }
	inner := func(ctx context.Context, tx *sql.Tx) error { return lease.GuardSQL(ctx, tx, fails) }
	p.isError(lease.GuardSQL(background, tx, run(undo, inner)), io.EOF)
	noError(tx.Commit())
	p.equal(p.sql("SELECT status FROM orders"), "new")
}

func TestAnInnerGuardThatCannotRollBackUndoesTheWhole(t *testing.T) {
	p := newFixture(t)
	lease, db := p.acquire(long, "order:7"), p.database("pgx")
	const many = "SELECT generate_series(1, 100000)"
	conn := must(pgx.Connect(background, url))
	tx, sqlTx := must(conn.Begin(background)), must(db.Begin())
	var rows pgx.Rows
	p.isError(lease.Guard(background, tx, func(ctx context.Context, tx pgx.Tx) (err error) {
		must(tx.Exec(ctx, pay))
		rows, err = tx.Query(ctx, many)
		return cmp.Or(err, io.EOF)
	}), io.EOF)
	rows.Close()
	p.equal(tx.Commit(background) == nil, false)
	p.isError(lease.GuardSQL(background, sqlTx, func(ctx context.Context, tx *sql.Tx) error {
		must(tx.ExecContext(ctx, pay))
		_, err := tx.QueryContext(background, many)
		return cmp.Or(err, io.EOF)
	}), io.EOF)
	p.equal(sqlTx.Commit() == nil, false)
	p.equal(p.sql("SELECT status FROM orders"), "new")
}

func TestAConnectionInATransactionIsLeftAlone(t *testing.T) {
	p := newFixture(t)
	conn := must(p.database("pgx").Conn(background))
	tx := must(conn.BeginTx(background, nil))
	noError(run("CREATE TABLE undone ()")(background, tx))
	err := p.acquire(long, "order:7").GuardSQL(background, conn, run(pay))
	p.isError(err, err, "by a savepoint")
	noError(cmp.Or(tx.Rollback(), conn.Close()))
	p.equal(p.sql("SELECT to_regclass('undone') IS NULL"), "t")
}

func TestAKeyHasValuesOfAnyType(t *testing.T) {
	p := newFixture(t)
	at := time.Date(2026, 1, 2, 3, 4, 5, 678000, time.FixedZone("far", 45*60))
	key := map[string]any{
		"bytes": []byte("\x00'\xff"), "at": &at, "id": [16]byte{15: 7},
		"part": sql.NullString{String: "a", Valid: true}, "net": netip.MustParseAddr("::1"),
	}
	p.sql("DROP TABLE IF EXISTS runs; " +
		"CREATE TABLE runs (bytes bytea, at timestamptz, id uuid, part text, net inet)")
	noError(errorOf(p.admin.Exec(background, "INSERT INTO runs VALUES ($1, $2, $3, $4, $5)",
		key["bytes"], key["at"], key["id"], key["part"], key["net"])))
	p.sql("SELECT fence_protect('runs', mode => 'managed', deadline => 'held_until')")
	token := int64(0)
	noError(p.admin.QueryRow(background,
		"UPDATE runs SET held_until = now() + '1 min' RETURNING fence").Scan(&token))
	lease := must(p.fence.KeepRow(background, "runs", key, token, pgfence.RowOptions{}))
	noError(lease.Release())
}

// handler is a handler of the log.
type handler struct {
	slog.Handler
	handle func()
}

func (h handler) Handle(context.Context, slog.Record) error { h.handle(); return nil }

func TestWhatAHandlerDoesAffectsNoLease(t *testing.T) {
	p := newFixture(t)
	var fence *pgfence.Fence
	var mutex sync.Mutex
	refused := make(chan error, 100)
	fails := func() {
		mutex.Lock()
		defer mutex.Unlock()
		ctx, cancel := context.WithTimeout(background, 10*time.Millisecond)
		defer cancel()
		_, err := fence.Acquire(ctx, []string{"other"}, long)
		select {
		case refused <- err:
		default: // its leases have events, too, which call it again
		}
		if len(refused)%2 > 0 {
			runtime.Goexit()
		}
		panic("a handler")
	}
	slog.SetDefault(slog.New(handler{slog.NewTextHandler(io.Discard, nil), fails}))
	fence = pgfence.New(url, pgfence.OnEvent(func(pgfence.Event) { fails() }))
	defer fence.Close()
	for range 3 {
		lease := must(fence.Acquire(background, []string{"job"}, pgfence.Options{AtMost: time.Second}))
		mutex.Lock()
		time.Sleep(1500 * time.Millisecond)
		p.isError(lease.Check(), pgfence.LeaseLost)
		mutex.Unlock()
		p.isError(lease.Release(), pgfence.LeaseLost)
		// The answers come after the handler.
		p.isError(<-refused, context.DeadlineExceeded)
	}
}

func TestALeaseIsForOneWork(t *testing.T) {
	p := newFixture(t)
	never := func(context.Context, *pgfence.Lease) error { p.Error("it works"); return nil }
	lease := p.acquire(long, "order:7")
	noError(lease.Do(background, func(ctx context.Context, lease *pgfence.Lease) error {
		err := lease.Do(ctx, never)
		p.isError(err, err, "already")
		return lease.Check()
	}))
	lease = p.acquire(long, "order:7")
	noError(lease.Release())
	p.isError(lease.Do(background, never), pgfence.LeaseLost, "released")
}

func TestAHostWhoseLookupHangsLeavesTimeForOthers(t *testing.T) {
	newFixture(t)
	config := must(pgxpool.ParseConfig(strings.Replace(url, "//", "//slow.invalid,", 1)))
	lookup := config.ConnConfig.LookupFunc
	config.ConnConfig.LookupFunc = func(ctx context.Context, host string) ([]string, error) {
		if host == "slow.invalid" {
			<-ctx.Done()
		}
		return lookup(ctx, host)
	}
	pool := must(pgxpool.NewWithConfig(background, config))
	defer pool.Close()
	fence := pgfence.New(pool)
	defer fence.Close()
	noError(must(fence.Acquire(background, []string{"order:7"}, long)).Release())
}

func TestADeadlineOfTheCallerEndsAnAcquireIfTheLogHangs(t *testing.T) {
	p := newFixture(t)
	hangs := make(chan int)
	logs := func() { <-hangs }
	slog.SetDefault(slog.New(handler{slog.NewTextHandler(io.Discard, nil), logs}))
	fence, options := pgfence.New(url), pgfence.Options{AtMost: time.Second}
	defer fence.Close()
	lease := must(fence.Acquire(background, []string{"order:7"}, options))
	<-lease.Lost()
	ctx, cancel := context.WithTimeout(background, time.Second)
	defer cancel()
	acquired := make(chan error)
	go func() { acquired <- errorOf(fence.Acquire(ctx, []string{"job"}, long)) }()
	select {
	case err := <-acquired:
		p.isError(err, context.DeadlineExceeded)
	case <-time.After(10 * time.Second):
		p.Error("it hangs")
	}
	close(hangs)
	p.isError(lease.Release(), pgfence.LeaseLost)
}

// ended is a transaction whose session a pooler ends at its commit, with an SQLSTATE of its own.
type ended struct{ pgx.Tx }

func (ended) Commit(context.Context) error {
	return &pgconn.PgError{Severity: "FATAL", Code: "XX000", Message: "no data from the node"}
}

// beginner begins such transactions.
type beginner struct{ conn *pgx.Conn }

func (b beginner) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := b.conn.Begin(ctx)
	return ended{tx}, err
}

func TestAPoolerMayEndASessionWithASQLStateOfItsOwn(t *testing.T) {
	p := newFixture(t)
	err := p.acquire(long, "order:7").Guard(background, beginner{p.admin}, exec(pay))
	p.equal(p.isError(err, pgfence.TransactionLost, "no data").InDoubt, true)
	// A connection that the work cannot open is no end of the guard's.
	elsewhere := must(pgx.ParseConfig(url))
	elsewhere.Database = "no_one"
	opens := func(ctx context.Context, _ *sql.Tx) error {
		return errorOf(pgx.ConnectConfig(ctx, elsewhere))
	}
	err = p.acquire(long, "other").GuardSQL(background, p.database("pgx"), opens)
	p.equal(p.isError(err, err, "3D000") == nil, true)
}

func TestAGuardOfPgxSaysWhatItsWorkHasDone(t *testing.T) {
	p := newFixture(t)
	lease, conn := p.acquire(long, "order:7"), must(pgx.Connect(background, url))
	tx := must(conn.Begin(background))
	commits := func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }
	err := lease.Guard(background, tx, commits, pgfence.Releasing)
	p.equal(p.isError(err, pgfence.TransactionLost, "ended the transaction itself").InDoubt, true)
	noError(tx.Rollback(background))
	lease = p.acquire(long, "other")
	err = lease.Guard(background, conn, func(ctx context.Context, tx pgx.Tx) error {
		return errorOf(tx.Query(ctx, "SELECT generate_series(1, 100000)"))
	})
	p.equal(p.isError(err, err, "not closed its rows") == nil, true)
	conn = must(pgx.Connect(background, url))
	failed := &pgconn.PgError{Code: "08006"}
	fails := func(context.Context, pgx.Tx) error { return failed }
	err = lease.Guard(background, conn, fails)
	p.equal(p.isError(err, failed) == nil, true)
	ends := func(_ context.Context, tx pgx.Tx) error {
		p.sql(fmt.Sprintf("SELECT pg_terminate_backend(%d, 5000)", tx.Conn().PgConn().PID()))
		return nil
	}
	tx = must(conn.Begin(background))
	err = lease.Guard(background, tx, ends) // a savepoint ends with its transaction
	p.equal(p.isError(err, pgfence.TransactionLost, "session has ended").InDoubt, false)
	p.isError(lease.Guard(background, conn, fails), pgfence.TransactionLost, "session has ended")
	conn = must(pgx.Connect(background, url))
	err = lease.Guard(background, conn, ends)
	p.equal(p.isError(err, pgfence.TransactionLost, "session has ended").InDoubt, true)
}

func TestAGuardOfSeveralIsBrokenOffByEach(t *testing.T) {
	p := newFixture(t)
	for _, driver := range []string{"pgx", "postgres"} {
		db := p.database(driver)
		leases := pgfence.Leases{p.acquire(long, "order:7"), p.acquire(short, "b")}
		err := p.fence.GuardSQL(background, db, leases, func(ctx context.Context, tx *sql.Tx) error {
			p.sql("SELECT lease_revoke('b')")
			if driver == "pgx" {
				ctx = background // the guard knows the socket of pgx, and cuts it
			}
			return errorOf(tx.ExecContext(ctx, "UPDATE orders SET status = pg_sleep(300)::text"))
		})
		p.equal(p.isError(err, pgfence.LeaseLost).Names[0], "b")
		leases[1] = p.acquire(long, `a "quoted\" name, and {another}`, "c")
		noError(p.fence.GuardSQL(background, db, leases, run(pay), pgfence.Releasing))
		noError(p.fence.Adopted("elsewhere", 7).GuardSQL(background, db, run()))
		p.sql("SELECT lease_revoke('elsewhere'), lease_forget('elsewhere')")
	}
}

func TestAPoolGetsItsConnectionBack(t *testing.T) {
	p := newFixture(t)
	config := must(pgxpool.ParseConfig(url + "&pool_max_conns=1"))
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		return errorOf(conn.Exec(ctx, "SET application_name = 'alike'"))
	}
	pool := must(pgxpool.NewWithConfig(background, config))
	defer pool.Close()
	fence := pgfence.New(pool)
	defer fence.Close()
	lease := must(fence.Acquire(background, []string{"order:7"}, short))
	p.isError(lease.Guard(background, pool, exec("COMMIT")), pgfence.TransactionLost)
	for _, on := range []pgfence.Pgx{pool, struct{ pgfence.Pgx }{pool}} {
		begins := lease.Guard(background, on, exec("COMMIT; BEGIN"))
		p.equal(p.isError(begins, pgfence.TransactionLost).InDoubt, true)
	}
	pooled := must(pool.Acquire(background))
	// The transaction takes longer than the ttl: the heartbeat does not need the pool.
	noError(lease.Guard(background, pooled, exec("SELECT pg_sleep(1.5)")))
	p.equal(p.sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'alike'"), "2")
	pooled.Release()
}

func TestWhatMeansNothingIsRefusedByName(t *testing.T) {
	p := newFixture(t)
	silent := must(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	p.sql("BEGIN") // a guard is refused in it, before the work
	hanging := pgfence.New("postgresql://" + silent.Addr().String())
	missing := pgfence.New(strings.Replace(url, "?", "_no?", 1))
	none := func(context.Context) (pgfence.Conn, error) { return nil, nil }
	begun := func(ctx context.Context) (pgfence.Conn, error) {
		conn := must(pgx.Connect(ctx, url))
		return conn, errorOf(conn.Exec(ctx, "BEGIN"))
	}
	open := func(context.Context) (pgfence.Conn, error) { return nil, errors.New("no secret") }
	for words, err := range map[string]error{
		"takes a Holder":     acquireErr(p.fence, pgfence.Options{Reclaim: true}, "job"),
		"several":            acquireErr(p.fence, pgfence.Options{Slots: 2}, "a", "b"),
		"30ns is below":      acquireErr(p.fence, pgfence.Options{TTL: 30}, "job"),
		"Metadata":           acquireErr(p.fence, pgfence.Options{Metadata: func() {}}, "job"),
		`"nowhere" does not`: keepRowErr(p.fence, "nowhere.runs", pgfence.RowOptions{}),
		"part in the key": errorOf(p.fence.KeepRow(
			background, "runs", map[string]any{"part": nil}, 1, pgfence.RowOptions{})),
		"AtMost":              keepRowErr(p.fence, "orders", pgfence.RowOptions{AtMost: 30}),
		"under no lease":      p.fence.Guard(background, p.admin, nil, nil),
		"another fence":       p.fence.Guard(background, p.admin, pgfence.Leases{{}}, nil),
		"by a savepoint":      p.acquire(long, "d").Guard(background, p.admin, nil),
		"port=none":           acquireErr(pgfence.New("postgresql://me@?port=none"), long, "a"),
		"127.0.0.1":           acquireErr(hanging, short, "a"),
		"pg_fence is not":     acquireErr(pgfence.New(url, pgfence.InSchema(`no"where`)), long, "a"),
		"returned no":         acquireErr(pgfence.New(none), forever, "a"),
		"is in a transaction": acquireErr(pgfence.New(begun), forever, "a"),
		"no connection":       acquireErr(pgfence.New(open), forever, "a"),
		"refused TLS":         pgfence.New(url+"&sslmode=require").Lead(background, "a", 0, nil),
		`_no" does not exist`: acquireErr(missing, forever, "a"),
	} {
		p.isError(err, err, words)
	}
}

func TestALeaseSaysByWhomItIsTakenAndWhoMayUseIt(t *testing.T) {
	p := newFixture(t)
	p.acquire(pgfence.Options{Holder: "it's me", Metadata: map[string]int{"run": 7}}, "a", "b")
	err := acquireErr(p.fence, long, "b", "c")
	taken := p.isError(err, pgfence.LeaseTaken, "by it's me", "at the most")
	p.equal(taken.Remaining.Round(10*time.Second), 30*time.Second)
	p.sql(`CREATE ROLE "It's Me" LOGIN; CREATE ROLE monday LOGIN; CREATE ROLE tuesday LOGIN`)
	as := func(role string) string { return strings.Replace(url, "user=postgres", "user="+role, 1) }
	me := pgfence.New(as("It%27s%20Me"))
	p.isError(acquireErr(me, long, "job"), pgfence.NotGranted, `fence_grant('"It''s Me"')`)
	monday := pgfence.New(as("monday"))
	p.isError(acquireErr(monday, long, "job"), pgfence.NotGranted, "fence_grant('monday')")
	err = keepRowErr(monday, "orders", pgfence.RowOptions{Deadline: "until"})
	p.isError(err, pgfence.NotGranted, "the role monday", "for rows of a table it needs SELECT and UPDATE")
	p.sql("SELECT fence_grant('monday'), fence_grant('tuesday')")
	lease := must(monday.Acquire(background, []string{"job"}, long))
	conn := must(pgx.Connect(background, as("tuesday")))
	p.isError(lease.Guard(background, conn, nil), pgfence.NotGranted, "tuesday", "act as one role")
	noError(cmp.Or(conn.Close(background), lease.Release()))
	p.sql("SELECT fence_revoke('monday'), fence_revoke('tuesday'); DROP ROLE monday, tuesday, \"It's Me\"")
}

func TestALeaderEndsWithAnErrorOfItsWork(t *testing.T) {
	p := newFixture(t)
	for _, state := range []string{"40001", "53200", "55P03", "57014"} {
		ctx, cancel := context.WithTimeout(background, 10*time.Second)
		failed := &pgconn.PgError{Code: state}
		work := func(context.Context, *pgfence.Lease) error { return failed }
		err := p.fence.Lead(ctx, "job", time.Minute, work)
		p.isError(err, failed)
		p.equal(ctx.Err(), nil)
		cancel()
	}
}

func TestALeaderGoesOnAfterAServerThatDoesNotAnswer(t *testing.T) {
	p := newFixture(t)
	silent := must(net.Listen("tcp", "127.0.0.1:0"))
	defer func() { noError(silent.Close()) }()
	asks := "postgres://" + silent.Addr().String() + "/x?connect_timeout=1&sslmode=disable"
	conn := must(pgx.Connect(background, url))
	rows := must(conn.Query(background, "SELECT generate_series(1, 100000)"))
	runs := 0
	err := p.fence.Lead(background, "job", time.Second, func(ctx context.Context, _ *pgfence.Lease) error {
		if runs++; runs == 1 {
			return errorOf(pgx.Connect(ctx, asks))
		}
		// That the work has not closed its rows is an error of its own.
		return errorOf(conn.Exec(ctx, pay))
	})
	p.isError(err, err, "conn busy")
	p.equal(runs, 2)
	rows.Close()
	noError(conn.Close(background))
}

func TestTheLogNamesTheLeasesThatAreLost(t *testing.T) {
	p, log := newFixture(t), &strings.Builder{}
	slog.SetDefault(slog.New(slog.NewTextHandler(log, nil)))
	lease := p.acquire(pgfence.Options{}, "a", "b", "c", "d")
	p.sql("SELECT lease_revoke('a')")
	p.isError(lease.Release(), pgfence.LeaseLost)
	// This answer comes after the line.
	p.acquire(long, "e")
	if line := log.String(); !strings.Contains(line, `reason=gone count=1 names="[a b c]"`) {
		p.Error(line)
	}
}

func TestALeaderOfAClosedFenceDoesNotTryAgain(t *testing.T) {
	p, isInterrupted := newFixture(t), false
	fence := pgfence.New(url, pgfence.OnEvent(func(e pgfence.Event) {
		isInterrupted = isInterrupted || e.Kind == "interrupted"
	}))
	err := fence.Lead(background, "job", short.TTL, func(_ context.Context, l *pgfence.Lease) error {
		fence.Close()
		return l.Check()
	})
	p.isError(err, pgfence.LeaseLost, "released")
	// This answer comes after all events.
	p.isError(acquireErr(fence, long, "late"), pgfence.Closed)
	p.equal(isInterrupted, false)
}

func TestTheWorksContextSaysTheLoss(t *testing.T) {
	p := newFixture(t)
	for workErr, expected := range map[error]error{
		context.Canceled: pgfence.LeaseLost, nil: pgfence.LeaseLost, io.EOF: io.EOF,
	} {
		err := p.fence.Lease(background, "job", short, func(ctx context.Context, l *pgfence.Lease) error {
			// A log handler may call the fence.
			check := func(_ []string, a slog.Attr) slog.Attr { _ = l.Check(); return a }
			log := slog.NewTextHandler(io.Discard, &slog.HandlerOptions{ReplaceAttr: check})
			slog.SetDefault(slog.New(log))
			p.sql("SELECT lease_revoke('job')")
			<-ctx.Done()
			p.equal(context.Cause(ctx).(*pgfence.Error).Reason, pgfence.ReasonGone)
			return workErr
		})
		p.isError(err, expected)
	}
}

// losesAnswers is a connection that ends before the answer of an acquire arrives.
type losesAnswers struct{ *pgx.Conn }

func (l losesAnswers) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := l.Conn.Query(ctx, sql, args...)
	if strings.Contains(sql, "lease_acquire") {
		rows.Close()
		err = errors.Join(io.ErrUnexpectedEOF, l.Close(ctx))
	}
	return rows, err
}

func TestAGrantWhoseAnswerWasLostIsUndone(t *testing.T) {
	p := newFixture(t)
	fence := pgfence.New(func(ctx context.Context) (pgfence.Conn, error) {
		conn, err := pgx.Connect(ctx, url)
		return losesAnswers{conn}, err
	})
	defer fence.Close()
	p.equal(p.isError(acquireErr(fence, forever, "a", "b"), pgfence.NoAnswer).InDoubt, true)
}

// The scenarios of all clients test the rest of row leases.
func TestARowHasAKeyOfSeveralColumnsAndALastWrite(t *testing.T) {
	p := newFixture(t)
	p.sql(`DROP TABLE IF EXISTS runs;
		CREATE TABLE runs (part text, id bigint, state text, PRIMARY KEY (id, part));
		INSERT INTO runs VALUES ('a', 1), ('b', 1);
		SELECT fence_protect('runs', mode => 'managed', deadline => 'held_until')`)
	db, token := p.database("postgres"), int64(0)
	noError(p.admin.QueryRow(background, `UPDATE runs SET held_until = clock_timestamp() + '1 s'
		WHERE part = 'b' RETURNING fence`).Scan(&token))
	key, options := map[string]any{"part": "b", "id": 1}, pgfence.RowOptions{TTL: time.Second}
	// The fence names the schema of each function.
	fence := pgfence.New(url, pgfence.InSchema("public"))
	defer fence.Close()
	lease := must(fence.KeepRow(background, "runs", key, token, options))
	// The transaction has locked the row: nobody else can claim it after the deadline, and the
	// holder may still finish it.
	noError(lease.GuardSQL(background, db, run("SELECT pg_sleep(1.5)")))
	p.isError(lease.Check(), pgfence.LeaseLost)
	done := run("UPDATE runs SET state = 'done' WHERE part = 'b'")
	noError(lease.GuardSQL(background, db, done, pgfence.Releasing))
	p.equal(p.sql("SELECT concat(state, held_until) FROM runs WHERE part = 'b'"), "done")
}
