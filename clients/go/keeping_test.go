package pgfence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"pgfence.example/pgfence"
)

// One heartbeat for all leases, and the verbs around a lease.

// counted is a Fence whose connections are counted: those that are open, and all that there were.
func counted(t *testing.T) (fence *pgfence.Fence, open, all *atomic.Int32) {
	t.Helper()
	open, all = &atomic.Int32{}, &atomic.Int32{}
	config := configWith(t, func(conn net.Conn) net.Conn {
		open.Add(1)
		all.Add(1)
		return &countedConn{Conn: conn, open: open}
	})
	return pgfence.NewConfig(config), open, all
}

type countedConn struct {
	net.Conn
	open *atomic.Int32
	once sync.Once
}

func (c *countedConn) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.Conn.Close()
}

func TestAllLeasesAreKeptOnOneConnection(t *testing.T) {
	_, admin := table(t)
	fence, open, all := counted(t)
	goroutines := runtime.NumGoroutine()
	var leases pgfence.Leases
	for number := range 40 {
		leases = append(leases, acquire(t, fence, pgfence.Options{TTL: time.Second}, fmt.Sprint("w", number)))
	}
	leases = append(leases, acquire(t, fence, pgfence.Options{TTL: 2 * time.Second}, "order:8", "order:7"))
	equal(t, runtime.NumGoroutine() <= goroutines+2, true)
	comesTrue(t, "all are renewed", func() bool {
		return text(t, admin, "SELECT (min(renewals) >= 4)::text FROM fence.leases WHERE state = 'held'") == "true"
	})
	equal(t, int(open.Load()), 1)
	equal(t, int(all.Load()), 1)
	must(t, leases.Release())
	equal(t, int(open.Load()), 0)
	equal(t, text(t, admin, held), "0")
}

// A try on a connection that has ended unseen is made once more, and may find its own grant.
func TestAConnectionThatEndedUnseenIsNoFailure(t *testing.T) {
	_, admin := table(t)
	fence, _, all := counted(t)
	first := acquire(t, fence, long, "a")
	const end = "SELECT count(pg_terminate_backend(pid, 5000))::text FROM pg_stat_activity WHERE query LIKE '%lease_%' AND pid <> pg_backend_pid()"
	ends := func() { equal(t, text(t, admin, end), "1") }
	ends()
	second := acquire(t, fence, long, "b")
	ends()
	several := acquire(t, fence, long, "c", "d")
	ends()
	_, err := first.Renew(background)
	must(t, err)
	// A COMMIT was the last: it does not show who it was.
	must(t, pgfence.Leases{first, second, several}.Release())
	equal(t, text(t, admin, held), "0")
	equal(t, int(all.Load()), 4)
}

// swallows is a socket that can lose the next answer, and its connection.
type swallows struct {
	net.Conn
	next *atomic.Bool
}

