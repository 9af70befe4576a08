//! Many that claim from one list at the same moment. The rest is in acquire_any.script.

use crate::support::concurrency::{at_once, rounds, sessions};
use pg_test::{ensure, lab_test, Lab, Result};
use rand::seq::SliceRandom;
use rand::RngExt;

/// Sessions that each want one of the names, all at the same moment; of those that get one some roll back.
#[lab_test]
fn everybody_gets_one_where_there_are_enough(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut sessions = sessions(&db, 64)?;
    let mut random = rand::rng();
    for round in 0..rounds(12) {
        let free: usize = match round % 4 {
            0 => random.random_range(1..=64),
            1 => 64,
            2 => random.random_range(64..=200),
            _ => 1_000,
        };
        let callers = random.random_range(1..=free.min(64));
        let statements: Vec<String> = (0..callers)
            .map(|_| {
                let mut names: Vec<String> = (0..free).map(|n| format!("r{round}-{n}")).collect();
                // Mostly all read the same list.
                if random.random_bool(0.3) {
                    names.shuffle(&mut random);
                }
                let end = if random.random_bool(0.3) { "ROLLBACK" } else { "COMMIT" };
                format!(
                    "BEGIN; SELECT name || ' ' || token FROM lease_acquire_any('{{{}}}', ttl => '1 h'); {end}",
                    names.join(",")
                )
            })
            .collect();
        let outcomes = at_once(&mut sessions[..callers], |n| statements[n].clone());
        let mut kept = Vec::new();
        for (outcome, statement) in outcomes.into_iter().zip(&statements) {
            let rows = outcome?;
            ensure!(
                rows.len() == 1,
                "{callers} wanted one of {free}, and one of them got {rows:?}"
            );
            if statement.ends_with("COMMIT") {
                kept.extend(rows[0][0].clone());
            }
        }
        kept.sort_unstable();
        let held = format!(
            "SELECT name || ' ' || token FROM fence.leases WHERE name LIKE 'r{round}-%' AND state = 'held'"
        );
        let mut held: Vec<_> =
            sessions[0].rows(&held)?.into_iter().filter_map(|mut r| r.remove(0)).collect();
        held.sort_unstable();
        ensure!(held == kept, "{held:?} are held, not {kept:?}");
    }
    Ok(())
}
