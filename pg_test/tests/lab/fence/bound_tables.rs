//! Tables bound to their lease: which lease a row has, and which tokens may write it.

use crate::support::set_if_known;
use crate::support::test_database::{bound, shows, TestDatabase, ORDERS, ROW};
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Lab, Result};

#[lab_test]
fn a_lease_is_named_by_columns_of_the_types_that_the_readme_names(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    let foreign = db.token()?;
    for (kind, value) in [
        ("smallint", "-32768"),
        ("integer", "-2147483648"),
        ("integer", "0"),
        ("bigint", "9223372036854775807"),
        ("text", "Ünï – 'quoted' \"x\" {y}"),
        ("text", " padded "),
        ("text", ""),
        ("varchar", "plain"),
        ("varchar(8)", "end  "),
        ("uuid", "00112233-4455-6677-8899-aabbccddeeff"),
        ("boolean", "true"),
        ("boolean", "false"),
    ] {
        let text = value.replace('\'', "''");
        db.run(&format!(
            "DROP TABLE IF EXISTS t; CREATE TABLE t (k {kind}, v int, fence bigint); \
             INSERT INTO t VALUES ('{text}', 0); SELECT fence_protect('t', lease => 'k={{k}};')"
        ))?;
        // As the column's own text has it.
        let name: String = db.one("SELECT 'k=' || k::text || ';' FROM t", &[])?;
        ensure!(name == format!("k={value};"), "{name}");
        let token = db.grant(&name)?;
        db.refused(&format!("UPDATE t SET v = 7, fence = {foreign}"), "PF004")?;
        db.run(&format!("UPDATE t SET v = 7, fence = {token}"))?;
        db.run(&format!("INSERT INTO t VALUES ('{text}', 8, {token})"))?;
        db.run(&format!("SELECT lease_release('{}', {token})", name.replace('\'', "''")))?;
    }
    Ok(())
}

#[lab_test]
fn no_setting_changes_the_name_of_a_lease(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE t (a int, b boolean, c uuid, d text, v int, fence bigint); \
         INSERT INTO t VALUES (1234567, true, '00112233-4455-6677-8899-aabbccddeeff', 'é\\', 0); \
         SELECT fence_protect('t', lease => '{a}/{b}/{c}/{d}')",
    )?;
    let token = db.grant("1234567/true/00112233-4455-6677-8899-aabbccddeeff/é\\")?;
    for setting in [
        "standard_conforming_strings = off",
        "bytea_output = 'escape'",
        "DateStyle = 'SQL, DMY'",
        "extra_float_digits = -15",
        "lc_numeric = 'C'",
        "client_encoding = 'LATIN1'",
        "quote_all_identifiers = on",
        "search_path = ''",
    ] {
        let set = set_if_known(&format!("LOCAL {setting}"));
        db.run(&format!("BEGIN; {set}; UPDATE public.t SET v = v + 1, fence = {token}; COMMIT"))?;
    }
    shows(&mut db, "SELECT v FROM t", "8")
}

#[lab_test]
fn a_lease_may_be_named_by_several_columns_or_none(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run("CREATE TABLE t (a int, b text, v int, fence bigint); INSERT INTO t VALUES (1, 'x', 0), (1, 'y', 0)")?;
    let (x, y) = (db.grant("{1}x1")?, db.grant("{1}y1")?);
    db.run("SELECT fence_protect('t', lease => '{{{a}}}{b}{a}')")?;
    let rows = "SELECT b, v, fence FROM t ORDER BY b";
    db.comes_to(
        &format!("UPDATE t SET v = 7, fence = {x} WHERE b = 'x'"),
        rows,
        &format!("x|7|{x} y|0|-"),
    )?;
    db.comes_to(&format!("UPDATE t SET v = 7, fence = {y} WHERE b = 'x'"), rows, "PF004")?;
    db.comes_to(&format!("UPDATE t SET v = 7, fence = {y}"), rows, "PF004")?;
    let whole = db.grant("the whole table")?;
    db.run("SELECT fence_protect('t', lease => 'the whole table')")?;
    db.comes_to(&format!("UPDATE t SET v = 7, fence = {y}"), rows, "PF004")?;
    db.comes_to(
        &format!("UPDATE t SET v = 7, fence = {whole}"),
        rows,
        &format!("x|7|{whole} y|7|{whole}"),
    )
}

