//! What is documented as not promised, or as a limit: that it is so, and that the advice helps.

use crate::support::test_database::{shows, TestDatabase, ORDERS};
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result};

#[lab_test]
fn a_token_read_from_the_row_passes_among_workers_of_one_role(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    let roles = [db.database().role("worker")?, db.database().role("other")?];
    for role in &roles {
        db.run(&format!("SELECT fence_grant('{role}'); GRANT SELECT, UPDATE ON orders TO {role}"))?;
    }
    let mut holder = db.database().connect_as(&roles[0])?;
    let mut worker = db.database().connect_as(&roles[0])?;
    let mut other = db.database().connect_as(&roles[1])?;
    let token = holder.acquire("order:1", "1 h")?;
    holder.run(&format!("UPDATE orders SET v = 1, fence = {token}"))?;
    let read = worker.granted("SELECT fence FROM orders")?;
    let write = format!("UPDATE orders SET v = 7, fence = {read}");
    let same = "UPDATE orders SET v = 7, fence = fence";
    worker.run(&write)?;
    worker.run(same)?;
    // What helps: not to write the column, roles of their own, strict.
    worker.refused("UPDATE orders SET v = 8", "PF002")?;
    for sql in [&*write, same] {
        other.refused(sql, "42501")?;
    }
    db.protect("lease => 'order:{id}', mode => 'strict'")?;
    for sql in [&*write, same] {
        worker.refused(sql, "PF001")?;
    }
    db.protect("lease => 'order:{id}', mode => 'monotonic'")?;
    holder.release("order:1", token)?.expect("held");
    for sql in [&*write, same] {
        worker.refused(sql, "PF004")?;
    }
    Ok(())
}

#[lab_test]
fn a_statement_that_waits_for_its_grant_reads_what_was_before(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run("CREATE TABLE pair (id int, v int); INSERT INTO pair VALUES (1, 1), (2, 0)")?;
    let mut waiter = Background::connect(&db.database().conninfo())?;
    for (value, apart) in [(10, false), (20, true)] {
        let token = db.acquire("pair", "1 h")?;
        let acquire = "SELECT lease_acquire('pair', wait => '5 min')";
        let take = "UPDATE pair SET v = (SELECT v FROM pair WHERE id = 1)";
        if apart {
            waiter.send(acquire)?;
        } else {
            waiter.send(&format!("{take} WHERE id = 2 AND ({acquire}) > 0"))?;
        }
        pg_test::process::wait_until("it waits", PATIENCE, || {
            waiter.waits_for().is_some_and(|(kind, _)| kind == "Extension")
        })?;
        db.run(&format!(
            "BEGIN; SELECT lease_guard('pair', {token}); UPDATE pair SET v = {value} WHERE id = 1; \
             SELECT lease_release('pair', {token}); COMMIT"
        ))?;
        waiter.rows()?;
        if apart {
            waiter.send(&format!("{take} WHERE id = 2"))?;
            waiter.rows()?;
        }
        let wanted = if apart { value } else { 1 };
        shows(&mut db, "SELECT v FROM pair WHERE id = 2", &wanted.to_string())?;
        db.run("SELECT lease_revoke('pair')")?;
    }
    Ok(())
}

#[lab_test]
fn shared_holders_that_guard_run_between_each_other(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "lease => 'order:{id}'")?;
    let mut other = db.another()?;
    for kind in ["shared => true", "slots => 2"] {
        let acquire = format!("SELECT lease_acquire('order:1', ttl => '1 h', {kind})");
        let (a, b) = (db.granted(&acquire)?, other.granted(&acquire)?);
        let seen = db.granted("SELECT v FROM orders")?;
        db.run(&format!("BEGIN; SELECT lease_guard('order:1', {a})"))?;
        other.run(&format!("BEGIN; SELECT lease_guard('order:1', {b})"))?;
        let read = [db.granted("SELECT v FROM orders")?, other.granted("SELECT v FROM orders")?];
        db.run(&format!("UPDATE orders SET v = {} + 1; COMMIT", read[0]))?;
        other.run(&format!("UPDATE orders SET v = {} + 1; COMMIT", read[1]))?;
        let lost = seen + 1;
        shows(&mut db, "SELECT v FROM orders", &lost.to_string())?;
        db.run("SELECT lease_revoke('order:1')")?;
    }
    Ok(())
}

#[lab_test]
fn names_made_of_texts_may_be_alike(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE t (a text, b text, fence bigint); INSERT INTO t VALUES ('x:y', 'z'), ('x', 'y:z'); \
         SELECT fence_protect('t', lease => '{a}:{b}')",
    )?;
    let token = db.acquire("x:y:z", "1 h")?;
    db.run(&format!("UPDATE t SET fence = {token}"))?;
    shows(&mut db, &format!("SELECT count(*) FROM t WHERE fence = {token}"), "2")
}

#[lab_test]
fn a_role_that_lost_its_rights_writes_until_its_grant_ends(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    db.protect("lease => 'order:{id}'")?;
    let role = db.database().role("worker")?;
    db.run(&format!("SELECT fence_grant('{role}'); GRANT SELECT, UPDATE ON orders TO {role}"))?;
    let mut worker = db.database().connect_as(&role)?;
    let token = worker.acquire("order:1", "1 h")?;
    db.run(&format!("SELECT fence_revoke('{role}')"))?;
    for call in ["renew", "release"] {
        worker.refused(&format!("SELECT lease_{call}('order:1', {token})"), "42501")?;
    }
    let write = format!("UPDATE orders SET v = v + 1, fence = {token}");
    worker.run(&write)?;
    db.run("SELECT lease_revoke('order:1')")?;
    worker.refused(&write, "PF004")?;
    ensure!(db.granted("SELECT v FROM orders")? == 1);
    Ok(())
}

#[lab_test]
fn a_renamed_role_loses_its_leases_to_whoever_gets_the_old_name(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let role = db.database().role("worker")?;
    db.run(&format!("SELECT fence_grant('{role}')"))?;
    let mut worker = db.database().connect_as(&role)?;
    let token = worker.acquire("job", "1 h")?;
    db.run(&format!("ALTER ROLE {role} RENAME TO {role}_renamed"))?;
    // Its names stay with the old name as well, so that it learns nothing of the lease any more.
    ensure!(worker.renew("job", token)?.is_none() && worker.release("job", token)?.is_none());
    worker.refused("SELECT lease_acquire('other')", "42501")?;
    db.run(&format!("CREATE ROLE {role} LOGIN; SELECT fence_grant('{role}')"))?;
    let mut stranger = db.database().connect_as(&role)?;
    ensure!(
        stranger.renew("job", token)?.is_some(),
        "a token is no secret, and the name is the same"
    );
    drop(stranger);
    db.run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))?;
    db.run(&format!("ALTER ROLE {role}_renamed RENAME TO {role}"))?;
    // What helps: to end its leases before.
    db.run(&format!(
        "SELECT lease_revoke(name) FROM fence.leases WHERE role = '{role}' AND state = 'held'"
    ))?;
    db.run(&format!(
        "ALTER ROLE {role} RENAME TO {role}_renamed; SELECT fence_grant('{role}_renamed')"
    ))?;
    let again = worker.acquire("job", "1 h")?;
    ensure!(worker.renew("job", again)?.is_some());
    db.run(&format!("ALTER ROLE {role}_renamed RENAME TO {role}"))
}
