package pgfence

import (
	"context"
	"math"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// lookAgain is after how long a wait looks at the clock again: Go's timers do not count the time that the machine
	// slept.
	lookAgain = time.Second
	// mostNames are renewed by one statement: each takes room in the server's lock table until its end.
	mostNames = 500
)

// kept are the leases of a Fence that are held, and what has to be done for them on the server. While there is anything,
// a keeper is at it.
type kept struct {
	fence *Fence

	mu     sync.Mutex
	leases map[*Lease]struct{}
	// jobs wait for the keeper; pending also counts the one that it is at.
	jobs    []*job
	pending int
	keeper  *keeper
}

// job is a call to the server that is no renewal.
type job struct {
	// do returns after how long it is to be tried again; 0 is never. Then told is called, once it counts as done.
	do func(k *keeper) (again time.Duration, told func())
	// notBefore is a time of now().
	notBefore time.Duration
}

// keeper is two goroutines: one does everything on the server, on one connection, and the other tells losses at the
// deadlines, so that it does not matter where the first one hangs.
type keeper struct {
	kept *kept
	own  connection
	// wake has the first one look again, and look the second.
	wake, look chan struct{}
	// calls is the context of what the connection does; it ends when nothing is left to be kept.
	calls context.Context
	stop  context.CancelFunc
	// over is closed by the one that ends last.
	over    chan struct{}
	running atomic.Int32
}

// begin makes a keeper where there is none. The caller has the lock.
func (s *kept) begin() *keeper {
	if s.keeper != nil {
		return s.keeper
	}
	k := &keeper{
		kept: s,
		own:  connection{config: &s.fence.config.Config},
		wake: make(chan struct{}, 1),
		look: make(chan struct{}, 1),
		over: make(chan struct{}),
	}
	k.calls, k.stop = context.WithCancel(context.Background())
	s.keeper = k
	k.running.Store(2)
	go k.goOn(k.run)
	go k.goOn(func() { s.fence.hooks.Watch(k.watch) })
	return k
}

// goOn is one of the two.
func (k *keeper) goOn(do func()) {
	do()
	if k.running.Add(-1) == 0 {
		close(k.over)
	}
}

// end has the keeper end where nothing is left. The caller has the lock.
func (s *kept) end() {
	if s.keeper != nil && len(s.leases) == 0 && s.pending == 0 {
		s.keeper.stop()
		s.keeper = nil
	}
}

// join has the lease be kept.
func (s *kept) join(l *Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases[l] = struct{}{}
	k := s.begin()
	signal(k.wake)
	signal(k.look)
}

// leave has the lease be kept no more. What it returns is closed when the keeper has ended, if this was the last lease.
func (s *kept) leave(l *Lease) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.keeper
	delete(s.leases, l)
	if s.end(); k != nil && s.keeper == nil {
		return k.over
	}
	over := make(chan struct{})
	close(over)
	return over
}

// enqueue has the keeper do something for a lease.
func (s *kept) enqueue(one *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.jobs = append(s.jobs, one)
	s.pending++
	signal(s.begin().wake)
}

// wake has the keeper look again what is due.
func (s *kept) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keeper != nil {
		signal(s.keeper.wake)
	}
}

func signal(channel chan struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// The deadlines

func (k *keeper) watch() {
	for {
		overdue, next := k.kept.overdue()
		for _, lease := range overdue {
			lease.lose(Deadline, nil)
		}
		timer := time.NewTimer(min(next-now(), lookAgain))
		select {
		case <-timer.C:
		case <-k.look:
		case <-k.calls.Done():
			timer.Stop()
			return
		}
		timer.Stop()
	}
}

// overdue are the leases whose deadline has come; next is the first deadline of the others.
func (s *kept) overdue() (overdue []*Lease, next time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next = math.MaxInt64
	for lease := range s.leases {
		if deadline := lease.endsAt(); deadline <= now() {
			overdue = append(overdue, lease)
		} else {
			next = min(next, deadline)
		}
	}
	return overdue, next
}

// The connection

func (k *keeper) run() {
	defer k.own.close()
	for k.calls.Err() == nil {
		due, next := k.kept.due(k)
		for _, batch := range batches(due) {
			k.renew(batch)
			for _, lease := range batch {
				lease.giveTurn()
			}
		}
		isBusy := len(due) > 0
		if one := k.kept.nextJob(k, &next); one != nil {
			again, told := one.do(k)
			k.kept.hasDone(one, again)
			if told != nil {
				told()
			}
			isBusy = true
		}
		if isBusy {
			continue
		}
		timer := time.NewTimer(min(next-now(), lookAgain))
		select {
		case <-timer.C:
		case <-k.wake:
		case <-k.calls.Done():
		}
		timer.Stop()
	}
}

// nextJob is the first whose time has come; until then it is what is next.
func (s *kept) nextJob(k *keeper, next *time.Duration) *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keeper != k {
		return nil
	}
	for index, one := range s.jobs {
		if one.notBefore <= now() {
			s.jobs = append(s.jobs[:index], s.jobs[index+1:]...)
			return one
		}
		*next = min(*next, one.notBefore)
	}
	return nil
}