#[lab_test]
fn a_null_in_a_placeholder_is_an_error(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE t (id int, owner text, v int, fence bigint); INSERT INTO t VALUES (1, NULL, 0), (2, 'x', 0); \
         SELECT fence_protect('t', lease => 'owner:{owner}')",
    )?;
    let token = db.grant("owner:x")?;
    for sql in [
        format!("UPDATE t SET v = 7, fence = {token} WHERE id = 1"),
        format!("UPDATE t SET owner = 'x', fence = {token} WHERE id = 1"),
        format!("UPDATE t SET owner = NULL, fence = {token} WHERE id = 2"),
        format!("INSERT INTO t VALUES (3, NULL, 0, {token})"),
        format!("SET pg_fence.token = '{token}'; DELETE FROM t WHERE id = 1"),
    ] {
        let fault = db.refused(&sql, "22004")?;
        ensure!(fault.message.contains("\"owner\"") && fault.hint.is_some(), "{fault}");
        ensure!(fault.table.as_deref() == Some("t"), "{fault}");
    }
    db.run(&format!("UPDATE t SET v = 7, fence = {token} WHERE id = 2"))
}

#[lab_test]
fn a_name_that_is_too_long_or_empty_is_an_error(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(
        "CREATE TABLE t (k text, fence bigint); INSERT INTO t VALUES (repeat('ü', 256)), (repeat('ü', 256) || 'x'), (''); \
         SELECT fence_protect('t', lease => '{k}')",
    )?;
    let token = db.grant(&"ü".repeat(256))?;
    db.run(&format!("UPDATE t SET fence = {token} WHERE octet_length(k) = 512"))?;
    for length in [513, 0] {
        let sql = format!("UPDATE t SET fence = {token} WHERE octet_length(k) = {length}");
        db.refused(&sql, "22023")?;
    }
    // However long it is stored.
    db.refused(
        &format!("UPDATE t SET k = repeat('x', 1000000), fence = {token} WHERE k > 'a'"),
        "22023",
    )
    .map(drop)
}

#[lab_test]
fn an_update_that_changes_the_key_needs_the_old_and_the_new_lease(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let (one, two) = (db.grant("order:1")?, db.grant("order:2")?);
    db.run(&format!("UPDATE orders SET fence = {one}"))?;
    let rows = "SELECT id, fence FROM orders";
    let rename = "UPDATE orders SET id = 2";
    for token in [one, two] {
        db.comes_to(&format!("{rename}, fence = {token}"), rows, "PF004")?;
        db.comes_to(&format!("SET LOCAL pg_fence.token = '{token}'; {rename}"), rows, "PF004")?;
    }
    // Not even with both guarded: a write has one token.
    let guards = format!("SELECT lease_guard('order:1', {one}), lease_guard('order:2', {two})");
    db.comes_to(&format!("{guards}; {rename}"), rows, "PF004")?;
    // Away with the old row and in with the new one, each under its own.
    let by_hand =
        format!("{guards}; DELETE FROM orders WHERE id = 1; INSERT INTO orders VALUES (2, 0)");
    db.comes_to(&by_hand, rows, &format!("2|{two}"))?;
    db.run(&format!("SELECT lease_release('order:1', {one}), lease_release('order:2', {two})"))?;
    let both: i64 = db.one("SELECT lease_acquire_all('{order:2,order:1}', 'test', '1 h')", &[])?;
    db.comes_to(&format!("{rename}, fence = {both}"), rows, &format!("2|{both}"))?;
    // Both grants are guarded then.
    db.run(&format!(
        "BEGIN; {rename}, fence = {both}; SELECT lease_release_all('{{order:1,order:2}}', {both})"
    ))?;
    let mut other = db.another()?;
    for name in ["order:1", "order:2"] {
        let taken: Option<i64> = other.one("SELECT lease_acquire($1)", &[&name])?;
        ensure!(taken.is_none(), "{name} was not guarded");
    }
    db.run("COMMIT")?;
    let granted: Option<i64> = other.one("SELECT lease_acquire_all('{order:2,order:1}')", &[])?;
    ensure!(granted.is_some());
    Ok(())
}

