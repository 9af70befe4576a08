// Package pgfence keeps leases with fencing tokens of the PostgreSQL extension pg_fence.
//
// All leases of a [Fence] are kept by one heartbeat on one connection. [Guard] and [Present] run the transactions that
// write, of pgx 5 or of database/sql with any driver, and put the lease's token into them. A loss is told by the deadline at
// the latest, whatever hangs: the contexts of the lease and of its transactions end.
package pgfence

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"pgfence.example/pgfence/internal/hooks"
)

// Fence is where leases come from. It has a connection, and two goroutines, while leases of it are held, and none
// otherwise: there is nothing to be closed. Its methods may be called from any goroutine.
type Fence struct {
	config    *pgx.ConnConfig
	err       error
	schema    string
	hooks     hooks.Hooks
	telemetry Telemetry
	kept      *kept
}

// New takes a connection string, as a URL or in key=value form, and the environment (PGHOST…), as libpq does. What is
// wrong with it is told by the first lease.
func New(connString string) *Fence {
	config, err := pgx.ParseConfig(connString)
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

// NewConfig takes a configuration that pgx.ParseConfig has made: pool.Config().ConnConfig is that of a pool.
func NewConfig(config *pgx.ConnConfig) *Fence {
	return (&Fence{config: config.Copy(), hooks: hooks.None(), telemetry: silence{}}).fresh()
}

// fresh has it keep leases of its own.
func (f *Fence) fresh() *Fence {
	f.kept = &kept{fence: f, leases: map[*Lease]struct{}{}}
	return f
}

// isDriverSetting knows what pgxpool and lib/pq take from a connection string for themselves. The server would refuse it.
func isDriverSetting(name string) bool {
	switch name {
	case "binary_parameters", "disable_prepared_binary_result":
		return true
	}
	return strings.HasPrefix(name, "pool_")
}

// InSchema is another Fence, for an extension in a schema that is not in the search path.
func (f *Fence) InSchema(schema string) *Fence {
	there := *f
	there.schema = `"` + strings.ReplaceAll(schema, `"`, `""`) + `".`
	return there.fresh()
}

// WithTelemetry is another Fence, which tells what it does.
func (f *Fence) WithTelemetry(telemetry Telemetry) *Fence {
	telling := *f
	telling.telemetry = telemetry
	return telling.fresh()
}

// Hooked is for the laboratory that tests this client; the type of its argument cannot be named elsewhere.
func (f *Fence) Hooked(with hooks.Hooks) *Fence {
	hooked := *f
	hooked.hooks = with
	return hooked.fresh()
}

func (f *Fence) call(function string) string { return "SELECT " + f.schema + function }

// Options are how a lease is asked for.
type Options struct {
	// TTL is how long it is held without a renewal: 30 s unless it is given, and at least 100 ms.
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
	// HoldAtMost is after how long, counted from the acquire, it is renewed no more, so that a loop which is stuck does not
	// hold it for ever: it is then lost at its deadline.
	HoldAtMost time.Duration
	// HoldAtLeast is for how long, counted from the acquire, nobody else is to have it: a release before that leaves it to
	// end by itself. That is for schedulers whose clocks differ.
	HoldAtLeast time.Duration
	// OnLeader is told by Lead who leads, at first and at each change, in a goroutine of its own.
	OnLeader func(Leader)
	// OnLost is told of a loss, in a goroutine of its own.
	OnLost func(*Error)
	// Logf is told of losses and of renewals that failed; log.Printf will do.
	Logf func(format string, args ...any)

	metadata any
	// mayReclaim: the Holder is unique for this call.
	mayReclaim bool
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
		return o, fmt.Errorf("pgfence: a TTL of %v is too short: it is at least %v; is it a number without its unit?", o.TTL, shortestTTL)
	case o.HoldAtMost < 0 || o.HoldAtLeast < 0:
		return o, errors.New("pgfence: HoldAtMost and HoldAtLeast are no times before the acquire")
	case o.Reclaim && o.Holder == "":
		return o, errors.New("pgfence: only a Holder of your own can be reclaimed")
	case len(names) > 1 && (o.Shared || o.Slots != 1 || o.Reclaim):
		return o, errors.New("pgfence: several names at once are exclusive: no Shared, Slots or Reclaim")
	}
	if err := checkWait(o.Wait); err != nil {
		return o, err
	}
	if o.Holder == "" {
		o.Holder = uniqueHolder()
		// An answer that was lost may have been our own grant.
		o.mayReclaim = len(names) == 1
	}
	var err error
	o.metadata, err = asJSON(o.Metadata)
	return o, err
}

func checkWait(wait time.Duration) error {
	if wait < 0 || wait > 0 && wait < shortestWait {
		return fmt.Errorf("pgfence: a Wait of %v is too short; is it a number without its unit?", wait)
	}
	return nil
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
