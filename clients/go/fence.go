// Package pgfence keeps leases with fencing tokens of the PostgreSQL extension pg_fence.
//
// A lease is kept by a heartbeat on a connection of its own. [Guard] and [Present] run the transactions that write, of
// pgx (any version) or database/sql (any driver), and put the lease's token into them. A loss is told by the deadline at
// the latest, whatever hangs: the contexts of the lease and of its transactions end.
package pgfence

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgconn"

	"pgfence/internal/hooks"
)

// Fence is where leases come from. It holds no connection itself; each lease has one while it is held.
type Fence struct {
	config *pgconn.Config
	err    error
	schema string
	hooks  hooks.Hooks
}

// New takes a connection string, as a URL or in key=value form, and the environment (PGHOST…), as libpq does. What is
// wrong with it is told by the first lease.
func New(connString string) *Fence {
	config, err := pgconn.ParseConfig(connString)
	if err != nil {
		return &Fence{err: err}
	}
	for name := range config.RuntimeParams {
		if isDriverSetting(name) {
			delete(config.RuntimeParams, name)
		}
	}
	return NewConfig(config)
}

// NewConfig takes a configuration that pgconn.ParseConfig has made.
func NewConfig(config *pgconn.Config) *Fence {
	return &Fence{config: config.Copy(), hooks: hooks.None()}
}

// isDriverSetting knows what pgx and lib/pq take from a connection string for themselves. The server would refuse it.
func isDriverSetting(name string) bool {
	switch name {
	case "statement_cache_mode", "statement_cache_capacity", "description_cache_capacity", "prefer_simple_protocol",
		"default_query_exec_mode", "binary_parameters", "disable_prepared_binary_result":
		return true
	}
	return strings.HasPrefix(name, "pool_")
}

// InSchema is the same, for an extension in a schema that is not in the search path.
func (f *Fence) InSchema(schema string) *Fence {
	there := *f
	there.schema = `"` + strings.ReplaceAll(schema, `"`, `""`) + `".`
	return &there
}

// Hooked is for the laboratory that tests this client; the type of its argument cannot be named elsewhere.
func (f *Fence) Hooked(with hooks.Hooks) *Fence {
	hooked := *f
	hooked.hooks = with
	return &hooked
}

func (f *Fence) call(function string) string { return "SELECT " + f.schema + function }

// Options are how a lease is asked for.
type Options struct {
	// TTL is how long it is held without a renewal: 30 s unless it is given.
	TTL time.Duration
	// Wait is how long to wait in line for it.
	Wait time.Duration
	// Holder is shown in the view of all leases; unless it is given, it is unique for each lease.
	Holder string
	// Metadata is shown there, too, as JSON.
	Metadata any
	// Shared: others may have it shared at the same time.
	Shared bool
	// Slots is how many may have it at the same time; 0 is 1.
	Slots int
	// Session: it ends with its session, too. Not through a pooler.
	Session bool
	// Reclaim: where that Holder has it already, it gets a new grant at once.
	Reclaim bool
	// OnLost is told of a loss, in a goroutine of its own.
	OnLost func(*Error)
	// Logf is told of losses and of renewals that failed; log.Printf will do.
	Logf func(format string, args ...any)

	metadata any
}

// A number without a unit is a Duration in nanoseconds to Go. Nobody means so short a ttl or wait.
const (
	shortestTTL  = 100 * time.Millisecond
	shortestWait = time.Millisecond
)

func (o Options) complete(names []string) (Options, error) {
	if o.TTL == 0 {
		o.TTL = 30 * time.Second
	}
	if o.Slots == 0 {
		o.Slots = 1
	}
	switch {
	case len(names) == 0:
		return o, errors.New("pgfence: a lease needs a name")
	case o.TTL < shortestTTL:
		return o, fmt.Errorf("pgfence: a ttl of %v is too short; is it a number without its unit?", o.TTL)
	case o.Wait < 0 || o.Wait > 0 && o.Wait < shortestWait:
		return o, fmt.Errorf("pgfence: a wait of %v is too short; is it a number without its unit?", o.Wait)
	case o.Reclaim && o.Holder == "":
		return o, errors.New("pgfence: only a holder of your own can be reclaimed")
	case len(names) > 1 && (o.Shared || o.Slots != 1 || o.Reclaim):
		return o, errors.New("pgfence: several names at once are exclusive: no Shared, Slots or Reclaim")
	}
	if o.Holder == "" {
		o.Holder = uniqueHolder()
	}
	var err error
	o.metadata, err = asJSON(o.Metadata)
	return o, err
}

