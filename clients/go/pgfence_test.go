package pgfence_test

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"reflect"
	"runtime"
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

// What the scenarios of all clients do not show: the kinds of transactions, and what is Go's own. DATABASE_URL names a
// database with the extension that is otherwise of no use: a table is made and dropped in it.

var (
	url        = os.Getenv("DATABASE_URL")
	background = context.Background()
	long       = pgfence.Options{TTL: 5 * time.Minute}
)

const (
	pay     = "UPDATE orders SET status = 'paid'"
	waiting = "SELECT count(*)::text FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT lease_acquire%'"
	held    = "SELECT count(*)::text FROM fence.leases WHERE state IN ('held', 'uncommitted')"
)

// table makes the table, and at the end sees to it that nothing is left: no lease, no goroutine.
func table(t *testing.T) (*pgfence.Fence, *pgx.Conn) {
	t.Helper()
	before := runtime.NumGoroutine()
	hangs := time.AfterFunc(2*time.Minute, func() { panic(t.Name() + " hangs") })
	t.Cleanup(func() { hangs.Stop() })
	admin := connect(t)
	run(t, admin, "DROP TABLE IF EXISTS orders")
	run(t, admin, "CREATE TABLE orders (id bigint PRIMARY KEY, status text)")
	run(t, admin, "INSERT INTO orders VALUES (7, 'new')")
	run(t, admin, "SELECT fence_protect('orders', lease => 'order:{id}')")
	t.Cleanup(func() {
		comesTrue(t, "no lease is held", func() bool { return text(t, admin, held) == "0" })
		if err := admin.Close(background); err != nil {
			t.Error(err)
		}
		comesTrue(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= before })
	})
	return pgfence.New(url), admin
}

// configWith is a configuration whose sockets are wrapped.
func configWith(t *testing.T, wrap func(net.Conn) net.Conn) *pgx.ConnConfig {
	t.Helper()
	config, err := pgx.ParseConfig(url + "&sslmode=disable")
	must(t, err)
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err == nil {
			conn = wrap(conn)
		}
		return conn, err
	}
	return config
}

func connect(t *testing.T) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(background, url)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close(background) })
	return conn
}

func run(t *testing.T, conn *pgx.Conn, query string) {
	t.Helper()
	_, err := conn.Exec(background, query)
	must(t, err)
}

func text(t *testing.T, conn *pgx.Conn, query string) (value string) {
	t.Helper()
	must(t, conn.QueryRow(background, query).Scan(&value))
	return value
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal(t *testing.T, is, should any) {
	t.Helper()
	if !reflect.DeepEqual(is, should) {
		t.Fatalf("it is %v and should be %v", is, should)
	}
}

func is(t *testing.T, err, target error) *pgfence.Error {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("it is %v and should be %v", err, target)
	}
	var typed *pgfence.Error
	errors.As(err, &typed)
	return typed
}

func comesTrue(t *testing.T, what string, check func() bool) {
	t.Helper()
	for range 600 {
		if check() {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	stacks := make([]byte, 1<<16)
	t.Fatalf("it does not come true that %s\n%s", what, stacks[:runtime.Stack(stacks, true)])
}

func acquire(t *testing.T, fence *pgfence.Fence, options pgfence.Options, names ...string) *pgfence.Lease {
	t.Helper()
	lease, err := fence.AcquireAll(background, names, options)
	must(t, err)
	t.Cleanup(func() { _ = lease.Release() })
	return lease
}

const (
	pay9     = "UPDATE orders SET status = 'paid' WHERE id = 9"
	send9    = "UPDATE orders SET status = 'sent' WHERE id = 9"
	order9   = "SELECT status || ' ' || coalesce(fence, 0) FROM orders WHERE id = 9"
	adopting = "SELECT count(*)::text FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT lease_adopt%'"
)

// adoptedTable has an order whose lease somebody else grants. forget is as a failover to a standby that has missed the
// adoption.
func adoptedTable(t *testing.T) (fence *pgfence.Fence, admin *pgx.Conn, forget func()) {
	t.Helper()
	fence, admin = table(t)
	run(t, admin, "SELECT fence_unprotect('orders')")
	run(t, admin, "INSERT INTO orders VALUES (9, 'new')")
	run(t, admin, "SELECT fence_protect('orders', lease => 'order:{id}')")
	forget = func() {
		run(t, admin, "SELECT lease_revoke('order:9')")
		run(t, admin, "SELECT lease_forget('order:9')")
	}
	t.Cleanup(forget)
	return fence, admin, forget
}

func adopt(t *testing.T, fence *pgfence.Fence, token int64) *pgfence.Adopted {
	t.Helper()
	adopted, err := fence.Adopt(background, "order:9", token, pgfence.AdoptOptions{})
	must(t, err)
	return adopted
}

// does is the work of a transaction of pgx.
func does(statement string) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, statement)
		return err
	}
}

