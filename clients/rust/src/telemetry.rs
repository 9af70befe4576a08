//! What is told to `tracing`, and by it to OpenTelemetry (feature `tracing`): spans of acquires and guards, and events
//! that `tracing-opentelemetry`'s MetricsLayer counts. Without the feature it is nothing.

use crate::error::{Error, LeaseLost};
use std::future::Future;

#[cfg(feature = "tracing")]
pub(crate) async fn acquire<T>(names: &[String], work: impl Future<Output = T>) -> T {
    use tracing::Instrument;
    work.instrument(tracing::info_span!("pg_fence.acquire", lease = names.join(", "))).await
}

#[cfg(feature = "tracing")]
pub(crate) async fn guard<T>(names: &[String], work: impl Future<Output = T>) -> T {
    use tracing::Instrument;
    work.instrument(tracing::info_span!("pg_fence.guard", lease = names.join(", "))).await
}

#[cfg(feature = "tracing")]
pub(crate) fn lost(loss: &LeaseLost) {
    let (lease, reason) = (loss.names().join(", "), loss.reason().as_str());
    tracing::warn!(monotonic_counter.pg_fence.lost = 1_u64, lease, reason);
}

#[cfg(feature = "tracing")]
pub(crate) fn refused(names: &[String], error: &Error) {
    if error.refusal().is_some() {
        let (lease, sqlstate) = (names.join(", "), error.sqlstate());
        tracing::warn!(monotonic_counter.pg_fence.refused = 1_u64, lease, sqlstate);
    }
}

#[cfg(not(feature = "tracing"))]
pub(crate) async fn acquire<T>(_: &[String], work: impl Future<Output = T>) -> T {
    work.await
}

#[cfg(not(feature = "tracing"))]
pub(crate) async fn guard<T>(_: &[String], work: impl Future<Output = T>) -> T {
    work.await
}

#[cfg(not(feature = "tracing"))]
pub(crate) fn lost(_: &LeaseLost) {}

#[cfg(not(feature = "tracing"))]
pub(crate) fn refused(_: &[String], _: &Error) {}
