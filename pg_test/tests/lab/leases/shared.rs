//! Shared grants: crowds of readers and writers. The rest is in shared.script.

use crate::support::concurrency::{
    at_once, gets_nothing, sessions, still_wait, token_of, tokens, waiting, with_time_enough, WAIT,
};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result, Session};
use std::collections::HashSet;

const SHARE: &str = "SELECT lease_acquire('job', ttl => '1 h', shared => true)";
const WAIT_SHARED: &str =
    "SELECT lease_acquire('job', ttl => '1 h', wait => '10 min', shared => true)";

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
fn a_writer_that_gives_up_leaves_the_way_open(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut one = db.connect()?;
    one.granted(SHARE)?;
    with_time_enough(|seconds| {
        let mut hasty = Background::connect(&db.conninfo())?;
        let mut reader = Background::connect(&db.conninfo())?;
        hasty.send(&format!("SELECT lease_acquire('job', wait => '{seconds} s')"))?;
        hasty.blocks_or_ends()?;
        reader.send(WAIT_SHARED)?;
        let stood_behind = reader.blocks_or_ends()?;
        gets_nothing(&mut hasty)?;
        let token = token_of(&mut reader)?;
        ensure!(live(&mut one)? == 2);
        one.release("job", token)?.expect("held");
        Ok(stood_behind.then_some(()))
    })
}

#[lab_test]
fn waiting_readers_are_granted_together_when_their_turn_comes(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let token = holder.acquire("job", "1 h")?;
    let mut readers = (0..6).map(|_| waiting(&db, WAIT_SHARED)).collect::<Result<Vec<_>>>()?;
    let mut writer = waiting(&db, WAIT)?;
    let mut late = waiting(&db, WAIT_SHARED)?;
    holder.release("job", token)?.expect("held");
    let granted = readers.iter_mut().map(token_of).collect::<Result<Vec<i64>>>()?;
    ensure!(granted.is_sorted(), "not in the order they came: {granted:?}");
    ensure!(live(&mut holder)? == 6, "{} live together", live(&mut holder)?);
    still_wait([&mut writer, &mut late])?;
    for token in granted {
        still_wait([&mut writer, &mut late])?;
        holder.release("job", token)?.expect("held");
    }
    let token = token_of(&mut writer)?;
    still_wait([&mut late])?;
    holder.release("job", token)?.expect("held");
    token_of(&mut late)?;
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