func TestAnAdoptedLeasesNumberIsJudged(t *testing.T) {
	fence, admin, _ := adoptedTable(t)
	conn := connect(t)
	const number = int64(1) << 60
	first, err := fence.Adopt(background, "order:9", number, pgfence.AdoptOptions{
		Holder: "it's A", Metadata: map[string]any{"run": 7},
	})
	must(t, err)
	shown := text(t, admin, "SELECT holder || ' ' || metadata || ' ' || adopted FROM lease_info('order:9')")
	equal(t, shown, `it's A {"run": 7} true`)
	must(t, pgfence.Guard(background, first, conn.Begin, does(pay9)))
	must(t, pgfence.Present(background, first, conn.Begin, does(pay9)))
	equal(t, text(t, admin, order9), fmt.Sprint("paid ", number))
	second := adopt(t, fence, number+1)
	is(t, pgfence.Present(background, first, conn.Begin, does(send9)), pgfence.ErrNotSpeaking)
	// Refused once, it looks before it begins.
	is(t, pgfence.Present(background, first, conn.Begin, does("SELECT 1")), pgfence.ErrStaleToken)
	stale := is(t, pgfence.Guard(background, first, conn.Begin, does(send9)), pgfence.ErrStaleToken)
	equal(t, stale.Detail["presented"], number)
	_, err = fence.Adopt(background, "order:9", number, pgfence.AdoptOptions{})
	is(t, err, pgfence.ErrStaleToken)
	must(t, pgfence.Guard(background, second, conn.Begin, does(send9)))
	must(t, second.Release())
	equal(t, is(t, first.Release(), pgfence.ErrLeaseLost).Reason, pgfence.Gone)
	equal(t, text(t, admin, order9), fmt.Sprint("sent ", number+1))
}

func TestAnAdoptionIsTakenWhileAnOlderNumberIsGuarded(t *testing.T) {
	fence, admin, _ := adoptedTable(t)
	conn := connect(t)
	next := make(chan error, 1)
	must(t, pgfence.Guard(background, adopt(t, fence, 33), conn.Begin, func(ctx context.Context, tx pgx.Tx) error {
		_, err := fence.Adopt(ctx, "order:9", 34, pgfence.AdoptOptions{})
		is(t, err, pgfence.ErrLeaseTaken)
		giveUp, cancel := context.WithCancel(ctx)
		go func() {
			comesTrue(t, "it waits", func() bool { return text(t, admin, adopting) == "1" })
			cancel()
		}()
		_, err = fence.Adopt(giveUp, "order:9", 35, pgfence.AdoptOptions{Wait: 5 * time.Minute})
		is(t, err, context.Canceled)
		comesTrue(t, "nobody waits", func() bool { return text(t, admin, adopting) == "0" })
		go func() {
			adopted, err := fence.Adopt(background, "order:9", 36, pgfence.AdoptOptions{Wait: 5 * time.Minute})
			if err == nil {
				err = adopted.Release()
			}
			next <- err
		}()
		comesTrue(t, "it waits", func() bool { return text(t, admin, adopting) == "1" })
		return does(pay9)(ctx, tx)
	}))
	must(t, <-next)
	equal(t, text(t, admin, order9), "paid 33")
}

func TestEachTransactionMakesAnAdoptedNumberKnown(t *testing.T) {
	fence, admin, forget := adoptedTable(t)
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead} {
		for _, db := range databases(t) {
			begin := func(ctx context.Context) (*sql.Tx, error) {
				return db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
			}
			pays := doesSQL(pay9)
			adopted := adopt(t, fence, 33)
			for _, silence := range []func(){forget, func() { run(t, admin, "SELECT fence_new_epoch()") }} {
				silence()
				must(t, pgfence.Guard(background, adopted, begin, pays))
				silence()
				is(t, pgfence.Present(background, adopted, begin, pays), pgfence.ErrNotSpeaking)
				must(t, pgfence.Present(background, adopted, begin, pays))
			}
			must(t, adopted.Release())
			forget()
		}
	}
}

