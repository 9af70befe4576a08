package pgfence

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// lookAgain: timers stand still while the machine sleeps, and nothing tells that a session has ended.
	lookAgain = time.Second
	// portion is how long one of a wait takes at the most: its snapshot holds back vacuum.
	portion = 2 * time.Second
	// tryAgain is how often several names are tried, for they have no queue.
	tryAgain = 250 * time.Millisecond
	// mostPairs is what lease_keep takes at once; mostReleased is for one transaction, which has its share of locks.
	mostPairs, mostReleased = 10_000, 200
)

// Event is what has become of a lease: "acquired", "renewed", "lost", which has a Reason, or "released".
type Event struct {
	Kind      string
	Names     []string
	Token     int64
	Remaining time.Duration
	Reason    Reason
}

// grant is a lease that was granted, until it is over.
type grant struct {
	names []string
	token int64
	// The keeper's lock guards it.
	keeping keeping
	// session is the connection that a session lease lives on; 0 for other leases.
	session int
	// over is why it is: lost, or released. At a loss, loss ends.
	over atomic.Pointer[Error]
	loss context.Context
	lose context.CancelCauseFunc
}

func (g *grant) lostBy(reason Reason) *Error {
	return &Error{Kind: LeaseLost, Reason: reason, Names: g.names}
}

// lost is nil where it is not lost.
func (g *grant) lost() error {
	if over := g.over.Load(); over != nil && over.Reason != ReasonReleased {
		return over
	}
	return nil
}

// keeper keeps all leases of a fence: one goroutine renews them, and another one watches their deadlines. Both, and the
// connection, begin with the first lease and end with the last.
type keeper struct {
	// schema is the extension's, quoted and with its dot.
	schema  string
	onEvent func(Event)
	log     *slog.Logger
	line    *line

	mu     sync.Mutex
	grants map[*grant]struct{}
	// users are calls that are under way.
	users int
	run   *run
	// isOut: the heartbeat fails; hasTold: and a loss by that is in the log, one line however many leases there are.
	isOut, hasTold atomic.Bool
	// open ends with the fence.
	open  context.Context
	close context.CancelFunc
}

// run is one life of the two goroutines, which go on until stop is closed.
type run struct{ stop, beat, watch chan struct{} }

// lock returns what unlocks it, and leaves nothing behind when nothing is kept.
func (k *keeper) lock() (unlock func()) {
	k.mu.Lock()
	return func() {
		defer k.mu.Unlock()
		if len(k.grants) == 0 {
			k.halt()
		}
		if len(k.grants) == 0 && k.users == 0 {
			// Without users nobody has the turn.
			k.line.close()
		}
	}
}

// use counts a call on the connection, until what it returns is called.
func (k *keeper) use() (leave func()) {
	defer k.lock()()
	k.users++
	return func() {
		defer k.lock()()
		k.users--
	}
}

// call is a statement that a fence sends, in autocommit or in a transaction of the work.
type call struct {
	sql  string
	args []any
}

func (k *keeper) call(sql string, args ...any) call {
	return call{strings.ReplaceAll(sql, "lease_", k.schema+"lease_"), args}
}

// interval is a text that every IntervalStyle reads alike.
func interval(span time.Duration) string {
	return strconv.FormatInt(span.Microseconds(), 10) + " microseconds"
}

// acquiring is one try, or a portion of the wait, which is below the role's timeouts, whatever these are.
func (k *keeper) acquiring(names []string, o Options, wait time.Duration) call {
	if len(names) > 1 {
		return k.call("SELECT lease_acquire_all($1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)",
			names, o.Holder, interval(o.TTL), o.Metadata, o.Session)
	}
	return k.call(`SELECT lease_acquire($1::text, $2::text, $3::interval, least($4::interval,
			nullif(current_setting('statement_timeout'), '0')::interval / 2,
			nullif(current_setting('lock_timeout'), '0')::interval / 2),
		$5::jsonb, $6::boolean, $7::integer, $8::boolean, $9::boolean)`,
		names[0], o.Holder, interval(o.TTL), interval(wait), o.Metadata, o.Shared, o.Slots, o.Reclaim, o.Session)
}

// aside runs what acquires where a caller who gives up does not wait for it. Grants that come all the same are given back.
func (k *keeper) aside(
	ctx context.Context, limit time.Duration, acquire func(context.Context) ([]*grant, error),
) ([]*grant, error) {
	done := make(chan func() ([]*grant, error))
	inTime, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	defer context.AfterFunc(k.open, cancel)()
	go func() {
		defer k.use()()
		granted, err := acquire(inTime)
		select {
		case done <- func() ([]*grant, error) { return granted, err }:
		case <-inTime.Done():
			k.release(granted)
		}
	}()
	select {
	case end := <-done:
		return end()
	case <-inTime.Done():
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case k.open.Err() != nil:
			return nil, &Error{Kind: Closed}
		}
		return nil, noAnswer(limit, inTime.Err())
	}
}

