//! One lease database, many shards, in its short form; and that it notices what is missing.

use pg_test::chaos::shards::{self, Fault};
use pg_test::chaos::Shown;
use pg_test::{lab_test, Context, Lab, Result};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[lab_test(slow)]
fn half_a_minute_of_failures_lets_no_stale_write_land_on_any_shard(lab: &Lab) -> Result<()> {
    run(lab, None)
}

#[lab_test(slow)]
fn a_shard_without_a_fence_is_noticed(lab: &Lab) -> Result<()> {
    run(lab, Some(Fault::NoFence))
}

#[lab_test(slow)]
fn standbys_that_nobody_waits_for_are_noticed(lab: &Lab) -> Result<()> {
    run(lab, Some(Fault::AsyncStandby))
}

fn run(lab: &Lab, fault: Option<Fault>) -> Result<()> {
    // One after another: each has ten servers.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (time, seed) = (Duration::from_secs(30), std::process::id().into());
    let summary = shards::run_until_enough_happened(lab.prefix(), time, seed, fault)?;
    match fault {
        Some(_) => Ok(()),
        None => summary.judged().with_context(|| summary.to_string()),
    }
}