func (c *swallows) Read(into []byte) (int, error) {
	n, err := c.Conn.Read(into)
	if err == nil && c.next.CompareAndSwap(true, false) {
		_ = c.Conn.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// What was granted, renewed or released by a call whose answer is lost is our own.
func TestAnAnswerThatIsLostIsNoFailure(t *testing.T) {
	_, admin := table(t)
	next := &atomic.Bool{}
	fence := pgfence.NewConfig(configWith(t, func(conn net.Conn) net.Conn { return &swallows{Conn: conn, next: next} }))
	first := acquire(t, fence, long, "a")
	next.Store(true)
	second := acquire(t, fence, long, "b")
	equal(t, next.Load(), false)
	must(t, pgfence.Guard(background, second, admin.Begin, does("SELECT 1")))
	next.Store(true)
	_, err := first.Renew(background)
	must(t, err)
	equal(t, next.Load(), false)
	next.Store(true)
	must(t, first.Release())
	equal(t, next.Load(), false)
	equal(t, text(t, admin, held), "1")
	// With a holder of the caller's own it would be another's, for all we know.
	options := pgfence.Options{TTL: time.Second, Holder: "me"}
	next.Store(true)
	_, err = fence.Acquire(background, "c", options)
	equal(t, err != nil && !errors.Is(err, pgfence.ErrLeaseTaken), true)
	next.Store(true)
	_, err = fence.AcquireAll(background, []string{"d", "e"}, pgfence.Options{TTL: time.Second})
	equal(t, err != nil && !errors.Is(err, pgfence.ErrLeaseTaken), true)
}

// A caller that gives up while the keeper is busy leaves nothing behind.
func TestATryThatNobodyWaitsForIsGivenBack(t *testing.T) {
	fence, admin := table(t)
	acquire(t, fence, long, "a")
	for round := range 200 {
		ctx, cancel := context.WithCancel(background)
		time.AfterFunc(time.Duration(round)*10*time.Microsecond, cancel)
		lease, err := fence.Acquire(ctx, "b", long)
		if err == nil {
			err = lease.Release()
		}
		// The grant of the round before may not have been given back yet.
		if err != nil && !errors.Is(err, pgfence.ErrLeaseTaken) {
			is(t, err, context.Canceled)
		}
		cancel()
	}
	comesTrue(t, "all are given back", func() bool { return text(t, admin, held) == "1" })
}

// A release that waits for somebody's open transaction holds up no other lease.
func TestAReleaseThatWaitsHoldsUpNobody(t *testing.T) {
	fence, admin := table(t)
	blocked := acquire(t, fence, pgfence.Options{TTL: 6 * time.Second}, "a")
	other := acquire(t, fence, pgfence.Options{TTL: time.Second}, "b")
	tx, err := admin.Begin(background)
	must(t, err)
	_, err = tx.Exec(background, "SELECT lease_renew('a', $1)", blocked.Token())
	must(t, err)
	released := make(chan error, 1)
	go func() { released <- blocked.Release() }()
	for until := time.Now().Add(2500 * time.Millisecond); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		must(t, other.Check())
	}
	must(t, tx.Rollback(background))
	must(t, <-released)
	equal(t, text(t, admin, held), "1")
}

func TestASessionThatEndsIsToldByItsSocket(t *testing.T) {
	fence, admin := table(t)
	options := long
	options.Session = true
	lost := make(chan *pgfence.Error, 1)
	options.OnLost = func(loss *pgfence.Error) { lost <- loss }
	lease := acquire(t, fence, options, "order:7")
	_, err := lease.Detach()
	equal(t, err != nil && lease.Check() == nil, true)
	run(t, admin, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'SELECT lease_acquire%' AND pid <> pg_backend_pid()")
	equal(t, (<-lost).Reason, pgfence.Session)
	is(t, lease.Check(), pgfence.ErrLeaseLost)
	// Released, it ends without a loss.
	must(t, acquire(t, fence, options, "order:7").Release())
	equal(t, len(lost), 0)
}

// silent is a server that takes connections and says nothing.
func silent(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = conn.Close() })
		}
	}()
	return listener.Addr().String()
}

func TestAnAcquireThatIsBrokenOffSaysSo(t *testing.T) {
	table(t)
	fence := pgfence.New("postgresql://" + silent(t) + "/shop?user=me&sslmode=disable")
	options := pgfence.Options{TTL: 300 * time.Millisecond}
	_, err := fence.Acquire(background, "order:7", options)
	equal(t, is(t, err, pgfence.ErrAcquireTimeout).Names, []string{"order:7"})
	options.Wait = 100 * time.Millisecond
	_, err = fence.Acquire(background, "order:7", options)
	is(t, err, pgfence.ErrAcquireTimeout)
}

func TestWhereTheExtensionIsMissingItIsSaid(t *testing.T) {
	_, admin := table(t)
	var database string
	must(t, admin.QueryRow(background, "SELECT current_database() || '_without'").Scan(&database))
	run(t, admin, "DROP DATABASE IF EXISTS "+database)
	run(t, admin, "CREATE DATABASE "+database)
	defer run(t, admin, "DROP DATABASE "+database+" WITH (FORCE)")
	config, err := pgx.ParseConfig(url)
	must(t, err)
	config.Database = database
	without := pgfence.NewConfig(config)
	for _, fence := range []*pgfence.Fence{without, pgfence.New(url).InSchema("nowhere")} {
		_, err = fence.Acquire(background, "order:7", long)
		told := is(t, err, pgfence.ErrNotInstalled)
		equal(t, strings.Contains(told.Error(), "search_path") && strings.Contains(told.Hint, "InSchema"), true)
		_, err = fence.Resume(background, "order:7", 1, long)
		is(t, err, pgfence.ErrNotInstalled)
		_, err = fence.Claim(background, "SELECT 'a'", nil, 1, long)
		is(t, err, pgfence.ErrNotInstalled)
		_, err = fence.Adopt(background, "order:7", 1, pgfence.AdoptOptions{})
		is(t, err, pgfence.ErrNotInstalled)
		is(t, fence.Observe(background, "order:7", func(pgfence.Leader) {}), pgfence.ErrNotInstalled)
		is(t, fence.Lead(background, "order:7", long, nil), pgfence.ErrNotInstalled)
	}
}

