//! The events that wake the head of a queue, and (in wakeup.script) those that do not.

use crate::support::concurrency::{
    is_woken, nothing_is_left, still_wait, token_of, undisturbed_server, waiting, Waiter, WAIT,
};
use pg_test::calls::within_ttl;
use pg_test::{
    ensure, lab_test, Background, Calls, Cluster, Context, Database, Lab, Result, Session,
};
use std::time::Duration;

/// The sessions of a test: two for its script, one to clear up.
struct Sessions {
    db: Database,
    a: Session,
    b: Session,
    c: Session,
    _server: Option<Cluster>,
}

impl Sessions {
    fn new(lab: &Lab) -> Result<Sessions> {
        Sessions::of(lab.database()?, None)
    }

    /// On a server of their own: the ends of other tests' databases wake the waiters on the shared one.
    fn undisturbed(lab: &Lab) -> Result<Sessions> {
        let server = undisturbed_server(lab)?;
        Sessions::of(Database::with_extension(server.conninfo("postgres"))?, Some(server))
    }

    fn of(db: Database, server: Option<Cluster>) -> Result<Sessions> {
        let (a, b, c) = (db.connect()?, db.connect()?, db.connect()?);
        Ok(Sessions { db, a, b, c, _server: server })
    }

    /// Somebody waits for what `before` holds, and `end` wakes the waiter; in each round it is served.
    fn wakes(
        &mut self,
        before: impl Fn(&mut Sessions) -> Result<i64>,
        end: impl Fn(&mut Sessions, i64) -> Result<()>,
    ) -> Result<()> {
        is_woken(|| {
            let token = before(self)?;
            let waiter = Waiter::comes(&self.db, &mut self.c)?;
            end(self, token)?;
            let (next, took) = waiter.served(&mut self.c)?;
            ensure!(next > token, "{next} after {token}");
            self.c.release("job", next)?.expect("held");
            Ok(took)
        })?;
        nothing_is_left(&mut self.c)
    }
}

#[lab_test]
fn a_release_wakes(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::undisturbed(lab)?;
    sessions
        .wakes(|s| s.a.acquire("job", "1 h"), |s, token| s.a.release("job", token).map(drop))?;
    // In a transaction, at its end; by another session; as one of several; in a savepoint.
    sessions.wakes(
        |s| {
            let token = s.a.acquire("job", "1 h")?;
            s.a.run(&format!("BEGIN; SELECT lease_release('job', {token})"))?;
            Ok(token)
        },
        |s, _| s.a.run("COMMIT"),
    )?;
    sessions.wakes(
        |s| s.a.granted("SELECT lease_acquire_all('{x, job, y}', ttl => '1 h')"),
        |s, token| s.b.run(&format!("SELECT lease_release_all('{{y, job, x}}', {token})")),
    )?;
    sessions.wakes(
        |s| {
            let token = s.a.acquire("job", "1 h")?;
            s.a.run("BEGIN; SAVEPOINT s")?;
            s.a.run(&format!("SELECT lease_release('job', {token}); RELEASE s"))?;
            Ok(token)
        },
        |s, _| s.a.run("COMMIT"),
    )
}

#[lab_test]
fn a_revocation_wakes(lab: &Lab) -> Result<()> {
    Sessions::undisturbed(lab)?
        .wakes(|s| s.a.acquire("job", "1 h"), |s, _| s.b.run("SELECT lease_revoke('job')"))
}

#[lab_test]
fn the_end_of_a_grant_that_was_never_committed_wakes(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::undisturbed(lab)?;
    sessions.wakes(
        |s| {
            s.a.run("BEGIN")?;
            s.a.acquire("job", "1 h")
        },
        |s, _| s.a.run("ROLLBACK"),
    )?;
    sessions.wakes(
        |s| {
            s.a.run("BEGIN; SAVEPOINT s")?;
            s.a.acquire("job", "1 h")
        },
        |s, _| s.a.run("ROLLBACK TO s"),
    )?;
    sessions.a.run("COMMIT")?;
    sessions.wakes(
        |s| {
            s.a.run("BEGIN; SAVEPOINT s; SAVEPOINT t")?;
            let token = s.a.granted("SELECT lease_acquire_all('{a, job}', ttl => '1 h')")?;
            s.a.run("RELEASE t")?;
            Ok(token)
        },
        |s, _| s.a.refused("SELECT 1/0", "22012").and_then(|_| s.a.run("ROLLBACK")),
    )?;
    sessions.wakes(
        |s| {
            s.a.run("BEGIN; SAVEPOINT s")?;
            s.a.granted("SELECT lease_acquire('job', shared => true, ttl => '1 h')")
        },
        |s, _| s.a.run("ROLLBACK TO s; ROLLBACK"),
    )
}