// acquire is LeaseTaken where somebody else has it. A wait ends soon after the context.
func (k *keeper) acquire(ctx context.Context, names []string, o Options) ([]*grant, error) {
	return k.aside(ctx, min(o.Wait, forever)+2*longest, func(ctx context.Context) ([]*grant, error) {
		on, begun := k.line, now()
		if o.Wait > 0 && !o.Session {
			// The others are renewed meanwhile.
			on = &line{open: k.line.open}
			defer on.close()
		}
		for until := begun + min(o.Wait, forever); ; {
			before, limit := now(), k.limit(o.TTL)
			wait := max(0, min(until-before, portion))
			if on == k.line {
				wait = min(wait, limit)
			}
			rows, session, err := on.askCalmly(ctx, wait+limit, k.acquiring(names, o, wait))
			switch {
			case stateOf(err) == "40001" && ctx.Err() == nil && now() < max(until, begun+limit):
				// The role's transactions are SERIALIZABLE.
			case err != nil:
				return nil, err
			case rows[0][0] != nil:
				g := &grant{names: names, token: rows[0][0].(int64), keeping: grantedBefore(before, o.TTL)}
				if o.Session {
					g.session = session
				}
				return k.granted(g)
			case ctx.Err() != nil || now() >= until || k.open.Err() != nil:
				return nil, k.taken(ctx, on, names, limit)
			case len(names) > 1:
				time.Sleep(min(until-now(), tryAgain))
			}
		}
	})
}

// taken says by whom, where that can be seen.
func (k *keeper) taken(ctx context.Context, on *line, names []string, limit time.Duration) error {
	if k.open.Err() != nil {
		return &Error{Kind: Closed}
	}
	told := &Error{Kind: LeaseTaken, Names: names}
	rows, _, _ := on.askCalmly(ctx, limit, k.call(`SELECT i.holder, extract(epoch FROM i.remaining)::float8
		FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i
		WHERE i.state IN ('held', 'uncommitted') ORDER BY i.remaining DESC NULLS LAST LIMIT 1`, names))
	for _, row := range rows {
		told.Holder, _ = row[0].(string)
		told.Remaining = max(0, span(row[1]))
	}
	return told
}

func (k *keeper) claim(ctx context.Context, names []string, n int, o Options) ([]*grant, error) {
	return k.aside(ctx, 2*longest, func(ctx context.Context) (held []*grant, err error) {
		before := now()
		rows, _, err := k.line.askCalmly(ctx, k.limit(o.TTL), k.call(
			"SELECT name, token FROM lease_acquire_any($1::text[], $2::integer, $3::text, $4::interval)",
			names, n, o.Holder, interval(o.TTL)))
		for _, row := range rows {
			// One that is lost already is told, and left out.
			one, _ := k.granted(&grant{
				names: []string{row[0].(string)}, token: row[1].(int64), keeping: grantedBefore(before, o.TTL),
			})
			held = append(held, one...)
		}
		return held, err
	})
}

// granted has it be kept.
func (k *keeper) granted(g *grant) ([]*grant, error) {
	g.loss, g.lose = context.WithCancelCause(context.Background())
	all := []*grant{g}
	if now() > g.keeping.beatAt {
		// The call has waited, and the server counts from a later moment.
		k.keep(all)
	}
	unlock := k.lock()
	if g.over.Load() == nil {
		k.grants[g] = struct{}{}
		k.begin()
	}
	unlock()
	if k.open.Err() != nil {
		k.release(all)
		return nil, &Error{Kind: Closed}
	}
	if err := k.check(g); err != nil {
		return nil, err
	}
	k.tell("acquired", all)
	return all, nil
}

// keep renews them now, and takes the answers.
func (k *keeper) keep(grants []*grant) {
	defer k.use()()
	names, tokens, smallest := pairs(grants)
	before, rows, gotOn := now(), [][]any(nil), false
	for first := 0; first < len(names); first += mostPairs {
		last := min(len(names), first+mostPairs)
		some, _, err := k.line.ask(min(smallest/3, longest), k.call(
			`SELECT outcome, extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8
			FROM lease_keep($1::text[], $2::bigint[])`, names[first:last], tokens[first:last]))
		if err != nil {
			k.keptNot(grants, smallest, err)
			return
		}
		rows = append(rows, some...)
	}
	answers := make([]answer, len(rows))
	for i, row := range rows {
		answers[i] = answer{row[0].(string), span(row[1]), span(row[2])}
		gotOn = gotOn || row[0] == "kept"
	}
	lost, renewed := map[Reason][]*grant{}, []*grant(nil)
	unlock := k.lock()
	k.isOut.Store(false)
	k.hasTold.Store(false)
	for _, g := range grants {
		reason, isRenewed := g.keeping.answered(answers[:len(g.names)], before, now(), gotOn)
		answers = answers[len(g.names):]
		if reason != "" {
			lost[reason] = append(lost[reason], g)
		} else if isRenewed && g.over.Load() == nil {
			renewed = append(renewed, g)
		}
	}
	unlock()
	for reason, some := range lost {
		k.end(some, reason)
	}
	k.tell("renewed", renewed)
}