func TestAnOlderNumberMayComeFirstAfterAFailover(t *testing.T) {
	fence, admin, forget := adoptedTable(t)
	conn, other := connect(t), connect(t)
	newer := adopt(t, fence, 34)
	forget()
	older := adopt(t, fence, 33)
	must(t, pgfence.Guard(background, older, conn.Begin, func(ctx context.Context, tx pgx.Tx) error {
		is(t, pgfence.Guard(ctx, newer, other.Begin, does(send9)), pgfence.ErrLeaseTaken)
		return does(pay9)(ctx, tx)
	}))
	must(t, pgfence.Guard(background, newer, other.Begin, does(send9)))
	must(t, newer.Release())
	equal(t, text(t, admin, order9), "sent 34")
}

func TestAnAdoptedLeaseThatWasReleasedIsOver(t *testing.T) {
	fence, admin, _ := adoptedTable(t)
	conn := connect(t)
	adopted := adopt(t, fence, 33)
	must(t, pgfence.Guard(background, adopted, conn.Begin, does(pay9), pgfence.Releasing))
	over := is(t, pgfence.Guard(background, adopted, conn.Begin, does(send9)), pgfence.ErrLeaseLost)
	equal(t, over.Reason, pgfence.Released)
	must(t, adopted.Release())
	_, err := fence.Adopt(background, "order:9", 33, pgfence.AdoptOptions{})
	is(t, err, pgfence.ErrStaleToken)
	equal(t, text(t, admin, order9), "paid 33")
}

func TestANameIsGrantedHereOrAdopted(t *testing.T) {
	fence, _ := table(t)
	acquire(t, fence, long, "order:7")
	_, err := fence.Adopt(background, "order:7", 33, pgfence.AdoptOptions{})
	var server *pgconn.PgError
	equal(t, errors.As(err, &server) && server.Code == "55000", true)
	_, err = fence.Adopt(background, "order:9", 33, pgfence.AdoptOptions{Wait: 5000})
	equal(t, err != nil, true)
}

var pays = does(pay)

func TestALostTryIsAnErrorOfItsKind(t *testing.T) {
	fence, admin := table(t)
	options := long
	options.Holder, options.Metadata = "it's me", map[string]int{"run": 7}
	lease := acquire(t, fence, options, "order:7")
	_, err := fence.Acquire(background, "order:7", long)
	equal(t, is(t, err, pgfence.ErrLeaseTaken).Names, []string{"order:7"})
	equal(t, text(t, admin, "SELECT holder || ' ' || metadata FROM lease_info('order:7')"), `it's me {"run": 7}`)
	equal(t, lease.Held(), true)
}

func TestBadInputIsRefused(t *testing.T) {
	fence, _ := table(t)
	for _, options := range []pgfence.Options{{TTL: 30000}, {TTL: -1}, {Wait: 5000}, {Reclaim: true}} {
		if _, err := fence.Acquire(background, "order:7", options); err == nil {
			t.Fatalf("%+v is taken", options)
		}
	}
	if err := fence.Lead(background, "order:7", pgfence.Options{TTL: 30000}, nil); err == nil {
		t.Fatal("a ttl without a unit is led with")
	}
	_, err := fence.Acquire(background, "", long)
	equal(t, err.(interface{ SQLState() string }).SQLState(), "22023")
	equal(t, pgfence.Classify(err), (*pgfence.Error)(nil))
	if _, err = pgfence.New("postgresql://%%").Acquire(background, "order:7", long); err == nil {
		t.Fatal("a wrong connection string is taken")
	}
	if err = pgfence.New("postgresql://%%").Lead(background, "order:7", long, nil); err == nil {
		t.Fatal("a wrong connection string is led with")
	}
}

func TestSeveralAreAllThereOrNone(t *testing.T) {
	fence, admin := table(t)
	one := acquire(t, fence, long, "order:8")
	names := []string{"order:6", `"o\dd`, "order:7", "order:8"}
	_, err := fence.AcquireAll(background, names, pgfence.Options{Wait: 300 * time.Millisecond})
	is(t, err, pgfence.ErrLeaseTaken)
	must(t, one.Release())
	several := acquire(t, fence, long, names...)
	must(t, pgfence.Guard(background, several, admin.Begin, pays))
	renewed, err := several.Renew(background)
	must(t, err)
	equal(t, renewed > several.Token(), true)
	must(t, pgfence.Guard(background, several, admin.Begin, pays, pgfence.Releasing))
	equal(t, text(t, admin, held), "0")
	equal(t, is(t, several.Check(), pgfence.ErrLeaseLost).Reason, pgfence.Released)
}

