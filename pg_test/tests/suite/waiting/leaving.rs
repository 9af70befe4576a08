//! Leaving the queue at the moment at which the wait ends. The rest is in leaving.script.

use crate::support::c_module;
use crate::support::concurrency::{WAIT, rounds, waiting};
use pg_test::process::{PATIENCE, wait_until};
use pg_test::{Background, Calls, Database, Harness, Result, ensure, harness_test};

/// Creates a database in which the lease is held.
fn held(harness: &Harness) -> Result<Database> {
    let db = harness.database()?;
    db.connect()?.acquire("job", "1 h")?;
    Ok(db)
}

const BY_TIMEOUT: &str = "canceling statement due to statement timeout";
const BY_USER: &str = "canceling statement due to user request";

/// Returns a statement whose work after the wait takes longer than the test's patience.
fn then_goes_on(wait: &str) -> String {
    format!("SELECT lease_acquire('job', wait => '{wait}'), pg_sleep(600)")
}

/// Checks that the statement ends with that cancel, and that the session continues.
fn is_cancelled(session: &mut Background, message: &str) -> Result<()> {
    let fault = session.refused("57014")?;
    ensure!(fault.message == message, "{}", fault.message);
    // The cancel has one effect only: the next statement is not cancelled.
    session.run("SET statement_timeout = 0; SELECT pg_sleep(0.01)").map(drop)
}

#[harness_test]
fn a_statement_timeout_that_is_due_with_the_wait_is_not_lost(harness: &Harness) -> Result<()> {
    let db = held(harness)?;
    let connect = || Background::connect(&db.conninfo());
    let mut waiters = (0..6).map(|_| connect()).collect::<Result<Vec<_>>>()?;
    for head in [true, false] {
        // Without this one, one of the others is the head of the queue.
        let _head = (!head).then(|| waiting(&db, WAIT)).transpose()?;
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

#[harness_test]
fn a_cancel_that_comes_when_the_wait_ends_is_not_lost(harness: &Harness) -> Result<()> {
    const WAIT_MS: i64 = 300;
    let db = held(harness)?;
    let connect = || Background::connect(&db.conninfo());
    let mut waiters = (0..5).map(|_| connect()).collect::<Result<Vec<_>>>()?;
    let mut cancellers = (0..5).map(|_| connect()).collect::<Result<Vec<_>>>()?;
    let _head = waiting(&db, WAIT)?;
    for round in 0..rounds(24) {
        for session in &mut waiters {
            session.send(&then_goes_on(&format!("{WAIT_MS} ms")))?;
        }
        for (n, session) in waiters.iter_mut().enumerate() {
            // From now on a cancel hits this statement.
            wait_until("it waits", PATIENCE, || session.waits_for().is_some())?;
            // Each round is a little later: from two milliseconds before the end of the wait to four after it.
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

/// An extension that handles SIGINT before PostgreSQL does, and records the sender.
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

#[harness_test]
fn a_wait_leaves_another_extension_s_handler_of_cancels_as_it_was(harness: &Harness) -> Result<()> {
    let library = c_module::build(harness, "handles_sigint", HANDLES_SIGINT)?;
    let db = held(harness)?;
    let (mut admin, _head) = (db.connect()?, waiting(&db, WAIT)?);
    for (function, answer) in [("handle_sigint", "void"), ("sender_of_sigint", "int")] {
        admin.run(&format!(
            "CREATE FUNCTION {function}() RETURNS {answer} LANGUAGE c AS '{}'",
            library.display()
        ))?;
    }
    let mut waiter = Background::connect(&db.conninfo())?;
    waiter.run("SELECT handle_sigint()")?;
    let sender = |waiter: &mut Background| -> Result<Option<String>> {
        Ok(waiter.run("SELECT sender_of_sigint()")?[0][0].clone())
    };
    waiter.run("SELECT lease_acquire('job', wait => '10 ms')")?;
    ensure!(sender(&mut waiter)?.as_deref() == Some("0"), "after a wait that was over");
    // It records the sender during a wait, and afterwards.
    for statement in [WAIT, "SELECT pg_sleep(600)"] {
        waiter.send(statement)?;
        wait_until("it waits", PATIENCE, || waiter.waits_for().is_some())?;
        admin.run(&format!("SELECT pg_cancel_backend({})", waiter.pid()))?;
        is_cancelled(&mut waiter, BY_USER)?;
        let got = sender(&mut waiter)?;
        ensure!(got == Some(admin.pid().to_string()), "{statement}: {got:?}");
    }
    Ok(())
}
