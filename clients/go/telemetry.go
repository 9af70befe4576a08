package pgfence

import (
	"context"
	"errors"
)

// Telemetry is told what is done, for traces and metrics. The README shows one for OpenTelemetry. Its methods may be called
// from any goroutine, and must not wait for anything.
type Telemetry interface {
	// Start begins a span, "pg_fence.acquire" or "pg_fence.guard", about these leases. What it returns is called at its end,
	// with an error or nil.
	Start(ctx context.Context, span string, leases []string) (context.Context, func(error))
	// Lost counts a lease that was lost.
	Lost(reason Reason)
	// Refused counts what the server refused: a write, a guard, an adoption.
	Refused(kind Kind)
}

// silence tells nobody.
type silence struct{}

func (silence) Start(ctx context.Context, _ string, _ []string) (context.Context, func(error)) {
	return ctx, func(error) {}
}

func (silence) Lost(Reason) {}

func (silence) Refused(Kind) {}

// countRefused tells of an error of the server's.
func countRefused(telemetry Telemetry, err error) {
	var told *Error
	if errors.As(err, &told) {
		if _, isRefusal := kinds[told.SQLState]; isRefusal {
			telemetry.Refused(told.Kind)
		}
	}
}
