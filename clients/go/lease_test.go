package pgfence_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"pgfence.example/pgfence"
)

// runs makes a table whose rows are leases of their own, and claims one of them, with the time before
// the claim.
func runs(t *testing.T, admin *pgx.Conn, mode string) (claim func(where, ttl string) (int64, time.Time)) {
	run(t, admin, `DROP TABLE IF EXISTS runs; CREATE TABLE runs (part text, id bigint, state text,
		PRIMARY KEY (id, part)); INSERT INTO runs VALUES ('a', 1, 'ready'), ('b', 2, 'ready');
		SELECT fence_protect('runs', mode => '`+mode+`', deadline => 'held_until')`)
	t.Cleanup(func() { run(t, connect(t), "DROP TABLE runs") })
	return func(where, ttl string) (token int64, before time.Time) {
		before = time.Now()
		must(t, admin.QueryRow(background, "UPDATE runs SET state = 'running', "+
			"held_until = clock_timestamp() + $1::text::interval WHERE "+where+" RETURNING fence", ttl).Scan(&token))
		return token, before
	}
}

func onBoth(t *testing.T, test func(*testing.T, string, *pgx.Conn, chan pgfence.Event, *pgfence.Fence)) {
	for _, mode := range []string{"monotonic", "managed"} {
		t.Run(mode, func(t *testing.T) {
			_, admin := table(t)
			events := make(chan pgfence.Event, 1000)
			fence := pgfence.New(url, pgfence.OnEvent(func(event pgfence.Event) { events <- event }))
			t.Cleanup(fence.Close)
			test(t, mode, admin, events, fence)
		})
	}
}

func kinds(events chan pgfence.Event, last string) (all []string) {
	for event := range events {
		all = append(all, strings.TrimSpace(event.Kind+" "+string(event.Reason)))
		if event.Kind == last {
			return all
		}
	}
	return all
}

const deadlines = `SELECT string_agg(CASE WHEN held_until > now() THEN 'held' WHEN held_until IS NULL THEN '-'
	ELSE 'over' END, ' ' ORDER BY id) FROM runs`

func TestARowIsALease(t *testing.T) {
	onBoth(t, func(t *testing.T, mode string, admin *pgx.Conn, events chan pgfence.Event, fence *pgfence.Fence) {
		claim := runs(t, admin, mode)
		one, before := claim("id = 1", "1 s")
		first := have(fence.KeepRow(background, "runs", []any{1, "a"}, one,
			pgfence.Options{TTL: time.Second, Claimed: before}))
		equal(t, first.Remaining() > 500*time.Millisecond && first.Remaining() <= 980*time.Millisecond, true)
		two, _ := claim("id = 2", "5 min")
		second := have(fence.KeepRow(background, "runs", []any{2, "b"}, two, long))
		equal(t, kinds(events, "renewed")[:2], []string{"acquired", "acquired"})
		time.Sleep(1200 * time.Millisecond)
		must(t, first.Check())
		equal(t, text(t, admin, deadlines), "held held")
		// The work's own statement names no token.
		must(t, first.Guard(background, admin, ofPgx(does("UPDATE runs SET state = 'half' WHERE id = 1"))))
		must(t, first.GuardSQL(background, database(t, "postgres"),
			ofSQL(does("UPDATE runs SET state = 'done' WHERE id = 1")), pgfence.Releasing))
		equal(t, first.Check().(*pgfence.Error).Reason, pgfence.ReasonReleased)
		equal(t, text(t, admin, "SELECT state FROM runs WHERE id = 1"), "done")
		equal(t, text(t, admin, deadlines), "- held")
		must(t, second.Release())
		equal(t, text(t, admin, deadlines), "- -")
		equal(t, second.Release(), nil)
		is(t, second.Guard(background, admin, ofPgx(does("SELECT 1"))), pgfence.LeaseLost)
	})
}