#[lab_test]
fn only_a_token_that_speaks_for_the_lease_writes(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let write = |token: i64| format!("UPDATE orders SET v = 7, fence = {token}");
    let released = db.grant("order:1")?;
    let closing: i64 = db.one("SELECT lease_release('order:1', $1)", &[&released])?;
    let revoked = db.grant("order:1")?;
    let revoking: i64 = db.one("SELECT lease_revoke('order:1')", &[])?;
    let expired: i64 = db.one("SELECT lease_acquire('order:1', ttl => '1 ms')", &[])?;
    wait_until("it has expired", PATIENCE, || {
        db.text("SELECT state FROM lease_info('order:1')")
            .is_ok_and(|s| s.as_deref() == Some("expired"))
    })?;
    for dead in [released, closing, revoked, revoking, expired] {
        db.comes_to(&write(dead), ROW, "PF004")?;
    }
    // Nobody can take over a grant that is over and revive it; renewing does not either.
    db.comes_to(
        &format!("UPDATE orders SET v = 7, fence = lease_renew('order:1', {expired})"),
        ROW,
        "PF002",
    )?;
    let held = db.grant("order:1")?;
    db.comes_to(&write(held), ROW, &format!("7|{held}"))?;
    for dead in [released, closing, revoked, revoking, expired] {
        db.comes_to(&write(dead), ROW, "PF004")?;
    }
    Ok(())
}

#[lab_test]
fn the_acquire_s_token_serves_as_long_as_the_grant_lives(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let first = db.grant("order:1")?;
    let mut renewals = Vec::new();
    for _ in 0..18 {
        let token: i64 = db.one("SELECT lease_renew('order:1', $1)", &[&first])?;
        renewals.push(token);
    }
    // A heartbeat in another thread disturbs nobody; the latest 16 renewals are good too.
    db.run(&format!("UPDATE orders SET v = 1, fence = {first}"))?;
    for (n, token) in renewals.iter().enumerate() {
        let wanted = if n < 2 { "PF004".to_owned() } else { format!("7|{token}") };
        db.comes_to(&format!("UPDATE orders SET v = 7, fence = {token}"), ROW, &wanted)?;
    }
    // A token of another lease that falls between two of them is none of them.
    let between = db.token()?;
    let last: i64 = db.one("SELECT lease_renew('order:1', $1)", &[&first])?;
    ensure!(renewals[17] < between && between < last);
    db.comes_to(&format!("UPDATE orders SET v = 7, fence = {between}"), ROW, "PF004")
}

#[lab_test]
fn the_last_write_releases_the_lease_in_one_statement(lab: &Lab) -> Result<()> {
    for mode in ["strict", "monotonic"] {
        let mut db = TestDatabase::orders(
            lab,
            &format!("lease => 'order:{{id}}', mode => '{mode}', verify => true"),
        )?;
        let token = db.grant("order:1")?;
        let last = format!(
            "UPDATE orders SET v = 7, fence = lease_release('order:1', {token}) RETURNING fence"
        );
        db.run(&format!("UPDATE orders SET v = 1, fence = {token}; BEGIN"))?;
        let closing: i64 = db.text(&last)?.unwrap_or_default().parse()?;
        ensure!(closing > token);
        // Written but not committed: nobody may have the lease yet.
        let mut next = db.another()?;
        let early: Option<i64> = next.one("SELECT lease_acquire('order:1')", &[])?;
        ensure!(early.is_none(), "the lease was granted before the last write was there");
        db.run("COMMIT")?;
        shows(&mut db, ROW, &format!("7|{closing}"))?;
        // With the transaction the closing token is spent.
        let fault = db.try_out(&format!("UPDATE orders SET v = 8, fence = {closing}"), ROW)?;
        ensure!(fault.is_err_and(|f| f.sqlstate == "PF004" || f.sqlstate == "PF001"));
        db.comes_to(&last, ROW, "PF002")?;
        let after: Option<i64> = next.one("SELECT lease_acquire('order:1')", &[])?;
        ensure!(after.is_some_and(|token| token > closing));
    }
    Ok(())
}

