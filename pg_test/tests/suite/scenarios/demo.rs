//! The demo scenarios, with real worker processes, and that they fail without the extension's protection.

use pg_test::demo_run::DemoRun;
use pg_test::demo_scenarios::{self, DemoScenario};
use pg_test::timeline::Timeline;
use pg_test::{Harness, Result, ensure};
use std::time::Duration;

cases![
    a_payout_is_made_once_though_its_worker_was_frozen => holds(&demo_scenarios::PAYOUT_BATCH, true),
    a_stale_worker_s_late_word_on_an_order_changes_nothing => holds(&demo_scenarios::ORDER_PAYMENT, true),
    a_frozen_merge_is_whole_or_not_there => holds(&demo_scenarios::DAILY_MERGE, false),
    without_its_fence_the_payout_story_does_not_hold => fails_unprotected(&demo_scenarios::PAYOUT_BATCH, "Carla was paid 600 of 300"),
    without_its_fence_the_order_story_does_not_hold => fails_unprotected(&demo_scenarios::ORDER_PAYMENT, "order 7 said paid, then failed"),
    without_its_guard_the_merge_story_does_not_hold => fails_unprotected(&demo_scenarios::DAILY_MERGE, "a mix of merges: A and B"),
];

/// Checks that the scenario's promise holds. If that took a refusal, the database must have counted it.
fn holds(harness: &Harness, scenario: &DemoScenario, refuses: bool) -> Result<()> {
    let db = harness.database()?;
    let timeline = Timeline::silent();
    let mut run = DemoRun::new(harness, db.conninfo(), &timeline);
    // The ttl is longer than in the demonstration, because other tests keep the machine busy.
    run.ttl = Duration::from_secs(3);
    run.play(scenario)?;
    let refused = run.counted()?;
    ensure!((refused > 0) == refuses, "{refused} refused writes");
    Ok(())
}

fn fails_unprotected(harness: &Harness, scenario: &DemoScenario, how: &str) -> Result<()> {
    let db = harness.database()?;
    let timeline = Timeline::silent();
    let mut run = DemoRun::new(harness, db.conninfo(), &timeline).without_protection();
    let outcome = run.play(scenario);
    let shown = format!("{outcome:?}");
    ensure!(outcome.is_err() && shown.contains(how), "{shown}");
    Ok(())
}
