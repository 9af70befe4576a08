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
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"pgfence.example/pgfence"
)

// The part that the scenarios of all clients do not show: the shape of the API, the kinds of connections, and what is
// Go's own. DATABASE_URL names a database with the extension that is otherwise of no use: a table is made and dropped
// in it.

var (
	url        = os.Getenv("DATABASE_URL")
	background = context.Background()
	long       = pgfence.Options{TTL: 5 * time.Minute}
	short      = pgfence.Options{TTL: time.Second}
)

const (
	pay  = "UPDATE orders SET status = 'paid'"
	held = "SELECT count(*)::text FROM fence.leases WHERE state IN ('held', 'uncommitted')"
)

// table makes the table, and at the end sees to it that nothing is left: no lease, no goroutine.
func table(t *testing.T) (*pgfence.Fence, *pgx.Conn) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	before := runtime.NumGoroutine()
	hangs := time.AfterFunc(2*time.Minute, func() { panic(t.Name() + " hangs") })
	admin := connect(t)
	run(t, admin, `DROP TABLE IF EXISTS orders; CREATE TABLE orders (id bigint PRIMARY KEY, status text);
		INSERT INTO orders VALUES (7, 'new'); SELECT fence_protect('orders', lease => 'order:{id}')`)
	fence := pgfence.New(url)
	t.Cleanup(func() {
		hangs.Stop()
		fence.Close()
		comesTrue(t, "no lease is held", func() bool { return text(t, admin, held) == "0" })
		must(t, admin.Close(background))
		comesTrue(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= before })
	})
	return fence, admin
}

func connect(t *testing.T) *pgx.Conn {
	conn := have(pgx.Connect(background, url))
	t.Cleanup(func() { _ = conn.Close(background) })
	return conn
}

func run(_ *testing.T, conn *pgx.Conn, query string) { have(conn.Exec(background, query)) }

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

func second[T any](_ T, err error) error { return err }

// have is what there is without an error.
func have[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
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
	var told *pgfence.Error
	errors.As(err, &told)
	return told
}