#[lab_test]
fn a_release_of_many_rows_draws_one_token(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    db.run("INSERT INTO orders SELECT n FROM generate_series(2, 500) AS n")?;
    db.protect("lease => 'batch', verify => true")?;
    let token = db.grant("batch")?;
    db.run(&format!("UPDATE orders SET v = 7, fence = lease_release('batch', {token})"))?;
    let closing = token + 1;
    shows(
        &mut db,
        "SELECT count(*), min(fence), max(fence) FROM orders",
        &format!("500|{closing}|{closing}"),
    )?;
    shows(&mut db, "SELECT last_token FROM fence_status()", &closing.to_string())
}

#[lab_test]
fn a_token_of_one_s_own_open_transaction_writes(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    db.run("BEGIN")?;
    let token: i64 = db.one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])?;
    db.run(&format!("UPDATE orders SET v = 1, fence = {token}"))?;
    db.run(&format!("UPDATE orders SET v = 2, fence = lease_renew('order:1', {token})"))?;
    db.run(&format!("UPDATE orders SET v = 3, fence = lease_release('order:1', {token})"))?;
    db.run("COMMIT")?;
    shows(&mut db, ROW, &format!("3|{}", token + 2))
}

#[lab_test]
fn one_statement_over_rows_of_several_leases_needs_a_token_for_all(lab: &Lab) -> Result<()> {
    let mut db = TestDatabase::new(lab)?;
    db.run(ORDERS)?;
    db.run("INSERT INTO orders VALUES (2), (3)")?;
    db.protect("lease => 'order:{id}'")?;
    let one = db.grant("order:1")?;
    let (two, three) = (db.grant("order:2")?, db.grant("order:3")?);
    let rows = "SELECT fence FROM orders ORDER BY id";
    db.comes_to(&format!("UPDATE orders SET v = 7, fence = {one}"), rows, "PF004")?;
    let each = format!("UPDATE orders SET v = 7, fence = CASE id WHEN 1 THEN {one} WHEN 2 THEN {two} ELSE {three} END");
    db.comes_to(&each, rows, &format!("{one} {two} {three}"))?;
    // Each row takes the token by which its own lease is guarded.
    let guards = format!("SELECT lease_guard('order:1', {one}), lease_guard('order:2', {two}), lease_guard('order:3', {three})");
    db.comes_to(
        &format!("{guards}; UPDATE orders SET v = 7"),
        rows,
        &format!("{one} {two} {three}"),
    )?;
    db.comes_to(&format!("{guards}; DELETE FROM orders"), rows, "")
}

#[lab_test]
fn writers_need_no_grant_but_the_lease_must_be_theirs(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let (holder, member, writer) = (
        db.database().role("holder")?,
        db.database().role("member")?,
        db.database().role("writer")?,
    );
    db.run(&format!(
        "SELECT fence_grant('{holder}'); GRANT ALL ON orders TO {holder}, {member}, {writer}; \
         GRANT {holder} TO {member}; \
         CREATE FUNCTION pay(t bigint) RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = public \
             AS 'UPDATE orders SET v = 8, fence = t'; GRANT EXECUTE ON FUNCTION pay TO PUBLIC; \
         ALTER FUNCTION pay OWNER TO {holder}"
    ))?;
    let token: i64 = db
        .database()
        .connect_as(&holder)?
        .one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])?;
    let write = format!("UPDATE orders SET v = v + 1, fence = {token}");
    db.database().connect_as(&holder)?.run(&write)?;
    // A member of the role needs no rights on pg_fence at all.
    db.database().connect_as(&member)?.run(&write)?;
    let mut stranger = db.database().connect_as(&writer)?;
    // Nor does it learn that somebody else's token is one.
    stranger.refused(&write, "PF004")?;
    stranger
        .refused(&format!("SET pg_fence.token = '{token}'; UPDATE orders SET v = 9"), "PF004")?;
    // What the holder's own function does is done by the holder.
    stranger.run(&format!("SELECT pay({token})"))?;
    db.run(&write)?;
    shows(&mut db, ROW, &format!("9|{token}"))
}
