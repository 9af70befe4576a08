//! Writes of a lease under what a DBA adds to the tables of the state: errors of triggers, indexes of every kind; and
//! columns of ours that were altered. The rest is in writes.script.

use pg_test::{ensure, lab_test, Calls, Database, Lab, Result, Session};

/// All that writes a row of a lease: a new one, a renewal, a release, a grant over it, a revocation, an expiry
/// that a grant of another kind ends, several at once. The lease is free at the end.
fn write_in_every_way(session: &mut Session) -> Result<()> {
    let token = session.acquire("job", "1 h")?;
    session.renew("job", token)?.expect("held");
    session.release("job", token)?.expect("held");
    session.acquire("job", "1 h")?;
    session.granted("SELECT lease_revoke('job')")?;
    session.acquire_expired("job")?;
    let slot = "SELECT lease_acquire('job', slots => 2, ttl => '1 h')";
    let tokens = [session.granted(slot)?, session.granted(slot)?];
    for token in tokens {
        session.release("job", token)?.expect("held");
    }
    let all =
        session.granted("SELECT lease_acquire_all('{job,other}', 'me', '1 h', '{\"a\": 1}')")?;
    session.granted(&format!("SELECT lease_renew_all('{{job,other}}', {all})"))?;
    session.granted(&format!("SELECT lease_release_all('{{job,other}}', {all})"))?;
    Ok(())
}

/// A trigger that does so with each row.
fn meddle(session: &mut Session, when: &str, body: &str) -> Result<()> {
    session.run(&format!(
        "CREATE OR REPLACE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$;
         CREATE OR REPLACE TRIGGER meddle {when} FOR EACH ROW EXECUTE FUNCTION meddle()"
    ))
}

#[lab_test]
fn an_error_of_a_trigger_leaves_nothing_granted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let raise = "RAISE EXCEPTION 'no' USING ERRCODE = 'XY123';";
    meddle(&mut session, "AFTER INSERT ON fence.lease", raise)?;
    session.refused("SELECT lease_acquire('job')", "XY123")?;
    session.run("BEGIN; SAVEPOINT s")?;
    session.refused("SELECT lease_acquire('job')", "XY123")?;
    session.run("ROLLBACK TO s; ALTER TABLE fence.lease DISABLE TRIGGER meddle; COMMIT")?;
    let token = other.acquire("job", "1 h")?;
    ensure!(other.speaks("job", token)?);
    // It comes as it was raised, though another was caught on the way.
    let whole = "BEGIN RAISE 'first' USING ERRCODE = 'XY001', DETAIL = 'd', HINT = 'h', TABLE = 't';
        EXCEPTION WHEN SQLSTATE 'XY001' THEN
            BEGIN RAISE 'second' USING ERRCODE = 'XY002'; EXCEPTION WHEN OTHERS THEN NULL; END;
            RAISE NOTICE 'seen'; RAISE 'third' USING ERRCODE = 'XY003', DETAIL = 'd', HINT = 'h', TABLE = 't'; END;";
    session.run("ALTER TABLE fence.lease ENABLE TRIGGER meddle")?;
    meddle(&mut session, "AFTER INSERT ON fence.lease", whole)?;
    session.notices();
    let fault = session.refused("SELECT lease_acquire('new')", "XY003")?;
    let fields = [&fault.detail, &fault.hint, &fault.table].map(|f| f.as_deref().unwrap_or("-"));
    ensure!(fault.message == "third" && fields == ["d", "h", "t"], "{fault}: {fields:?}");
    ensure!(
        fault.context.as_deref().is_some_and(|c| c.contains("meddle()")),
        "{:?}",
        fault.context
    );
    ensure!(session.notices().iter().any(|n| n.message == "seen"));
    // Nor does it matter that it is an earlier one that is raised again.
    let again = "BEGIN RAISE 'first' USING ERRCODE = 'XY001', DETAIL = 'd', HINT = 'h', TABLE = 't';
        EXCEPTION WHEN SQLSTATE 'XY001' THEN
            BEGIN RAISE 'second' USING ERRCODE = 'XY002'; EXCEPTION WHEN OTHERS THEN NULL; END; RAISE; END;";
    meddle(&mut session, "AFTER INSERT ON fence.lease", again)?;
    let fault = session.refused("SELECT lease_acquire('new')", "XY001")?;
    let fields = [&fault.detail, &fault.hint, &fault.table].map(|f| f.as_deref().unwrap_or("-"));
    ensure!(fault.message == "first" && fields == ["d", "h", "t"], "{fault}: {fields:?}");
    Ok(())
}

