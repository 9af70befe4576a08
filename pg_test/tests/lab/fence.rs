//! The trigger: what a write presents, and what comes of it.

automod::dir!(pub "tests/lab/fence");

use crate::support::test_database::{shows, TestDatabase, ROW};
use pg_test::{ensure, lab_test, Lab, Result};

const HUGE: i64 = 1 << 60;

/// A database whose only row has the second of four tokens.
fn with_four_tokens(lab: &Lab, arguments: &str) -> Result<(TestDatabase, [i64; 4])> {
    let mut db = TestDatabase::orders(lab, arguments)?;
    let tokens = [db.token()?, db.token()?, db.token()?, db.token()?];
    db.run(&format!("UPDATE orders SET fence = {}", tokens[1]))?;
    Ok((db, tokens))
}

fn set(token: i64) -> String {
    format!("SET LOCAL pg_fence.token = '{token}'; ")
}

#[lab_test]
fn an_update_is_judged_by_what_it_presents(lab: &Lab) -> Result<()> {
    for mode in ["strict", "monotonic"] {
        let (mut db, [a, b, c, d]) = with_four_tokens(lab, &format!("mode => '{mode}'"))?;
        let only_monotonic =
            |landed: String| if mode == "strict" { "PF001".to_owned() } else { landed };
        let update = |columns: &str| format!("UPDATE orders SET {columns} WHERE id = 1");
        let cases = [
            // The column comes first, where it differs.
            (update(&format!("v = 7, fence = {c}")), format!("7|{c}")),
            (update(&format!("v = 7, fence = {a}")), "PF001".into()),
            (update("v = 7, fence = NULL"), "PF002".into()),
            (update(&format!("v = 7, fence = {}", d + 1)), "PF003".into()),
            (update(&format!("v = 7, fence = {d}")), format!("7|{d}")),
            (update("v = 7, fence = 0"), "PF003".into()),
            (update("v = 7, fence = -1"), "PF003".into()),
            (update(&format!("v = 7, fence = {}", i64::MAX)), "PF003".into()),
            (update(&format!("v = 7, fence = {}", i64::MIN)), "PF003".into()),
            // An equal value that the statement names.
            (update(&format!("v = 7, fence = {b}")), only_monotonic(format!("7|{b}"))),
            (update("v = 7, fence = fence"), only_monotonic(format!("7|{b}"))),
            // Nothing at all.
            (update("v = 7"), "PF002".into()),
            // The setting, which is stamped.
            (set(c) + &update("v = 7"), format!("7|{c}")),
            (set(c) + &update("v = 7, fence = fence"), format!("7|{c}")),
            (set(b) + &update("v = 7"), only_monotonic(format!("7|{b}"))),
            (set(b) + &update("v = 7, fence = fence"), only_monotonic(format!("7|{b}"))),
            (set(a) + &update("v = 7"), "PF001".into()),
            (set(a) + &update("v = 7, fence = fence"), "PF001".into()),
            (set(HUGE) + &update("v = 7"), "PF003".into()),
            // Both: the column wins, for better or worse.
            (set(a) + &update(&format!("v = 7, fence = {c}")), format!("7|{c}")),
            (set(c) + &update(&format!("v = 7, fence = {a}")), "PF001".into()),
            (set(c) + &update("v = 7, fence = NULL"), "PF002".into()),
            (set(HUGE) + &update(&format!("v = 7, fence = {c}")), format!("7|{c}")),
        ];
        for (sql, wanted) in cases {
            db.comes_to(&sql, ROW, &wanted)?;
        }
        shows(&mut db, ROW, &format!("0|{b}"))?;
    }
    Ok(())
}

#[lab_test]
fn a_delete_presents_the_setting(lab: &Lab) -> Result<()> {
    for mode in ["strict", "monotonic"] {
        let (mut db, [a, b, c, _]) = with_four_tokens(lab, &format!("mode => '{mode}'"))?;
        let delete = "DELETE FROM orders WHERE id = 1";
        let count = "SELECT count(*) FROM orders";
        db.comes_to(delete, count, "PF002")?;
        db.comes_to(&(set(a) + delete), count, "PF001")?;
        db.comes_to(&(set(b) + delete), count, if mode == "strict" { "PF001" } else { "0" })?;
        db.comes_to(&(set(c) + delete), count, "0")?;
        db.comes_to(&(set(HUGE) + delete), count, "PF003")?;
    }
    Ok(())
}