func TestAWrongTransactionIsNamed(t *testing.T) {
	fence, _ := table(t)
	lease := acquire(t, fence, long, "order:7")
	begin := func(context.Context) (int, error) { return 7, nil }
	err := pgfence.Guard(background, lease, begin, func(context.Context, int) error { return nil })
	equal(t, err != nil && strings.Contains(err.Error(), "int is no transaction") && strings.Contains(err.Error(), "pool.Begin"), true)
	equal(t, pgfence.Guard(background, pgfence.Leases{}, begin, nil) != nil, true)
}

// A transaction that was rolled back under its work is no success, whatever the work says.
func TestWorkThatSwallowsAnErrorHasFailed(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, long, "order:7")
	conn := connect(t)
	for _, statement := range []string{"SELECT 1/0", "ROLLBACK"} {
		swallows := func(ctx context.Context, tx pgx.Tx) error {
			must(t, pays(ctx, tx))
			_, _ = tx.Exec(ctx, statement)
			return nil
		}
		lost := is(t, pgfence.Guard(background, lease, conn.Begin, swallows), pgfence.ErrTransactionLost)
		equal(t, lost.InDoubt, statement == "ROLLBACK")
		is(t, pgfence.Present(background, lease, conn.Begin, swallows, pgfence.Releasing), pgfence.ErrTransactionLost)
		tx, err := conn.Begin(background)
		must(t, err)
		is(t, pgfence.GuardTx(background, lease, tx, swallows), pgfence.ErrTransactionLost)
		_ = tx.Rollback(background)
		for driver, db := range databases(t) {
			err := pgfence.Guard(background, lease, pgfence.SQL(db), func(ctx context.Context, tx *sql.Tx) error {
				must(t, doesSQL(pay)(ctx, tx))
				_, _ = tx.ExecContext(ctx, statement)
				return nil
			})
			if err == nil {
				t.Errorf("%s is silent about %s", driver, statement)
			}
		}
	}
	must(t, lease.Check())
	equal(t, text(t, admin, "SELECT status FROM orders"), "new")
}

func TestALeaseIsHandedOver(t *testing.T) {
	fence, admin := table(t)
	other := pgfence.New(url)
	lease := acquire(t, fence, long, "order:7")
	renewed, err := lease.Renew(background)
	must(t, err)
	token, err := lease.Detach()
	must(t, err)
	equal(t, is(t, lease.Check(), pgfence.ErrLeaseLost).Reason, pgfence.Released)
	equal(t, text(t, admin, held), "1")
	// Whichever of the grant's tokens is handed over, what is kept is the first: it outlives sixteen renewals.
	resumed, err := other.Resume(background, "order:7", renewed, long)
	must(t, err)
	equal(t, resumed.Token(), token)
	for range 20 {
		_, err = resumed.Renew(background)
		must(t, err)
	}
	must(t, pgfence.Guard(background, resumed, admin.Begin, pays, pgfence.Releasing))
	_, err = fence.Resume(background, "order:7", token, long)
	equal(t, is(t, err, pgfence.ErrLeaseLost).Reason, pgfence.Gone)
	_, err = resumed.Detach()
	is(t, err, pgfence.ErrLeaseLost)
}

func TestTheFirstFreeRowsOfAQueryAreClaimed(t *testing.T) {
	fence, admin := table(t)
	acquire(t, fence, long, "row:2")
	const query = "SELECT 'row:' || id, id, 'no ' || id AS label FROM generate_series($1::int, 9) AS id WHERE id <> ANY ($2::int[]) ORDER BY id DESC; "
	leases, err := fence.Claim(background, "SELECT 'row:' || id, id, 'no ' || id AS label FROM generate_series($1::int, 5) AS id ORDER BY id DESC -- all",
		[]any{1}, 3, pgfence.Options{TTL: time.Second})
	must(t, err)
	claimed := pgfence.Leases(leases)
	equal(t, claimed.Names(), []string{"row:5", "row:4", "row:3"})
	equal(t, leases[0].Row(), map[string]any{"id": int32(5), "label": "no 5"})
	equal(t, text(t, admin, held), "4")
	time.Sleep(1500 * time.Millisecond)
	for _, lease := range leases {
		must(t, lease.Check())
	}
	rest, err := fence.Claim(background, query, []any{1, []int32{0}}, 100, long)
	must(t, err)
	equal(t, pgfence.Leases(rest).Names(), []string{"row:9", "row:8", "row:7", "row:6", "row:1"})
	must(t, claimed.Release())
	must(t, pgfence.Leases(rest).Release())
	none, err := fence.Claim(background, "SELECT 'row:2'", nil, 1, long)
	must(t, err)
	equal(t, len(none), 0)
}

