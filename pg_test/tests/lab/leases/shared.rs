//! Shared grants: many beside each other, none beside an exclusive one.

use crate::support::concurrency::{
    at_once, gets_nothing, sessions, still_wait, token_of, tokens, waiting, with_time_enough,
};
use pg_test::{ensure, lab_test, Background, Calls, Database, Lab, Result, Session};
use std::collections::HashSet;

const SHARE: &str = "SELECT lease_acquire('job', ttl => '1 h', shared => true)";
const WAIT_SHARED: &str =
    "SELECT lease_acquire('job', ttl => '1 h', wait => '10 min', shared => true)";
const WAIT_EXCLUSIVE: &str = "SELECT lease_acquire('job', ttl => '1 h', wait => '10 min')";

/// How many grants of `job` live.
fn live(session: &mut Session) -> Result<i64> {
    session.granted("SELECT count(*) FROM lease_info('job') WHERE state = 'held'")
}

fn pair(db: &Database) -> Result<(Session, Session)> {
    Ok((db.connect()?, db.connect()?))
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
fn readers_are_granted_beside_open_transactions_of_others(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holders = sessions(&db, 5)?;
    for round in 0..2 {
        for session in &mut holders {
            session.run("BEGIN; SET LOCAL lock_timeout = '10 s'")?;
            session.granted(SHARE)?;
        }
        ensure!(db.connect()?.is_taken("job")?, "a writer beside uncommitted readers");
        let (gone, kept) = holders.split_at_mut(2);
        gone.iter_mut().try_for_each(|session| session.run("ROLLBACK"))?;
        ensure!(db.connect()?.is_taken("job")?);
        kept.iter_mut().try_for_each(|session| session.run("COMMIT"))?;
        let held = live(&mut db.connect()?)?;
        ensure!(held == 3 * (round + 1), "{held} of round {round}");
    }
    Ok(())
}

#[lab_test]
fn no_reader_beside_a_writer_and_no_writer_beside_a_reader(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut one, mut two) = pair(&db)?;
    // Committed, and not yet.
    for open in [false, true] {
        let step = |session: &mut Session, sql: &str| if open { session.run(sql) } else { Ok(()) };
        for (first, second) in [
            ("", ", shared => true"),
            (", shared => true", ""),
            ("", ""),
            (", shared => true", ", slots => 2"),
            (", slots => 2", ", shared => true, slots => 1"),
        ] {
            step(&mut one, "BEGIN")?;
            let token =
                one.granted(&format!("SELECT lease_acquire('job', ttl => '1 h'{first})"))?;
            step(&mut two, "BEGIN; SET LOCAL lock_timeout = '10 s'")?;
            two.nothing(&format!("SELECT lease_acquire('job'{second})"))?;
            step(&mut two, "COMMIT")?;
            step(&mut one, "COMMIT")?;
            two.nothing(&format!("SELECT lease_acquire('job'{second})"))?;
            one.release("job", token)?.expect("held");
            let token = two.granted(&format!("SELECT lease_acquire('job'{second})"))?;
            two.release("job", token)?.expect("held");
        }
    }
    // All at the same instant: either one writer or readers, never both.
    let mut holders = sessions(&db, 12)?;
    for round in 0..15 {
        let got = tokens(at_once(&mut holders, |i| {
            format!("SELECT lease_acquire('job', ttl => '1 h', shared => {})", i % 3 != 0)
        }))?;
        let writers = got.iter().step_by(3).flatten().count();
        let all = got.iter().flatten().count();
        ensure!(all > 0, "round {round}: nobody won");
        ensure!(writers == 0 || all == 1, "round {round}: {writers} writers of {all} winners");
        one.granted("SELECT lease_revoke('job')")?;
    }
    Ok(())
}

