//! fence.refusals: what is kept of refused writes.

use super::shown;
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

/// A table bound to a lease that another worker holds, and the token that a first one has lost.
fn lost_lease(session: &mut Session) -> Result<i64> {
    table(session, "(7, 'eu', 0), (8, 'us', 0)")
}

fn table(session: &mut Session, rows: &str) -> Result<i64> {
    session.run(&format!(
        "CREATE TABLE orders (id int, region text, v int, fence bigint, PRIMARY KEY (region, id));
         INSERT INTO orders VALUES {rows};
         SELECT fence_protect('orders', lease => 'order:{{id}}')",
    ))?;
    let lost = session.acquire_expired("order:7")?;
    session.granted("SELECT lease_acquire('order:7', 'worker B', '1 h')")?;
    Ok(lost)
}

const ALL: &str =
    "SELECT sqlstate, relation, key, lease, presented, stored, holder, role, application_name, \
                   client_addr, pid FROM fence.refusals";

#[lab_test]
fn a_refused_write_is_kept_with_all_that_is_known(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let lost = lost_lease(&mut admin)?;
    let role = db.role("worker")?;
    admin.run(&format!("SELECT fence_grant('{role}'); GRANT ALL ON orders TO {role}"))?;
    let mut worker = db.conninfo().user(&role).application("worker A").connect()?;
    let fault = worker
        .refused(&format!("UPDATE orders SET v = 1, fence = {lost} WHERE id = 7"), "PF004")?;
    let wanted = [
        "PF004",
        "public.orders",
        "{\"id\": 7, \"region\": \"eu\"}",
        "order:7",
        &lost.to_string(),
        "",
        "worker B",
        &role,
        "worker A",
        "127.0.0.1",
        &worker.pid().to_string(),
    ]
    .map(str::to_owned);
    let rows = admin.rows(ALL)?;
    let found: Vec<String> = rows[0].iter().map(|text| text.clone().unwrap_or_default()).collect();
    ensure!(rows.len() == 1 && found == wanted, "{rows:?}");
    // As the error has told it.
    let key = serde_json::from_str::<serde_json::Value>(&found[2])?;
    ensure!(
        fault.json()?["key"] == key && fault.json()?["relation"] == found[1].as_str(),
        "{fault}"
    );
    ensure!(admin.truth(
        "SELECT refused_at BETWEEN now() - interval '1 min' AND now() FROM fence.refusals"
    )?);
    Ok(())
}

#[lab_test]
fn what_the_writer_may_not_know_the_administrator_does(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let lost = table(&mut admin, "(7, 'eu', 0)")?;
    let role = db.role("worker")?;
    let newer = admin.granted(
        "SELECT first_token FROM fence.leases WHERE name = 'order:7' AND state = 'held'",
    )?;
    admin.run(&format!("UPDATE orders SET fence = {newer} WHERE id = 7"))?;
    admin.run(&format!("GRANT UPDATE ON orders TO {role}"))?;
    let mut worker = db.connect_as(&role)?;
    for (presented, sqlstate, stored) in
        [(lost, "PF001", Some(newer)), (newer + 1_000_000, "PF004", Some(newer))]
    {
        let fault =
            worker.refused(&format!("UPDATE orders SET v = 1, fence = {presented}"), sqlstate)?;
        let detail = fault.json()?;
        ensure!(detail.get("key").is_none() && detail.get("stored").is_none(), "{fault}");
        let row = admin.rows(ALL)?.remove(0);
        ensure!(row[2].as_deref() == Some("{\"id\": 7, \"region\": \"eu\"}"), "{row:?}");
        ensure!(
            row[3].as_deref() == Some("order:7") && row[6].as_deref() == Some("worker B"),
            "{row:?}"
        );
        ensure!(row[4] == Some(presented.to_string()), "{row:?}");
        ensure!(row[5] == stored.map(|token| token.to_string()), "{row:?}");
    }
    Ok(())
}

