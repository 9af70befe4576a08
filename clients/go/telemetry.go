package pgfence

import (
	"context"
	"errors"
)

// Telemetry is told what is done, for traces and metrics. Its methods may be called from any goroutine, and must not wait
// for anything. For OpenTelemetry it is this:
//
//	type otelTelemetry struct {
//		tracer        trace.Tracer
//		lost, refused metric.Int64Counter
//	}
//
//	func (o otelTelemetry) Start(ctx context.Context, span string, leases []string) (context.Context, func(error)) {
//		ctx, s := o.tracer.Start(ctx, span, trace.WithAttributes(attribute.StringSlice("pg_fence.leases", leases)))
//		return ctx, func(err error) {
//			s.RecordError(err)
//			s.End()
//		}
//	}
//
//	func (o otelTelemetry) Lost(reason pgfence.Reason) {
//		o.lost.Add(context.Background(), 1, metric.WithAttributes(attribute.String("reason", string(reason))))
//	}
//
//	func (o otelTelemetry) Refused(kind pgfence.Kind) {
//		o.refused.Add(context.Background(), 1, metric.WithAttributes(attribute.String("kind", string(kind))))
//	}
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
