//! Shared grants: crowds of readers and writers. The rest is in shared.script.

use crate::support::concurrency::{at_once, sessions, tokens};
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};
use std::collections::HashSet;

const SHARE: &str = "SELECT lease_acquire('job', ttl => '1 h', shared => true)";

/// How many grants of `job` live.
fn live(session: &mut Session) -> Result<i64> {
    session.granted("SELECT count(*) FROM lease_info('job') WHERE state = 'held'")
}

#[lab_test]
fn all_readers_of_one_instant_are_granted(lab: &Lab) -> Result<()> {
    const READERS: usize = 20;
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let mut holders = sessions(&db, READERS)?;
    let mut all = HashSet::new();
    for round in 0..12 {
        // Upon a name never used, upon places left by the last round, and beside grants that live.
        let got = tokens(at_once(&mut holders, |_| SHARE.to_owned()))?;
        let won: Vec<i64> = got.iter().copied().flatten().collect();
        ensure!(won.len() == READERS, "round {round}: {} of {READERS} granted", won.len());
        ensure!(
            won.iter().all(|token| all.insert(*token)),
            "round {round}: a token twice: {won:?}"
        );
        for &token in won.iter().skip(round % 3) {
            ensure!(admin.speaks("job", token)?, "round {round}: {token} does not speak");
        }
        if round % 2 == 0 {
            admin.granted("SELECT lease_revoke('job')")?;
        } else {
            let released = tokens(at_once(&mut holders, |i| {
                format!("SELECT lease_release('job', {})", won[i])
            }))?;
            ensure!(released.iter().all(Option::is_some), "round {round}: {released:?}");
        }
        ensure!(live(&mut admin)? == 0, "round {round}");
    }
    Ok(())
}

#[lab_test]
fn slots_of_readers_are_used_again(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holders = sessions(&db, 8)?;
    for _ in 0..10 {
        let got = tokens(at_once(&mut holders, |_| SHARE.to_owned()))?;
        let got: Vec<i64> = got.into_iter().flatten().collect();
        ensure!(got.len() == 8);
        at_once(&mut holders, |i| format!("SELECT lease_release('job', {})", got[i]));
        let token = holders[0].acquire("job", "1 h")?;
        holders[0].release("job", token)?.expect("held");
    }
    let rows = holders[0].granted("SELECT count(*) FROM lease_info('job')")?;
    ensure!(rows <= 8, "{rows} rows for eight at most");
    // One row a grant: each place shows the mode of its last.
    let token = holders[0].granted(SHARE)?;
    let row = holders[0].rows("SELECT mode, token FROM lease_info('job') WHERE state = 'held'")?;
    ensure!(row == [[Some("shared".to_owned()), Some(token.to_string())]], "{row:?}");
    Ok(())
}
