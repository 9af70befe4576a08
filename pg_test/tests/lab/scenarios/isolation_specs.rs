//! Deterministic races: every isolation spec is a test.

use pg_test::{ensure, isolation, lab_test, Lab, Result};

/// One test a spec.
macro_rules! specs {
    ($($spec:ident),* $(,)?) => {
        const SPECS: &[&str] = &[$(stringify!($spec)),*];
        $(
            #[lab_test]
            fn $spec(lab: &Lab) -> Result<()> {
                play(lab, stringify!($spec))
            }
        )*
    };
}

specs![
    adopt_guard,
    adopt_guard_unprotected,
    adopt_race,
    all_crossing,
    bound_first_write,
    bound_first_write_unprotected,
    bound_insert,
    bound_late_commit,
    bound_late_commit_unprotected,
    bound_row_lock,
    bound_row_lock_unprotected,
    bound_unwritten_row,
    bound_unwritten_row_unprotected,
    closing_write,
    closing_write_unprotected,
    delete_insert,
    delete_insert_unprotected,
    first_name,
    grant_rollback,
    guard_expired,
    guard_expired_unprotected,
    guard_prepared,
    guard_savepoint,
    jump_guard,
    other_lease,
    other_lease_unprotected,
    partition_move,
    partition_move_unprotected,
    prepared_changes,
    release_acquire,
    release_renew,
    release_savepoint,
    renew_acquire,
    revoke_grant,
    row_race,
    row_race_unprotected,
    shared_exclusive,
    slots_exclusive,
];

/// Each in a database of its own, whose tokens therefore begin at 1.
fn play(lab: &Lab, spec: &str) -> Result<()> {
    let database = lab.bare_database()?;
    isolation::play(lab.rundir(), &database.conninfo(), spec)
}

#[lab_test]
fn every_spec_is_played(_: &Lab) -> Result<()> {
    let mut listed = SPECS.to_vec();
    listed.sort_unstable();
    ensure!(isolation::specs()? == listed, "specs: {:?}\nlisted: {listed:?}", isolation::specs()?);
    let expectations = isolation::expectations()?;
    ensure!(expectations == listed, "expected: {expectations:?}\nlisted: {listed:?}");
    Ok(())
}

/// A spec without protection says which one it belongs to, and that one exists.
#[lab_test]
fn every_spec_opens_with_what_it_rules_out(_: &Lab) -> Result<()> {
    for name in SPECS {
        let text = isolation::text_of(name)?;
        let twin = name.strip_suffix("_unprotected");
        let opening = if twin.is_some() { "# Shows: " } else { "# Rules out: " };
        ensure!(text.starts_with(opening), "{name} does not begin with {opening:?}");
        if let Some(twin) = twin {
            ensure!(SPECS.contains(&twin), "{name} has no protected twin");
        }
    }
    Ok(())
}