#[lab_test]
fn each_kind_of_refusal_is_kept(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let lost = lost_lease(&mut session)?;
    for (sql, sqlstate, wanted) in [
        ("TRUNCATE orders".to_owned(), "PF005", "public.orders||||"),
        ("UPDATE orders SET v = 1 WHERE id = 8".into(), "PF002", "public.orders|8|order:8||"),
        (format!("SELECT lease_guard('order:7', {lost})"), "PF004", "||order:7|T|worker B"),
        (
            format!("INSERT INTO orders VALUES (7, 'as', 0, {lost})"),
            "PF004",
            "public.orders|7|order:7|T|worker B",
        ),
        (
            format!("DELETE FROM orders WHERE id = 7 AND {lost} > 0"),
            "PF002",
            "public.orders|7|order:7||worker B",
        ),
    ] {
        session.refused(&sql, sqlstate)?;
        let row = session.text(
            "SELECT concat_ws('|', sqlstate, coalesce(relation, ''), coalesce(key ->> 'id', ''), \
                 coalesce(lease, ''), coalesce(presented::text, ''), coalesce(holder, '')) \
               FROM fence.refusals LIMIT 1",
        )?;
        let wanted = format!("{sqlstate}|{}", wanted.replace('T', &lost.to_string()));
        ensure!(row.as_deref() == Some(&*wanted), "{sql}: {row:?}, not {wanted}");
    }
    // What the fence does not refuse for its own reasons is not its refusal.
    session.refused("INSERT INTO orders VALUES (9, NULL, 0, 1)", "PF004")?;
    session.run(&format!("SET pg_fence.token = {lost}"))?;
    session.run("ALTER TABLE orders RENAME fence TO f")?;
    session.refused("UPDATE orders SET v = 1", "42703")?;
    ensure!(session.granted("SELECT count(*) FROM fence.refusals")? == 6);
    Ok(())
}

#[lab_test]
fn the_ring_keeps_the_latest(lab: &Lab) -> Result<()> {
    let refuse = |session: &mut Session, from: i32, to: i32| {
        session.run(&format!(
            "DO $$ BEGIN FOR n IN {from}..{to} LOOP
                 BEGIN UPDATE t SET fence = n + 9000000000000000; EXCEPTION WHEN SQLSTATE 'PF003' THEN END;
             END LOOP; END $$"
        ))
    };
    let presented =
        "SELECT coalesce(string_agg((presented - 9000000000000000)::text, ' '), '') FROM fence.refusals";
    for (setting, kept) in [(None, 256), (Some("3"), 3), (Some("0"), 0)] {
        let db = lab.database()?;
        if let Some(setting) = setting {
            db.connect()?.run(&format!(
                "ALTER DATABASE {} SET pg_fence.refusals_kept = {setting}",
                db.name()
            ))?;
        }
        let mut session = db.connect()?;
        session.run(
            "CREATE TABLE t (fence bigint); INSERT INTO t VALUES (1); SELECT fence_protect('t')",
        )?;
        refuse(&mut session, 1, 2)?;
        let wanted = if kept == 0 { "" } else { "2 1" };
        ensure!(session.text(presented)?.as_deref() == Some(wanted), "{setting:?}");
        refuse(&mut session, 3, 300)?;
        let wanted: Vec<String> = (1..=300).rev().take(kept).map(|n| n.to_string()).collect();
        ensure!(session.text(presented)? == Some(wanted.join(" ")), "{setting:?}");
        ensure!(shown(&mut session)? == "refused_pf003 300, writes_checked 300");
        session.run("SELECT fence_stats_reset()")?;
        ensure!(session.text(presented)?.as_deref() == Some(""));
        refuse(&mut session, 5, 5)?;
        let wanted = if kept == 0 { "" } else { "5" };
        ensure!(session.text(presented)?.as_deref() == Some(wanted), "{setting:?}");
    }
    Ok(())
}

