#!/bin/bash
# sqlxmq 0.6.0 (crates.io, job queue in PostgreSQL): an ordered job that has used up its tries stops its channel for ever.
#
# Guess: jobs of a channel that are ordered run one after the other. One that fails is tried again, and when its tries
#   are used up it is given up, and the next one's turn has come. Or the channel stands still, and somebody is told.
# Seen: the job stays in the table without a next try, and those behind it wait for it to go. No error, no state, no
#   hook: the runner, and each later one, finds nothing to do. Jobs that are not ordered pass by.
. "$(dirname "$0")/lib.sh"
postgres
cargo_init <<'END'
sqlx = { version = "=0.8.6", default-features = false, features = ["postgres", "runtime-tokio", "migrate"] }
sqlxmq = { version = "=0.6.0", default-features = false }
tokio = { version = "1", features = ["full"] }
END
cat > src/main.rs <<'END'
use sqlxmq::{job, CurrentJob, JobRegistry};
use std::{env, error::Error, path::Path, time::Duration};
use tokio::time::sleep;

#[job]
async fn work(mut job: CurrentJob) -> Result<(), Box<dyn Error + Send + Sync>> {
    let name: String = job.json()?.unwrap();
    println!("{name} runs");
    if name == "one" {
        return Err("a fault in the data of one".into());
    }
    job.complete().await?;
    Ok(())
}

#[tokio::main]
async fn main() {
    let pool = sqlx::PgPool::connect(&env::var("DATABASE_URL").unwrap()).await.unwrap();
    let migrations = Path::new(&env::args().nth(1).unwrap()).join("migrations");
    sqlx::migrate::Migrator::new(migrations).await.unwrap().run(&pool).await.unwrap();
    for (name, ordered, delay) in [("one", true, 0), ("two", true, 0), ("three", false, 5)] {
        let mut builder = work.builder();
        builder.set_channel_name("orders").set_ordered(ordered).set_retries(1);
        builder.set_retry_backoff(Duration::from_secs(1)).set_delay(Duration::from_secs(delay));
        builder.set_json(name).unwrap().spawn(&pool).await.unwrap();
    }
    for runner in ["the runner", "a second runner"] {
        println!("{runner}");
        let running = JobRegistry::new(&[work]).runner(&pool).run().await.unwrap();
        sleep(Duration::from_secs(10)).await;
        drop(running);
    }
    let left: Vec<(String, bool)> = sqlx::query_as(
        "select payload_json #>> '{}', attempt_at is null from mq_payloads join mq_msgs using (id) order by created_at, 1")
        .fetch_all(&pool).await.unwrap();
    println!("left in the table, is there no next try: {left:?}");
}
END
timeout -k 5 500 cargo build -q
source=$(dirname "$(find "${CARGO_HOME:-$HOME/.cargo}/registry/src" -path '*/sqlxmq-0.6.0/Cargo.toml')")
timeout -k 5 120 "${CARGO_TARGET_DIR:-target}/debug/finding" "$source" > "$work/seen" 2>&1 || true
still <<'END'
the runner
one runs
one runs
three runs
a second runner
left in the table, is there no next try: [("one", true), ("two", false)]
END
