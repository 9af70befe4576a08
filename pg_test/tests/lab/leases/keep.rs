//! The heartbeat of a process: one call renews all of its leases, and says of each what became of it.

use nix::sys::signal::Signal;
use pg_test::client::literal;
use pg_test::process::{self, wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Context, Lab, Result, Session};

/// A row of the answer.
#[derive(Debug, Clone, PartialEq)]
struct Kept {
    name: String,
    token: i64,
    /// The outcome, with the code where there is one: 'kept', 'later 55P03'.
    outcome: String,
    renewed: Option<i64>,
    /// In microseconds.
    remaining: Option<i64>,
    /// In microseconds.
    again_in: Option<i64>,
}

const HOUR: i64 = 3_600_000_000;

/// The call on these pairs.
fn call(pairs: &[(&str, i64)]) -> String {
    let names: Vec<String> = pairs.iter().map(|(name, _)| literal(name)).collect();
    let tokens: Vec<String> = pairs.iter().map(|(_, token)| token.to_string()).collect();
    format!("lease_keep(ARRAY[{}]::text[], ARRAY[{}]::bigint[])", names.join(","), tokens.join(","))
}

fn keep(session: &mut Session, pairs: &[(&str, i64)]) -> Result<Vec<Kept>> {
    let us = |column| format!("(extract(epoch FROM {column}) * 1000000)::bigint");
    let sql = format!(
        "SELECT name, token, concat_ws(' ', outcome, code), renewed, {}, {} FROM {}",
        us("remaining"),
        us("again_in"),
        call(pairs)
    );
    let rows = session.rows(&sql)?;
    let given: Vec<&str> = rows.iter().filter_map(|row| row[0].as_deref()).collect();
    ensure!(given == pairs.iter().map(|(name, _)| *name).collect::<Vec<_>>(), "{given:?}");
    rows.into_iter()
        .map(|row| {
            let number = |n: usize| row[n].as_ref().map(|text| text.parse::<i64>()).transpose();
            Ok(Kept {
                name: row[0].clone().context("a name")?,
                token: number(1)?.context("a token")?,
                outcome: row[2].clone().context("an outcome")?,
                renewed: number(3)?,
                remaining: number(4)?,
                again_in: number(5)?,
            })
        })
        .collect()
}

/// The outcomes alone.
fn outcomes(rows: &[Kept]) -> Vec<&str> {
    rows.iter().map(|row| row.outcome.as_str()).collect()
}

#[lab_test]
fn each_pair_is_answered_for_itself_in_its_place(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut admin, mut other) = (db.connect()?, db.connect()?);
    let role = db.role("keeper")?;
    admin.run(&format!("SELECT fence_grant('{role}', 'adopter')"))?;
    let mut session = db.connect_as(&role)?;
    let kept = session.acquire("kept", "1 h")?;
    let revoked = session.acquire("revoked", "1 h")?;
    admin.granted("SELECT lease_revoke('revoked')")?;
    let expired = session.acquire_expired("expired")?;
    let foreign = other.acquire("foreign", "1 h")?;
    session.run("SELECT lease_adopt('adopted', 7)")?;
    let locked = session.acquire("locked", "1 h")?;
    other.run(&format!("BEGIN; SELECT lease_renew('locked', {locked}, '1 h')"))?;
    let long = "x".repeat(513);
    let pairs = [
        ("revoked", revoked),
        ("kept", kept),
        ("expired", expired),
        ("foreign", foreign),
        ("adopted", 7),
        ("", 1),
        ("locked", locked),
        (&long, 1),
        ("kept", 0),
        ("kept", kept + 1_000_000),
        ("never heard of", 1),
    ];
    session.run("SET lock_timeout = '10 s'")?;
    let rows = keep(&mut session, &pairs)?;
    ensure!(
        outcomes(&rows)
            == [
                "lost",
                "kept",
                "lost",
                "refused 42501",
                "refused 55000",
                "refused 22023",
                "later 55P03",
                "refused 22023",
                "refused 22023",
                "lost",
                "lost"
            ],
        "{rows:#?}"
    );
    for row in &rows {
        match row.outcome.as_str() {
            "kept" => {
                ensure!(row.renewed.is_some_and(|token| token > kept), "{row:?}");
                ensure!(row.remaining == Some(HOUR) && row.again_in == Some(HOUR / 3), "{row:?}");
            }
            "later 55P03" => {
                let left = row.remaining.context("what remains")?;
                ensure!(row.renewed.is_none() && 0 < left && left <= HOUR, "{row:?}");
                ensure!(row.again_in == Some(left / 10), "{row:?}");
            }
            _ => {
                let nothing = (row.renewed, row.remaining, row.again_in);
                ensure!(nothing == (None, None, None), "{row:?}");
            }
        }
    }
    other.run("COMMIT")?;
    ensure!(outcomes(&keep(&mut session, &[("locked", locked)])?) == ["kept"]);
    Ok(())
}