#[lab_test]
fn the_end_of_a_guarded_transaction_wakes(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::undisturbed(lab)?;
    let guarded = |s: &mut Sessions| {
        let token = s.a.acquire("job", "1 h")?;
        s.a.run(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
        s.b.granted("SELECT lease_revoke('job')")?;
        Ok(token)
    };
    sessions.wakes(guarded, |s, _| s.a.run("COMMIT"))?;
    sessions.wakes(guarded, |s, _| s.a.run("ROLLBACK"))?;
    sessions.wakes(guarded, |s, _| {
        s.a.refused("SELECT 1/0", "22012")?;
        s.a.run("ROLLBACK")
    })?;
    // The guard goes with its savepoint.
    sessions.wakes(
        |s| {
            let token = s.a.acquire("job", "1 h")?;
            s.a.run("BEGIN; SAVEPOINT s")?;
            s.a.run(&format!("SELECT lease_guard('job', {token})"))?;
            s.b.granted(&format!("SELECT lease_renew('job', {token}, '1 us')"))?;
            s.b.wait_expired("job")?;
            Ok(token)
        },
        |s, _| s.a.run("ROLLBACK TO s"),
    )?;
    sessions.a.run("COMMIT")
}

#[lab_test]
fn the_end_of_a_transaction_guarded_by_a_bound_fence_wakes(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::undisturbed(lab)?;
    sessions.a.run("CREATE TABLE t (n int)")?;
    sessions.a.run("SELECT fence_protect('t', lease => 'job')")?;
    for end in ["COMMIT", "ROLLBACK"] {
        sessions.wakes(
            |s| {
                let token = s.a.acquire("job", "1 h")?;
                s.a.run(&format!("BEGIN; INSERT INTO t (n, fence) VALUES (1, {token})"))?;
                s.b.granted(&format!("SELECT lease_release('job', {token})"))?;
                Ok(token)
            },
            |s, _| s.a.run(end),
        )?;
    }
    Ok(())
}

#[lab_test]
fn the_death_of_a_session_wakes(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::undisturbed(lab)?;
    // One that has acquired, one that guards, one that has released, in open transactions.
    for sql in ["", "lease_guard", "lease_release"] {
        sessions.wakes(
            |s| {
                s.a = s.db.connect()?;
                if sql.is_empty() {
                    s.a.run("BEGIN")?;
                    return s.a.acquire("job", "1 h");
                }
                let token = s.a.acquire("job", "1 h")?;
                s.a.run(&format!("BEGIN; SELECT {sql}('job', {token})"))?;
                // The release is undone, so the lease must come to an end by itself.
                if sql == "lease_guard" {
                    s.b.granted("SELECT lease_revoke('job')")?;
                }
                Ok(token)
            },
            |s, token| {
                let pid = s.a.pid();
                s.b.run(&format!("SELECT pg_terminate_backend({pid})"))?;
                if sql == "lease_release" {
                    ensure!(s.b.release("job", token)?.is_some(), "the dead one's release held");
                }
                Ok(())
            },
        )?;
    }
    Ok(())
}

#[lab_test]
fn expiry_wakes(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::new(lab)?;
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
    let mut sessions = Sessions::new(lab)?;
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
    let mut sessions = Sessions::new(lab)?;
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
fn a_renewal_to_a_sooner_end_wakes(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::undisturbed(lab)?;
    for call in ["lease_renew('job', $, '1 ms')", "lease_renew_all('{job}', $, '1 ms')"] {
        sessions
            .wakes(
                |s| s.a.acquire("job", "1 h"),
                |s, token| s.a.run(&format!("SELECT {}", call.replace('$', &token.to_string()))),
            )
            .context(call)?;
    }
    Ok(())
}

#[lab_test]
fn a_prepared_grant_is_waited_out_and_its_end_noticed(lab: &Lab) -> Result<()> {
    let mut sessions = Sessions::new(lab)?;
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