#[lab_test]
fn a_waiting_writer_is_not_starved_by_readers(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut one, mut two) = pair(&db)?;
    let (first, second) = (one.granted(SHARE)?, one.granted(SHARE)?);
    let mut writer = waiting(&db, WAIT_EXCLUSIVE)?;
    // Who would have joined the readers a moment ago now stands behind the writer.
    two.nothing(SHARE)?;
    let mut reader = waiting(&db, WAIT_SHARED)?;
    // A grant that lives may be renewed for as long as its holder likes.
    let renewed = one.renew("job", first)?.expect("held");
    one.release("job", renewed)?.expect("held");
    two.nothing(SHARE)?;
    still_wait([&mut writer, &mut reader])?;
    one.release("job", second)?.expect("held");
    let token = token_of(&mut writer)?;
    still_wait([&mut reader])?;
    one.release("job", token)?.expect("held");
    token_of(&mut reader)?;
    two.granted(SHARE)?;
    // A writer that gives up leaves the way open.
    with_time_enough(|seconds| {
        let mut hasty = Background::connect(&db.conninfo())?;
        let mut reader = Background::connect(&db.conninfo())?;
        hasty.send(&format!("SELECT lease_acquire('job', wait => '{seconds} s')"))?;
        hasty.blocks_or_ends()?;
        reader.send(WAIT_SHARED)?;
        let stood_behind = reader.blocks_or_ends()?;
        gets_nothing(&mut hasty)?;
        let token = token_of(&mut reader)?;
        ensure!(live(&mut one)? == 3);
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
    let mut writer = waiting(&db, WAIT_EXCLUSIVE)?;
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

#[lab_test]
fn each_shared_grant_lives_its_own_life(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let a = session.granted(SHARE)?;
    let b = session.granted(SHARE)?;
    let c = session.granted("SELECT lease_acquire('job', ttl => '1 us', shared => true)")?;
    while session.speaks("job", c)? {}
    let renewed = session.renew("job", a)?.expect("held");
    ensure!(renewed > c && session.renew("job", c)?.is_none(), "an expired grant was revived");
    ensure!(session.speaks("job", a)? && session.speaks("job", renewed)?);
    ensure!(session.speaks("job", b)? && !session.speaks("job", c)?);
    let closing = session.release("job", a)?.expect("held");
    ensure!(closing > renewed);
    ensure!(!session.speaks("job", a)? && !session.speaks("job", renewed)?);
    ensure!(session.speaks("job", b)? && session.release("job", renewed)?.is_none());
    ensure!(session.is_taken("job")? && live(&mut session)? == 1);
    session.release("job", b)?.expect("held");
    ensure!(!session.is_taken("job")?);
    Ok(())
}

#[lab_test]
fn a_revocation_ends_every_shared_grant(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let all = (0..4).map(|_| session.granted(SHARE)).collect::<Result<Vec<_>>>()?;
    let mut writer = waiting(&db, WAIT_EXCLUSIVE)?;
    let closing = session.granted("SELECT lease_revoke('job')")?;
    ensure!(all.iter().all(|token| *token < closing));
    ensure!(token_of(&mut writer)? > closing);
    for token in all {
        ensure!(!session.speaks("job", token)? && session.release("job", token)?.is_none());
    }
    Ok(())
}

#[lab_test]
fn a_reader_reclaims_its_own_grant_only(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let call = |holder: &str, reclaim: bool| {
        format!(
            "SELECT lease_acquire('job', '{holder}', '1 h', shared => true, reclaim => {reclaim})"
        )
    };
    let a = session.granted(&call("a", false))?;
    let b = session.granted(&call("b", false))?;
    let mut writer = waiting(&db, WAIT_EXCLUSIVE)?;
    // Ahead of the writer, and without one grant more than there were.
    let again = session.granted(&call("a", true))?;
    ensure!(!session.speaks("job", a)? && session.speaks("job", again)?);
    ensure!(session.speaks("job", b)? && live(&mut session)? == 2);
    still_wait([&mut writer])?;
    session.release("job", again)?.expect("held");
    session.release("job", b)?.expect("held");
    token_of(&mut writer)?;
    // What a writer has, no reader's reclaim opens for another.
    session.nothing(&call("a", true))
}

#[lab_test]
fn a_guard_on_one_shared_grant_holds_up_writers_but_no_readers(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut guard) = pair(&db)?;
    session.run("SET lock_timeout = '10 s'")?;
    let a = session.granted(SHARE)?;
    let b = session.granted(SHARE)?;
    guard.run(&format!("BEGIN; SELECT lease_guard('job', {a})"))?;
    // Others read, renew and release beside it.
    let c = session.granted(SHARE)?;
    let renewed = session.renew("job", b)?.expect("held");
    session.release("job", renewed)?.expect("held");
    session.release("job", c)?.expect("held");
    session.nothing("SELECT lease_acquire('job')")?;
    // Whatever becomes of the guarded grant, no writer comes, and it keeps its place.
    session.release("job", a)?.expect("held");
    ensure!(live(&mut session)? == 0);
    session.nothing("SELECT lease_acquire('job')")?;
    session.nothing("SELECT lease_acquire('job', slots => 2)")?;
    let d = session.granted(SHARE)?;
    session.release("job", d)?.expect("held");
    let mut writer = waiting(&db, WAIT_EXCLUSIVE)?;
    let by =
        session.text("SELECT blocking_pids FROM lease_info('job') WHERE blocking_pids <> '{}'")?;
    ensure!(by == Some(format!("{{{}}}", guard.pid())), "{by:?}");
    guard.run("COMMIT")?;
    token_of(&mut writer)?;
    Ok(())
}

/// What an acquire in this mode takes beside its row: locks of the extension, and look-ups of the lease.
fn takes(session: &mut Session, name: &str, more: &str) -> Result<(Vec<i64>, i64)> {
    const LOOK_UPS: &str = "SELECT COALESCE(sum(idx_scan), 0)::bigint \
        FROM pg_stat_xact_all_tables WHERE relid = 'fence.lease'::regclass";
    session.run("BEGIN")?;
    let before: i64 = session.one(LOOK_UPS, &[])?;
    session.granted(&format!("SELECT lease_acquire('{name}', ttl => '1 h'{more})"))?;
    let look_ups = session.one::<i64>(LOOK_UPS, &[])? - before;
    let locks = session.rows(
        "SELECT objsubid FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' \
         ORDER BY 1",
    )?;
    let locks = locks.iter().flatten().flatten().filter_map(|kind| kind.parse().ok()).collect();
    session.run("COMMIT")?;
    Ok((locks, look_ups))
}

#[lab_test]
fn an_exclusive_grant_pays_nothing_for_them(lab: &Lab) -> Result<()> {
    const GRANT: i64 = 0x5046;
    const SHAPE: i64 = 0x5047;
    let db = lab.database()?;
    let mut session = db.connect()?;
    // A new name, and one that others have shared before.
    session.granted("SELECT lease_acquire('once shared', ttl => '1 us', shared => true)")?;
    // A name that has no row is looked up once more: somebody may just be loading one.
    for (name, look_ups) in [("new", 3), ("once shared", 2)] {
        let taken = takes(&mut session, name, "")?;
        // The second look-up falls away where no transaction has ended since the first.
        ensure!(taken.0 == [GRANT] && taken.1 <= look_ups, "{name}: {taken:?}");
    }
    let (locks, _) = takes(&mut session, "read", ", shared => true")?;
    ensure!(locks == [GRANT, GRANT, SHAPE], "{locks:?}");
    Ok(())
}