func TestASchemaAndADriversSettings(t *testing.T) {
	_, admin := table(t)
	schema := text(t, admin, "SELECT extnamespace::regnamespace::text FROM pg_extension WHERE extname = 'pg_fence'")
	fence := pgfence.New(url + "&pool_max_conns=3&default_query_exec_mode=exec").InSchema(schema)
	lease := acquire(t, fence, long, "order:7")
	must(t, pgfence.Guard(background, lease, admin.Begin, pays, pgfence.Releasing))
	equal(t, text(t, admin, "SELECT status FROM orders"), "paid")
}

func TestATransactionEndsAsItsWorkDoes(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, long, "order:7")
	must(t, pgfence.Present(background, lease, admin.Begin, pays))
	equal(t, text(t, admin, "SELECT status FROM orders"), "paid")
	undo := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "UPDATE orders SET status = 'undone'")
		must(t, err)
		return io.EOF
	}
	equal(t, pgfence.Guard(background, lease, admin.Begin, undo), io.EOF)
	func() {
		defer func() { equal(t, recover(), "panics") }()
		_ = pgfence.Guard(background, lease, admin.Begin, func(ctx context.Context, tx pgx.Tx) error {
			_ = undo(ctx, tx)
			panic("panics")
		})
	}()
	equal(t, text(t, admin, "SELECT status FROM orders"), "paid")
	swallows := func(ctx context.Context, tx pgx.Tx) error {
		_ = undo(ctx, tx)
		_, err := tx.Exec(ctx, "SELECT 1/0")
		equal(t, err != nil, true)
		return nil
	}
	is(t, pgfence.Guard(background, lease, admin.Begin, swallows), pgfence.ErrTransactionLost)
	equal(t, text(t, admin, "SELECT status FROM orders"), "paid")
}

func TestAnOpenTransactionIsLeftToTheCodeThatBeganIt(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, long, "order:7")
	tx, err := admin.Begin(background)
	must(t, err)
	must(t, pgfence.GuardTx(background, lease, tx, pays))
	must(t, tx.Commit(background))
	equal(t, text(t, admin, "SELECT status FROM orders"), "paid")
	// A savepoint is ended, and the transaction around it goes on.
	tx, err = admin.Begin(background)
	must(t, err)
	must(t, pgfence.Guard(background, lease, tx.Begin, pays))
	must(t, pgfence.PresentTx(background, lease, tx, pays))
	must(t, tx.Rollback(background))
}

// databases are those of database/sql, by driver.
func databases(t *testing.T) map[string]*sql.DB {
	t.Helper()
	opened := map[string]*sql.DB{}
	for _, driver := range []string{"pgx", "postgres"} {
		db, err := sql.Open(driver, url+"&sslmode=disable")
		must(t, err)
		t.Cleanup(func() { _ = db.Close() })
		opened[driver] = db
	}
	return opened
}

// doesSQL is the work of a transaction of database/sql.
func doesSQL(statement string) func(context.Context, *sql.Tx) error {
	return func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, statement)
		return err
	}
}

func TestTransactionsOfDatabaseSQL(t *testing.T) {
	fence, admin := table(t)
	for driver, db := range databases(t) {
		t.Run(driver, func(t *testing.T) {
			// The heartbeat does not use the worker's connections.
			db.SetMaxOpenConns(1)
			lease := acquire(t, fence, long, "order:7", "order:8")
			must(t, pgfence.Guard(background, lease, pgfence.SQL(db), doesSQL(pay)))
			must(t, pgfence.Present(background, lease, pgfence.SQL(db), doesSQL(pay)))
			tx, err := db.BeginTx(background, nil)
			must(t, err)
			must(t, pgfence.GuardTx(background, lease, tx, doesSQL(pay)))
			must(t, tx.Commit())
			ends := func(ctx context.Context, tx *sql.Tx) error {
				var pid int
				must(t, tx.QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&pid))
				run(t, admin, fmt.Sprintf("SELECT pg_terminate_backend(%d, 5000)", pid))
				return doesSQL(pay)(ctx, tx)
			}
			is(t, pgfence.Guard(background, lease, pgfence.SQL(db), ends), pgfence.ErrTransactionLost)
			must(t, lease.Check())
			must(t, pgfence.Guard(background, lease, pgfence.SQL(db), doesSQL(pay), pgfence.Releasing))
			_, err = db.Exec(pay)
			equal(t, pgfence.Classify(err).Kind, pgfence.ErrNoToken)
			equal(t, pgfence.Classify(err).Detail["relation"], "public.orders")
		})
	}
}

