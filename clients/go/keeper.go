package pgfence

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// lookingAgain: timers stand still while the machine sleeps, and nothing tells that a session has ended.
	lookingAgain = time.Second
	// longestPortion is how long one of a wait takes at the most: its snapshot holds back vacuum.
	longestPortion = 2 * time.Second
	// tryingAgain is how often several names are tried, for they have no queue.
	tryingAgain = 250 * time.Millisecond
	// mostKept is what lease_keep takes at once; mostGivenBack is for one transaction, which has its share of locks.
	mostKept, mostGivenBack = 10_000, 200
)

// Event is what has become of a lease: "acquired", "renewed", "lost", which has a Reason, or "released".
type Event struct {
	Kind      string
	Names     []string
	Token     int64
	Remaining time.Duration
	Reason    Reason
}

// keeper keeps all leases of a fence, by one timer, which tells losses at their deadlines and has heartbeats begin. It begins
// with the first lease and ends with the last, and so does the connection.
type keeper struct {
	// schema is the extension's, quoted and with its dot.
	schema  string
	onEvent func(Event)
	line    *line

	mu     sync.Mutex
	leases map[*Lease]struct{}
	// users are calls that are under way.
	users     int
	isBeating bool
	lookAt    time.Duration
	timer     *time.Timer
	// isOut: the heartbeat fails; hasTold: and a loss by that is in the log, one line however many leases there are.
	isOut, hasTold atomic.Bool
	// open ends with the fence.
	open  context.Context
	close context.CancelFunc
}