#[lab_test]
fn an_insert_is_judged_where_it_is_fenced(lab: &Lab) -> Result<()> {
    let (mut db, [a, _, c, d]) = with_four_tokens(lab, "")?;
    let row = "SELECT v, fence FROM orders WHERE id = 2";
    let insert = |fence: &str| format!("INSERT INTO orders VALUES (2, 7, {fence})");
    db.comes_to(&insert("NULL"), row, "7|-")?;
    db.protect("events => 'insert,update'")?;
    db.comes_to(&insert("NULL"), row, "PF002")?;
    db.comes_to("INSERT INTO orders (id, v) VALUES (2, 7)", row, "PF002")?;
    db.comes_to(&insert(&a.to_string()), row, &format!("7|{a}"))?;
    db.comes_to(&insert(&(d + 1).to_string()), row, "PF003")?;
    db.comes_to(&insert("0"), row, "PF003")?;
    db.comes_to(&(set(c) + &insert("NULL")), row, &format!("7|{c}"))?;
    db.comes_to(&(set(c) + &insert("DEFAULT")), row, &format!("7|{c}"))?;
    db.comes_to(&(set(c) + &insert(&a.to_string())), row, &format!("7|{a}"))?;
    db.comes_to(&(set(HUGE) + &insert("NULL")), row, "PF003")
}

#[lab_test]
fn a_row_without_a_token_accepts_any_issued_one(lab: &Lab) -> Result<()> {
    for mode in ["strict", "monotonic"] {
        let mut db = TestDatabase::orders(lab, &format!("mode => '{mode}'"))?;
        let (a, b) = (db.token()?, db.token()?);
        db.comes_to(&format!("UPDATE orders SET v = 7, fence = {a}"), ROW, &format!("7|{a}"))?;
        db.comes_to(&(set(b) + "UPDATE orders SET v = 7"), ROW, &format!("7|{b}"))?;
        db.comes_to(&(set(a) + "DELETE FROM orders"), ROW, "")?;
        db.comes_to("UPDATE orders SET v = 7", ROW, "PF002")?;
        db.comes_to("UPDATE orders SET v = 7, fence = NULL", ROW, "PF002")?;
        db.comes_to("DELETE FROM orders", ROW, "PF002")?;
        db.comes_to(&format!("UPDATE orders SET v = 7, fence = {HUGE}"), ROW, "PF003")?;
    }
    Ok(())
}

#[lab_test]
fn truncate_is_refused(lab: &Lab) -> Result<()> {
    let (mut db, [.., c, _]) = with_four_tokens(lab, "")?;
    db.run(
        "CREATE TABLE head (id int PRIMARY KEY); INSERT INTO head VALUES (1); \
         ALTER TABLE orders ADD FOREIGN KEY (id) REFERENCES head",
    )?;
    db.comes_to("TRUNCATE orders", ROW, "PF005")?;
    db.comes_to(&(set(c) + "TRUNCATE orders"), ROW, "PF005")?;
    db.comes_to("TRUNCATE head CASCADE", ROW, "PF005")?;
    db.comes_to("TRUNCATE head, orders RESTART IDENTITY", ROW, "PF005")?;
    // As the hint says, the owner can.
    let owner = "SELECT fence_unprotect('orders'); TRUNCATE orders; SELECT fence_protect('orders')";
    db.comes_to(owner, "SELECT count(*) FROM orders", "0")?;
    db.run("SET session_replication_role = replica")?;
    db.comes_to("TRUNCATE orders", "SELECT count(*) FROM orders", "0")
}

#[lab_test]
fn a_token_never_issued_leaves_the_row_writable(lab: &Lab) -> Result<()> {
    let (mut db, [_, b, c, _]) = with_four_tokens(lab, "events => 'insert,update,delete'")?;
    db.refused(&format!("UPDATE orders SET fence = {HUGE}"), "PF003")?;
    db.refused(&format!("INSERT INTO orders VALUES (2, 0, {HUGE})"), "PF003")?;
    shows(&mut db, "TABLE orders", &format!("1|0|{b}"))?;
    db.run(&format!("UPDATE orders SET v = 7, fence = {c}"))?;
    db.run(&format!("INSERT INTO orders VALUES (2, 0, {c})"))?;
    // What was never issued then is issued in its turn, and known at once to every session.
    let mut other = db.another()?;
    other.refused(&format!("UPDATE orders SET fence = {}", c + 2), "PF003")?;
    let next = db.token()?;
    ensure!(next == c + 2);
    other.run(&format!("UPDATE orders SET fence = {next}"))
}