func TestALossEndsTheContextsOfDatabaseSQL(t *testing.T) {
	fence, admin := table(t)
	for driver, db := range databases(t) {
		t.Run(driver, func(t *testing.T) {
			lease := acquire(t, fence, pgfence.Options{TTL: 2 * time.Second}, "order:7")
			run(t, admin, "SELECT lease_revoke('order:7')")
			err := pgfence.Present(background, lease, pgfence.SQL(db), doesSQL("SELECT pg_sleep(300)"))
			equal(t, is(t, err, pgfence.ErrLeaseLost).Reason, pgfence.Gone)
		})
	}
}

func TestErrorsHaveTheirKindTheirCauseAndTheirDetail(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, long, "other")
	err := pgfence.Guard(background, lease, admin.Begin, func(ctx context.Context, tx pgx.Tx) error {
		return fmt.Errorf("wrapped: %w", pays(ctx, tx))
	})
	told := is(t, err, pgfence.ErrNotSpeaking)
	equal(t, told.SQLState, "PF004")
	equal(t, told.Detail["lease"], "order:7")
	equal(t, told.Detail["presented"], lease.Token())
	equal(t, told.Hint != "", true)
	var server interface{ SQLState() string }
	equal(t, errors.As(err, &server), true)
	err = pgfence.Guard(background, lease, admin.Begin, does("SELECT 1/0"))
	equal(t, pgfence.Classify(err), (*pgfence.Error)(nil))
}

func TestAnotherConnectionThatBreaksIsTheWorksOwnBusiness(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, long, "order:7")
	other := connect(t)
	err := pgfence.Guard(background, lease, admin.Begin, func(ctx context.Context, tx pgx.Tx) error {
		_, err := other.Exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())")
		return err
	})
	equal(t, err != nil && !errors.Is(err, pgfence.ErrTransactionLost), true)
	equal(t, pgfence.Classify(err).Kind, pgfence.ErrTransactionLost)
}

func TestALossIsToldAtTheEndAndReplacesNoError(t *testing.T) {
	fence, admin := table(t)
	told := make(chan *pgfence.Error, 1)
	options := long
	options.OnLost = func(loss *pgfence.Error) { told <- loss }
	revoke := func(context.Context, *pgfence.Lease) error {
		run(t, admin, "SELECT lease_revoke('order:7')")
		return nil
	}
	err := fence.Hold(background, "order:7", options, revoke)
	equal(t, is(t, err, pgfence.ErrLeaseLost).Reason, pgfence.Gone)
	equal(t, (<-told).Reason, pgfence.Gone)
	equal(t, fence.Hold(background, "order:7", long, func(ctx context.Context, lease *pgfence.Lease) error {
		_ = revoke(ctx, lease)
		return io.EOF
	}), io.EOF)
}

func TestContextsEndWithTheLossAndSayIt(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, pgfence.Options{TTL: 2 * time.Second}, "order:7")
	child, cancel := context.WithTimeout(lease.Context(), time.Hour)
	defer cancel()
	run(t, admin, "SELECT lease_revoke('order:7')")
	<-child.Done()
	for _, ctx := range []context.Context{lease.Context(), child} {
		equal(t, is(t, context.Cause(ctx), pgfence.ErrLeaseLost).Reason, pgfence.Gone)
		equal(t, ctx.Err(), context.Canceled)
	}
	_, err := lease.Renew(background)
	is(t, err, pgfence.ErrLeaseLost)
	is(t, pgfence.Guard(background, lease, admin.Begin, pays), pgfence.ErrLeaseLost)
	is(t, lease.Release(), pgfence.ErrLeaseLost)
}