// asJSON is a text, or nil for nothing.
func asJSON(metadata any) (any, error) {
	if metadata == nil {
		return nil, nil
	}
	text, err := json.Marshal(metadata)
	if err != nil {
		return nil, fmt.Errorf("pgfence: metadata: %w", err)
	}
	return string(text), nil
}

func uniqueHolder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "go"
	}
	random := make([]byte, 4)
	_, _ = rand.Read(random)
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), hex.EncodeToString(random))
}

// Acquire takes the lease, or returns an error of the kind ErrLeaseTaken. Whoever has it calls Release in the end. The
// context ends a wait in line, and later the lease's Context; the lease itself ends by Release alone.
func (f *Fence) Acquire(ctx context.Context, name string, options Options) (*Lease, error) {
	return f.AcquireAll(ctx, []string{name}, options)
}

// AcquireAll takes several at once, all or none.
func (f *Fence) AcquireAll(ctx context.Context, names []string, options Options) (*Lease, error) {
	if f.err != nil {
		return nil, f.err
	}
	options, err := options.complete(names)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	lease := f.newLease(ctx, append([]string(nil), names...), options)
	answer := make(chan error, 1)
	go func() { answer <- lease.take() }()
	select {
	case err := <-answer:
		if err != nil {
			lease.startQuitting()
			lease.end()
			return nil, err
		}
		lease.start()
		return lease, nil
	case <-ctx.Done():
		go lease.giveUp(answer)
		return nil, ctx.Err()
	}
}

// Hold does work under the lease, and releases it. It returns the error of the work; where that has none, an error of
// the kind ErrLeaseLost if the lease was lost. The context of the work is the lease's.
func (f *Fence) Hold(
	ctx context.Context, name string, options Options, work func(context.Context, *Lease) error,
) error {
	lease, err := f.Acquire(ctx, name, options)
	if err != nil {
		return err
	}
	return lease.during(work)
}

func (l *Lease) during(work func(context.Context, *Lease) error) error {
	// Also where the work panics.
	defer func() { _ = l.Release() }()
	if err := work(l.Context(), l); err != nil {
		return err
	}
	return l.Release()
}

// Lead does work while leading, and again after each loss. It ends when the work returns nil or an error that is no
// loss, when the server refuses for good, or with the context. Options need no Holder, Wait or Reclaim.
func (f *Fence) Lead(
	ctx context.Context, name string, options Options, work func(context.Context, *Lease) error,
) error {
	if options.TTL == 0 {
		options.TTL = 30 * time.Second
	}
	// Whoever never saw the answer to an acquire takes the grant over by its own unique name.
	options.Holder, options.Reclaim = uniqueHolder(), true
	options.Wait = portionOf(options.TTL)
	if _, err := options.complete([]string{name}); err != nil {
		return err
	}
	for {
		lease, err := f.Acquire(ctx, name, options)
		if err == nil {
			err = lease.during(work)
			if !errors.Is(err, ErrLeaseLost) && lease.loss.Load() == nil && !isStale(err) {
				return err
			}
		} else if f.err != nil || isPermanent(err) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !errors.Is(err, ErrLeaseTaken) {
			pause(ctx, options.TTL/12)
		}
	}
}

// portionOf is how long leading waits in line at a time.
func portionOf(ttl time.Duration) time.Duration {
	switch third := ttl / 3; {
	case third < time.Second:
		return time.Second
	case third > 10*time.Second:
		return 10 * time.Second
	default:
		return third
	}
}

func isStale(err error) bool {
	told := Classify(err)
	return told != nil && (told.Kind == ErrStaleToken || told.Kind == ErrNotSpeaking)
}

func pause(ctx context.Context, span time.Duration) {
	timer := time.NewTimer(span)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
