//! The events that wake the head of a queue, and (in wakeup.script) those that do not.

use crate::support::concurrency::{
    is_woken, nothing_is_left, still_wait, token_of, undisturbed_server, waiting, Waiter, WAIT,
};
use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Background, Calls, Context, Database, Lab, Result, Session};
use std::time::Duration;

const HELD: &str = "a: SELECT lease_acquire('job', ttl => '1 h')";
const GUARDED: &str = "a: BEGIN; SELECT lease_guard('job', $)";
const RELEASED: &str = "a: BEGIN; SELECT lease_release('job', $)";
const WRITTEN: &str = "a: BEGIN; INSERT INTO t (n, fence) VALUES (1, $)";
const REVOKED: &str = "b: SELECT lease_revoke('job')";
const FAILS: &str = "a: SELECT 1/0";
const DIES: &str = "b: SELECT pg_terminate_backend($a)";

/// What one session waits for, and what wakes it: statements of two others, in order. `$` is the first token.
type Cases = &'static [(&'static [&'static str], &'static [&'static str])];

const WAKES: Cases = &[
    // A release; in a transaction, at its end; in a savepoint.
    (&[HELD], &["a: SELECT lease_release('job', $)"]),
    (&[HELD, RELEASED], &["a: COMMIT"]),
    (&[HELD, "a: BEGIN; SAVEPOINT s; SELECT lease_release('job', $); RELEASE s"], &["a: COMMIT"]),
    (&[HELD], &[REVOKED]),
    // A renewal to a sooner end.
    (&[HELD], &["a: SELECT lease_renew('job', $, '1 ms')"]),
    // The end of a grant that was never committed.
    (&["a: BEGIN", HELD], &["a: ROLLBACK"]),
    (&["a: BEGIN; SAVEPOINT s", HELD], &["a: ROLLBACK TO s"]),
    (&["a: BEGIN; SAVEPOINT s; SAVEPOINT t", HELD, "a: RELEASE t"], &["a: ROLLBACK TO s"]),
    // The end of a guarded transaction. The guard goes with its savepoint, too.
    (&[HELD, GUARDED, REVOKED], &["a: COMMIT"]),
    (&[HELD, GUARDED, REVOKED], &["a: ROLLBACK"]),
    (&[HELD, GUARDED, REVOKED], &[FAILS, "a: ROLLBACK"]),
    (
        &[HELD, "a: BEGIN; SAVEPOINT s; SELECT lease_guard('job', $)", REVOKED],
        &["a: ROLLBACK TO s"],
    ),
    (&[HELD, WRITTEN, REVOKED], &["a: COMMIT"]),
    (&[HELD, WRITTEN, REVOKED], &["a: ROLLBACK"]),
    // The death of a session that has acquired, that guards; that has released, which is undone.
    (&["a: BEGIN", HELD], &[DIES]),
    (&[HELD, GUARDED, REVOKED], &[DIES]),
    (&[HELD, RELEASED], &[DIES, "b: SELECT lease_release('job', $)"]),
];

/// The same of several leases, by another session, too; and of a shared grant.
const OF_SEVERAL: Cases = &[
    (
        &["a: SELECT lease_acquire_all('{x, job, y}', ttl => '1 h')"],
        &["b: SELECT lease_release_all('{y, job, x}', $)"],
    ),
    (&[HELD], &["a: SELECT lease_renew_all('{job}', $, '1 ms')"]),
    (
        &[
            "a: BEGIN; SAVEPOINT s; SAVEPOINT t",
            "a: SELECT lease_acquire_all('{a, job}', ttl => '1 h')",
            "a: RELEASE t",
        ],
        &[FAILS, "a: ROLLBACK"],
    ),
    (
        &["a: BEGIN; SAVEPOINT s", "a: SELECT lease_acquire('job', shared => true, ttl => '1 h')"],
        &["a: ROLLBACK TO s; ROLLBACK"],
    ),
];

/// Two sessions that play a case, and one that waits and clears up.
struct Sessions {
    db: Database,
    a: Session,
    b: Session,
    c: Session,
}

impl Sessions {
    fn new(db: Database) -> Result<Sessions> {
        let (a, b, c) = (db.connect()?, db.connect()?, db.connect()?);
        Ok(Sessions { db, a, b, c })
    }

    /// Plays the statements; the first token of all.
    fn play(&mut self, statements: &[&str], mut token: Option<i64>) -> Result<i64> {
        for statement in statements {
            let (who, sql) = statement.split_once(": ").expect("a session's name");
            let sql = sql.replace("$a", &self.a.pid().to_string());
            let sql = sql.replace('$', &token.unwrap_or_default().to_string());
            let session = if who == "a" { &mut self.a } else { &mut self.b };
            if *statement == FAILS {
                session.refused(&sql, "22012")?;
                continue;
            }
            let rows = session.rows(&sql).with_context(|| statement.to_string())?;
            token = token.or(rows.first().and_then(|row| row[0].as_deref()?.parse().ok()));
        }
        token.context("no token")
    }
}

cases![
    what_ends_a_grant_or_a_guard_wakes => each_wakes(WAKES),
    what_ends_a_grant_of_several_wakes => each_wakes(OF_SEVERAL),
];

fn each_wakes(lab: &Lab, cases: Cases) -> Result<()> {
    // On a server of its own: the ends of other tests' databases wake the waiters on the shared one.
    let server = undisturbed_server(lab)?;
    let mut s = Sessions::new(Database::with_extension(server.conninfo("postgres"))?)?;
    s.b.run("CREATE TABLE t (n int); SELECT fence_protect('t', lease => 'job')")?;
    for (before, end) in cases {
        is_woken(|| {
            if s.a.run("ROLLBACK").is_err() {
                s.a = s.db.connect()?;
            }
            let token = s.play(before, None)?;
            let waiter = Waiter::comes(&s.db, &mut s.c)?;
            s.play(end, Some(token))?;
            let (next, took) = waiter.served(&mut s.c)?;
            ensure!(next > token, "{next} after {token}");
            s.c.release("job", next)?.expect("held");
            Ok(took)
        })
        .with_context(|| format!("{before:?}, {end:?}"))?;
    }
    s.a.run("ROLLBACK").or_else(|_| Ok(())).and_then(|()| nothing_is_left(&mut s.c))
}

#[lab_test]
fn expiry_wakes(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::new(lab.database()?)?;
    for more in ["", ", shared => true", ", slots => 1"] {
        // The head's look is due at the end of the grant. One that looked only each second would be late in every
        // round, however many there are; in some of them the machine may be busy.
        let mut late = vec![late_after_expiry(&mut sessions, more)?];
        while late.iter().all(|&ms| ms >= 400) {
            ensure!(late.len() < 20, "so many ms late: {late:?}");
            late.push(late_after_expiry(&mut sessions, more)?);
        }
    }
    Ok(())
}

/// How many milliseconds after the end of a grant that runs out in a second and a third its waiter is served.
fn late_after_expiry(sessions: &mut Sessions, more: &str) -> Result<i64> {
    let token = sessions.a.granted(&format!("SELECT lease_acquire('job', ttl => '1 h'{more})"))?;
    let mut waiter = waiting(&sessions.db, WAIT)?;
    // The renewal wakes the head, which looks a second later, then at the end.
    sessions.a.run(&format!("BEGIN; SELECT lease_renew('job', {token}, '1300 ms')"))?;
    let ends = sessions.a.text("SELECT expires_at FROM lease_info('job')")?.expect("held");
    sessions.a.run("COMMIT")?;
    let next = token_of(&mut waiter)?;
    let late = sessions.a.text(&format!(
        "SELECT (extract(epoch FROM acquired_at - '{ends}') * 1000)::bigint \
         FROM lease_info('job') WHERE token = {next}"
    ))?;
    let late = late.expect("held").parse()?;
    ensure!(late >= 0, "granted {late} ms after the end");
    sessions.a.release("job", next)?;
    Ok(late)
}

#[lab_test]
fn a_grant_committed_while_they_wait_is_waited_out(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::new(lab.database()?)?;
    sessions.a.run("BEGIN")?;
    sessions.a.acquire("job", "3 s")?;
    let mut queue = [waiting(&sessions.db, WAIT)?, waiting(&sessions.db, WAIT)?];
    let ends = sessions.a.text("SELECT expires_at FROM lease_info('job')")?.expect("held");
    sessions.a.run("COMMIT")?;
    let [head, second] = &mut queue;
    let token = token_of(head)?;
    let in_time = format!("SELECT acquired_at >= '{ends}' FROM lease_info('job')");
    ensure!(sessions.a.truth(&in_time)?, "granted before the predecessor's end");
    still_wait([&mut *second])?;
    sessions.a.release("job", token)?.expect("held");
    token_of(second)?;
    Ok(())
}

/// Two have seen the lease with this ttl, and wait on behind its end, for the holder has renewed it in time.
fn they_wait_on(lab: &Lab, ttl: &str) -> Result<Option<()>> {
    let mut sessions = Sessions::new(lab.database()?)?;
    let conninfo = sessions.db.conninfo();
    let mut queue = [Background::connect(&conninfo)?, Background::connect(&conninfo)?];
    let token = sessions.a.acquire("job", ttl)?;
    let first_end = sessions.a.text("SELECT expires_at FROM lease_info('job')")?.expect("held");
    for waiter in &mut queue {
        waiter.send(WAIT)?;
        if waiter.wait_until_blocked().is_err() {
            return Ok(None);
        }
    }
    let Some(token) = sessions.a.renew("job", token)? else { return Ok(None) };
    let renew = format!("SELECT lease_renew('job', {token}, '1 h')");
    let Some(token) = sessions.a.token(&renew)? else { return Ok(None) };
    let passed = format!("SELECT clock_timestamp() > '{first_end}'::timestamptz + '700 ms'");
    while !sessions.a.truth(&passed)? {
        std::thread::sleep(Duration::from_millis(50));
    }
    still_wait(&mut queue)?;
    ensure!(sessions.a.speaks("job", token)?);
    sessions.a.release("job", token)?.expect("held");
    token_of(&mut queue[0])?;
    still_wait(&mut queue[1..]).map(Some)
}

#[lab_test]
fn a_renewed_lease_is_waited_for_on(lab: &Lab) -> Result<()> {
    within_ttl(|ttl| they_wait_on(lab, ttl))
}

#[lab_test]
fn a_prepared_grant_is_waited_out_and_its_end_noticed(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::new(lab.database()?)?;
    let gid = format!("{}_line", sessions.db.name());
    for (end, by) in [("COMMIT", "COMMIT"), ("ROLLBACK", "ROLLBACK")] {
        sessions.a.run("BEGIN")?;
        let token = sessions.a.acquire("job", "1 h")?;
        sessions.a.run(&format!("PREPARE TRANSACTION '{gid}'"))?;
        let mut queue = [waiting(&sessions.db, WAIT)?, waiting(&sessions.db, WAIT)?];
        still_wait(&mut queue)?;
        sessions.b.run(&format!("{by} PREPARED '{gid}'"))?;
        if end == "COMMIT" {
            still_wait(&mut queue)?;
            sessions.a.release("job", token)?.expect("held");
        }
        let next = token_of(&mut queue[0])?;
        still_wait(&mut queue[1..])?;
        sessions.a.release("job", next)?.expect("held");
        let next = token_of(&mut queue[1])?;
        sessions.a.release("job", next)?.expect("held");
    }
    // A prepared release.
    let token = sessions.a.acquire("job", "1 h")?;
    sessions.a.run(&format!("BEGIN; SELECT lease_release('job', {token})"))?;
    sessions.a.run(&format!("PREPARE TRANSACTION '{gid}'"))?;
    let mut waiter = waiting(&sessions.db, WAIT)?;
    sessions.b.run(&format!("COMMIT PREPARED '{gid}'"))?;
    token_of(&mut waiter)?;
    Ok(())
}