func TestARowThatIsTakenAwayIsLost(t *testing.T) {
	onBoth(t, func(t *testing.T, mode string, admin *pgx.Conn, events chan pgfence.Event, fence *pgfence.Fence) {
		claim := runs(t, admin, mode)
		token, _ := claim("id = 1", "1 s")
		lease := have(fence.KeepRow(background, "runs", []any{1, "a"}, token, short))
		evict := "UPDATE runs SET held_until = NULL, fence = fence WHERE id = 1"
		if mode == "managed" {
			evict = fmt.Sprintf("SET pg_fence.token = '%d'; %s; RESET pg_fence.token", token, evict)
		}
		run(t, admin, evict)
		<-lease.Lost()
		again, _ := claim("id = 1", "1 s")
		equal(t, again > token, true)
		is(t, lease.Guard(background, admin, ofPgx(does("SELECT 1"))), pgfence.LeaseLost)
		is(t, lease.Release(), pgfence.LeaseLost)
		equal(t, kinds(events, "lost")[0], "acquired")
		// Another's by the time of the first look.
		is(t, second(fence.KeepRow(background, "runs", []any{1, "a"}, token, short)), pgfence.LeaseLost)
	})
}

func TestAWorkersOwnTransactionKeepsItsRow(t *testing.T) {
	onBoth(t, func(t *testing.T, mode string, admin *pgx.Conn, events chan pgfence.Event, fence *pgfence.Fence) {
		claim := runs(t, admin, mode)
		token, _ := claim("id = 1", "1 s")
		lease := have(fence.KeepRow(background, "runs", []any{1, "a"}, token, short))
		must(t, lease.Guard(background, admin, func(ctx context.Context, tx pgx.Tx) error {
			time.Sleep(1500 * time.Millisecond)
			equal(t, lease.Held(), true)
			return second(tx.Exec(ctx, "UPDATE runs SET state = 'late' WHERE id = 1"))
		}))
		is(t, lease.Check(), pgfence.LeaseLost)
		equal(t, kinds(events, "lost")[0], "acquired")
		equal(t, text(t, admin, "SELECT state FROM runs WHERE id = 1"), "late")
		// Nobody has come: the last write lands, as the table's trigger decides.
		must(t, lease.Guard(background, admin, ofPgx(does("UPDATE runs SET state = 'last' WHERE id = 1")), pgfence.Releasing))
		equal(t, text(t, admin, "SELECT state || fence FROM runs WHERE id = 1"), fmt.Sprint("last", token))
		equal(t, text(t, admin, deadlines), "- -")
	})
}

func TestWhatIsNoRowLeaseIsNamed(t *testing.T) {
	fence, admin := table(t)
	runs(t, admin, "monotonic")
	for message, err := range map[string]error{
		"orders":    second(fence.KeepRow(background, "orders", 7, 1, short)),
		"nowhere":   second(fence.KeepRow(background, "nowhere", 7, 1, short)),
		"2 columns": second(fence.KeepRow(background, "runs", 7, 1, short)),
		"TTL":       second(fence.KeepRow(background, "runs", 7, 1, pgfence.Options{Wait: time.Hour})),
	} {
		equal(t, err != nil && strings.Contains(err.Error(), message), true)
	}
}

func TestAReleaseInATransactionOfTheCallersIsOneWhenThatHasCommitted(t *testing.T) {
	for _, commits := range []bool{false, true} {
		_, admin := table(t)
		events := make(chan pgfence.Event, 1000)
		fence := pgfence.New(url, pgfence.OnEvent(func(event pgfence.Event) { events <- event }))
		lease := acquire(t, fence, short, "order:7")
		tx := have(admin.Begin(background))
		must(t, lease.Guard(background, tx, ofPgx(does(pay)), pgfence.Releasing))
		equal(t, lease.Held(), true)
		if commits {
			must(t, tx.Commit(background))
			all := kinds(events, "released")
			equal(t, all[len(all)-1], "released")
			continue
		}
		must(t, tx.Rollback(background))
		time.Sleep(1200 * time.Millisecond)
		must(t, lease.Check())
		must(t, lease.Guard(background, admin, ofPgx(does(pay)), pgfence.Releasing))
		all := kinds(events, "released")
		equal(t, len(all) > 2 && all[1] == "renewed", true)
		fence.Close()
	}
}

func TestALeaseIsHeldAtMostSoLong(t *testing.T) {
	fence, admin := table(t)
	begun := time.Now()
	lease := acquire(t, fence, pgfence.Options{TTL: time.Second, AtMost: 1500 * time.Millisecond}, "job")
	<-lease.Lost()
	equal(t, time.Since(begun) > 1400*time.Millisecond && time.Since(begun) < 2500*time.Millisecond, true)
	equal(t, is(t, lease.Release(), pgfence.LeaseLost).Reason, pgfence.ReasonAtMost)
	comesTrue(t, "it is given back", func() bool { return text(t, admin, held) == "0" })
}