func TestSeveralLeasesGuardOneTransaction(t *testing.T) {
	fence, admin := table(t)
	conn := connect(t)
	both := pgfence.Leases{acquire(t, fence, long, "z"), acquire(t, fence, long, "order:7", "order:8")}
	must(t, pgfence.Guard(background, both, conn.Begin, func(ctx context.Context, tx pgx.Tx) error {
		for _, name := range []string{"z", "order:7", "order:8"} {
			// Nobody else can be granted one of them.
			run(t, admin, fmt.Sprintf("SELECT lease_revoke('%s')", name))
			equal(t, text(t, admin, fmt.Sprintf("SELECT coalesce(lease_acquire('%s')::text, 'taken')", name)), "taken")
		}
		return pays(ctx, tx)
	}))
	is(t, pgfence.Guard(background, both, conn.Begin, pays), pgfence.ErrLeaseLost)
	for _, db := range databases(t) {
		both := pgfence.Leases{acquire(t, fence, long, "order:7"), acquire(t, fence, long, "a", "b")}
		must(t, pgfence.Guard(background, both, pgfence.SQL(db), doesSQL(pay), pgfence.Releasing))
		equal(t, text(t, admin, held), "0")
		is(t, both.Release(), nil)
	}
}

func TestAStuckLoopDoesNotHoldForEver(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, pgfence.Options{TTL: time.Second, HoldAtMost: 1500 * time.Millisecond}, "order:7")
	<-lease.Context().Done()
	equal(t, is(t, lease.Check(), pgfence.ErrLeaseLost).Reason, pgfence.Deadline)
	equal(t, text(t, admin, "SELECT (max(renewals) >= 3)::text FROM lease_info('order:7')"), "true")
}

func TestWhatIsDoneAtOnceStaysTaken(t *testing.T) {
	fence, admin := table(t)
	conn := connect(t)
	options := pgfence.Options{TTL: 5 * time.Minute, HoldAtLeast: 3 * time.Second}
	const rest = "SELECT (remaining BETWEEN '1 s' AND '3 s')::text FROM lease_info('order:7')"
	must(t, acquire(t, fence, options, "order:7").Release())
	equal(t, text(t, admin, rest), "true")
	comesTrue(t, "it ends", func() bool { return text(t, admin, held) == "0" })
	must(t, pgfence.Guard(background, acquire(t, fence, options, "order:7"), conn.Begin, pays, pgfence.Releasing))
	equal(t, text(t, admin, rest), "true")
	for _, db := range databases(t) {
		comesTrue(t, "it ends", func() bool { return text(t, admin, held) == "0" })
		must(t, pgfence.Guard(background, acquire(t, fence, options, "order:7"), pgfence.SQL(db), doesSQL(pay), pgfence.Releasing))
		equal(t, text(t, admin, rest), "true")
	}
}

func TestWhoLeadsIsToldAtEachChange(t *testing.T) {
	fence, admin := table(t)
	ctx, cancel := context.WithCancel(background)
	told := make(chan pgfence.Leader, 10)
	ended := make(chan error, 1)
	acquire(t, fence, long, "other")
	options := pgfence.Options{TTL: time.Second, OnLeader: func(leader pgfence.Leader) { told <- leader }}
	first := acquire(t, fence, pgfence.Options{TTL: 5 * time.Minute, Holder: "first"}, "chief")
	go func() {
		ended <- fence.Lead(ctx, "chief", options, func(ctx context.Context, lease *pgfence.Lease) error {
			<-ctx.Done()
			return ctx.Err()
		})
	}()
	equal(t, (<-told).Holder, "first")
	must(t, first.Release())
	leader := <-told
	if leader.Token == 0 {
		leader = <-told
	}
	equal(t, leader.Holder != "first" && leader.Token > first.Token(), true)
	since := text(t, admin, "SELECT to_char(acquired_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') FROM lease_info('chief') WHERE state = 'held'")
	equal(t, leader.Since.Format("2006-01-02 15:04:05.000000"), since)
	// Renewals are no change.
	time.Sleep(2500 * time.Millisecond)
	equal(t, len(told), 0)
	cancel()
	is(t, <-ended, context.Canceled)
}