#[lab_test]
fn one_token_renews_all_of_them_for_the_ttl_last_asked_for(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let a = session.acquire("a", "30 s")?;
    let b = session.acquire("b", "1 h")?;
    session.granted(&format!("SELECT lease_renew('b', {b}, '2 h')"))?;
    let c = session.granted("SELECT lease_acquire('c', ttl => '30 days')")?;
    let readers = ["r", "r"].map(|name| format!("SELECT lease_acquire('{name}', shared => true)"));
    let one = session.granted(&readers[0])?;
    let two = session.granted(&readers[1])?;
    let drawn = session.last_token()?;
    let rows =
        keep(&mut session, &[("c", c), ("a", a), ("r", two), ("b", b), ("r", one), ("a", a)])?;
    ensure!(rows.iter().all(|row| row.outcome == "kept"), "{rows:#?}");
    let renewed: Vec<i64> = rows.iter().filter_map(|row| row.renewed).collect();
    // One for the call, and one more for the second reader.
    ensure!(renewed == [1, 1, 2, 1, 1, 1].map(|n| drawn + n), "{renewed:?} after {drawn}");
    ensure!(session.last_token()? == drawn + 2);
    let second = 1_000_000;
    let times: Vec<_> = rows.iter().map(|row| (row.remaining, row.again_in)).collect();
    let wanted = [(30 * 86_400, 86_400), (30, 10), (30, 10), (7_200, 2_400), (30, 10), (30, 10)];
    ensure!(
        times == wanted.map(|(left, again)| (Some(left * second), Some(again * second))),
        "{times:?}"
    );
    for (row, count) in [("a", 1), ("b", 2), ("c", 1)] {
        let renewals = format!("SELECT renewals FROM fence.leases WHERE name = '{row}'");
        ensure!(session.granted(&renewals)? == count, "{row} was not renewed once");
    }
    for row in &rows {
        ensure!(
            session.speaks(&row.name, row.token)?
                && session.speaks(&row.name, row.renewed.context("kept")?)?
        );
    }
    // Two tokens of one grant renew it once.
    let again = keep(&mut session, &[("a", a), ("a", renewed[1])])?;
    ensure!(
        outcomes(&again) == ["kept", "kept"] && again[0].renewed == again[1].renewed,
        "{again:?}"
    );
    ensure!(session.granted("SELECT renewals FROM fence.leases WHERE name = 'a'")? == 2);
    Ok(())
}

#[lab_test]
fn bad_lists_are_refused_before_anything_is_kept(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.acquire("a", "1 h")?;
    let many = "(SELECT array_agg('a'::text) FROM generate_series(1, 10001))";
    let tokens = format!("(SELECT array_agg({token}::bigint) FROM generate_series(1, 10001))");
    for (names, tokens, sqlstate) in [
        ("NULL", "NULL", "22004"),
        ("NULL", "'{}'", "22004"),
        ("'{a}'", "NULL", "22004"),
        ("'{a, NULL}'", "'{1, 1}'", "22004"),
        ("'{a, b}'", "'{1, NULL}'", "22004"),
        ("'{a, b}'", "'{1}'", "22023"),
        ("'{a}'", "'{1, 2}'", "22023"),
        (many, &tokens, "22023"),
    ] {
        let fault =
            session.refused(&format!("SELECT * FROM lease_keep({names}, {tokens})"), sqlstate)?;
        ensure!(fault.hint.is_some(), "no hint: {fault}");
    }
    ensure!(session.granted("SELECT renewals FROM fence.leases")? == 0);
    ensure!(keep(&mut session, &[])?.is_empty());
    // 10,000 may come, one lease so many times, and in arrays of more dimensions.
    let all = many.replace("10001", "10000");
    let kept = format!(
        "SELECT count(*) FROM lease_keep({all}, {}) WHERE outcome = 'kept'",
        tokens.replace("10001", "10000")
    );
    ensure!(session.granted(&kept)? == 10_000);
    ensure!(session.granted("SELECT renewals FROM fence.leases")? == 1);
    let square = format!("SELECT count(*) FROM lease_keep('{{{{a,a}},{{a,b}}}}', '{{{{{token},{token}}},{{1,1}}}}') WHERE outcome = 'kept'");
    ensure!(session.granted(&square)? == 2);
    Ok(())
}

