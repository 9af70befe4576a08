//! Leaving the queue: cancelled, timed out, terminated, gone. The queue goes on and nothing is left behind. (The extent of
//! what an error undoes: leaving.script.)

use crate::support::c_module;
use crate::support::concurrency::{
    gets_nothing, nothing_is_left, rounds, still_wait, token_of, waiting, with_time_enough, WAIT,
};
use nix::sys::signal::Signal;
use pg_test::process::{is_alive, is_stopped, signal, wait_until, PATIENCE};
use pg_test::{
    ensure, lab_test, Background, Calls, Conninfo, Database, Fault, Lab, Result, Session,
};
use std::time::{Duration, Instant};

/// A lease that is held, and a queue of three of which one leaves.
struct Queue {
    db: Database,
    holder: Session,
    token: i64,
}

impl Queue {
    fn new(lab: &Lab) -> Result<Queue> {
        let db = lab.database()?;
        let mut holder = db.connect()?;
        let token = holder.acquire("job", "1 h")?;
        Ok(Queue { db, holder, token })
    }

    /// One waiter leaves, as the head of the queue, from its middle and from its end; the others are served in
    /// their order. It connects and calls as `comes` says for a wait of so many seconds.
    fn one_leaves(
        &mut self,
        comes: impl Fn(u32) -> (Conninfo, String),
        leave: impl Fn(&mut Background) -> Result<()>,
    ) -> Result<()> {
        for place in 0..3 {
            let (mut leaver, mut stay) =
                with_time_enough(|seconds| self.queue_of_three(place, comes(seconds)))?;
            let drawn = self.holder.last_token()?;
            leave(&mut leaver)?;
            still_wait(&mut stay)?;
            ensure!(self.holder.last_token()? == drawn, "a token was drawn for who left");
            for waiter in &mut stay {
                self.holder.release("job", self.token)?.expect("held");
                self.token = token_of(waiter)?;
            }
            nothing_is_left(&mut self.holder)?;
        }
        Ok(())
    }

    /// A queue of three: the one at this place, and the others; None where that one has left already.
    fn queue_of_three(
        &self,
        place: usize,
        (conninfo, sql): (Conninfo, String),
    ) -> Result<Option<(Background, Vec<Background>)>> {
        let mut others = Vec::new();
        for _ in 0..place {
            others.push(waiting(&self.db, WAIT)?);
        }
        let mut leaver = Background::connect(&conninfo)?;
        leaver.send(&sql)?;
        leaver.blocks_or_ends()?;
        for _ in place..2 {
            others.push(waiting(&self.db, WAIT)?);
        }
        Ok((!leaver.is_finished()).then_some((leaver, others)))
    }
}

/// The setting is what the session connected with.
fn is_as_it_was(session: &mut Background, setting: &str) -> Result<()> {
    let sql =
        format!("SELECT setting = reset_val, setting FROM pg_settings WHERE name = '{setting}'");
    let row = session.run(&sql)?.remove(0);
    ensure!(row[0].as_deref() == Some("t"), "{setting} is {:?} afterwards", row[1]);
    Ok(())
}

/// The session is neither in a failed transaction nor in one at all, and of use.
fn goes_on(session: &mut Background) -> Result<()> {
    session.run("SET statement_timeout = 0; SET lock_timeout = 0")?;
    session.run("VACUUM fence.lease")?;
    session.run("SELECT lease_acquire('job')")?;
    session.run("BEGIN; SAVEPOINT s; RELEASE s; COMMIT").map(drop)
}

/// It would wait for as long as the others.
fn for_long(conninfo: &Conninfo) -> impl Fn(u32) -> (Conninfo, String) + '_ {
    |_| (conninfo.clone(), WAIT.to_owned())
}

#[lab_test]
fn a_cancelled_waiter_leaves_and_its_session_goes_on(lab: &Lab) -> Result<()> {
    let mut queue = Queue::new(lab)?;
    let conninfo = queue.db.conninfo();
    queue.one_leaves(for_long(&conninfo), |waiter| {
        waiter.cancel()?;
        waiter.refused("57014")?;
        goes_on(waiter)
    })
}

