//! What is told to `tracing`.

use super::*;
use ::tracing::field::{Field, Visit};
use ::tracing::span::{Attributes, Id, Record};
use ::tracing::{Event, Metadata, Subscriber};
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

/// Notes each span and each event, a line with its fields. All tests tell it.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<String>>>);

impl Seen {
    fn has(&self, line: &str) -> bool {
        self.0.lock().unwrap().iter().any(|one| one == line)
    }
}

/// Its name, and its fields.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.push_str(&format!(" {}={value:?}", field.name()));
    }
}

impl Subscriber for Seen {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("pg_fence_client")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut line = Line(span.metadata().name().to_owned());
        span.record(&mut line);
        self.0.lock().unwrap().push(line.0);
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn acquires_and_guards_are_spans_and_losses_and_refusals_are_counted() {
    let seen = Seen::default();
    ::tracing::subscriber::set_global_default(seen.clone()).unwrap();
    let shop = Shop::new("traced").await;
    let lease = shop.lease().await;
    let other = shop.fence.lease("traced:8").ttl(LONG).acquire().await.unwrap();
    assert!(seen.has(r#"pg_fence.acquire lease="traced:7""#));
    let mut client = client().await;
    let guarded = other.guard(&mut client).await.unwrap();
    assert!(seen.has(r#"pg_fence.guard lease="traced:8""#));
    let refused = r#" monotonic_counter.pg_fence.refused=1 lease="traced:8" sqlstate="PF004""#;
    assert!(!seen.has(refused));
    assert!(guarded.execute(&shop.set("late"), &[]).await.is_err());
    drop(guarded);
    assert!(seen.has(refused));
    let lost = r#" monotonic_counter.pg_fence.lost=1 lease="traced:7" reason="gone""#;
    assert!(!seen.has(lost));
    shop.revoke().await;
    assert!(lease.renew().await.is_err());
    assert!(seen.has(lost));
    other.release().await.unwrap();
}
