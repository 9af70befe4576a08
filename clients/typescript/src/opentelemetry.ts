/**
 * Spans and counters of OpenTelemetry: `new Fence(pool, { hooks: openTelemetry() })`.
 *
 * Spans: `pg_fence.acquire`, `pg_fence.guard`, `pg_fence.present`, with the lease in `pg_fence.lease`. Counters:
 * `pg_fence.leases.lost` by `reason`, `pg_fence.writes.refused` by `sqlstate`.
 *
 * @module
 */
import { metrics, SpanStatusCode, trace, type MeterProvider, type TracerProvider } from "@opentelemetry/api";

import type { Hooks } from "./hooks.js";

/** Whose; by default the global ones. */
export interface Providers {
  readonly tracerProvider?: TracerProvider | undefined;
  readonly meterProvider?: MeterProvider | undefined;
}

const NAME = "pg_fence";

/** Hooks of a `Fence` that tell OpenTelemetry. */
export function openTelemetry({ tracerProvider, meterProvider }: Providers = {}): Hooks {
  const tracer = (tracerProvider ?? trace).getTracer(NAME);
  const meter = (meterProvider ?? metrics).getMeter(NAME);
  const lost = meter.createCounter("pg_fence.leases.lost", { description: "Leases that were lost" });
  const refused = meter.createCounter("pg_fence.writes.refused", { description: "Writes and guards that were refused" });
  return {
    span: (name, attributes, work) =>
      tracer.startActiveSpan(name, { attributes }, async (span) => {
        try {
          return await work();
        } catch (error) {
          span.recordException(error as Error);
          span.setStatus({ code: SpanStatusCode.ERROR, message: String(error) });
          throw error;
        } finally {
          span.end();
        }
      }),
    lost: ({ reason }) => lost.add(1, { reason }),
    refused: ({ sqlstate = "" }) => refused.add(1, { sqlstate }),
  };
}