#[lab_test]
fn nothing_kept_is_nothing_written(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let locked = session.acquire("locked", "1 h")?;
    let free = session.acquire("free", "1 h")?;
    session.release("free", free)?;
    other.run(&format!("BEGIN; SELECT lease_renew('locked', {locked})"))?;
    let drawn = session.last_token()?;
    session.run("BEGIN")?;
    let rows = keep(&mut session, &[("locked", locked), ("free", free), ("", 1)])?;
    ensure!(outcomes(&rows) == ["later 55P03", "lost", "refused 22023"], "{rows:?}");
    ensure!(session.text("SELECT pg_current_xact_id_if_assigned()")?.is_none(), "an id was taken");
    let locks = session.granted(
        "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
    )?;
    ensure!(locks == 0 && session.last_token()? == drawn);
    session.run("COMMIT")?;
    Ok(())
}

#[lab_test]
fn maintenance_is_not_waited_for(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let token = session.acquire("a", "1 h")?;
    session.run("SET lock_timeout = '10 s'")?;
    let is_later = |session: &mut Session| -> Result<()> {
        let rows = keep(session, &[("a", token), ("", 1)])?;
        ensure!(outcomes(&rows) == ["later 55006", "refused 22023"], "{rows:?}");
        ensure!((rows[0].remaining, rows[0].again_in) == (None, Some(10_000)), "{rows:?}");
        Ok(())
    };
    for work in [
        "VACUUM FULL fence.lease",
        "REINDEX TABLE fence.lease",
        "CLUSTER fence.lease USING lease_pkey",
    ] {
        // One that waits for an open transaction, and one that is at work.
        other.run("BEGIN")?;
        other.acquire("b", "1 h")?;
        let mut maintenance = Background::connect(&db.conninfo())?;
        maintenance.send(work)?;
        maintenance.wait_until_blocked()?;
        is_later(&mut session)?;
        other.run("ROLLBACK")?;
        maintenance.rows()?;
        ensure!(outcomes(&keep(&mut session, &[("a", token)])?) == ["kept"], "after {work}");
    }
    other.run("BEGIN; LOCK TABLE fence.lease")?;
    is_later(&mut session)?;
    other.run("COMMIT; BEGIN; REINDEX TABLE fence.lease")?;
    is_later(&mut session)?;
    other.run("COMMIT")?;
    ensure!(outcomes(&keep(&mut session, &[("a", token)])?) == ["kept"]);
    Ok(())
}

#[lab_test]
fn open_transactions_of_any_kind_are_left_for_later(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    session.run("SET lock_timeout = '10 s'")?;
    let token = session.acquire("a", "1 h")?;
    for begin in [
        format!("SELECT lease_renew('a', {token})"),
        format!("SELECT lease_release('a', {token})"),
        "SELECT lease_revoke('a')".to_owned(),
        format!("SELECT * FROM lease_keep('{{a}}', '{{{token}}}')"),
        // Without the lease's lock, as a data-only restore does.
        "UPDATE fence.lease SET renewals = 7".to_owned(),
    ] {
        other.run(&format!("BEGIN; {begin}"))?;
        ensure!(outcomes(&keep(&mut session, &[("a", token)])?) == ["later 55P03"], "{begin}");
        other.run("ROLLBACK")?;
    }
    other.run(&format!("BEGIN; SELECT lease_renew('a', {token}); PREPARE TRANSACTION 'keep'"))?;
    ensure!(outcomes(&keep(&mut session, &[("a", token)])?) == ["later 55P03"], "it is prepared");
    other.run("COMMIT PREPARED 'keep'")?;
    // A guard holds up no heartbeat, and a token of an acquire that is not committed is not lost.
    other.run(&format!("BEGIN; SELECT lease_guard('a', {token})"))?;
    let new = other.acquire("new", "1 h")?;
    let rows = keep(&mut session, &[("a", token), ("new", new)])?;
    ensure!(outcomes(&rows) == ["kept", "later 55P03"], "{rows:?}");
    other.run("COMMIT")?;
    // By an older snapshot as by any.
    session.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")?;
    other.renew("a", token)?.context("held")?;
    ensure!(outcomes(&keep(&mut session, &[("a", token), ("new", new)])?) == ["kept", "kept"]);
    session.run("COMMIT")?;
    Ok(())
}

