//! The picture on the first page agrees with today's demonstration.

use super::page;
use pg_test::demo_run::DemoRun;
use pg_test::timeline::{Timeline, picture};
use pg_test::{Context, Harness, Result, demo_scenarios, ensure, harness_test};
use std::time::Duration;

const PICTURE: &str = "docs/images/demonstration.svg";

#[harness_test]
fn the_picture_shows_the_demonstration(harness: &Harness) -> Result<()> {
    ensure!(page("README.md")?.contains(PICTURE), "the first page does not show it");
    let scenario = demo_scenarios::ALL.first().context("no scenario")?;
    let (db, timeline) = (harness.database()?, Timeline::silent());
    let mut run = DemoRun::new(harness, db.conninfo(), &timeline);
    // Other tests keep the machine busy.
    run.ttl = Duration::from_secs(3);
    let end = run.play(scenario)?;
    let drawn = picture::draw(scenario.title, &timeline.events(), &end);
    // Events before a restart on a slow machine are no part of the picture.
    ensure!(
        without_numbers(&page(PICTURE)?) == without_numbers(&drawn) || drawn.contains("too slow"),
        "draw it again: cargo run -- demo --svg {PICTURE}\n{drawn}"
    );
    Ok(())
}

/// Removes times, tokens and process ids, which differ in each run.
fn without_numbers(text: &str) -> String {
    let parts = text.split(|c: char| c.is_ascii_digit()).filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("#")
}
