//! News of newer versions of PostgreSQL, and how leases and fences get on with them. The rest is in newer_versions.script.

use pg_test::process::PATIENCE;
use pg_test::{bail, ensure, lab_test, Background, Calls, Lab, Result};

#[lab_test(from = 17)]
fn transaction_timeout_ends_a_guarded_transaction_that_goes_on_and_on(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut other = db.connect()?;
    other.run("CREATE TABLE totals (n int); INSERT INTO totals VALUES (0)")?;
    let mut busy = db.conninfo().set("transaction_timeout", "3s").connect()?;
    let token = busy.acquire("job", "1 h")?;
    busy.run(&format!("BEGIN; SELECT lease_guard('job', {token}); UPDATE totals SET n = 1"))?;
    other.expire_now("job", token)?;
    // Neither silent nor long at one statement: no other timeout would ever end it.
    let fault = (0..1_000).find_map(|_| busy.try_rows("SELECT pg_sleep(0.05)").err());
    let Some(fault) = fault else { bail!("the transaction goes on") };
    // Between two statements the client does not get to read why.
    ensure!(fault.sqlstate == "25P04" || fault.is_disconnect(), "{fault}");
    ensure!(lab.cluster().log()?.contains("connection due to transaction timeout"));
    other.granted("SELECT lease_acquire('job', wait => '60 s')")?;
    ensure!(other.one::<i32>("SELECT n FROM totals", &[])? == 0, "it was committed");
    Ok(())
}

#[lab_test(from = 17)]
fn transaction_timeout_ends_a_wait_in_the_queue_and_leaves_nothing_behind(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let token = holder.acquire("job", "1 h")?;
    let mut impatient = Background::connect(&db.conninfo().set("transaction_timeout", "1s"))?;
    impatient.send("SELECT lease_acquire('job', wait => '1 h')")?;
    impatient.wait_until_blocked()?;
    let mut patient = Background::connect(&db.conninfo())?;
    patient.send("SELECT lease_acquire('job', wait => '1 h')")?;
    match impatient.outcome(PATIENCE)? {
        // A client that reads late may only see that the connection is closed.
        Err(fault) => ensure!(fault.sqlstate == "25P04" || fault.is_disconnect(), "{fault}"),
        Ok(rows) => bail!("it was granted what is taken: {rows:?}"),
    }
    let (log, session) = (lab.cluster().log()?, format!("[{}]", impatient.pid()));
    let why = |line: &str| line.contains(&session) && line.contains("due to transaction timeout");
    ensure!(log.lines().any(why), "it ended by something else");
    holder.release("job", token)?;
    patient.outcome(PATIENCE)??;
    Ok(())
}

#[lab_test(from = 19)]
fn a_conflict_that_is_only_read_is_an_insert_s_to_refuse_and_writes_nothing(
    lab: &Lab,
) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint);
         INSERT INTO orders VALUES (1, 0);
         SELECT fence_protect('orders', lease => 'order:{id}')",
    )?;
    let token = session.acquire("order:1", "1 h")?;
    session.run(&format!("UPDATE orders SET v = 1, fence = {token}"))?;
    let insert = |fence: &str, lock: &str| {
        format!(
            "INSERT INTO orders VALUES (1, 9, {fence}) ON CONFLICT (id) DO SELECT {lock} RETURNING v, fence"
        )
    };
    let version = "SELECT ctid::text FROM orders";
    let before = session.text(version)?;
    for lock in ["", "FOR UPDATE"] {
        // The row that might be inserted is judged first, as it is before any other ON CONFLICT.
        session.refused(&insert("NULL", lock), "PF002")?;
        let rows = session.rows(&insert(&token.to_string(), lock))?;
        ensure!(rows == [[Some("1".to_owned()), Some(token.to_string())]], "{lock}: {rows:?}");
    }
    ensure!(session.text(version)? == before, "it has written");
    Ok(())
}

#[lab_test(from = 19)]
fn a_fence_that_copy_cannot_read_is_none(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint);
         CREATE TABLE drafts (LIKE orders INCLUDING ALL);
         SELECT fence_protect('orders', lease => 'order:{id}'),
                fence_protect('drafts', lease => 'order:{id}', mode => 'managed')",
    )?;
    let copy = |table: &str, fence: &str| {
        format!("COPY {table} FROM PROGRAM 'printf \"1\\t2\\t{fence}\\n\"' (ON_ERROR SET_NULL)")
    };
    let token = session.acquire("order:1", "1 h")?;
    session.refused(&copy("orders", "abc"), "PF002")?;
    // Of another column it is of no concern; a managed one takes the token that is presented anyway.
    session.run(&format!("SET pg_fence.token = {token}"))?;
    for table in ["orders", "drafts"] {
        session.run(&copy(table, "abc"))?;
        ensure!(
            session.one::<i64>(&format!("SELECT fence FROM {table}"), &[])? == token,
            "{table}"
        );
    }
    Ok(())
}
