//! The ring of fence.refusals, and texts that are cut. The rest is in refused_writes.script.

use super::shown;
use pg_test::{ensure, lab_test, Lab, Result, Session};

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
    let row = session
        .rows(
            "SELECT sqlstate, relation, key, lease, presented, stored, holder FROM fence.refusals",
        )?
        .remove(0);
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
    let row = session
        .rows(
            "SELECT sqlstate, relation, key, lease, presented, stored, holder FROM fence.refusals",
        )?
        .remove(0);
    ensure!(row[3] == Some(long) && row[0].as_deref() == Some("PF004"), "{row:?}");
    let key = row[2].as_deref().map(serde_json::from_str::<serde_json::Value>).transpose()?;
    ensure!(key.is_none_or(|key| key.is_object()));
    Ok(())
}
