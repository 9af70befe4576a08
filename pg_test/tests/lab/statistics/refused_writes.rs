//! The ring of fence.refusals, and texts that are cut. The rest is in refused_writes.script.

use pg_test::{ensure, lab_test, Lab, Result};

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
