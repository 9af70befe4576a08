//! A session that sleeps in the extension, as `pg_stat_activity` shows it.

use crate::support::concurrency::{waiting, WAIT};
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result};

/// The wait event of that name, where this PostgreSQL has names for those of extensions.
fn event(lab: &Lab, name: &str) -> (String, String) {
    let has_names = lab.prefix().major_number() >= 17;
    ("Extension".to_owned(), if has_names { name } else { "Extension" }.to_owned())
}

#[lab_test]
fn the_head_of_a_queue_shows_as_waiting_for_a_lease(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let token = holder.acquire("job", "1 h")?;
    let (mut head, mut second) = (waiting(&db, WAIT)?, waiting(&db, WAIT)?);
    // But for the moments in which it looks.
    wait_until("the head waits for a lease", PATIENCE, || {
        head.waits_for() == Some(event(lab, "PgFenceLease"))
    })?;
    let behind = Some(("Lock".to_owned(), "advisory".to_owned()));
    ensure!(second.waits_for() == behind, "{:?}", second.waits_for());
    // The next head has asked for the name in another session.
    holder.release("job", token)?;
    head.rows()?;
    wait_until("the second is the head", PATIENCE, || {
        second.waits_for() == Some(event(lab, "PgFenceLease"))
    })?;
    // A session that waits again has the name already.
    head.send(WAIT)?;
    head.wait_until_blocked()?;
    ensure!(head.waits_for() == behind, "{:?}", head.waits_for());
    second.terminate()?;
    wait_until("the first is the head again", PATIENCE, || {
        head.waits_for() == Some(event(lab, "PgFenceLease"))
    })
}

#[lab_test]
fn a_move_of_the_token_sequence_shows_as_waiting_for_the_clock(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut mover = Background::connect(&db.conninfo())?;
    // Each jump waits for the clock to reach the one before it, about a second.
    mover.send("DO $$ BEGIN FOR n IN 1..60 LOOP PERFORM fence_new_epoch(); END LOOP; END $$")?;
    wait_until("it waits for the clock", PATIENCE, || {
        mover.waits_for() == Some(event(lab, "PgFenceClock"))
    })?;
    mover.cancel()?;
    mover.refused("57014").map(drop)
}
