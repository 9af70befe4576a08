package pgfence

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Holding is a lease that somebody holds, under a token that its transactions present: a [*Lease], an [*Adopted] one, or
// several [Leases].
type Holding interface {
	// Token is what its transactions present. It serves for as long as the lease is held.
	Token() int64
	// Names are those that it is a lease of.
	Names() []string
	// Release gives it back, and returns an error of the kind ErrLeaseLost where it was lost before.
	Release() error

	// each is what it consists of.
	each() []holder
}

// holder is a lease, or an adopted one, to the transactions under it.
type holder interface {
	// common is what all of them have.
	common() *holding
	// refuseIfOver returns an error of the kind ErrLeaseLost when it is known to be ours no more.
	refuseIfOver() error
	// guarding is the statement that a transaction guards it by, with its arguments.
	guarding() (query string, args []any)
	// releasing is the statement that gives it back, with its arguments; NULL is that it was lost.
	releasing() (query string, args []any)
	// isInDoubt tells whether a transaction was refused, so that the next one mends before it begins.
	isInDoubt() bool
	// canMend tells whether mend may help where a transaction could not begin because of that.
	canMend(err error) bool
	// mend makes the token speak again, as after a failover.
	mend(ctx context.Context) error
	// beatSoon is called where the server refused a write: to be found out whether the lease is lost.
	beatSoon()
	// takeTurn keeps the heartbeat from renewing, if there is one, until giveTurn.
	takeTurn(ctx context.Context) error
	giveTurn()
	// lost is the loss, to be told with what has shown it; nil while the lease is held.
	lost(cause error) *Error
	lose(reason Reason, cause error)
	// hasBeenReleased by a transaction of its holder's. The caller has the turn.
	hasBeenReleased()
}

// holding is what a lease and an adopted one have in common.
type holding struct {
	fence *Fence
	names []string
	token int64
	loss  atomic.Pointer[Error]
	// limit is how long a call may take.
	limit time.Duration
	logTo func(format string, args ...any)

	mu sync.Mutex
	// atLoss is what a loss has to interrupt.
	atLoss map[*interruption]struct{}
}

// interruption is what a loss calls. It must not wait for anything.
type interruption struct{ do func() }

// Token is what its transactions present. It serves for as long as the lease is held.
func (h *holding) Token() int64 { return h.token }

// Names are those that it is a lease of.
func (h *holding) Names() []string { return append([]string(nil), h.names...) }

func (h *holding) common() *holding { return h }

func (h *holding) isInDoubt() bool { return false }

func (h *holding) guarding() (string, []any) {
	return h.onNames("lease_guard"), []any{h.name(), h.token}
}

func (h *holding) releasing() (string, []any) {
	return h.onNames("lease_release"), []any{h.name(), h.token}
}

// presenting is the statement that a transaction presents the token by.
func (h *holding) presenting() (string, []any) {
	// As text: there is no set_config that takes a number.
	return "SELECT set_config('pg_fence.token', $1, true)", []any{strconv.FormatInt(h.token, 10)}
}

// interrupts has a loss call do, until forget is called. It tells whether the lease was lost already.
func (h *holding) interrupts(do func()) (forget func(), isLost bool) {
	one := &interruption{do}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.atLoss[one] = struct{}{}
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.atLoss, one)
	}, h.loss.Load() != nil
}

// interrupt calls all of that. The caller has the lock, so that nothing is interrupted that ends meanwhile: a pool may
// have given its connection away.
func (h *holding) interrupt() {
	for one := range h.atLoss {
		one.do()
	}
}

// onNames calls a function, or its sibling for several names, with name(), the token and more.
func (h *holding) onNames(function string, more ...string) string {
	args := "($1::text::"
	if len(h.names) > 1 {
		function += "_all"
		args += "text[]"
	} else {
		args += "text"
	}
	return h.fence.call(function + strings.Join(append([]string{args, "$2::bigint"}, more...), ", ") + ")")
}

// name is the argument that says which: an array as text, for drivers disagree on how one is to be given.
func (h *holding) name() string {
	if len(h.names) > 1 {
		return arrayOf(h.names)
	}
	return h.names[0]
}

func (h *holding) logf(format string, args ...any) {
	if h.logTo != nil {
		h.logTo("pgfence: "+format, args...)
	}
}