#[lab_test]
fn one_holder_writes_a_strict_row_again_by_renewing(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let first = db.grant("order:1")?;
    db.run(&format!("UPDATE orders SET v = 1, fence = {first}"))?;
    db.refused(&format!("UPDATE orders SET v = 2, fence = {first}"), "PF001")?;
    db.run(&format!("UPDATE orders SET v = 2, fence = lease_renew('order:1', {first})"))?;
    db.run(&format!("UPDATE orders SET v = 3, fence = lease_release('order:1', {first})"))?;
    shows(&mut db, ROW, &format!("3|{}", first + 2))
}

#[lab_test]
fn a_null_hints_at_a_lost_lease(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::orders(lab, "")?;
    let lost = db.grant("order:1")?;
    let held = db.take_over("order:1")?;
    db.run(&format!("UPDATE orders SET fence = {held}"))?;
    for call in ["lease_renew", "lease_release"] {
        let sql = format!("UPDATE orders SET v = 7, fence = {call}('order:1', {lost})");
        let fault = db.refused(&sql, "PF002")?;
        let hint = fault.hint.as_deref().unwrap_or_default();
        ensure!(hint.contains("lease_renew") && hint.contains("lease_release"), "{fault}");
    }
    shows(&mut db, ROW, &format!("0|{held}"))
}

#[lab_test]
fn a_refused_row_refuses_its_whole_statement(lab: &Lab) -> Result<()> {
    let (mut db, [_, b, c, d]) = with_four_tokens(lab, "")?;
    db.run("INSERT INTO orders SELECT n FROM generate_series(2, 200) AS n")?;
    db.run(&format!("UPDATE orders SET fence = {d} WHERE id = 120"))?;
    let before = "SELECT count(*), sum(v), count(fence), max(fence) FROM orders";
    let all = format!("200|0|2|{d}");
    shows(&mut db, before, &all)?;
    for sql in [
        format!("UPDATE orders SET v = 7, fence = {c}"),
        format!("SET pg_fence.token = '{c}'; UPDATE orders SET v = 7; RESET pg_fence.token"),
        format!("SET pg_fence.token = '{c}'; DELETE FROM orders; RESET pg_fence.token"),
        format!("UPDATE orders SET v = 7, fence = {c} WHERE id > 100 RETURNING id"),
    ] {
        db.refused(&sql, "PF001")?;
        shows(&mut db, before, &all)?;
    }
    db.run(&format!("UPDATE orders SET v = 7, fence = {c} WHERE id <> 120"))?;
    shows(
        &mut db,
        "SELECT fence, count(*) FROM orders GROUP BY 1 ORDER BY 1",
        &format!("{c}|199 {d}|1"),
    )?;
    ensure!(b < c);
    Ok(())
}

#[lab_test]
fn under_replica_a_trigger_that_always_fires_checks_the_order_only(lab: &Lab) -> Result<()> {
    for mode in ["strict", "monotonic"] {
        let arguments =
            format!("mode => '{mode}', events => 'insert,update,delete', always => true");
        let (mut db, [a, b, c, _]) = with_four_tokens(lab, &arguments)?;
        db.run("SET session_replication_role = replica")?;
        let update = |fence: &str| format!("UPDATE orders SET v = 7, fence = {fence}");
        db.comes_to(&update(&c.to_string()), ROW, &format!("7|{c}"))?;
        db.comes_to(&update(&a.to_string()), ROW, "PF001")?;
        db.comes_to(&(set(c) + &update(&a.to_string())), ROW, "PF001")?;
        // The subscriber's sequence knows nothing of the publisher's tokens.
        db.comes_to(&update(&HUGE.to_string()), ROW, &format!("7|{HUGE}"))?;
        let equal = if mode == "strict" { "PF001".to_owned() } else { format!("7|{b}") };
        db.comes_to(&update(&b.to_string()), ROW, &equal)?;
        db.comes_to("DELETE FROM orders", ROW, "")?;
        let second = "SELECT fence FROM orders WHERE id = 2";
        db.comes_to(
            &format!("INSERT INTO orders VALUES (2, 7, {HUGE})"),
            second,
            &HUGE.to_string(),
        )?;
        db.comes_to("INSERT INTO orders VALUES (2, 7)", second, "-")?;
        // No setting is stamped there.
        db.comes_to(&(set(c) + "INSERT INTO orders VALUES (2, 7)"), second, "-")?;
    }
    Ok(())
}