#[lab_test]
fn long_texts_are_cut_between_characters(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let wide = "é".repeat(31);
    let (schema, table, column) = (wide.clone(), wide.clone(), format!("\"{}", "é".repeat(31)));
    let quoted = column.replace('"', "\"\"");
    session.run(&format!("CREATE SCHEMA \"{schema}\""))?;
    session.run(&format!(
        "CREATE TABLE \"{schema}\".\"{table}\" (\"{quoted}\" text PRIMARY KEY, lease text, fence bigint);
         SELECT fence_protect('\"{schema}\".\"{table}\"', lease => '{{lease}}')"
    ))?;
    let (lease, holder) = ("€".repeat(60), "ü".repeat(256));
    session.run(&format!("SELECT lease_acquire('{lease}', '{holder}', '1 h')"))?;
    session.refused(
        &format!(
            "INSERT INTO \"{schema}\".\"{table}\" VALUES ('{}', '{lease}', 1)",
            "ß".repeat(1000)
        ),
        "PF004",
    )?;
    let row = session.rows(ALL)?.remove(0);
    ensure!(row[1] == Some(format!("\"{schema}\".\"{table}\"")), "{row:?}");
    ensure!(row[3] == Some(lease) && row[6] == Some("ü".repeat(128)), "{row:?}");
    let key: serde_json::Value = serde_json::from_str(row[2].as_deref().unwrap_or_default())?;
    ensure!(key[&column]
        .as_str()
        .is_some_and(|text| text.starts_with("ßß") && text.ends_with("...")));
    // A key with too long a name and value for the room that is left is not shown; all else is.
    let many: Vec<String> = (0..8).map(|n| format!("\"{n}{}\"", "k".repeat(60))).collect();
    let columns = many.iter().map(|name| format!("{name} text")).collect::<Vec<_>>().join(", ");
    let values =
        many.iter().map(|_| format!("'{}'", "\\".repeat(60))).collect::<Vec<_>>().join(", ");
    session.run(&format!(
        "CREATE TABLE \"{schema}\".wide ({columns}, lease text, fence bigint, PRIMARY KEY ({})); \
         SELECT fence_protect('\"{schema}\".wide', lease => '{{lease}}')",
        many.join(", ")
    ))?;
    let long = "x".repeat(512);
    session.run(&format!("SELECT lease_acquire('{long}', '{}', '1 h')", "y".repeat(256)))?;
    session.refused(
        &format!("INSERT INTO \"{schema}\".wide VALUES ({values}, '{long}', 1)"),
        "PF004",
    )?;
    let row = session.rows(ALL)?.remove(0);
    ensure!(row[3] == Some(long) && row[0].as_deref() == Some("PF004"), "{row:?}");
    let key = row[2].as_deref().map(serde_json::from_str::<serde_json::Value>).transpose()?;
    ensure!(key.is_none_or(|key| key.is_object()));
    Ok(())
}

#[lab_test]
fn a_role_that_floods_them_drives_out_its_own(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let (stranger, worker) = (db.role("stranger")?, db.role("worker")?);
    admin.run(&format!(
        "GRANT CREATE ON SCHEMA public TO {stranger};
         CREATE TABLE t (id int, fence bigint); SELECT fence_protect('t', events => 'insert'); GRANT ALL ON t TO {worker}"
    ))?;
    let refuse = |session: &mut Session, table: &str, times: i32| {
        session.run(&format!(
            "DO $$ BEGIN FOR n IN 1..{times} LOOP
                 BEGIN INSERT INTO {table} VALUES (n, 9000000000000000); EXCEPTION WHEN SQLSTATE 'PF003' THEN END;
             END LOOP; END $$"
        ))
    };
    let mut kept = |wanted: &str| -> Result<()> {
        let kept = admin.text(
            "SELECT string_agg(of, ', ' ORDER BY of COLLATE \"C\")
               FROM (SELECT regexp_replace(role, '.*_', '') || ' ' || count(*) AS of FROM fence.refusals GROUP BY role) r",
        )?;
        ensure!(kept.as_deref() == Some(wanted), "{kept:?}, not {wanted}");
        let order = "SELECT count(*) FROM (SELECT refused_at < lead(refused_at) OVER () AS older FROM fence.refusals) r WHERE older";
        ensure!(admin.granted(order)? == 0, "not the newest first");
        Ok(())
    };
    let mut worker = db.connect_as(&worker)?;
    refuse(&mut worker, "t", 10)?;
    let mut stranger = db.connect_as(&stranger)?;
    stranger.run(
        "CREATE TABLE own (id int, fence bigint); SELECT fence_protect('own', events => 'insert')",
    )?;
    refuse(&mut stranger, "own", 400)?;
    kept("stranger 246, worker 10")?;
    // What others add goes over what the stranger has.
    refuse(&mut worker, "t", 30)?;
    kept("stranger 216, worker 40")?;
    refuse(&mut stranger, "own", 400)?;
    kept("stranger 216, worker 40")?;
    ensure!(shown(&mut db.connect()?)? == "refused_pf003 840, writes_checked 840");
    Ok(())
}