// What hangs in a transaction of pgx ends by a loss, also where the work forgot the context.
func TestALossBreaksTheConnectionOff(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, pgfence.Options{TTL: 2 * time.Second}, "order:7")
	conn := connect(t)
	run(t, admin, "SELECT lease_revoke('order:7')")
	err := pgfence.Present(background, lease, conn.Begin, func(_ context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(background, "SELECT pg_sleep(300)")
		return err
	})
	is(t, err, pgfence.ErrLeaseLost)
	equal(t, conn.IsClosed(), true)
}

// waitsInClose is a socket whose Close waits for a Read that is under way, as a tunnel's may.
type waitsInClose struct {
	net.Conn
	reading sync.Mutex
}

func (c *waitsInClose) Read(into []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.Conn.Read(into)
}

func (c *waitsInClose) Close() error {
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.Conn.Close()
}

func TestALossDoesNotWaitForASocketToClose(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, pgfence.Options{TTL: 2 * time.Second}, "order:7")
	config := configWith(t, func(conn net.Conn) net.Conn { return &waitsInClose{Conn: conn} })
	conn, err := pgx.ConnectConfig(background, config)
	must(t, err)
	run(t, admin, "SELECT lease_revoke('order:7')")
	err = pgfence.Present(background, lease, conn.Begin, func(_ context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(background, "SELECT pg_sleep(300)")
		return err
	})
	is(t, err, pgfence.ErrLeaseLost)
}

func TestAPoolOfOneConnectionIsEnoughAndGetsItBack(t *testing.T) {
	fence, admin := table(t)
	config, err := pgxpool.ParseConfig(url + "&pool_max_conns=1")
	must(t, err)
	pool, err := pgxpool.NewWithConfig(background, config)
	must(t, err)
	defer pool.Close()
	lease := acquire(t, fence, pgfence.Options{TTL: time.Second}, "order:7")
	ends := does("SELECT pg_terminate_backend(pg_backend_pid())")
	fails := does("INSERT INTO orders VALUES (7, 'twice')")
	swallows := func(ctx context.Context, tx pgx.Tx) error {
		_ = fails(ctx, tx)
		return nil
	}
	for range 3 {
		for _, work := range []func(context.Context, pgx.Tx) error{ends, fails, swallows} {
			equal(t, pgfence.Guard(background, lease, pool.Begin, work) != nil, true)
		}
		must(t, pgfence.Guard(background, lease, pool.Begin, func(ctx context.Context, tx pgx.Tx) error {
			// Longer than the ttl: the heartbeat does not need the pool.
			_, err := tx.Exec(ctx, "SELECT pg_sleep(1.5)")
			return err
		}))
	}
	canceled, cancel := context.WithTimeout(background, 200*time.Millisecond)
	defer cancel()
	err = pgfence.Guard(canceled, lease, pool.Begin, does("SELECT pg_sleep(300)"))
	is(t, err, context.DeadlineExceeded)
	must(t, pgfence.Guard(background, lease, pool.Begin, pays, pgfence.Releasing))
	equal(t, text(t, admin, "SELECT status FROM orders"), "paid")
}

func TestACanceledContextGivesUpWaitingAndLeavesNothingBehind(t *testing.T) {
	fence, admin := table(t)
	acquire(t, fence, long, "order:7")
	ctx, cancel := context.WithCancel(background)
	options := long
	options.Wait = 5 * time.Minute
	go func() {
		time.Sleep(300 * time.Millisecond)
		cancel()
	}()
	_, err := fence.Acquire(ctx, "order:7", options)
	equal(t, err, context.Canceled)
	comesTrue(t, "nobody waits", func() bool { return text(t, admin, waiting) == "0" })
}

// A grant that comes at the moment of giving up is given back.
func TestAGrantThatNobodyWaitsForIsGivenBack(t *testing.T) {
	fence, admin := table(t)
	givesUp(t, fence, admin)
}

// lateCancel is a socket that passes a request to cancel on some time after it has said so, as a pooler may.
type lateCancel struct {
	net.Conn
	isCancel bool
}

func (c *lateCancel) Write(data []byte) (int, error) {
	const cancelRequest = 80877102
	if len(data) != 16 || binary.BigEndian.Uint32(data[4:]) != cancelRequest {
		return c.Conn.Write(data)
	}
	c.isCancel = true
	request := append([]byte(nil), data...)
	late := time.Duration(rand.Intn(10000)) * time.Microsecond
	time.AfterFunc(late, func() {
		_, _ = c.Conn.Write(request)
		_ = c.Conn.Close()
	})
	return len(data), nil
}