// hasDone puts a job back that is to be tried again.
func (s *kept) hasDone(one *job, again time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if again > 0 {
		one.notBefore = now() + again
		s.jobs = append(s.jobs, one)
		return
	}
	s.pending--
	s.end()
}

// smallestTTL is that of all leases that are kept, and of one that may join them.
func (s *kept) smallestTTL(ttl time.Duration) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	for lease := range s.leases {
		ttl = min(ttl, lease.options.TTL)
	}
	return ttl
}

// due are the leases that are to be renewed now, whose turns are taken; next is when others will be. Where one is due,
// those that will be soon come with it, so that they beat together from then on.
func (s *kept) due(k *keeper) (due []*Lease, next time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	smallest := time.Duration(math.MaxInt64)
	next = smallest
	if s.keeper != k {
		// What has joined meanwhile has another one.
		return nil, next
	}
	for lease := range s.leases {
		smallest = min(smallest, lease.options.TTL)
		next = min(next, lease.beatsAt(0))
	}
	if next > now() {
		return nil, next
	}
	if s.fence.hooks.IsStarved() {
		return nil, now() + smallest/6
	}
	until := now() + smallest/6
	next = math.MaxInt64
	for lease := range s.leases {
		if at := lease.beatsAt(smallest / 6); at <= until && lease.triesTurn() {
			due = append(due, lease)
		} else {
			next = min(next, at)
		}
	}
	return due, next
}

// batches are what one statement renews each: the leases of one name together, in the order of the names, so that no two
// clients wait for each other; and by itself what is of several names, or stands apart.
func batches(due []*Lease) (batches [][]*Lease) {
	var together []*Lease
	for _, lease := range due {
		if len(lease.names) > 1 || lease.standsApart() {
			batches = append(batches, []*Lease{lease})
		} else {
			together = append(together, lease)
		}
	}
	sort.Slice(together, func(i, j int) bool { return together[i].names[0] < together[j].names[0] })
	for len(together) > 0 {
		size := min(len(together), mostNames)
		batches = append([][]*Lease{together[:size:size]}, batches...)
		together = together[size:]
	}
	return batches
}

// renew does so once for all of a batch, or twice where the first attempt only showed that the connection had ended unseen.
// Where the server refuses it because of one of them, it is divided, until that one stands alone.
func (k *keeper) renew(batch []*Lease) {
	for mayRepeat := k.own.isOpen(); ; mayRepeat = false {
		before := now()
		tokens, err := k.askToRenew(batch)
		if err == nil {
			for index, lease := range batch {
				lease.wasRenewed(before, tokens[index])
			}
			return
		}
		state, _ := sqlState(err)
		isOfOne := state != "" && k.own.isOpen()
		if isOfOne && len(batch) > 1 {
			k.renew(batch[:len(batch)/2])
			k.renew(batch[len(batch)/2:])
			return
		}
		if mayRepeat && k.hasEndedUnseen(err) {
			continue
		}
		for _, lease := range batch {
			lease.wasNotRenewed(err, isOfOne)
		}
		return
	}
}

// hasEndedUnseen tells that a call which failed so has only shown that its connection had ended: a new one may do at once.
func (k *keeper) hasEndedUnseen(err error) bool {
	return !k.own.isOpen() && !isPermanent(err) && !isOverdue(err)
}

func (k *keeper) askToRenew(batch []*Lease) ([]*int64, error) {
	names, tokens := make([]string, len(batch)), make([]int64, len(batch))
	for index, lease := range batch {
		names[index], tokens[index] = lease.names[0], lease.token
	}
	return k.kept.fence.hooks.Renew(func() ([]*int64, error) {
		if len(batch[0].names) > 1 {
			lease := batch[0]
			token, err := number(k.rows(lease.options.TTL, lease.onNames("lease_renew"), lease.name(), lease.token))
			return []*int64{token}, err
		}
		query := k.kept.fence.call("lease_renew(x.name, x.token) FROM unnest($1::text[], $2::bigint[]) AS x (name, token)")
		rows, err := k.rows(ttlOf(batch), query, names, tokens)
		answers := make([]*int64, len(rows))
		for index, row := range rows {
			if answers[index], err = whole(row[0]); err != nil {
				return nil, err
			}
		}
		return answers, err
	}, names, tokens)
}

func ttlOf(batch []*Lease) time.Duration {
	ttl := batch[0].options.TTL
	for _, lease := range batch {
		ttl = min(ttl, lease.options.TTL)
	}
	return ttl
}

// rows runs a statement for leases of that ttl. It may take no longer than any lease can stand.
func (k *keeper) rows(ttl time.Duration, sql string, args ...any) ([][][]byte, error) {
	within := bounds{limit: k.kept.smallestTTL(ttl) / 3, lock: max(ttl/240, 10*time.Millisecond)}
	return k.own.rows(k.calls, within, sql, args...)
}
