//! What is told to `tracing`.

use super::*;
use ::tracing::field::{Field, Visit};
use ::tracing::span::{Attributes, Id, Record};
use ::tracing::{Event, Metadata, Subscriber};
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

/// Notes the names of spans, and the fields of events.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<String>>>);

impl Seen {
    fn has(&self, what: &str) -> bool {
        self.0.lock().unwrap().iter().any(|one| one == what)
    }
}

impl Subscriber for Seen {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("pg_fence_client")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.0.lock().unwrap().push(span.metadata().name().to_owned());
        span.record(&mut self.clone());
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.lock().unwrap().push(format!("{}={value:?}", field.name()));
    }
}

#[tokio::test]
async fn acquires_and_guards_are_spans_and_losses_and_refusals_are_counted() {
    let seen = Seen::default();
    let _told = ::tracing::subscriber::set_default(seen.clone());
    let shop = Shop::new("traced").await;
    let lease = shop.lease().await;
    let other = shop.fence.lease("traced:8").ttl(LONG).acquire().await.unwrap();
    assert!(seen.has("pg_fence.acquire") && seen.has("lease=\"traced:7\""));
    let mut client = client().await;
    let guarded = other.guard(&mut client).await.unwrap();
    assert!(guarded.execute(&shop.set("late"), &[]).await.is_err());
    drop(guarded);
    assert!(seen.has("pg_fence.guard") && seen.has("sqlstate=\"PF004\""));
    assert!(seen.has("monotonic_counter.pg_fence.refused=1"));
    assert!(!seen.has("monotonic_counter.pg_fence.lost=1"));
    shop.revoke().await;
    assert!(lease.renew().await.is_err());
    assert!(seen.has("monotonic_counter.pg_fence.lost=1") && seen.has("reason=\"gone\""));
    other.release().await.unwrap();
}