#[lab_test]
fn statement_timeout_ends_a_wait(lab: &Lab) -> Result<()> {
    let mut queue = Queue::new(lab)?;
    let conninfo = queue.db.conninfo();
    let comes =
        |seconds| (conninfo.clone().set("statement_timeout", &format!("{seconds}s")), WAIT.into());
    queue.one_leaves(comes, |waiter| {
        waiter.refused("57014")?;
        goes_on(waiter)
    })
}

#[lab_test]
fn a_lock_timeout_shorter_than_the_wait_ends_it(lab: &Lab) -> Result<()> {
    let mut queue = Queue::new(lab)?;
    let conninfo = queue.db.conninfo();
    let comes =
        |seconds| (conninfo.clone().set("lock_timeout", &format!("{seconds}s")), WAIT.into());
    queue.one_leaves(comes, |waiter| {
        waiter.refused("55P03")?;
        is_as_it_was(waiter, "lock_timeout")?;
        goes_on(waiter)
    })
}

#[lab_test]
fn a_lock_timeout_longer_than_the_wait_does_not_matter(lab: &Lab) -> Result<()> {
    let mut queue = Queue::new(lab)?;
    let conninfo = queue.db.conninfo().set("lock_timeout", "1h");
    let call = |seconds| format!("SELECT lease_acquire('job', wait => '{seconds} s')");
    queue.one_leaves(
        |seconds| (conninfo.clone(), call(seconds)),
        |waiter| {
            gets_nothing(waiter)?;
            is_as_it_was(waiter, "lock_timeout")?;
            goes_on(waiter)
        },
    )
}