func (c *lateCancel) Read(into []byte) (int, error) {
	if c.isCancel {
		return 0, io.EOF
	}
	return c.Conn.Read(into)
}

func (c *lateCancel) Close() error {
	if c.isCancel {
		return nil
	}
	return c.Conn.Close()
}

// The request to cancel must not hit the release.
func TestAGrantThatNobodyWaitsForIsGivenBackWhereACancelIsLate(t *testing.T) {
	_, admin := table(t)
	config := configWith(t, func(conn net.Conn) net.Conn { return &lateCancel{Conn: conn} })
	givesUp(t, pgfence.NewConfig(config), admin)
}

func givesUp(t *testing.T, fence *pgfence.Fence, admin *pgx.Conn) {
	t.Helper()
	options := long
	options.Wait = 5 * time.Minute
	for range 40 {
		holder, err := fence.Acquire(background, "order:7", options)
		must(t, err)
		ctx, cancel := context.WithCancel(background)
		given := make(chan error, 1)
		go func() {
			lease, err := fence.Acquire(ctx, "order:7", options)
			if err == nil {
				err = lease.Release()
			}
			given <- err
		}()
		comesTrue(t, "it waits", func() bool { return text(t, admin, waiting) == "1" })
		go cancel()
		must(t, holder.Release())
		if err := <-given; err != nil {
			is(t, err, context.Canceled)
		}
		comesTrue(t, "it is given back", func() bool { return text(t, admin, held) == "0" })
	}
}

func TestTheLongestTTLCanBeRenewed(t *testing.T) {
	fence, _ := table(t)
	lease := acquire(t, fence, pgfence.Options{TTL: 366 * 24 * time.Hour}, "order:7")
	_, err := lease.Renew(background)
	must(t, err)
}

func TestLeadingEndsWithItsWork(t *testing.T) {
	fence, admin := table(t)
	must(t, fence.Lead(background, "chief", long, func(context.Context, *pgfence.Lease) error { return nil }))
	equal(t, fence.Lead(background, "chief", long, func(context.Context, *pgfence.Lease) error {
		return io.EOF
	}), io.EOF)
	terms := 0
	must(t, fence.Lead(background, "chief", pgfence.Options{TTL: 2 * time.Second},
		func(ctx context.Context, lease *pgfence.Lease) error {
			if terms++; terms == 1 {
				run(t, admin, "SELECT lease_revoke('chief')")
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}))
	equal(t, terms, 2)
	ctx, cancel := context.WithCancel(background)
	err := fence.Lead(ctx, "chief", long, func(ctx context.Context, _ *pgfence.Lease) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	})
	equal(t, err, context.Canceled)
}

// What the table of drivers says on the common page.
func TestWhatDriversSendForArguments(t *testing.T) {
	_, admin := table(t)
	rollBack := errors.New("rolled back")
	for _, one := range []struct {
		query string
		arg   any
		pgx   bool
		pq    bool
	}{
		{"SELECT lease_acquire('job', ttl => $1)::text", 30 * time.Second, true, false},
		{"SELECT lease_acquire('job', ttl => $1::text::interval)::text", "1500 milliseconds", true, true},
		{"SELECT lease_acquire('job', metadata => $1)::text", `{"run": 7}`, true, true},
		{"SELECT lease_acquire('job', metadata => $1)::text", map[string]int{"run": 7}, true, false},
		{"SELECT set_config('pg_fence.token', $1, true)", "1", true, true},
		{"SELECT set_config('pg_fence.token', $1, true)", int64(1), false, true},
		{"SELECT set_config('pg_fence.token', $1::bigint::text, true)", int64(1), true, true},
	} {
		var value string
		err := pgx.BeginFunc(background, admin, func(tx pgx.Tx) error {
			if err := tx.QueryRow(background, one.query, one.arg).Scan(&value); err != nil {
				return err
			}
			return rollBack
		})
		if (err == rollBack) != one.pgx {
			t.Errorf("pgx: %s with %T: %v", one.query, one.arg, err)
		}
		tx, err := databases(t)["postgres"].Begin()
		must(t, err)
		err = tx.QueryRow(one.query, one.arg).Scan(&value)
		must(t, tx.Rollback())
		if (err == nil) != one.pq {
			t.Errorf("lib/pq: %s with %T: %v", one.query, one.arg, err)
		}
	}
	var token int64
	equal(t, admin.QueryRow(background, "SELECT NULL::bigint").Scan(&token) != nil, true)
}
