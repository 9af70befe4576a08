#!/bin/bash
# distributed-lock-postgres 0.2.0 (crates.io): lost_token() calls a lock lost that is held, and held one that is lost.
#
# Guess: its page has "Handle Loss Detection", and the example of lost_token() stops the work of select! when changed()
#   is done: at the end of the lock's session, and not before. Where a backend has none it is never done, says the page.
# Seen: the sender of that channel is dropped as the lock is granted. So changed() is done at once, with an error that
#   the example does not look at, and the work is stopped as it begins. The value is "not lost" for good, also after the
#   server has ended the session and another one has the lock; then release() is Ok as well.
. "$(dirname "$0")/lib.sh"
postgres
cargo_init <<'END'
distributed-lock-core = "=0.2.0"
distributed-lock-postgres = "=0.2.0"
tokio = { version = "1", features = ["full"] }
END
cat > src/main.rs <<'END'
use distributed_lock_core::traits::{DistributedLock, LockHandle, LockProvider};
use distributed_lock_postgres::PostgresLockProvider;
use std::{env, process::Command, time::Duration};
use tokio::time::sleep;

#[tokio::main]
async fn main() {
    let url = env::var("DATABASE_URL").unwrap();
    let ours = PostgresLockProvider::new(url.as_str()).await.unwrap().create_lock("report");
    let others = PostgresLockProvider::new(url.as_str()).await.unwrap().create_lock("report");

    let handle = ours.acquire(Some(Duration::from_secs(5))).await.unwrap();
    let mut lost = handle.lost_token().clone();
    tokio::select! {
        _ = lost.changed() => println!("as in the example: lost, so the work is stopped"),
        _ = sleep(Duration::from_secs(3)) => println!("as in the example: the work is done"),
    }
    println!("another one may have the lock: {}", others.try_acquire().await.unwrap().is_some());

    let end_sessions = "select pg_terminate_backend(pid, 5000) from pg_locks where locktype = 'advisory'";
    Command::new("psql").args(["-Xqc", end_sessions]).output().unwrap();
    println!("the server has ended the session of the lock");
    sleep(Duration::from_secs(3)).await;
    let next = others.try_acquire().await.unwrap();
    println!("another one may have the lock: {}", next.is_some());
    println!("lost, by the value: {}", *handle.lost_token().borrow());
    println!("release: {:?}", handle.release().await);
}
END
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=false
cargo build -q
timeout 60 cargo run -q > "$work/seen" 2>&1 || true
still <<'END'
as in the example: lost, so the work is stopped
another one may have the lock: false
the server has ended the session of the lock
another one may have the lock: true
lost, by the value: false
release: Ok(())
END
