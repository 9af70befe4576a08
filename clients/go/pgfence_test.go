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
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"pgfence.example/pgfence"
)

// The part that the vectors and the scenarios of all clients do not show: the shape of the API, the
// kinds of connections, and what is Go's own. DATABASE_URL names a database with the extension that
// is otherwise of no use: tables are made and dropped in it.

var (
	url        = os.Getenv("DATABASE_URL")
	background = context.Background()
	long       = pgfence.Options{TTL: 5 * time.Minute}
	short      = pgfence.Options{TTL: time.Second}
)

const (
	pay  = "UPDATE orders SET status = 'paid'"
	undo = "UPDATE orders SET status = 'undone'"
	held = "SELECT count(*) FROM fence.leases WHERE state IN ('held', 'uncommitted')"
)

// place is what a test has: a table, a fence, and a connection beside it.
type place struct {
	*testing.T
	admin  *pgx.Conn
	fence  *pgfence.Fence
	events chan pgfence.Event
}

// in makes it, and at the end sees to it that nothing is left: no lease, no goroutine.
func in(t *testing.T) *place {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	p, before := &place{T: t, events: make(chan pgfence.Event, 1000)}, runtime.NumGoroutine()
	hangs := time.AfterFunc(2*time.Minute, func() { panic(t.Name() + " hangs") })
	p.admin = have(pgx.Connect(background, url))
	p.sql(`DROP TABLE IF EXISTS orders; CREATE TABLE orders (id bigint PRIMARY KEY, status text);
		INSERT INTO orders VALUES (7, 'new'); SELECT fence_protect('orders', lease => 'order:{id}')`)
	p.fence = pgfence.New(url, pgfence.OnEvent(func(event pgfence.Event) {
		p.events <- event
		panic("which takes nothing from the lease")
	}))
	t.Cleanup(func() {
		hangs.Stop()
		p.fence.Close()
		p.is(try(p.fence, long, "late"), pgfence.Closed)
		p.comesTrue(func() bool { return p.sql(held) == "0" })
		_ = p.admin.Close(background)
		p.comesTrue(func() bool { return runtime.NumGoroutine() <= before })
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

func (p *place) equal(is, should any) {
	p.Helper()
	if !reflect.DeepEqual(is, should) {
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

func (p *place) comesTrue(check func() bool) {
	p.Helper()
	for range 600 {
		if check() {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	p.Fatal("it does not come true")
}

// have is what there is without an error.
func have[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func must(err error) { have(0, err) }

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

func nothing(context.Context, pgx.Tx) error { return nil }

// Those of pgx are the scenarios'.
func TestATransactionOfEachKindOfDB(t *testing.T) {
	for name, open := range map[string]func(*place) pgfence.SQL{
		"pgx":         func(p *place) pgfence.SQL { return p.database("pgx") },
		"lib/pq":      func(p *place) pgfence.SQL { return p.database("postgres") },
		"Conn of pgx": func(p *place) pgfence.SQL { return have(p.database("pgx").Conn(background)) },
	} {
		t.Run(name, func(t *testing.T) { in(t).endsAsItsWorkDoes(open) })
	}
}

func (p *place) endsAsItsWorkDoes(open func(*place) pgfence.SQL) {
	// The two that hang are longer than its ttl.
	lease := p.acquire(pgfence.Options{TTL: 3 * time.Second}, "order:7")
	db, other := open(p), p.acquire(long, "other")
	fails := func(context.Context, *sql.Tx) error { return io.EOF }
	commits := func(_ context.Context, tx *sql.Tx) error { return tx.Commit() }
	swallows := func(ctx context.Context, tx *sql.Tx) error {
		_, _ = tx.ExecContext(ctx, "SELECT 1 / 0")
		return nil
	}
	forgets := func(ctx context.Context, _ *sql.Tx) error {
		<-ctx.Done()
		return nil
	}
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
		{lease, does(undo, fails), io.EOF, "new", false},
		{lease, does(undo, swallows), pgfence.TransactionLost, "new", false},
		{other, within, nil, "paid", false},
		{lease, does(undo, "COMMIT"), pgfence.TransactionLost, "undone", true},
		{lease, does(pay, commits), pgfence.TransactionLost, "paid", true},
		{lease, does(undo, forgets), context.DeadlineExceeded, "paid", false},
		{lease, does(undo, "SELECT pg_sleep(300)"), context.DeadlineExceeded, "paid", false},
	} {
		ctx, cancel := context.WithTimeout(background, 2*time.Second)
		told := p.is(one.under.GuardSQL(ctx, open(p), one.do), one.err)
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
	told := p.is(other.GuardSQL(background, db, does(undo)), pgfence.Refused, "(The lease")
	p.equal(fmt.Sprint(told.SQLState, told.Detail["lease"], told.Detail["presented"]),
		fmt.Sprint("PF004", "order:7", other.Token()))
	divided := lease.GuardSQL(background, db, does("SELECT 1 / 0"))
	p.equal(errors.Unwrap(told) == nil || errors.As(divided, &told), false)
	must(other.GuardSQL(background, db, releases))
	p.comesTrue(func() bool { return !lease.Held() })
	must(lease.Release())
	p.sql("SELECT lease_revoke('other')")
	p.is(other.GuardSQL(background, db, does()), pgfence.LeaseLost)
	// A loss ends what hangs, after the end of its caller, too.
	lease = p.acquire(pgfence.Options{TTL: 3 * time.Second, AtMost: 2 * time.Second}, "order:7")
	caller, cancel := context.WithCancel(background)
	defer cancel()
	err := lease.GuardSQL(caller, db, func(ctx context.Context, tx *sql.Tx) error {
		if !strings.Contains(p.Name(), "pq") {
			ctx = background
			time.AfterFunc(500*time.Millisecond, cancel)
		}
		return second(tx.ExecContext(ctx, "SELECT pg_sleep(300)"))
	})
	p.equal(p.is(err, pgfence.LeaseLost).Reason, pgfence.ReasonAtMost)
	p.is(lease.Release(), pgfence.LeaseLost)
	<-lease.Lost()
}

func TestAGuardOfSeveralIsBrokenOffByEachOfItsOwnAndByNoOther(t *testing.T) {
	p := in(t)
	stranger := p.acquire(short, "stranger")
	leases := pgfence.Leases{p.acquire(long, "order:7"), p.acquire(short, "b")}
	db := p.database("pgx")
	err := p.fence.GuardSQL(background, db, leases, func(_ context.Context, tx *sql.Tx) error {
		p.sql("SELECT lease_revoke('stranger')")
		<-stranger.Lost()
		must(leases[1].Check())
		p.sql("SELECT lease_revoke('b')")
		return second(tx.Exec("UPDATE orders SET status = pg_sleep(300)::text"))
	})
	p.equal(p.is(err, pgfence.LeaseLost).Names, []string{"b"})
	leases[1] = p.acquire(long, `a "quoted\" name, and {another}`, "c")
	db = p.database("postgres")
	must(p.fence.GuardSQL(background, db, leases, does(pay), pgfence.Releasing))
	p.equal(p.sql(held), "0")
	p.is(p.fence.Guard(background, p.admin, leases, nothing), pgfence.LeaseLost)
	err = p.fence.Guard(background, p.admin, nil, nothing)
	p.is(err, err, "under no lease")
	p.sql("BEGIN") // in which it is refused before the work
	err = p.acquire(long, "d").Guard(background, p.admin, nil)
	p.is(err, err, "by a savepoint")
	p.sql("ROLLBACK")
}

func TestAPoolOfOneConnectionGetsItBack(t *testing.T) {
	p := in(t)
	pool, lease := have(pgxpool.New(background, url+"&pool_max_conns=1")), p.acquire(short, "order:7")
	defer pool.Close()
	for statement, kind := range map[string]error{
		"SELECT pg_terminate_backend(pg_backend_pid())": pgfence.TransactionLost,
		"SELECT 1 / 0": pgfence.TransactionLost, "COMMIT": pgfence.TransactionLost,
		"SELECT pg_sleep(1.5)": nil, // longer than the ttl: the heartbeat does not need the pool
	} {
		p.is(lease.Guard(background, pool, func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, statement)
			return nil
		}), kind)
	}
	pooled := have(pool.Acquire(background))
	must(lease.Guard(background, pooled, nothing))
	pooled.Release()
	p.sql("SELECT fence_new_epoch()") // no token speaks until its holder has renewed
	must(lease.Guard(background, pool, func(context.Context, pgx.Tx) error {
		p.equal(pool.Stat().AcquiredConns(), int32(1))
		return nil
	}))
}

func TestANumberThatAnotherHolderHasAdoptedIsTaken(t *testing.T) {
	p := in(t)
	defer p.sql("SELECT lease_revoke('elsewhere'), lease_forget('elsewhere')")
	for _, fence := range []*pgfence.Fence{p.fence, pgfence.New(url)} {
		must(fence.Adopted("elsewhere", 7).Guard(background, p.admin, nothing))
	}
	another, db := p.fence.Adopted("elsewhere", 7, "another"), p.database("postgres")
	holder := fmt.Sprintf("/%d/", os.Getpid())
	p.is(another.Guard(background, p.admin, nothing), pgfence.LeaseTaken, holder)
	p.is(another.GuardSQL(background, db, does()), pgfence.LeaseTaken, holder)
}

// A lease to which nobody refers is not given back by the collector.
func TestALeaseThatIsTakenSaysByWhomAndForWhatItWaits(t *testing.T) {
	p := in(t)
	p.acquire(pgfence.Options{Holder: "it's me", Metadata: map[string]int{"run": 7}}, "a", "b")
	for range 5 {
		runtime.GC()
		time.Sleep(100 * time.Millisecond)
	}
	taken := p.is(try(p.fence, long, "b", "c"), pgfence.LeaseTaken, "by it's me", "at the most")
	p.equal([]any{taken.WaitsFor, taken.Holder}, []any{"ttl", "it's me"})
	p.equal(taken.Remaining.Round(10*time.Second), 30*time.Second)
	p.sql("BEGIN; SELECT lease_acquire('job', 'it', '1 s')")
	p.is(try(p.fence, short, "job"), pgfence.LeaseTaken, "by it, whose acquire is not committed")
	p.sql("COMMIT; BEGIN; SELECT lease_guard('job', first_token) FROM lease_info('job')")
	time.Sleep(1100 * time.Millisecond)
	p.is(try(p.fence, short, "job"), pgfence.LeaseTaken, "by it, until a transaction ends")
	p.sql("COMMIT")
}

func TestWhatMeansNothingIsRefusedByName(t *testing.T) {
	p := in(t)
	keep := func(table string, options pgfence.RowOptions) error {
		return second(p.fence.KeepRow(background, table, map[string]any{"id": 7}, 1, options))
	}
	silent := have(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	at := silent.Addr().String()
	for words, err := range map[string]error{
		"30ns is below":  try(p.fence, pgfence.Options{TTL: 30}, "job"),
		"5ns":            try(p.fence, pgfence.Options{Wait: 5}, "job"),
		"takes a Holder": try(p.fence, pgfence.Options{Reclaim: true}, "job"),
		"Metadata":       try(p.fence, pgfence.Options{Metadata: func() {}}, "job"),
		"several":        try(p.fence, pgfence.Options{Slots: 2}, "a", "b"),
		"names must not": try(p.fence, long),
		"needs a name":   try(p.fence, long, ""),
		"r.no_fence":     keep("orders", pgfence.RowOptions{Fence: "no_fence"}),
		`"nowhere"`:      keep("nowhere", pgfence.RowOptions{}),
		"30ns":           keep("orders", pgfence.RowOptions{TTL: 30}),
		"port=none":      try(pgfence.New("postgresql://me@?port=none"), long, "a"),
		at:               try(pgfence.New("postgresql://"+at), short, "a"),
		"not installed":  try(pgfence.New(url, pgfence.InSchema(`no"where`)), long, "a"),
	} {
		p.is(err, err, words)
	}
}

func TestAFenceIsMadeFromWhatOpensConnections(t *testing.T) {
	p := in(t)
	pooled := have(pgxpool.ParseConfig(url))
	pooled.BeforeConnect = func(_ context.Context, config *pgx.ConnConfig) error {
		config.RuntimeParams["application_name"] = "before"
		return nil
	}
	pooled.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		return second(conn.Exec(ctx, `SELECT set_config('application_name',
			current_setting('application_name') || ' after', false)`))
	}
	made := have(pgxpool.NewWithConfig(background, pooled))
	defer made.Close()
	drivers := "&pool_max_conns=3&binary_parameters=yes&default_query_exec_mode=simple_protocol"
	other := pgfence.New(url+drivers, pgfence.InSchema("public"))
	defer other.Close()
	must(try(other, long, "other"))
	fence := pgfence.New(made)
	defer fence.Close()
	must(try(fence, long, "job"))
	named := "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'before after'"
	p.equal(p.sql(named), "1")
}

func TestALeaseOfAnotherRoleSaysHowItIsKeptWhileLoginRolesChange(t *testing.T) {
	p := in(t)
	p.sql("CREATE ROLE monday LOGIN; CREATE ROLE tuesday LOGIN")
	as := func(role string) string { return strings.Replace(url, "user=postgres", "user="+role, 1) }
	monday := pgfence.New(as("monday"))
	p.is(try(monday, long, "job"), pgfence.NotGranted, "fence_grant('monday')")
	p.sql("SELECT fence_grant('monday'), fence_grant('tuesday')")
	lease := have(monday.Acquire(background, []string{"job"}, long))
	conn := have(pgx.Connect(background, as("tuesday")))
	err := lease.Guard(background, conn, nothing)
	p.is(err, pgfence.NotGranted, "tuesday", "act as one role")
	p.equal(strings.Contains(err.Error(), "fence_grant"), false)
	must(cmp.Or(conn.Close(background), lease.Release()))
	p.sql("SELECT fence_revoke('monday'), fence_revoke('tuesday'); DROP ROLE monday, tuesday")
}

func TestTheWorksContextSaysTheLossAndALeaderGoesOn(t *testing.T) {
	p, terms := in(t), 0
	isLost := func(ctx context.Context, lease *pgfence.Lease) error {
		p.sql("SELECT lease_revoke('job')")
		<-ctx.Done()
		p.equal(context.Cause(ctx).(*pgfence.Error).Reason, pgfence.ReasonGone)
		p.equal([]any{lease.Held(), lease.Remaining()}, []any{false, time.Duration(0)})
		return nil
	}
	ctx, cancel := context.WithCancel(background)
	must(p.fence.Lead(ctx, "job", short.TTL, func(ctx context.Context, lease *pgfence.Lease) error {
		if terms++; terms < 3 {
			return isLost(ctx, lease)
		}
		cancel()
		<-ctx.Done()
		return lease.Guard(background, p.admin, nothing)
	}))
	p.is(p.fence.Lead(ctx, "job", short.TTL, nil), context.Canceled)
	kinds := map[string]int{}
	for len(p.events) > 0 {
		kinds[(<-p.events).Kind]++
	}
	p.equal([]int{kinds["acquired"], kinds["lost"], kinds["interrupted"]}, []int{3, 2, 1})
	for ends, told := range map[error]error{
		context.Canceled: pgfence.LeaseLost, nil: pgfence.LeaseLost, io.EOF: io.EOF,
	} {
		work := func(ctx context.Context, l *pgfence.Lease) error { return cmp.Or(isLost(ctx, l), ends) }
		p.is(p.fence.Lease(background, "job", short, work), told)
	}
}

func TestWhatCanNeverBeOpenedIsToldAtOnceAndAnOutageIsOneLineOfTheLog(t *testing.T) {
	p := in(t)
	opens := func(context.Context) (pgfence.Conn, error) { return nil, errors.New("no secret") }
	for words, fence := range map[string]*pgfence.Fence{
		"refused TLS":    pgfence.New(url + "&sslmode=require"),
		"does not exist": pgfence.New(strings.Replace(url, "?", "_nowhere?", 1)),
		"no secret":      pgfence.New(opens),
	} {
		ctx, cancel := context.WithTimeout(background, 5*time.Second)
		waits := pgfence.Options{TTL: time.Second, Wait: time.Minute}
		p.is(fence.Lease(ctx, "job", waits, nil), pgfence.NoConnection, words)
		p.is(fence.Lead(ctx, "job", time.Second, nil), pgfence.NoConnection, words)
		must(ctx.Err())
		cancel()
	}
	var log strings.Builder
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	away, waits := pgfence.New("postgresql://127.0.0.1:1/shop"), pgfence.Options{Wait: time.Second}
	p.is(try(away, waits, "job"), pgfence.NoConnection)
	slog.SetDefault(slog.New(slog.DiscardHandler))
	p.equal(strings.Count(log.String(), "level=WARN"), 1)
	line := `"pgfence: no lease could be acquired, and it is tried again" reason="failed to connect`
	p.equal(strings.Contains(log.String(), line), true)
}

// loses is a connection that ends after an acquire, whose answer nobody reads.
type loses struct {
	*pgx.Conn
	next *atomic.Bool
}

func (l loses) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := l.Conn.Query(ctx, sql, args...)
	if err == nil && strings.Contains(sql, "lease_acquire") && l.next.CompareAndSwap(true, false) {
		rows.Close()
		_ = l.Conn.Close(ctx)
		return nil, io.ErrUnexpectedEOF
	}
	return rows, err
}

func TestAGrantWhoseAnswerWasLostIsTakenOverOrUndone(t *testing.T) {
	p, next := in(t), &atomic.Bool{}
	fence := pgfence.New(func(ctx context.Context) (pgfence.Conn, error) {
		conn, err := pgx.Connect(ctx, url)
		return loses{conn, next}, err
	})
	defer fence.Close()
	next.Store(true)
	must(have(fence.Acquire(background, []string{"job"}, long)).Release())
	p.equal(next.Load(), false)
	next.Store(true)
	p.equal(p.is(try(fence, long, "a", "b"), pgfence.NoAnswer).InDoubt, true)
	p.comesTrue(func() bool { return p.sql(held) == "0" })
	next.Store(true)
	must(try(fence, pgfence.Options{TTL: time.Minute, Wait: time.Minute}, "a", "b"))
	p.equal(p.sql(held), "2")
	p.equal(p.sql("SELECT right(max(holder), 2) FROM fence.leases WHERE state = 'held'"), "/2")
}

func TestWhatDriversSendForArguments(t *testing.T) {
	p := in(t)
	for _, one := range []struct {
		query   string
		arg     any
		pgx, pq bool
	}{
		{"lease_acquire('job', ttl => $1)::text", 30 * time.Second, true, false},
		{"lease_acquire('job', ttl => $1::text::interval)::text", "1500 milliseconds", true, true},
		{"lease_acquire('job', metadata => $1)::text", `{"run": 7}`, true, true},
		{"lease_acquire('job', metadata => $1)::text", map[string]int{"run": 7}, true, false},
		{"set_config('pg_fence.token', $1, true)", "1", true, true},
		{"set_config('pg_fence.token', $1, true)", int64(1), false, true},
		{"set_config('pg_fence.token', $1::bigint::text, true)", int64(1), true, true},
	} {
		for driver, takes := range map[string]bool{"pgx": one.pgx, "postgres": one.pq} {
			tx := have(p.database(driver).Begin())
			if err := tx.QueryRow("SELECT "+one.query, one.arg).Scan(new(string)); (err == nil) != takes {
				p.Errorf("%s: %s with %T: %v", driver, one.query, one.arg, err)
			}
			must(tx.Rollback())
		}
	}
	p.equal(p.admin.QueryRow(background, "SELECT NULL::bigint").Scan(new(int64)) != nil, true)
}

func TestARowIsALease(t *testing.T) {
	for _, mode := range []string{"monotonic", "managed"} {
		t.Run(mode, func(t *testing.T) { in(t).keepsARow(mode) })
	}
}

func (p *place) keepsARow(mode string) {
	p.sql(`CREATE TABLE runs (part text, id bigint, state text, PRIMARY KEY (id, part));
		INSERT INTO runs VALUES ('a', 1);
		SELECT fence_protect('runs', mode => '` + mode + `', deadline => 'held_until')`)
	defer p.sql("DROP TABLE runs")
	is := func(format string, token int64) {
		row := p.sql("SELECT concat_ws(' ', state, fence, held_until > clock_timestamp()) FROM runs")
		p.equal(row, fmt.Sprintf(format, token))
	}
	claim := func() (token int64) {
		must(p.admin.QueryRow(background, `UPDATE runs SET state = 'claimed',
			held_until = clock_timestamp() + '1 s' RETURNING fence`).Scan(&token))
		return token
	}
	keep := func(token int64) (*pgfence.Lease, error) {
		key := map[string]any{"id": 1, "part": "a"}
		return p.fence.KeepRow(background, "runs", key, token, pgfence.RowOptions{TTL: time.Second})
	}
	// The work's own statements name no token.
	half, done := does("UPDATE runs SET state = 'half'"), does("UPDATE runs SET state = 'done'")
	db, token := p.database("postgres"), claim()
	lease := have(keep(token))
	left := lease.Remaining()
	p.equal(left > 500*time.Millisecond && left <= 980*time.Millisecond, true)
	time.Sleep(1200 * time.Millisecond)
	must(lease.Check())
	must(lease.GuardSQL(background, db, half))
	is("half %d t", token)
	must(lease.Guard(background, p.admin, nothing, pgfence.Releasing))
	p.equal(p.is(lease.Check(), pgfence.LeaseLost).Reason, pgfence.ReasonReleased)
	is("half %d", token)
	token = claim()
	must(have(keep(token)).Release())
	is("claimed %d", token)
	// Its own worker's transaction keeps it, also for a last write.
	token = claim()
	lease = have(keep(token))
	must(lease.GuardSQL(background, db, does("SELECT pg_sleep(1.5)", half)))
	p.is(lease.Check(), pgfence.LeaseLost)
	must(lease.GuardSQL(background, db, done, pgfence.Releasing))
	is("done %d", token)
	// It is taken away, and another's by the time of the first look.
	token = claim()
	lease = have(keep(token))
	p.sql(fmt.Sprintf(`BEGIN; SET LOCAL pg_fence.token = '%d';
		UPDATE runs SET held_until = NULL, fence = fence; COMMIT`, token))
	<-lease.Lost()
	is("claimed %d t", claim())
	p.is(lease.Guard(background, p.admin, nothing), pgfence.LeaseLost)
	p.is(second(keep(token)), pgfence.LeaseLost)
}