#[lab_test]
fn after_a_jump_the_first_call_lets_the_tokens_speak_again(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let (a, b) = (session.acquire("a", "1 h")?, session.acquire("b", "1 h")?);
    session.run("SELECT fence_new_epoch()")?;
    ensure!(!session.speaks("a", a)? && !session.speaks("b", b)?);
    let rows = keep(&mut session, &[("a", a), ("b", b)])?;
    ensure!(
        outcomes(&rows) == ["kept", "kept"] && session.speaks("a", a)? && session.speaks("b", b)?
    );
    Ok(())
}

#[lab_test]
fn ten_thousand_are_kept_in_as_many_calls_as_their_locks_take(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut pruner) = (db.connect()?, db.connect()?);
    session
        .run("CREATE TABLE held (name text PRIMARY KEY, token bigint, done bool DEFAULT false)")?;
    session.run(
        "DO $$ BEGIN FOR n IN 0..99 LOOP
             INSERT INTO held SELECT name, token FROM lease_acquire_any(
                 ARRAY(SELECT 'job' || n * 100 + i FROM generate_series(1, 100) i), 100, ttl => '1 h');
             COMMIT;
         END LOOP; END $$",
    )?;
    // Every tenth has been lost, and is pruned while the others are kept.
    session.run("DO $$ BEGIN FOR n IN 1..1000 LOOP PERFORM lease_revoke('job' || n * 10); COMMIT; END LOOP; END $$")?;
    let mut calls = 0;
    let mut left = 10_000;
    while left > 0 {
        let prune = std::thread::spawn(move || {
            let pruned = pruner.granted("SELECT lease_prune('0')");
            (pruner, pruned)
        });
        let answered = session.granted(
            "WITH k AS MATERIALIZED (SELECT k.* FROM (SELECT array_agg(name) n, array_agg(token) t FROM held WHERE NOT done) h,
                  lease_keep(h.n, h.t) k),
                  u AS (UPDATE held SET done = true FROM k WHERE k.name = held.name AND k.outcome IN ('kept', 'lost'))
             SELECT count(*) FROM k WHERE outcome IN ('kept', 'lost')",
        )?;
        let (again, pruned) = prune.join().expect("it does not panic");
        (pruner, calls, left) = (again, calls + 1, left - answered);
        pruned?;
        ensure!(answered > 0 && calls < 40, "{left} are left after {calls} calls");
    }
    ensure!(session.granted("SELECT count(*) FROM fence.leases WHERE renewals = 1")? == 9_000);
    ensure!(session.granted("SELECT renewals FROM fence.stats")? == 9_000);
    ensure!(session.granted("SELECT renewals_lost FROM fence.stats")? == 1_000);
    Ok(())
}

#[lab_test]
fn what_was_kept_before_a_crash_is_kept_though_nobody_was_told(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let mut local = cluster.connect("postgres")?;
    local.run("CREATE EXTENSION pg_fence; SET synchronous_commit = local")?;
    let (a, b) = (local.acquire("a", "1 h")?, local.acquire("b", "1 h")?);
    // One that never answers: the commit is on disk, and the client waits for its answer.
    cluster.configure(&[("synchronous_standby_names", "nobody")])?;
    cluster.reload()?;
    let keep_both = call(&[("a", a), ("b", b)]);
    let mut client = Background::connect(&cluster.conninfo("postgres"))?;
    wait_until("who asks for a standby waits for it", PATIENCE, || {
        if client.is_finished() {
            let _ = client.rows();
        }
        let _ = client.send(&format!("SELECT * FROM {keep_both}"));
        client.waits_for().is_some_and(|(_, event)| event == "SyncRep")
    })?;
    process::signal(client.pid(), Signal::SIGKILL)?;
    wait_until("the server has started again", PATIENCE, || {
        local.run("SELECT 1").is_err() && cluster.connect("postgres").is_ok()
    })?;
    let mut local = cluster.connect("postgres")?;
    local.run("SET synchronous_commit = local")?;
    let before = local.granted("SELECT min(renewals) FROM fence.leases")?;
    let token = local.granted("SELECT max(token) FROM fence.leases")?;
    ensure!(before >= 1 && local.speaks("a", a)? && local.speaks("b", b)?, "the commit is lost");
    let rows = keep(&mut local, &[("a", a), ("b", b)])?;
    ensure!(rows.iter().all(|row| row.outcome == "kept" && row.renewed > Some(token)), "{rows:?}");
    Ok(())
}