func comesTrue(t *testing.T, what string, check func() bool) {
	t.Helper()
	for range 600 {
		if check() {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("it does not come true that %s", what)
}

func acquire(t *testing.T, fence *pgfence.Fence, options pgfence.Options, names ...string) *pgfence.Lease {
	lease := have(fence.Acquire(background, names, options))
	t.Cleanup(func() { _ = lease.Release() })
	return lease
}

func database(t *testing.T, driver string) *sql.DB {
	db := have(sql.Open(driver, strings.Replace(url, "?", "?sslmode=disable&", 1)))
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func pool(t *testing.T, more string) *pgxpool.Pool {
	made := have(pgxpool.New(background, url+more))
	t.Cleanup(made.Close)
	return made
}

type txn struct {
	exec         func(context.Context, string) error
	commit       func() error
	guardsWithin func(*pgfence.Lease, work) error
}

type work = func(context.Context, txn) error
type guard = func(context.Context, *pgfence.Lease, work, ...pgfence.Last) error

func does(statements ...string) work {
	return func(ctx context.Context, tx txn) error {
		for _, statement := range statements {
			if err := tx.exec(ctx, statement); err != nil {
				return err
			}
		}
		return nil
	}
}

func swallows(ctx context.Context, tx txn) error {
	_ = tx.exec(ctx, "SELECT 1 / 0")
	return nil
}

func ofPgx(do work) pgfence.PgxWork {
	return func(ctx context.Context, inner pgx.Tx) error {
		return do(ctx, txn{
			func(ctx context.Context, sql string) error { return second(inner.Exec(ctx, sql)) },
			func() error { return inner.Commit(background) },
			func(lease *pgfence.Lease, do work) error { return lease.Guard(ctx, inner, ofPgx(do)) },
		})
	}
}

func ofSQL(do work) pgfence.SQLWork {
	return func(ctx context.Context, inner *sql.Tx) error {
		return do(ctx, txn{
			func(ctx context.Context, sql string) error { return second(inner.ExecContext(ctx, sql)) },
			inner.Commit,
			func(lease *pgfence.Lease, do work) error { return lease.GuardSQL(ctx, inner, ofSQL(do)) },
		})
	}
}

// onEach runs a test with each kind of connection.
func onEach(t *testing.T, test func(*testing.T, *pgfence.Fence, *pgx.Conn, guard)) {
	for name, open := range map[string]func(*testing.T) any{
		"Conn":         func(t *testing.T) any { return connect(t) },
		"Pool":         func(t *testing.T) any { return pool(t, "&pool_max_conns=1") },
		"DB on pgx":    func(t *testing.T) any { return database(t, "pgx") },
		"DB on lib/pq": func(t *testing.T) any { return database(t, "postgres") },
		"Conn of a DB": func(t *testing.T) any { return have(database(t, "pgx").Conn(background)) },
	} {
		t.Run(name, func(t *testing.T) {
			fence, admin := table(t)
			conn := open(t)
			test(t, fence, admin, func(ctx context.Context, lease *pgfence.Lease, do work, last ...pgfence.Last) error {
				if conn, is := conn.(pgfence.Pgx); is {
					return lease.Guard(ctx, conn, ofPgx(do), last...)
				}
				return lease.GuardSQL(ctx, conn.(pgfence.SQL), ofSQL(do), last...)
			})
		})
	}
}

func TestATransactionEndsAsItsWorkDoes(t *testing.T) {
	onEach(t, func(t *testing.T, fence *pgfence.Fence, admin *pgx.Conn, guard guard) {
		const now = "SELECT status FROM orders"
		lease := acquire(t, fence, long, "order:7")
		must(t, guard(background, lease, does(pay)))
		equal(t, text(t, admin, now), "paid")
		undone := func(end func() error) work {
			return func(ctx context.Context, tx txn) error {
				return cmp.Or(tx.exec(ctx, "UPDATE orders SET status = 'undone'"), end())
			}
		}
		equal(t, guard(background, lease, undone(func() error { return io.EOF })), io.EOF)
		func() {
			defer func() { equal(t, recover(), "panic") }()
			_ = guard(background, lease, undone(func() error { panic("panic") }))
		}()
		equal(t, text(t, admin, now), "paid")
		equal(t, is(t, guard(background, lease, swallows), pgfence.TransactionLost).InDoubt, false)
		for _, commits := range []func(context.Context, txn) error{
			does("UPDATE orders SET status = 'landed'", "COMMIT"),
			func(_ context.Context, tx txn) error { return tx.commit() },
		} {
			equal(t, is(t, guard(background, lease, commits), pgfence.TransactionLost).InDoubt, true)
		}
		equal(t, text(t, admin, now), "landed")
		must(t, guard(background, lease, does(pay), pgfence.Releasing))
		is(t, guard(background, lease, does(pay)), pgfence.LeaseLost)
		equal(t, lease.Check().(*pgfence.Error).Reason, pgfence.ReasonReleased)
		must(t, lease.Release())
	})
}

func TestAGuardWithinAnotherTransactionIsASavepoint(t *testing.T) {
	onEach(t, func(t *testing.T, fence *pgfence.Fence, admin *pgx.Conn, guard guard) {
		lease, other := acquire(t, fence, long, "order:7"), acquire(t, fence, long, "other")
		must(t, guard(background, other, func(_ context.Context, tx txn) error {
			equal(t, tx.guardsWithin(lease, func(ctx context.Context, tx txn) error {
				must(t, tx.exec(ctx, "UPDATE orders SET status = 'undone'"))
				return io.EOF
			}), io.EOF)
			is(t, tx.guardsWithin(lease, swallows), pgfence.TransactionLost)
			return tx.guardsWithin(lease, does(pay))
		}))
		equal(t, text(t, admin, "SELECT status FROM orders"), "paid")
	})
}

func TestWhatHangsEndsByALossAndIsTheLoss(t *testing.T) {
	onEach(t, func(t *testing.T, fence *pgfence.Fence, admin *pgx.Conn, guard guard) {
		lease := acquire(t, fence, short, "order:7")
		caller, cancel := context.WithCancel(background)
		defer cancel()
		err := guard(caller, lease, func(ctx context.Context, tx txn) error {
			if !strings.Contains(t.Name(), "pq") {
				// It hangs on after the end of its caller, too.
				ctx = background
				go func() {
					defer cancel()
					for text(t, admin, "SELECT count(*)::text FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == "0" && lease.Held() {
					}
				}()
			}
			// A release of its own that is not committed keeps the heartbeat off: so it is the deadline that tells.
			return tx.exec(ctx, fmt.Sprintf("SELECT lease_release('order:7', %d), pg_sleep(300)", lease.Token()))
		})
		equal(t, is(t, err, pgfence.LeaseLost).Reason, pgfence.ReasonDeadline)
		is(t, lease.Release(), pgfence.LeaseLost)
		<-lease.Lost()
	})
}

func TestAGuardOfSeveralIsBrokenOffByEachOfItsOwnAndByNoOther(t *testing.T) {
	fence, admin := table(t)
	leases := pgfence.Leases{acquire(t, fence, long, "a"), acquire(t, fence, short, "b"), acquire(t, fence, long, "order:7")}
	stranger := acquire(t, fence, short, "stranger")
	must(t, fence.Guard(background, connect(t), leases, func(ctx context.Context, tx pgx.Tx) error {
		run(t, admin, "SELECT lease_revoke('stranger')")
		<-stranger.Lost()
		return cmp.Or(leases[1].Check(), second(tx.Exec(ctx, pay)))
	}))
	caller, cancel := context.WithCancel(background)
	err := fence.Guard(caller, connect(t), leases, func(_ context.Context, tx pgx.Tx) error {
		cancel()
		run(t, admin, "SELECT lease_revoke('b')")
		return second(tx.Exec(background, "SELECT pg_sleep(300)"))
	})
	equal(t, is(t, err, pgfence.LeaseLost).Names, []string{"b"})
	leases = pgfence.Leases{acquire(t, fence, long, `a "quoted\" name, and {another}`, "c"), leases[2]}
	must(t, fence.Guard(background, admin, leases, ofPgx(does(pay))))
	must(t, fence.GuardSQL(background, database(t, "postgres"), leases, ofSQL(does(pay)), pgfence.Releasing))
	equal(t, text(t, admin, held), "1")
	is(t, fence.Guard(background, admin, leases, ofPgx(does(pay))), pgfence.LeaseLost)
	equal(t, fence.Guard(background, admin, nil, ofPgx(does(pay))) != nil, true)
	run(t, admin, "BEGIN") // in which it is refused before the work
	equal(t, strings.Contains(acquire(t, fence, long, "d").Guard(background, admin, nil).Error(), "savepoint"), true)
	run(t, admin, "ROLLBACK")
}

func TestADeadlineOfTheCallersIsItsOwn(t *testing.T) {
	forgets := func(ctx context.Context, _ txn) error {
		<-ctx.Done()
		return nil
	}
	for _, work := range []work{does("SELECT pg_sleep(300)"), forgets} {
		onEach(t, func(t *testing.T, fence *pgfence.Fence, _ *pgx.Conn, guard guard) {
			lease := acquire(t, fence, long, "order:7")
			ctx, cancel := context.WithTimeout(background, 200*time.Millisecond)
			defer cancel()
			is(t, guard(ctx, lease, work), context.DeadlineExceeded)
			is(t, guard(ctx, lease, does(pay)), context.DeadlineExceeded)
			must(t, lease.Check())
		})
	}
}

func TestAPoolOfOneConnectionGetsItBack(t *testing.T) {
	fence, admin := table(t)
	one, lease := pool(t, "&pool_max_conns=1"), acquire(t, fence, short, "order:7")
	for range 3 {
		for _, work := range []work{does("SELECT pg_terminate_backend(pg_backend_pid())"), does("SELECT 1 / 0"), does("COMMIT")} {
			equal(t, lease.Guard(background, one, ofPgx(work)) != nil, true)
		}
		// Longer than the ttl: the heartbeat does not need the pool.
		must(t, lease.Guard(background, one, ofPgx(does("SELECT pg_sleep(1.5)"))))
	}
	pooled := have(one.Acquire(background))
	must(t, lease.Guard(background, pooled, ofPgx(does("SELECT 1"))))
	pooled.Release()
	equal(t, text(t, admin, held), "1")
	run(t, admin, "SELECT fence_new_epoch()") // no token speaks until its holder has renewed
	must(t, lease.Guard(background, one, func(context.Context, pgx.Tx) error {
		equal(t, one.Stat().AcquiredConns(), int32(1))
		return nil
	}))
}

func TestErrorsHaveTheirKindTheirCauseAndTheirDetail(t *testing.T) {
	onEach(t, func(t *testing.T, fence *pgfence.Fence, admin *pgx.Conn, guard guard) {
		lease, other := acquire(t, fence, long, "order:7"), acquire(t, fence, long, "other")
		told := is(t, guard(background, other, does(pay)), pgfence.Refused)
		equal(t, fmt.Sprintln(told.SQLState, told.Detail["lease"], told.Detail["presented"]), fmt.Sprintln("PF004", "order:7", other.Token()))
		equal(t, told.Hint != "" && strings.Contains(told.Error(), told.Hint) && errors.Unwrap(told) != nil, true)
		equal(t, errors.As(guard(background, lease, does("SELECT 1 / 0")), new(*pgfence.Error)), false)
		run(t, admin, "SELECT lease_revoke('other')")
		is(t, guard(background, other, does(pay)), pgfence.LeaseLost)
	})
}

func TestAnAdoptedLeasesNumberIsChecked(t *testing.T) {
	fence, admin := table(t)
	run(t, admin, "SELECT lease_prune('0 s')")
	const older = int64(1) << 60
	first, second := fence.Adopted("order:7", older), fence.Adopted("order:7", older+1)
	t.Cleanup(func() { run(t, connect(t), "SELECT lease_revoke('order:7'), lease_forget('order:7')") })
	must(t, first.Guard(background, admin, ofPgx(func(context.Context, txn) error {
		is(t, second.Guard(background, connect(t), ofPgx(does(pay))), pgfence.LeaseTaken)
		return nil
	})))
	must(t, second.GuardSQL(background, database(t, "postgres"), ofSQL(does(pay))))
	told := is(t, first.Guard(background, admin, ofPgx(does(pay))), pgfence.Refused)
	equal(t, fmt.Sprintln(told.SQLState, told.Detail["presented"]), fmt.Sprintln("PF001", older))
	must(t, second.Guard(background, admin, ofPgx(does(pay)), pgfence.Releasing))
	equal(t, is(t, second.Guard(background, admin, ofPgx(does(pay))), pgfence.Refused).SQLState, "PF001")
}

func TestANumberThatAnotherHolderHasAdoptedIsTaken(t *testing.T) {
	fence, admin := table(t)
	t.Cleanup(func() { run(t, connect(t), "SELECT lease_revoke('elsewhere'), lease_forget('elsewhere')") })
	for _, fence := range []*pgfence.Fence{fence, pgfence.New(url)} {
		must(t, fence.Adopted("elsewhere", 7).Guard(background, admin, ofPgx(does("SELECT 1"))))
	}
	holder := text(t, admin, "SELECT holder FROM lease_info('elsewhere')")
	equal(t, strings.Contains(holder, fmt.Sprintf("/%d/", os.Getpid())), true)
	another := fence.Adopted("elsewhere", 7, "another")
	for _, err := range []error{
		another.Guard(background, admin, ofPgx(does("SELECT 1"))),
		another.GuardSQL(background, database(t, "postgres"), ofSQL(does("SELECT 1"))),
	} {
		taken := is(t, err, pgfence.LeaseTaken)
		equal(t, errors.Unwrap(taken).(interface{ SQLState() string }).SQLState(), "PF004")
		equal(t, strings.Contains(taken.Error(), "at the most"), false)
	}
}

func TestALostTrySaysByWhom(t *testing.T) {
	fence, _ := table(t)
	acquire(t, fence, pgfence.Options{Holder: "it's me", Metadata: map[string]int{"run": 7}}, "a", "b")
	for _, names := range [][]string{{"b"}, {"a", "c"}} {
		taken := is(t, second(fence.Acquire(background, names, long)), pgfence.LeaseTaken)
		equal(t, taken.Holder, "it's me")
		equal(t, taken.Remaining > 20*time.Second && taken.Remaining <= 30*time.Second, true)
	}
}

func TestWhatMeansNothingIsRefusedByName(t *testing.T) {
	fence, admin := table(t)
	for wrong, options := range map[string]pgfence.Options{
		"30ns":     {TTL: 30},
		"5ns":      {Wait: 5},
		"Holder":   {Reclaim: true},
		"Metadata": {Metadata: func() {}},
	} {
		err := fence.Lease(background, "job", options, nil)
		equal(t, err != nil && strings.Contains(err.Error(), wrong), true)
	}
	for _, err := range []error{
		second(fence.Acquire(background, nil, long)),
		second(fence.Acquire(background, []string{"a", "b"}, pgfence.Options{Slots: 2})),
		fence.Lead(background, "a", 30, nil),
		pgfence.New("postgresql://nobody@?port=none").Lease(background, "a", long, nil),
	} {
		equal(t, err != nil, true)
	}
	equal(t, is(t, fence.Lease(background, "", long, nil), pgfence.Refused).SQLState, "22023")
	silent := have(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	at := silent.Addr().String()
	told := is(t, pgfence.New("postgresql://"+at+"/shop").Lease(background, "job", short, nil), pgfence.NoConnection)
	equal(t, strings.Contains(told.Error(), at), true)
	equal(t, text(t, admin, held), "0")
}

func TestAFenceIsMadeFromWhatOpensConnections(t *testing.T) {
	_, admin := table(t)
	pooled := have(pgxpool.ParseConfig(url))
	pooled.BeforeConnect = func(_ context.Context, config *pgx.ConnConfig) error {
		config.RuntimeParams["application_name"] = "before"
		return nil
	}
	pooled.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		return second(conn.Exec(ctx, "SELECT set_config('application_name', current_setting('application_name') || ' after', false)"))
	}
	made := have(pgxpool.NewWithConfig(background, pooled))
	defer made.Close()
	drivers := url + "&pool_max_conns=3&binary_parameters=yes&default_query_exec_mode=simple_protocol"
	for _, fence := range []*pgfence.Fence{
		pgfence.New(func(ctx context.Context) (pgfence.Conn, error) { return pgx.Connect(ctx, url) }),
		pgfence.New(drivers), pgfence.New(url, pgfence.InSchema("public")),
	} {
		must(t, fence.Lease(background, "job", long, func(context.Context, *pgfence.Lease) error { return nil }))
	}
	lease := acquire(t, pgfence.New(made), long, "job")
	equal(t, text(t, admin, "SELECT count(*)::text FROM pg_stat_activity WHERE application_name = 'before after'"), "1")
	must(t, lease.Release())
	is(t, pgfence.New(url, pgfence.InSchema(`no"where`)).Lease(background, "job", long, nil), pgfence.NotInstalled)
	run(t, admin, "CREATE ROLE nobody LOGIN")
	defer run(t, connect(t), "DROP ROLE nobody")
	err := pgfence.New(strings.Replace(url, "user=postgres", "user=nobody", 1)).Lease(background, "job", long, nil)
	equal(t, strings.Contains(is(t, err, pgfence.NotGranted).Error(), "fence_grant('nobody')"), true)
}

func TestALeaseOfAnotherRoleSaysHowItIsKeptWhileLoginRolesChange(t *testing.T) {
	_, admin := table(t)
	run(t, admin, "CREATE ROLE team; CREATE ROLE monday LOGIN IN ROLE team; CREATE ROLE tuesday LOGIN IN ROLE team")
	run(t, admin, "SELECT fence_grant('team')")
	t.Cleanup(func() { run(t, connect(t), "SELECT fence_revoke('team'); DROP ROLE team, monday, tuesday") })
	for _, acts := range []string{"", "&options=-c%20role%3Dteam"} {
		as := func(role string) string { return strings.Replace(url, "user=postgres", "user="+role, 1) + acts }
		lease := acquire(t, pgfence.New(as("monday")), long, "job")
		conn := have(pgx.Connect(background, as("tuesday")))
		err := lease.Guard(background, conn, ofPgx(does("SELECT 1")))
		if acts == "" {
			told := is(t, err, pgfence.NotGranted).Error()
			equal(t, strings.Contains(told, "tuesday") && strings.Contains(told, "act as one role"), true)
			equal(t, strings.Contains(told, "fence_grant"), false)
		} else {
			must(t, err)
		}
		must(t, cmp.Or(conn.Close(background), lease.Release()))
	}
}

func TestWhatNobodyRefersToIsHeldAllTheSame(t *testing.T) {
	fence, admin := table(t)
	have(fence.Acquire(background, []string{"b"}, long))
	for range 5 {
		runtime.GC()
		time.Sleep(100 * time.Millisecond)
	}
	equal(t, text(t, admin, held), "1")
}

func TestTheWorksContextSaysTheLoss(t *testing.T) {
	fence, admin := table(t)
	for _, ends := range []struct{ work, lease error }{
		{context.Canceled, pgfence.LeaseLost}, {nil, pgfence.LeaseLost}, {io.EOF, io.EOF},
	} {
		is(t, fence.Lease(background, "job", short, func(ctx context.Context, lease *pgfence.Lease) error {
			run(t, admin, "SELECT lease_revoke('job')")
			<-ctx.Done()
			equal(t, context.Cause(ctx).(*pgfence.Error).Reason, pgfence.ReasonGone)
			equal(t, []any{lease.Held(), lease.Remaining()}, []any{false, time.Duration(0)})
			return ends.work
		}), ends.lease)
	}
}

func TestLeadingEndsWithItsWork(t *testing.T) {
	_, admin := table(t)
	opened, terms := atomic.Int64{}, 0
	fence := pgfence.New(func(ctx context.Context) (pgfence.Conn, error) {
		conn := have(pgx.Connect(ctx, url))
		if opened.Add(1) == 1 { // as a standby's
			have(conn.Exec(ctx, "SET default_transaction_read_only = on"))
		}
		return conn, nil
	})
	for _, ends := range []error{nil, io.EOF} {
		equal(t, fence.Lead(background, "chief", short.TTL, func(ctx context.Context, _ *pgfence.Lease) error {
			if terms++; terms == 1 {
				run(t, admin, "SELECT lease_revoke('chief')")
				<-ctx.Done()
				return ctx.Err()
			}
			return ends
		}), ends)
	}
	equal(t, terms, 3)
	ctx, cancel := context.WithCancel(background)
	equal(t, fence.Lead(ctx, "chief", short.TTL, func(ctx context.Context, lease *pgfence.Lease) error {
		cancel()
		<-ctx.Done()
		must(t, lease.Guard(background, admin, ofPgx(does("SELECT 1"))))
		return nil
	}), nil)
	equal(t, fence.Lead(ctx, "chief", short.TTL, nil), context.Canceled)
}

func TestAClosedFenceHasGivenEverythingBack(t *testing.T) {
	_, admin := table(t)
	events := make(chan pgfence.Event, 100)
	fence := pgfence.New(url, pgfence.OnEvent(func(event pgfence.Event) {
		events <- event
		panic("a panic of the program's")
	}))
	lease := acquire(t, fence, pgfence.Options{TTL: time.Second, Session: true}, "a", "b")
	equal(t, (<-events).Kind, "acquired")
	renewed := <-events
	equal(t, []any{renewed.Kind, renewed.Names, renewed.Token}, []any{"renewed", []string{"a", "b"}, lease.Token()})
	waits := make(chan error, 1)
	go func() { waits <- fence.Lease(background, "a", pgfence.Options{Wait: time.Hour}, nil) }()
	time.Sleep(300 * time.Millisecond)
	fence.Close()
	is(t, <-waits, pgfence.Closed)
	equal(t, text(t, admin, held), "0")
	must(t, lease.Release())
	is(t, fence.Lease(background, "a", long, nil), pgfence.Closed)
}

// Nobody who acquires holds up a release, however many they are, and whatever hangs.
func TestAFenceThatReachesNobodyIsClosedAllTheSame(t *testing.T) {
	_, admin := table(t)
	isDead := atomic.Bool{}
	fence := pgfence.New(func(ctx context.Context) (pgfence.Conn, error) {
		if isDead.Load() {
			<-ctx.Done()
		}
		return pgx.Connect(ctx, url)
	})
	acquire(t, fence, short, "job")
	isDead.Store(true)
	run(t, admin, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query ~ 'acquire' AND pid <> pg_backend_pid()")
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() { equal(t, fence.Lease(background, "other", short, nil) != nil, true) })
	}
	time.Sleep(300 * time.Millisecond)
	fence.Close()
	all.Wait()
}

// panics is a connection that is broken in another way than drivers know.
type panics struct {
	*pgx.Conn
	does *atomic.Bool
}

func (p panics) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if p.does.Load() {
		panic("no error")
	}
	return p.Conn.Query(ctx, sql, args...)
}

func TestACallThatPanicsIsAnErrorAndNoHang(t *testing.T) {
	table(t)
	does := &atomic.Bool{}
	fence := pgfence.New(func(ctx context.Context) (pgfence.Conn, error) {
		conn, err := pgx.Connect(ctx, url)
		return panics{conn, does}, err
	})
	does.Store(true)
	for range 2 {
		equal(t, strings.Contains(fence.Lease(background, "job", long, nil).Error(), "no error"), true)
	}
	does.Store(false)
	lease := acquire(t, fence, short, "job")
	does.Store(true)
	<-lease.Lost()
	equal(t, lease.Check().(*pgfence.Error).Reason, pgfence.ReasonKeeper)
	comesTrue(t, "the lease has ended", func() bool { return text(t, connect(t), held) == "0" })
}

func TestWhatDriversSendForArguments(t *testing.T) {
	_, admin := table(t)
	for _, one := range []struct {
		query   string
		arg     any
		pgx, pq bool
	}{
		{"SELECT lease_acquire('job', ttl => $1)::text", 30 * time.Second, true, false},
		{"SELECT lease_acquire('job', ttl => $1::text::interval)::text", "1500 milliseconds", true, true},
		{"SELECT lease_acquire('job', metadata => $1)::text", `{"run": 7}`, true, true},
		{"SELECT lease_acquire('job', metadata => $1)::text", map[string]int{"run": 7}, true, false},
		{"SELECT set_config('pg_fence.token', $1, true)", "1", true, true},
		{"SELECT set_config('pg_fence.token', $1, true)", int64(1), false, true},
		{"SELECT set_config('pg_fence.token', $1::bigint::text, true)", int64(1), true, true},
	} {
		for driver, takes := range map[string]bool{"pgx": one.pgx, "postgres": one.pq} {
			tx := have(database(t, driver).Begin())
			if err := tx.QueryRow(one.query, one.arg).Scan(new(string)); (err == nil) != takes {
				t.Errorf("%s: %s with %T: %v", driver, one.query, one.arg, err)
			}
			must(t, tx.Rollback())
		}
	}
	equal(t, admin.QueryRow(background, "SELECT NULL::bigint").Scan(new(int64)) != nil, true)
}