func TestALeaseThatIsTakenSaysForWhatItWaits(t *testing.T) {
	fence, admin := table(t)
	for waitsFor, begins := range map[string]string{
		"commit": "BEGIN; SELECT lease_acquire('job', 'it')",
		"ttl":    "SELECT lease_acquire('job', 'it')",
		"guard": `SELECT lease_acquire('job', 'it', '100 ms'); BEGIN;
			SELECT lease_guard('job', (SELECT first_token FROM lease_info('job'))); SELECT pg_sleep(0.3)`,
	} {
		run(t, admin, begins)
		told := is(t, second(fence.Acquire(background, []string{"job"}, short)), pgfence.LeaseTaken)
		equal(t, []any{told.WaitsFor, told.Holder}, []any{waitsFor, "it"})
		run(t, admin, "COMMIT")
		run(t, admin, "SELECT lease_revoke('job')")
	}
}

func TestALeaderTellsWhatItGoesOnAfter(t *testing.T) {
	_, admin := table(t)
	events := make(chan pgfence.Event, 1000)
	fence := pgfence.New(url, pgfence.OnEvent(func(event pgfence.Event) { events <- event }))
	begun, terms := time.Now(), 0
	must(t, fence.Lead(background, "chief", short.TTL, func(ctx context.Context, _ *pgfence.Lease) error {
		if terms++; terms == 5 {
			return nil
		}
		run(t, admin, "SELECT lease_revoke('chief')")
		<-ctx.Done()
		return ctx.Err()
	}))
	interrupted := 0
	for len(events) > 0 {
		if (<-events).Kind == "interrupted" {
			interrupted++
		}
	}
	equal(t, interrupted, 1)
	equal(t, time.Since(begun) > 900*time.Millisecond, true)
}

func TestWhatCanNeverBeOpenedIsToldAtOnceAndAnOutageIsOneLineOfTheLog(t *testing.T) {
	table(t)
	for words, fence := range map[string]*pgfence.Fence{
		"refused TLS":    pgfence.New(url + "&sslmode=require"),
		"does not exist": pgfence.New(strings.Replace(url, "?", "_nowhere?", 1)),
		"no secret":      pgfence.New(func(context.Context) (pgfence.Conn, error) { return nil, errors.New("no secret") }),
	} {
		ctx, cancel := context.WithTimeout(background, 5*time.Second)
		for _, err := range []error{
			fence.Lease(ctx, "job", pgfence.Options{TTL: time.Second, Wait: time.Minute}, nil),
			fence.Lead(ctx, "job", time.Second, nil),
		} {
			equal(t, strings.Contains(is(t, err, pgfence.NoConnection).Error(), words), true)
			equal(t, ctx.Err(), nil)
		}
		cancel()
	}
	var log strings.Builder
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	away := pgfence.New("postgresql://127.0.0.1:1/shop")
	is(t, away.Lease(background, "job", pgfence.Options{TTL: time.Second, Wait: time.Second}, nil), pgfence.NoConnection)
	slog.SetDefault(slog.New(slog.DiscardHandler))
	equal(t, strings.Count(log.String(), "level=WARN"), 1)
	equal(t, strings.Contains(log.String(), `"pgfence: no lease could be acquired, and it is tried again" reason="failed to connect`), true)
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
	_, admin := table(t)
	next := &atomic.Bool{}
	fence := pgfence.New(func(ctx context.Context) (pgfence.Conn, error) {
		conn, err := pgx.Connect(ctx, url)
		return loses{conn, next}, err
	})
	t.Cleanup(fence.Close)
	next.Store(true)
	must(t, acquire(t, fence, long, "job").Release())
	equal(t, next.Load(), false)
	next.Store(true)
	told := is(t, second(fence.Acquire(background, []string{"a", "b"}, long)), pgfence.NoAnswer)
	equal(t, told.InDoubt, true)
	comesTrue(t, "it is undone", func() bool { return text(t, admin, held) == "0" })
	next.Store(true)
	lease := acquire(t, fence, pgfence.Options{TTL: time.Minute, Wait: time.Minute}, "a", "b")
	equal(t, strings.HasSuffix(text(t, admin, "SELECT max(holder) FROM fence.leases WHERE state = 'held'"), "/2"), true)
	equal(t, text(t, admin, held), "2")
	must(t, lease.Release())
}