#[lab_test]
fn a_wait_leaves_the_session_s_lock_timeout_as_it_was(lab: &Lab) -> Result<()> {
    let mut queue = Queue::new(lab)?;
    for (setting, shown) in [("0", "0"), ("30s", "30s"), ("1h", "1h")] {
        // Granted, cancelled and elapsed, at the head and behind it.
        for how in ["granted", "cancelled", "elapsed"] {
            let mut head = waiting(&queue.db, WAIT)?;
            let mut waiter =
                Background::connect(&queue.db.conninfo().set("lock_timeout", setting))?;
            let wait = if how == "elapsed" { "200 ms" } else { "10 min" };
            waiter.send(&format!("SELECT lease_acquire('job', ttl => '1 h', wait => '{wait}')"))?;
            // The short wait may be over before anybody has seen it.
            if how != "elapsed" {
                waiter.wait_until_blocked()?;
            }
            match how {
                "granted" => {
                    queue.holder.release("job", queue.token)?.expect("held");
                    let first = token_of(&mut head)?;
                    queue.holder.release("job", first)?;
                    queue.token = token_of(&mut waiter)?;
                }
                "cancelled" => {
                    waiter.cancel()?;
                    waiter.refused("57014")?;
                }
                _ => gets_nothing(&mut waiter)?,
            }
            let got = waiter.run("SHOW lock_timeout")?[0][0].clone();
            ensure!(got.as_deref() == Some(shown), "{how}: lock_timeout {setting} became {got:?}");
            // And a lock is waited for no longer than it says.
            if setting == "30s" && how == "cancelled" {
                waiter.run("SET lock_timeout = '100 ms'")?;
                let mut locker = queue.db.connect()?;
                locker.run("BEGIN; SELECT pg_advisory_xact_lock(1)")?;
                waiter.send("SELECT pg_advisory_lock(1)")?;
                waiter.refused("55P03")?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn a_terminated_waiter_leaves(lab: &Lab) -> Result<()> {
    let mut queue = Queue::new(lab)?;
    let conninfo = queue.db.conninfo();
    queue.one_leaves(for_long(&conninfo), |waiter| {
        waiter.terminate()?;
        let outcome = waiter.outcome(PATIENCE)?;
        ensure!(outcome.as_ref().is_err_and(Fault::is_disconnect), "{outcome:?}");
        gone(waiter.pid())
    })
}

fn gone(backend: i32) -> Result<()> {
    wait_until("the backend is gone", PATIENCE, || !is_alive(backend))
}

#[lab_test]
fn a_client_that_disconnects_leaves(lab: &Lab) -> Result<()> {
    let mut queue = Queue::new(lab)?;
    // The kernel tells the server of a connection that is closed; only the head is asked to look.
    let mut worker = lab.worker("gone", &queue.db.conninfo())?;
    worker.send(WAIT)?;
    let mut probe = queue.db.connect()?;
    let waits = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = {} AND wait_event_type = 'Extension'",
        worker.backend()
    );
    wait_until("it waits", PATIENCE, || probe.granted(&waits).unwrap_or(0) == 1)?;
    let mut next = waiting(&queue.db, WAIT)?;
    worker.kill()?;
    gone(worker.backend())?;
    still_wait([&mut next])?;
    queue.holder.release("job", queue.token)?;
    token_of(&mut next)?;
    nothing_is_left(&mut queue.holder)
}

#[lab_test]
fn a_killed_client_leaves_at_once_where_the_server_checks_its_connection(lab: &Lab) -> Result<()> {
    let mut queue = Queue::new(lab)?;
    let conninfo = queue.db.conninfo().set("client_connection_check_interval", "100ms");
    let head = waiting(&queue.db, WAIT)?;
    let mut worker = lab.worker("gone", &conninfo)?;
    worker.send(WAIT)?;
    blocked(&mut queue.holder, worker.backend())?;
    worker.kill()?;
    // Though it is not the head and nobody has released anything.
    gone(worker.backend())?;
    drop(head);
    nothing_is_left(&mut queue.holder)
}

/// Waits until the backend waits for a lock.
fn blocked(session: &mut Session, backend: i32) -> Result<()> {
    let waits = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = {backend} AND wait_event_type = 'Lock'"
    );
    wait_until("it waits", PATIENCE, || session.granted(&waits).unwrap_or(0) == 1)
}

#[lab_test]
fn a_killed_client_is_granted_nothing(lab: &Lab) -> Result<()> {
    let mut queue = Queue::new(lab)?;
    let mut head = waiting(&queue.db, WAIT)?;
    let mut dead = Vec::new();
    for name in ["one", "two"] {
        let mut worker = lab.worker(name, &queue.db.conninfo())?;
        let session = name == "two";
        let call =
            format!("SELECT lease_acquire('job', '{name}', '1 h', '10 min', session => {session})");
        worker.send(&call)?;
        blocked(&mut queue.holder, worker.backend())?;
        dead.push(worker);
    }
    let mut last = waiting(&queue.db, WAIT)?;
    for worker in &mut dead {
        worker.kill()?;
    }
    queue.holder.release("job", queue.token)?;
    let token = token_of(&mut head)?;
    let closing = queue.holder.release("job", token)?.expect("held");
    // The next token drawn is that of the last in the queue: nobody between was granted anything.
    let next = token_of(&mut last)?;
    ensure!(next == closing + 1, "{} tokens between", next - closing - 1);
    for worker in &dead {
        gone(worker.backend())?;
    }
    nothing_is_left(&mut queue.holder)
}

const BY_TIMEOUT: &str = "canceling statement due to statement timeout";
const BY_USER: &str = "canceling statement due to user request";

/// The work after the wait takes longer than the test has patience with.
fn then_goes_on(wait: &str) -> String {
    format!("SELECT lease_acquire('job', wait => '{wait}'), pg_sleep(600)")
}

/// The statement ends with that cancel, and the session goes on.
fn is_cancelled(session: &mut Background, message: &str) -> Result<()> {
    let fault = session.refused("57014")?;
    ensure!(fault.message == message, "{}", fault.message);
    // Once: nothing is left of it for what comes next.
    session.run("SET statement_timeout = 0; SELECT pg_sleep(0.01)").map(drop)
}

#[lab_test]
fn a_statement_timeout_that_is_due_with_the_wait_is_not_lost(lab: &Lab) -> Result<()> {
    let queue = Queue::new(lab)?;
    let connect = || Background::connect(&queue.db.conninfo());
    let mut waiters = (0..6).map(|_| connect()).collect::<Result<Vec<_>>>()?;
    for head in [true, false] {
        // Without it, one of the others is the head.
        let _head = (!head).then(|| waiting(&queue.db, WAIT)).transpose()?;
        for _ in 0..rounds(15) {
            for session in &mut waiters {
                session.run("SET statement_timeout = '300 ms'")?;
                session.send(&then_goes_on("300 ms"))?;
            }
            for session in &mut waiters {
                is_cancelled(session, BY_TIMEOUT)?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn a_cancel_that_comes_when_the_wait_ends_is_not_lost(lab: &Lab) -> Result<()> {
    const WAIT_MS: i64 = 300;
    let queue = Queue::new(lab)?;
    let connect = || Background::connect(&queue.db.conninfo());
    let mut waiters = (0..5).map(|_| connect()).collect::<Result<Vec<_>>>()?;
    let mut cancellers = (0..5).map(|_| connect()).collect::<Result<Vec<_>>>()?;
    let _head = waiting(&queue.db, WAIT)?;
    for round in 0..rounds(24) {
        for session in &mut waiters {
            session.send(&then_goes_on(&format!("{WAIT_MS} ms")))?;
        }
        for (n, session) in waiters.iter_mut().enumerate() {
            // From now on it is this statement that is cancelled.
            wait_until("it waits", PATIENCE, || session.waits_for().is_some())?;
            // Each round a little later: from two milliseconds before to four after.
            let at_us = 1_000 * (WAIT_MS - 2) + 250 * (round % 24) + 50 * i64::try_from(n)?;
            cancellers[n].send(&format!(
                "SELECT pg_sleep(extract(epoch FROM query_start - clock_timestamp()) \
                 + {at_us} / 1e6), pg_cancel_backend(pid) FROM pg_stat_activity WHERE pid = {}",
                session.pid()
            ))?;
        }
        for (session, canceller) in waiters.iter_mut().zip(&mut cancellers) {
            canceller.rows()?;
            is_cancelled(session, BY_USER)?;
        }
    }
    Ok(())
}

/// The signals of a backend that was without a processor until all of them had come, as on a busy machine.
#[lab_test]
fn what_comes_together_with_the_end_of_a_wait_counts(lab: &Lab) -> Result<()> {
    let queue = Queue::new(lab)?;
    for head in [true, false] {
        let _head = (!head).then(|| waiting(&queue.db, WAIT)).transpose()?;
        for (setting, cancelled, expected) in [
            ("statement_timeout", false, Some(BY_TIMEOUT)),
            ("none", true, Some(BY_USER)),
            ("statement_timeout", true, Some(BY_TIMEOUT)),
            ("none", false, None),
        ] {
            for _ in 0..rounds(2) {
                let mut waiter = frozen_over_its_wait(&queue.db, setting, cancelled)?;
                match expected {
                    Some(message) => is_cancelled(&mut waiter, message)?,
                    None => gets_nothing(&mut waiter)?,
                }
            }
        }
    }
    Ok(())
}

/// One that waits for a second or more, and is frozen until that is over. It has that setting for as long, and is
/// cancelled while it is frozen.
fn frozen_over_its_wait(db: &Database, setting: &str, cancelled: bool) -> Result<Background> {
    with_time_enough(|seconds| {
        let mut waiter = Background::connect(&db.conninfo())?;
        if setting != "none" {
            waiter.run(&format!("SET {setting} = '{seconds} s'"))?;
        }
        // A statement that is to be ended would go on for long; another, for an instant.
        let then = if cancelled || setting != "none" { 600.0 } else { 0.2 };
        let (sent, span) = (Instant::now(), Duration::from_secs(seconds.into()));
        waiter.send(&format!(
            "SELECT lease_acquire('job', wait => '{seconds} s'), pg_sleep({then})"
        ))?;
        wait_until("it waits", PATIENCE, || waiter.waits_for().is_some())?;
        let pid = waiter.pid();
        signal(pid, Signal::SIGSTOP)?;
        let frozen = wait_until("it is frozen", PATIENCE, || is_stopped(pid));
        let in_time = sent.elapsed() < span;
        if frozen.is_ok() && in_time {
            if cancelled {
                waiter.cancel()?;
            }
            std::thread::sleep(span + Duration::from_millis(100));
        }
        signal(pid, Signal::SIGCONT)?;
        frozen.map(|()| in_time.then_some(waiter))
    })
}

/// Another extension, which handles SIGINT before Postgres does, and wants to know its sender.
const HANDLES_SIGINT: &str = r#"
#include "postgres.h"
#include "fmgr.h"
#include <signal.h>

PG_MODULE_MAGIC;
PG_FUNCTION_INFO_V1(handle_sigint);
PG_FUNCTION_INFO_V1(sender_of_sigint);

static struct sigaction before;
static volatile int sender;

static void
handle(int number, siginfo_t *info, void *context)
{
    sender = info->si_pid;
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else
        before.sa_handler(number);
}

Datum
handle_sigint(PG_FUNCTION_ARGS)
{
    struct sigaction own;

    sigaction(SIGINT, NULL, &before);
    own = before;
    own.sa_sigaction = handle;
    own.sa_flags |= SA_SIGINFO;
    sigaddset(&own.sa_mask, SIGUSR2);
    sigaction(SIGINT, &own, NULL);
    PG_RETURN_VOID();
}

/* NULL where the handler is no longer as it was installed. */
Datum
sender_of_sigint(PG_FUNCTION_ARGS)
{
    struct sigaction now;

    sigaction(SIGINT, NULL, &now);
    if (now.sa_sigaction != handle || !(now.sa_flags & SA_SIGINFO)
        || !sigismember(&now.sa_mask, SIGUSR2))
        PG_RETURN_NULL();
    PG_RETURN_INT32(sender);
}
"#;

#[lab_test]
fn a_wait_leaves_another_extension_s_handler_of_cancels_as_it_was(lab: &Lab) -> Result<()> {
    let library = c_module::build(lab, "handles_sigint", HANDLES_SIGINT)?;
    let queue = Queue::new(lab)?;
    let (mut admin, _head) = (queue.db.connect()?, waiting(&queue.db, WAIT)?);
    for (function, answer) in [("handle_sigint", "void"), ("sender_of_sigint", "int")] {
        admin.run(&format!(
            "CREATE FUNCTION {function}() RETURNS {answer} LANGUAGE c AS '{}'",
            library.display()
        ))?;
    }
    let mut waiter = Background::connect(&queue.db.conninfo())?;
    waiter.run("SELECT handle_sigint()")?;
    let sender = |waiter: &mut Background| -> Result<Option<String>> {
        Ok(waiter.run("SELECT sender_of_sigint()")?[0][0].clone())
    };
    waiter.run("SELECT lease_acquire('job', wait => '10 ms')")?;
    ensure!(sender(&mut waiter)?.as_deref() == Some("0"), "after a wait that was over");
    // It is told while somebody waits, and afterwards.
    for statement in [WAIT, "SELECT pg_sleep(600)"] {
        waiter.send(statement)?;
        wait_until("it waits", PATIENCE, || waiter.waits_for().is_some())?;
        admin.run(&format!("SELECT pg_cancel_backend({})", waiter.pid()))?;
        is_cancelled(&mut waiter, BY_USER)?;
        let told = sender(&mut waiter)?;
        ensure!(told == Some(admin.pid().to_string()), "{statement}: {told:?}");
    }
    Ok(())
}

#[lab_test]
fn an_extension_that_is_dropped_under_a_waiter_is_told_as_such(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut admin, mut guard) = (db.connect()?, db.connect()?);
    let token = admin.acquire("job", "1 h")?;
    admin.run("SELECT lease_adopt('adopted', 5)")?;
    // A guard keeps no lock on the state.
    guard.run("BEGIN; SELECT lease_guard('adopted', 5)")?;
    let mut waiters = Vec::new();
    for call in [WAIT, WAIT, "SELECT lease_adopt('adopted', 7, wait => '10 min')"] {
        waiters.push(waiting(&db, call)?);
    }
    admin.run("BEGIN; DROP EXTENSION pg_fence")?;
    // These come while it is being dropped.
    for call in [
        "SELECT lease_acquire('new')".to_owned(),
        format!("SELECT lease_renew('job', {token})"),
        format!("SELECT lease_release('job', {token})"),
        format!("SELECT lease_guard('job', {token})"),
        format!("SELECT lease_check('job', {token})"),
        "SELECT lease_revoke('job')".to_owned(),
        "SELECT lease_prune()".to_owned(),
        "SELECT lease_adopt('adopted', 9)".to_owned(),
        "SELECT lease_acquire_all('{a,b}')".to_owned(),
        "SELECT fence_status()".to_owned(),
        "SELECT fence_new_epoch()".to_owned(),
    ] {
        let mut session = Background::connect(&db.conninfo())?;
        session.send(&call)?;
        ensure!(session.blocks_or_ends()?, "{call} does not wait: {:?}", session.outcome(PATIENCE));
        waiters.push(session);
    }
    admin.run("COMMIT")?;
    guard.run("COMMIT")?;
    for waiter in &mut waiters {
        waiter.refused("55000")?;
        waiter.run("SELECT 1")?;
    }
    Ok(())
}
