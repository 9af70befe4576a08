//! The chaos run in its short form; and that it catches each known bug.

use pg_test::chaos::{self, Plant};
use pg_test::{ensure, lab_test, Lab, Result};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[lab_test]
fn half_a_minute_of_chaos_breaks_no_promise(lab: &Lab) -> Result<()> {
    let seed = std::process::id().into();
    let summary = chaos::rage(lab.prefix(), Duration::from_secs(30), seed, None)?;
    ensure!(summary.violations().is_empty(), "{summary}");
    ensure!(summary.void().is_none(), "void: {:?}\n{summary}", summary.void());
    Ok(())
}

#[lab_test(slow)]
fn a_token_drawn_before_the_lock_is_caught(lab: &Lab) -> Result<()> {
    is_caught(lab, Plant::TokenBeforeLock)
}

#[lab_test(slow)]
fn the_time_of_the_transactions_start_is_caught(lab: &Lab) -> Result<()> {
    is_caught(lab, Plant::Now)
}

#[lab_test(slow)]
fn a_server_that_starts_without_moving_on_is_caught(lab: &Lab) -> Result<()> {
    is_caught(lab, Plant::NoStartMove)
}

#[lab_test(slow)]
fn a_promotion_without_a_jump_is_caught(lab: &Lab) -> Result<()> {
    is_caught(lab, Plant::NoJump)
}

#[lab_test(slow)]
fn a_guard_without_a_lock_is_caught(lab: &Lab) -> Result<()> {
    is_caught(lab, Plant::NoGuardLock)
}

#[lab_test(slow)]
fn writes_past_row_triggers_are_caught(lab: &Lab) -> Result<()> {
    is_caught(lab, Plant::DirectWrites)
}

fn is_caught(lab: &Lab, plant: Plant) -> Result<()> {
    // One after another: they are built in the same place, and a run wants the machine for itself.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let prefix = chaos::planted(lab.rundir().program(), plant)?;
    let seed = std::process::id().into();
    chaos::catch(&prefix, plant, Duration::from_secs(180), seed).map(drop)
}