// What work goes on to do that does not look at its context is refused.
func TestLeadingThatIsStoppedEndsTheLease(t *testing.T) {
	fence, admin := table(t)
	ctx, cancel := context.WithCancel(background)
	err := fence.Lead(ctx, "chief", long, func(_ context.Context, lease *pgfence.Lease) error {
		cancel()
		comesTrue(t, "it is over", func() bool { return lease.Check() != nil })
		comesTrue(t, "it is given back", func() bool { return text(t, admin, held) == "0" })
		return pgfence.Guard(background, lease, admin.Begin, pays)
	})
	is(t, err, context.Canceled)
	// While it waits.
	acquire(t, fence, long, "chief")
	ctx, cancel = context.WithTimeout(background, 100*time.Millisecond)
	defer cancel()
	is(t, fence.Lead(ctx, "chief", long, nil), context.DeadlineExceeded)
}

func TestCodeThatKnowsNothingOfFencesIsFencedByItsConnection(t *testing.T) {
	fence, admin := table(t)
	lease := acquire(t, fence, long, "order:7")
	config, err := pgx.ParseConfig(url + "&options=-c%20statement_timeout=77s")
	must(t, err)
	db := sql.OpenDB(pgfence.Connector(lease, config))
	defer db.Close()
	_, err = db.Exec(pay)
	must(t, err)
	var timeout string
	must(t, db.QueryRow("SHOW statement_timeout").Scan(&timeout))
	equal(t, timeout, "77s")
	pooled, err := pgxpool.ParseConfig(url)
	must(t, err)
	pooled.ConnConfig = pgfence.Presenting(lease, pooled.ConnConfig)
	pool, err := pgxpool.NewWithConfig(background, pooled)
	must(t, err)
	defer pool.Close()
	_, err = pool.Exec(background, pay)
	must(t, err)
	if path, err := exec.LookPath("psql"); err == nil {
		psql := exec.Command(path, url, "-c", pay)
		psql.Env = append(os.Environ(), "PGOPTIONS="+pgfence.OptionsOf(lease))
		must(t, psql.Run())
	}
	equal(t, text(t, admin, "SELECT (fence = "+fmt.Sprint(lease.Token())+")::text FROM orders"), "true")
	must(t, lease.Release())
	_, err = db.Exec(pay)
	equal(t, pgfence.Classify(err).Kind, pgfence.ErrNotSpeaking)
	_, err = pgx.ConnectConfig(background, pooled.ConnConfig)
	equal(t, is(t, err, pgfence.ErrLeaseLost).Reason, pgfence.Released)
}

// noted is a Telemetry that notes what it is told.
type noted struct {
	mu  sync.Mutex
	all []string
}

func (n *noted) note(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, fmt.Sprintf(format, args...))
}

func (n *noted) Start(ctx context.Context, span string, leases []string) (context.Context, func(error)) {
	return ctx, func(err error) { n.note("%s %v %v", span, leases, err) }
}

func (n *noted) Lost(reason pgfence.Reason) { n.note("lost %s", reason) }

func (n *noted) Refused(kind pgfence.Kind) { n.note("refused %s", kind) }

func TestTelemetryIsTold(t *testing.T) {
	fence, admin := table(t)
	told := &noted{}
	lease := acquire(t, fence.WithTelemetry(told), long, "other")
	conn := connect(t)
	is(t, pgfence.Guard(background, lease, conn.Begin, pays), pgfence.ErrNotSpeaking)
	run(t, admin, "SELECT lease_revoke('other')")
	_, err := lease.Renew(background)
	is(t, err, pgfence.ErrLeaseLost)
	told.mu.Lock()
	defer told.mu.Unlock()
	equal(t, told.all[0], "pg_fence.acquire [other] <nil>")
	equal(t, told.all[1], "refused token does not speak for the lease")
	equal(t, strings.HasPrefix(told.all[2], "pg_fence.guard [other] "), true)
	equal(t, told.all[3], "lost gone")
}

func TestSpansThatMeanNothingAreRefusedByName(t *testing.T) {
	fence, _ := table(t)
	for name, options := range map[string]pgfence.Options{
		"TTL":         {TTL: 99 * time.Millisecond},
		"Wait":        {Wait: -1},
		"HoldAtMost":  {HoldAtMost: -1},
		"HoldAtLeast": {HoldAtLeast: -1},
	} {
		_, err := fence.Acquire(background, "order:7", options)
		equal(t, err != nil && strings.Contains(err.Error(), name), true)
	}
	equal(t, errors.Is(fence.Lead(background, "", long, nil), context.Canceled), false)
}
