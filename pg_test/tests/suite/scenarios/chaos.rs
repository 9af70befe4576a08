//! The short chaos run, and that it catches each known bug.

use clap::ValueEnum;
use pg_test::chaos::{self, KnownBug};
use pg_test::process::output_of;
use pg_test::source_tree::check_patch;
use pg_test::{Context, Harness, Result, ensure, harness_test};
use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[harness_test]
fn half_a_minute_of_chaos_breaks_no_promise(harness: &Harness) -> Result<()> {
    let seed = std::process::id().into();
    let summary =
        chaos::run_until_enough_happened(harness.install_dir(), Duration::from_secs(30), seed)?;
    summary.checked().with_context(|| summary.to_string())
}

/// A bug that can no longer be planted is found here, before the long runs that plant it.
#[harness_test]
fn the_patch_of_each_known_bug_fits_the_sources(_: &Harness) -> Result<()> {
    let mut expected: Vec<_> =
        KnownBug::value_variants().iter().filter_map(|bug| bug.patch()).collect();
    for patch in &expected {
        check_patch(patch)?;
    }
    let entries = fs::read_dir(chaos::patches())?;
    let mut there = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    expected.sort();
    there.sort();
    ensure!(there == expected, "{there:?}");
    Ok(())
}

cases![
    slow:
    a_token_drawn_before_the_lock_is_caught => is_caught(KnownBug::TokenBeforeLock),
    the_time_of_the_transactions_start_is_caught => is_caught(KnownBug::Now),
    a_server_that_starts_without_an_advance_is_caught => is_caught(KnownBug::NoStartAdvance),
    a_promotion_without_a_new_epoch_is_caught => is_caught(KnownBug::NoNewEpoch),
    a_remembered_epoch_that_is_not_checked_is_caught => is_caught(KnownBug::OldEpoch),
    a_remembered_place_that_is_not_checked_is_caught => is_caught(KnownBug::UncheckedPlace),
    a_guard_without_a_lock_is_caught => is_caught(KnownBug::NoGuardLock),
    reads_without_the_table_s_lock_are_caught => is_caught(KnownBug::NoTableLock),
    sessions_believed_to_live_for_ever_are_caught => is_caught(KnownBug::SessionOutlived),
    an_adoption_that_does_not_take_the_lease_alone_is_caught => is_caught(KnownBug::NoAdoptLock),
    a_row_s_version_taken_for_one_s_own_is_caught => is_caught(KnownBug::OwnIsEverybodys),
];

fn is_caught(harness: &Harness, bug: KnownBug) -> Result<()> {
    // The planted bugs are built in the same directory, and a run needs the machine for itself.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let install_dir = chaos::build_with(harness.rundir().program(), bug)?;
    let seed = std::process::id().into();
    chaos::catch(&install_dir, bug, Duration::from_secs(180), seed).map(drop)
}

/// Runs the command on the lite edition.
fn of_lite(harness: &Harness, arguments: &[&str]) -> Result<String> {
    let mut program = harness.rundir().command(harness.rundir().program());
    output_of(program.args(["chaos", "--edition", "lite"]).args(arguments))
}

#[harness_test(slow)]
fn the_lite_edition_breaks_no_promise_in_chaos(harness: &Harness) -> Result<()> {
    of_lite(harness, &["--short"]).map(drop)
}

#[harness_test(slow)]
fn bugs_in_the_lite_edition_are_caught(harness: &Harness) -> Result<()> {
    for bug in ["no-guard-lock", "decision-before-lock"] {
        let said = of_lite(harness, &["--minutes", "6", "--plant", bug])?;
        ensure!(said.contains("The planted bug was caught."), "{bug}: {said}");
    }
    Ok(())
}