// lock returns what unlocks it, and sees to it that what comes next is done in time.
func (k *keeper) lock() (unlock func()) {
	k.mu.Lock()
	return func() {
		defer k.mu.Unlock()
		next := k.lookAt
		for l := range k.leases {
			if next = min(next, l.deadline); !k.isBeating {
				next = min(next, l.dueAt())
			}
		}
		k.timer.Reset(next - now())
		if len(k.leases) == 0 {
			k.timer.Stop()
		}
		if len(k.leases) == 0 && k.users == 0 {
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
type statement struct {
	sql  string
	args []any
}

func (k *keeper) call(sql string, args ...any) statement {
	return statement{strings.ReplaceAll(sql, "lease_", k.schema+"lease_"), args}
}

// interval is a text that every IntervalStyle reads alike.
func interval(span time.Duration) string {
	return strconv.FormatInt(span.Microseconds(), 10) + " microseconds"
}

// acquiring is one try, or a longestPortion of the wait, which is below the role's timeouts, whatever these are.
func (k *keeper) acquiring(names []string, o Options, wait time.Duration) statement {
	const takenBy = ` AS granted LEFT JOIN LATERAL (SELECT i.holder, extract(epoch FROM i.remaining)::float8
		FROM unnest($1::text[]) AS n(name), lease_info(n.name) AS i WHERE granted IS NULL AND i.state IN ('held', 'uncommitted')
		ORDER BY i.remaining DESC NULLS LAST LIMIT 1) AS taken ON true`
	if len(names) != 1 {
		return k.call("SELECT granted, taken.* FROM lease_acquire_all($1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)"+
			takenBy, names, o.Holder, interval(o.TTL), o.Metadata, o.Session)
	}
	return k.call(`SELECT granted, taken.* FROM lease_acquire(($1::text[])[1], $2::text, $3::interval, least($4::interval,
			nullif(current_setting('statement_timeout'), '0')::interval / 2,
			nullif(current_setting('lock_timeout'), '0')::interval / 2),
		$5::jsonb, $6::boolean, $7::integer, $8::boolean, $9::boolean)`+takenBy,
		names, o.Holder, interval(o.TTL), interval(wait), o.Metadata, o.Shared, o.Slots, o.Reclaim, o.Session)
}

// aside runs what acquires where a caller who gives up does not wait for it. Grants that come all the same are given back.
func (k *keeper) aside(
	ctx context.Context, limit time.Duration, acquire func(context.Context) (Leases, error),
) (Leases, error) {
	awaited, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer time.AfterFunc(limit, func() { cancel(noAnswer(limit, context.DeadlineExceeded)) }).Stop()
	defer context.AfterFunc(k.open, func() { cancel(&Error{Kind: Closed}) })()
	done, granted, err := make(chan struct{}), Leases(nil), error(nil)
	go func() {
		defer k.use()()
		defer close(done)
		if granted, err = acquire(awaited); err == nil {
			err = k.granted(granted)
		}
	}()
	select {
	case <-done:
		if err == nil || awaited.Err() == nil {
			return granted, err
		}
	case <-awaited.Done():
		go func() {
			<-done
			k.release(granted)
		}()
	}
	return nil, cmp.Or(ctx.Err(), context.Cause(awaited))
}

// acquire is LeaseTaken where somebody else has it. A wait ends soon after the context.
func (k *keeper) acquire(ctx context.Context, names []string, o Options) (Leases, error) {
	return k.aside(ctx, min(o.Wait, forever)+2*longestCallTime, func(ctx context.Context) (Leases, error) {
		on, begun := k.line, now()
		if o.Wait > 0 && !o.Session {
			// The others are renewed meanwhile.
			on = &line{open: k.line.open}
			defer on.close()
		}
		for until := begun + min(o.Wait, forever); ; {
			before, limit := now(), k.limit(o.TTL)
			wait := max(0, min(until-before, longestPortion))
			if on == k.line {
				wait = min(wait, limit)
			}
			rows, session, err := on.askCalmly(ctx, wait+limit, k.acquiring(names, o, wait))
			switch {
			case stateOf(err) == "40001" && now() < max(until, begun+limit):
				// The role's transactions are SERIALIZABLE.
			case err != nil:
				return nil, err
			case rows[0][0] != nil:
				if !o.Session {
					session = -1
				}
				return Leases{k.newLease(names, rows[0][0], before, o.TTL, session)}, nil
			case ctx.Err() != nil || now() >= until:
				holder, _ := rows[0][1].(string)
				return nil, takenBy(holder, span(rows[0][2], 0), nil, names...)
			case len(names) > 1:
				time.Sleep(min(until-now(), tryingAgain))
			}
		}
	})
}

func (k *keeper) claim(ctx context.Context, names []string, n int, o Options) (Leases, error) {
	return k.aside(ctx, 2*longestCallTime, func(ctx context.Context) (claimed Leases, err error) {
		call := k.call("SELECT name, token FROM lease_acquire_any($1::text[], $2::integer, $3::text, $4::interval)",
			append([]string{}, names...), n, o.Holder, interval(o.TTL))
		before := now()
		rows, _, err := k.line.askCalmly(ctx, k.limit(o.TTL), call)
		for stateOf(err) == "40001" && now() < before+longestCallTime {
			// The role's transactions are SERIALIZABLE.
			rows, _, err = k.line.askCalmly(ctx, k.limit(o.TTL), call)
		}
		for _, row := range rows {
			claimed = append(claimed, k.newLease([]string{row[0].(string)}, row[1], before, o.TTL, -1))
		}
		return claimed, err
	})
}

// granted has them be kept.
func (k *keeper) granted(leases Leases) error {
	k.tell("acquired", leases)
	for _, l := range leases {
		if now() > l.beatAt {
			// The call has waited, and the server counts from a later moment.
			k.keep(l.leases)
		}
	}
	k.change(leases, func(l *Lease) {
		if l.over.Load() == nil {
			k.leases[l] = struct{}{}
		}
	})
	if k.open.Err() != nil {
		k.release(leases)
		return &Error{Kind: Closed}
	}
	return nil
}

// keep renews them now, and takes the answers. It asks, too, where none are due, to see whether a session has ended.
func (k *keeper) keep(due Leases) {
	defer k.use()()
	names, tokens, smallest := pairs(due)
	before, answers := now(), [][]any(nil)
	for first, last := 0, -1; last < len(names); first = last {
		last = min(len(names), first+mostKept)
		some, _, err := k.line.ask(k.limit(smallest), k.call(
			`SELECT outcome, extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8
			FROM lease_keep($1::text[], $2::bigint[])`, names[first:last], tokens[first:last]))
		if err != nil {
			k.keptNot(due, smallest, err)
			return
		}
		answers = append(answers, some...)
	}
	gotOn := slices.ContainsFunc(answers, func(one []any) bool { return one[0] == "kept" })
	lost, renewed := map[Reason]Leases{}, Leases(nil)
	k.isOut.Store(false)
	k.hasTold.Store(false)
	k.change(due, func(l *Lease) {
		reason, isRenewed := l.answered(answers[:len(l.names)], before, gotOn)
		answers = answers[len(l.names):]
		switch {
		case !k.hasSession(l):
			lost[ReasonSession] = append(lost[ReasonSession], l)
		case reason != "":
			lost[reason] = append(lost[reason], l)
		case isRenewed && l.over.Load() == nil:
			renewed = append(renewed, l)
		}
	})
	for reason, some := range lost {
		k.end(some, reason)
	}
	k.tell("renewed", renewed)
}

// keptNot is no loss, unless trying again cannot help: the deadlines tell.
func (k *keeper) keptNot(due Leases, smallest time.Duration, err error) {
	switch {
	case errors.Is(err, panicked):
		slog.Error("pgfence: what kept the leases has died", "panic", err)
		k.end(append(k.those(all), due...), ReasonKeeper)
	case isAnyOf(err, NotGranted, NotInstalled):
		k.end(due, ReasonRefused)
	default:
		k.change(due, func(of *Lease) { of.beatAt = now() + smallest/12 })
		if !k.isOut.Swap(true) {
			slog.Warn("pgfence: leases are not renewed, and it is tried again", "error", err)
		}
	}
}

// hasSession is false where a session lease has lost its connection.
func (k *keeper) hasSession(l *Lease) bool {
	return l.session < 0 || l.session == k.line.session.Load()
}

// pairs are their names and tokens, and the smallest of their ttls.
func pairs(leases Leases) (names []string, tokens []int64, smallest time.Duration) {
	names, tokens, smallest = []string{}, []int64{}, forever
	for _, l := range leases {
		smallest = min(smallest, l.ttl)
		for _, name := range l.names {
			names, tokens = append(names, name), append(tokens, l.token)
		}
	}
	return names, tokens, smallest
}

// release gives them back. It is no error where that fails: then they end at their ttl.
func (k *keeper) release(leases Leases) {
	defer k.use()()
	for some := range slices.Chunk(k.end(leases, ReasonReleased), mostGivenBack) {
		if !k.releaseAtOnce(some) {
			return
		}
	}
}

// releaseAtOnce is one transaction. It tells whether the server could be asked at all.
func (k *keeper) releaseAtOnce(leases Leases) (could bool) {
	names, tokens, smallest := pairs(leases)
	limit := k.limit(smallest)
	// So long it waits for the lock of somebody's open transaction.
	lock := strconv.FormatInt(max(10, limit.Milliseconds()/4), 10)
	for until, mayRepeat := now()+limit, true; ; {
		rows, _, err := k.line.ask(limit, k.call(`SELECT lease_release(x.name, x.token)
			FROM set_config('lock_timeout', $1, true), unnest($2::text[], $3::bigint[]) AS x(name, token)`, lock, names, tokens))
		state := stateOf(err)
		isLocked := state == "55P03" || state == "40001"
		switch {
		case isLocked && len(leases) > 1:
			for one := range slices.Chunk(leases, 1) {
				could = k.releaseAtOnce(one) || could
			}
			return could
		case mayRepeat && sessionEnded(err):
			// It may only have shown that the connection had ended.
			mayRepeat = false
		case isLocked && now() <= until:
			time.Sleep(limit / 4)
		case err != nil:
			k.warn("not released, and end at their ttl", leases, "error", err)
			return state != ""
		default:
			for _, l := range leases {
				isGone := slices.ContainsFunc(rows[:len(l.names)], func(row []any) bool { return row[0] == nil })
				if rows = rows[len(l.names):]; isGone {
					l.over.Store(lostBy(ReasonGone, l.names...))
					k.lose(l.leases, true)
				} else {
					k.tell("released", l.leases)
				}
			}
			return true
		}
	}
}

// endAll gives everything back, and ends the waits after their portions.
func (k *keeper) endAll() {
	k.close()
	k.release(k.those(all))
	users := 1
	for until := now() + longestPortion + lookingAgain; users > 0 && now() < until; time.Sleep(5 * time.Millisecond) {
		unlock := k.lock()
		users = k.users
		unlock()
	}
}

func (k *keeper) those(are func(*Lease) bool) (some Leases) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for l := range k.leases {
		if are(l) {
			some = append(some, l)
		}
	}
	return some
}

func all(*Lease) bool { return true }

// change is for their times.
func (k *keeper) change(leases Leases, do func(*Lease)) {
	defer k.lock()()
	for _, l := range leases {
		do(l)
	}
}

// end returns those that were not over before.
func (k *keeper) end(leases Leases, reason Reason) (ended Leases) {
	unlock := k.lock()
	for _, l := range leases {
		if l.over.CompareAndSwap(nil, lostBy(reason, l.names...)) {
			ended = append(ended, l)
		}
		delete(k.leases, l)
	}
	unlock()
	if len(ended) > 0 && reason != ReasonReleased {
		isOutage := k.isOut.Load() && reason == ReasonDeadline
		k.lose(ended, !isOutage || !k.hasTold.Swap(true))
	}
	return ended
}

func (k *keeper) lose(leases Leases, isNew bool) {
	if isNew {
		k.warn("lost", leases, "reason", leases[0].over.Load().Reason)
	}
	for _, l := range leases {
		l.lose(l.lost())
	}
	k.tell("lost", leases)
}

func (k *keeper) tell(kind string, leases Leases) {
	defer func() {
		if what := recover(); what != nil {
			slog.Error("pgfence: the function of OnEvent has panicked", "panic", what)
		}
	}()
	for _, l := range leases {
		event := Event{Kind: kind, Names: l.names, Token: l.token, Remaining: l.Remaining()}
		if kind == "lost" {
			event.Reason = l.over.Load().Reason
		}
		k.onEvent(event)
	}
}

func (k *keeper) warn(what string, leases Leases, key string, value any) {
	names, _, _ := pairs(leases[:min(5, len(leases))])
	slog.Warn("pgfence: leases are "+what, key, value, "count", len(leases), "names", names)
}

// limit is how long a call may take: a third of that ttl and of all that are kept.
func (k *keeper) limit(ttl time.Duration) time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	for l := range k.leases {
		ttl = min(ttl, l.ttl)
	}
	return min(ttl/3, longestCallTime)
}

// look tells losses at the deadlines, and renews what is due. A session lease ends with its connection.
func (k *keeper) look() {
	at, isDue, hasSession := now(), false, false
	k.end(k.those(func(l *Lease) bool {
		isDue, hasSession = isDue || l.dueAt() <= at, hasSession || l.session >= 0
		return l.deadline <= at
	}), ReasonDeadline)
	unlock := k.lock()
	beats := !k.isBeating && (isDue || hasSession)
	k.isBeating, k.lookAt = k.isBeating || beats, at+lookingAgain
	unlock()
	if beats {
		// Leases that are due soon go along.
		k.keep(k.those(func(l *Lease) bool { return isDue && l.dueAt() <= at+l.ttl/6 }))
		k.end(k.those(func(l *Lease) bool { return !k.hasSession(l) }), ReasonSession)
		defer k.lock()()
		k.isBeating = false
	}
}