// keptNot is no loss, unless trying again cannot help: the deadlines tell.
func (k *keeper) keptNot(grants []*grant, smallest time.Duration, err error) {
	switch {
	case errors.Is(err, panicked):
		k.died(err, grants)
	case isAnyOf(err, NotGranted, NotInstalled):
		k.end(grants, ReasonRefused)
	default:
		k.change(grants, func(of *keeping) { of.beatAt = now() + smallest/12 })
		if !k.isOut.Swap(true) {
			k.log.Warn("pgfence: leases are not renewed, and it is tried again", "error", err)
		}
	}
}

// pairs are their names and tokens, and the smallest of their ttls.
func pairs(grants []*grant) (names []string, tokens []int64, smallest time.Duration) {
	smallest = forever
	for _, g := range grants {
		smallest = min(smallest, g.keeping.ttl)
		for _, name := range g.names {
			names, tokens = append(names, name), append(tokens, g.token)
		}
	}
	return names, tokens, smallest
}

// release gives them back. It is no error where that fails: then they end at their ttl.
func (k *keeper) release(grants []*grant) {
	defer k.use()()
	for some := range slices.Chunk(k.end(grants, ReasonReleased), mostReleased) {
		if !k.releaseAtOnce(some) {
			return
		}
	}
}

// releaseAtOnce is one transaction. It tells whether the server could be asked at all.
func (k *keeper) releaseAtOnce(grants []*grant) (could bool) {
	names, tokens, smallest := pairs(grants)
	limit := k.limit(smallest)
	// So long it waits for the lock of somebody's open transaction.
	lock := strconv.FormatInt(max(10, limit.Milliseconds()/4), 10)
	for until, mayRepeat := now()+limit, true; ; time.Sleep(limit / 4) {
		rows, _, err := k.line.ask(limit, k.call(`SELECT lease_release(x.name, x.token)
			FROM set_config('lock_timeout', $1, true), unnest($2::text[], $3::bigint[]) AS x(name, token)`, lock, names, tokens))
		state := stateOf(err)
		isLocked := state == "55P03" || state == "40001"
		switch {
		case mayRepeat && sessionEnded(err):
			// It may only have shown that the connection had ended.
			mayRepeat = false
		case isLocked && len(grants) > 1:
			could = true
			for one := range slices.Chunk(grants, 1) {
				could = k.releaseAtOnce(one) && could
			}
			return could
		case err != nil && (!isLocked || now() > until):
			k.warn("not released, and end at their ttl", grants, "error", err)
			return state != ""
		case err == nil:
			for _, g := range grants {
				isGone := slices.ContainsFunc(rows[:len(g.names)], func(row []any) bool { return row[0] == nil })
				if rows = rows[len(g.names):]; isGone {
					g.over.Store(g.lostBy(ReasonGone))
					k.lose([]*grant{g}, true)
				} else {
					k.tell("released", []*grant{g})
				}
			}
			return true
		}
	}
}

// close gives everything back, and ends the waits after their portions.
func (k *keeper) endAll() {
	k.close()
	k.release(k.all())
	users := 1
	for until := now() + portion + lookAgain; users > 0 && now() < until; time.Sleep(5 * time.Millisecond) {
		unlock := k.lock()
		users = k.users
		unlock()
	}
}

func (k *keeper) all() []*grant {
	defer k.lock()()
	return slices.Collect(maps.Keys(k.grants))
}

// check is LeaseLost where it is over, whatever the goroutines do.
func (k *keeper) check(g *grant) error {
	if k.remaining(g) > 0 {
		return nil
	}
	k.end([]*grant{g}, ReasonDeadline)
	return g.over.Load()
}

func (k *keeper) remaining(g *grant) time.Duration {
	defer k.lock()()
	if g.over.Load() != nil {
		return 0
	}
	return max(0, g.keeping.deadline-now())
}

// change is for their times. The goroutines look at them.
func (k *keeper) change(grants []*grant, do func(*keeping)) {
	defer k.lock()()
	for _, g := range grants {
		do(&g.keeping)
	}
	k.wake()
}