/// Every condition finds the same rows by any index as by reading the table.
fn indexes_agree(session: &mut Session, table: &str, conditions: &[&str]) -> Result<()> {
    for condition in conditions {
        let query = format!("SELECT count(*), string_agg(t::text, ',' ORDER BY t::text) FROM {table} t WHERE {condition}");
        session.run(
            "SET enable_seqscan = off; SET enable_indexscan = on; SET enable_bitmapscan = on",
        )?;
        let by_index = session.rows(&query)?;
        let plan = session.rows(&format!("EXPLAIN {query}"))?;
        session.run(
            "SET enable_seqscan = on; SET enable_indexscan = off; SET enable_bitmapscan = off",
        )?;
        let by_table = session.rows(&query)?;
        session.run("RESET ALL")?;
        ensure!(
            by_index == by_table,
            "{condition}: {by_index:?} by index, {by_table:?} in the table"
        );
        let plan: String = plan.into_iter().flatten().flatten().collect();
        ensure!(plan.contains("Index") || plan.contains("index"), "{condition}: {plan}");
    }
    Ok(())
}

#[lab_test]
fn indexes_of_every_kind_find_what_the_table_has(lab: &Lab) -> Result<()> {
    let indexes = [
        ("ON fence.lease (split_part(name, ':', 1))", "split_part(name, ':', 1) = 'job'"),
        ("ON fence.lease (expires_at) WHERE closing_token IS NULL", "closing_token IS NULL"),
        ("ON fence.lease (ended_at) WHERE closing_token IS NOT NULL", "closing_token IS NOT NULL"),
        ("ON fence.lease (lower(holder)) WHERE ttl_us > 1", "lower(holder) = 'me' AND ttl_us > 1"),
        ("ON fence.lease (first_token)", "first_token > 0"),
        ("ON fence.lease (renewals) INCLUDE (holder)", "renewals > 0"),
        (
            "ON fence.lease USING hash (session_label)",
            "session_label = (SELECT min(session_label) FROM fence.lease)",
        ),
        ("ON fence.lease USING gin (metadata)", "metadata @> '{\"a\": 1}'"),
        (
            "ON fence.lease USING gin (renewal_tokens)",
            "renewal_tokens @> ARRAY[(SELECT max(first_token) + 1 FROM fence.lease)]",
        ),
        ("ON fence.lease USING brin (acquired_at)", "acquired_at > '2000-01-01'"),
    ];
    // A server of its own: an index that was made while old versions could be seen must not be used at once.
    let cluster = lab.builder().set("autovacuum", "off").start()?;
    let db = Database::with_extension(cluster.conninfo("postgres"))?;
    let mut session = db.connect()?;
    write_in_every_way(&mut session)?;
    for (index, condition) in indexes {
        session.run(&format!("CREATE INDEX one {index}"))?;
        write_in_every_way(&mut session).map_err(|e| e.context(index))?;
        indexes_agree(&mut session, "fence.lease", &[condition])?;
        session.run("DROP INDEX fence.one")?;
    }
    for (n, (index, _)) in indexes.iter().enumerate() {
        session.run(&format!("CREATE INDEX all_{n} {index}"))?;
    }
    for _ in 0..30 {
        write_in_every_way(&mut session)?;
    }
    session.granted("SELECT lease_acquire('job', 'Me', '1 h')")?;
    for (_, condition) in indexes {
        indexes_agree(&mut session, "fence.lease", &[condition])?;
    }
    Ok(())
}

#[lab_test]
fn columns_of_ours_that_were_altered_are_refused(lab: &Lab) -> Result<()> {
    for change in [
        "ALTER holder TYPE varchar(100)",
        "ALTER mode TYPE text",
        "ALTER slot TYPE bigint",
        "ALTER renewal_tokens TYPE text USING renewal_tokens::text",
        "DROP metadata CASCADE",
    ] {
        let db = lab.database()?;
        let mut session = db.connect()?;
        let token = session.acquire("job", "1 h")?;
        // Other objects made of the columns go first.
        session.run(
            "ALTER EXTENSION pg_fence DROP FUNCTION lease_info;
             ALTER EXTENSION pg_fence DROP FUNCTION fence.lease_findings; ALTER EXTENSION pg_fence DROP VIEW fence.leases;
             DROP VIEW fence.leases CASCADE",
        )?;
        session.run(&format!("ALTER TABLE fence.lease {change}"))?;
        for call in [
            "lease_acquire('other')".to_owned(),
            format!("lease_renew('job', {token})"),
            format!("lease_check('job', {token})"),
            format!("lease_guard('job', {token})"),
        ] {
            let fault = session.refused(&format!("SELECT {call}"), "55000")?;
            ensure!(fault.message.contains("fence.lease"), "{change}: {fault}");
        }
    }
    Ok(())
}