// end returns those that were not over before.
func (k *keeper) end(grants []*grant, reason Reason) (ended []*grant) {
	unlock := k.lock()
	for _, g := range grants {
		if g.over.CompareAndSwap(nil, g.lostBy(reason)) {
			ended = append(ended, g)
		}
		delete(k.grants, g)
	}
	unlock()
	if len(ended) > 0 && reason != ReasonReleased {
		isOutage := k.isOut.Load() && reason == ReasonDeadline
		k.lose(ended, !isOutage || !k.hasTold.Swap(true))
	}
	return ended
}

func (k *keeper) lose(grants []*grant, isNew bool) {
	if isNew {
		k.warn("lost", grants, "reason", grants[0].over.Load().Reason)
	}
	for _, g := range grants {
		g.lose(g.lost())
	}
	k.tell("lost", grants)
}

func (k *keeper) tell(kind string, grants []*grant) {
	defer func() {
		if what := recover(); what != nil {
			k.log.Error("pgfence: the function of OnEvent has panicked", "panic", what)
		}
	}()
	for _, g := range grants {
		event := Event{Kind: kind, Names: g.names, Token: g.token, Remaining: k.remaining(g)}
		if kind == "lost" {
			event.Reason = g.over.Load().Reason
		}
		k.onEvent(event)
	}
}

func (k *keeper) warn(what string, grants []*grant, key string, value any) {
	names, _, _ := pairs(grants[:min(5, len(grants))])
	k.log.Warn("pgfence: leases are "+what, key, value, "count", len(grants), "names", names)
}

// limit is how long a call may take: a third of that ttl and of all that are kept.
func (k *keeper) limit(ttl time.Duration) time.Duration {
	_, _, smallest := pairs(k.all())
	return min(ttl/3, smallest/3, longest)
}

// begin has the two goroutines run. The caller has the lock.
func (k *keeper) begin() {
	if k.run == nil {
		k.run = &run{make(chan struct{}), make(chan struct{}, 1), make(chan struct{}, 1)}
		go k.untilDeath(k.run.stop, k.run.beat, k.beat)
		go k.untilDeath(k.run.stop, k.run.watch, k.watch)
	}
	k.wake()
}

func (k *keeper) wake() {
	if k.run != nil {
		for _, sleeper := range []chan struct{}{k.run.beat, k.run.watch} {
			select {
			case sleeper <- struct{}{}:
			default:
			}
		}
	}
}

func (k *keeper) halt() {
	if k.run != nil {
		close(k.run.stop)
		k.run = nil
	}
}

// untilDeath does it again and again: at the time that it returns, or when it is woken.
func (k *keeper) untilDeath(stop, woken chan struct{}, do func(all []*grant) (next time.Duration)) {
	defer func() {
		if what := recover(); what != nil {
			k.died(what, nil)
		}
	}()
	for {
		select {
		case <-time.After(min(do(k.all())-now(), lookAgain)):
		case <-woken:
		case <-stop:
			return
		}
	}
}

// died has all leases be lost. The next one begins with new goroutines.
func (k *keeper) died(what any, also []*grant) {
	k.log.Error("pgfence: what kept the leases has died", "panic", what)
	unlock := k.lock()
	k.halt()
	unlock()
	k.end(append(k.all(), also...), ReasonKeeper)
}

// beat renews what is due, and looks after the session leases.
func (k *keeper) beat(all []*grant) (next time.Duration) {
	defer k.use()()
	if slices.ContainsFunc(all, func(g *grant) bool { return g.session != 0 }) {
		is := k.line.look()
		ends := func(g *grant) bool { return is >= 0 && g.session != 0 && g.session != is }
		k.end(those(all, ends), ReasonSession)
	}
	next = forever
	unlock := k.lock()
	for _, g := range all {
		next = min(next, g.keeping.dueAt())
	}
	due := those(all, func(g *grant) bool { return next <= now() && g.keeping.goesAlong(now()) && g.over.Load() == nil })
	unlock()
	if len(due) > 0 {
		k.keep(due)
		return 0
	}
	return next
}

// watch tells losses at the deadlines.
func (k *keeper) watch(all []*grant) (next time.Duration) {
	next = forever
	unlock := k.lock()
	over := those(all, func(g *grant) bool {
		next = min(next, max(now(), g.keeping.deadline))
		return g.keeping.deadline <= now()
	})
	unlock()
	k.end(over, ReasonDeadline)
	return next
}

func those(all []*grant, are func(*grant) bool) (some []*grant) {
	for _, g := range all {
		if are(g) {
			some = append(some, g)
		}
	}
	return some
}

// span is of seconds; negative where there are none.
func span(seconds any) time.Duration {
	if seconds, is := seconds.(float64); is {
		return time.Duration(min(seconds*float64(time.Second), float64(forever)))
	}
	return -1
}
