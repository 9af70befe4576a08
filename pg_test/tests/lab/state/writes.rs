//! What a DBA adds to the tables of the state is honoured by every write of a lease, as it is for any table:
//! triggers, constraints, indexes of every kind, columns. What cannot be honoured is refused before harm is done.

use pg_test::{bail, ensure, lab_test, Calls, Database, Lab, Result, Session};

/// A log that any trigger may write to.
const LOG: &str = "
    CREATE TABLE log (n int GENERATED ALWAYS AS IDENTITY, line text);
    CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO log (line) SELECT concat_ws(' ', TG_WHEN, TG_OP, TG_LEVEL);
        RETURN coalesce(NEW, OLD); END $$;";

fn with_log(lab: &Lab) -> Result<(Database, Session)> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(LOG)?;
    Ok((db, session))
}

/// What was logged since the last call.
fn logged(session: &mut Session) -> Result<Vec<String>> {
    let rows = session.rows(
        "WITH gone AS (DELETE FROM log RETURNING n, line) SELECT line FROM gone ORDER BY n",
    )?;
    Ok(rows.into_iter().flatten().flatten().collect())
}

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

#[lab_test]
fn row_triggers_fire_for_every_write(lab: &Lab) -> Result<()> {
    let (_db, mut session) = with_log(lab)?;
    session.run(
        "CREATE TRIGGER b BEFORE INSERT OR UPDATE OR DELETE ON fence.lease FOR EACH ROW EXECUTE FUNCTION log();
         CREATE TRIGGER a AFTER INSERT OR UPDATE OR DELETE ON fence.lease FOR EACH ROW EXECUTE FUNCTION log()",
    )?;
    let fired = |op: &str| vec![format!("BEFORE {op} ROW"), format!("AFTER {op} ROW")];
    let token = session.acquire("job", "1 h")?;
    ensure!(logged(&mut session)? == fired("INSERT"));
    let renewed = session.renew("job", token)?.expect("held");
    ensure!(logged(&mut session)? == fired("UPDATE") && renewed > token);
    ensure!(session.speaks("job", token)? && session.speaks("job", renewed)?);
    session.release("job", token)?.expect("held");
    ensure!(logged(&mut session)? == fired("UPDATE"));
    let next = session.acquire("job", "1 h")?;
    ensure!(logged(&mut session)? == fired("UPDATE") && !session.speaks("job", token)?);
    session.granted("SELECT lease_revoke('job')")?;
    ensure!(logged(&mut session)? == fired("UPDATE") && !session.speaks("job", next)?);
    ensure!(session.granted("SELECT lease_prune('0')")? == 1);
    ensure!(logged(&mut session)? == fired("DELETE"));
    // A try that loses writes nothing, so nothing fires.
    session.acquire("job", "1 h")?;
    logged(&mut session)?;
    session.nothing("SELECT lease_acquire('job')")?;
    ensure!(logged(&mut session)?.is_empty());
    session.granted("SELECT lease_revoke('job')")?;
    write_in_every_way(&mut session)
}

#[lab_test]
fn a_trigger_for_a_column_fires_when_that_is_written(lab: &Lab) -> Result<()> {
    let (_db, mut session) = with_log(lab)?;
    session.run(
        "CREATE TRIGGER r AFTER UPDATE OF expires_at ON fence.lease FOR EACH ROW EXECUTE FUNCTION log();
         CREATE TRIGGER c BEFORE UPDATE OF closing_token ON fence.lease FOR EACH ROW EXECUTE FUNCTION log();
         CREATE TRIGGER w AFTER UPDATE ON fence.lease FOR EACH ROW
            WHEN (OLD.first_token <> NEW.first_token) EXECUTE FUNCTION log()",
    )?;
    let token = session.acquire("job", "1 h")?;
    session.renew("job", token)?.expect("held");
    ensure!(logged(&mut session)? == ["AFTER UPDATE ROW"]);
    session.release("job", token)?.expect("held");
    ensure!(logged(&mut session)? == ["BEFORE UPDATE ROW"]);
    session.acquire("job", "1 h")?;
    ensure!(logged(&mut session)? == ["BEFORE UPDATE ROW", "AFTER UPDATE ROW", "AFTER UPDATE ROW"]);
    Ok(())
}

#[lab_test]
fn triggers_run_with_the_rights_of_the_caller(lab: &Lab) -> Result<()> {
    let (db, mut session) = with_log(lab)?;
    session.run(
        "CREATE FUNCTION who() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO log (line) VALUES (current_user); RETURN NEW; END $$;
         CREATE TRIGGER who BEFORE INSERT ON fence.lease FOR EACH ROW EXECUTE FUNCTION who()",
    )?;
    let role = db.role("worker")?;
    session.run(&format!("SELECT fence_grant('{role}')"))?;
    let mut worker = db.connect_as(&role)?;
    worker.refused("SELECT lease_acquire('job')", "42501")?;
    ensure!(session.text("SELECT count(*) FROM fence.lease")?.as_deref() == Some("0"));
    session.run(&format!("GRANT INSERT ON log TO {role}"))?;
    worker.acquire("job", "1 h")?;
    ensure!(logged(&mut session)? == [role]);
    Ok(())
}

/// A trigger that does so with each row.
fn meddle(session: &mut Session, when: &str, body: &str) -> Result<()> {
    session.run(&format!(
        "CREATE OR REPLACE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$;
         CREATE OR REPLACE TRIGGER meddle {when} FOR EACH ROW EXECUTE FUNCTION meddle()"
    ))
}

/// The call is refused because a trigger meddles.
fn is_refused(session: &mut Session, call: &str, table: &str) -> Result<()> {
    let fault = session.refused(call, "55000")?;
    ensure!(fault.message.contains("trigger") && fault.message.contains(table), "{fault}");
    ensure!(fault.json()?["relation"] == table, "{fault}");
    ensure!(fault.hint.as_deref().is_some_and(|h| h.contains("drop that trigger")), "{fault}");
    Ok(())
}

#[lab_test]
fn a_trigger_that_suppresses_a_write_is_refused(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    meddle(&mut session, "BEFORE INSERT ON fence.lease", "RETURN NULL;")?;
    is_refused(&mut session, "SELECT lease_acquire('job')", "fence.lease")?;
    is_refused(&mut session, "SELECT lease_acquire_all('{a,b}')", "fence.lease")?;
    is_refused(&mut session, "SELECT lease_acquire('job', wait => '1 h')", "fence.lease")?;
    session.run("DROP TRIGGER meddle ON fence.lease")?;
    let token = session.acquire("job", "1 h")?;
    for body in ["RETURN NULL;", "RETURN OLD;"] {
        meddle(&mut session, "BEFORE UPDATE ON fence.lease", body)?;
        for call in [
            format!("lease_renew('job', {token})"),
            format!("lease_release('job', {token})"),
            "lease_revoke('job')".to_owned(),
            "lease_acquire('job', 'me', reclaim => true)".to_owned(),
            format!("lease_renew_all('{{job}}', {token})"),
            format!("lease_release_all('{{job}}', {token})"),
        ] {
            if call.contains("reclaim") {
                // Nobody's yet: a lease that is taken stays so, without a write.
                session.nothing(&format!("SELECT {call}"))?;
            } else {
                is_refused(&mut session, &format!("SELECT {call}"), "fence.lease")?;
            }
        }
        ensure!(session.speaks("job", token)?, "what was refused has happened");
        session.run("DROP TRIGGER meddle ON fence.lease")?;
    }
    session.release("job", token)?.expect("held");
    meddle(&mut session, "BEFORE UPDATE ON fence.lease", "RETURN NULL;")?;
    is_refused(&mut session, "SELECT lease_acquire('job')", "fence.lease")
}

#[lab_test]
fn a_trigger_that_changes_what_was_written_is_refused(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let changes = [
        "NEW.name := NEW.name || '!'",
        "NEW.slot := NEW.slot + 1",
        "NEW.mode := 's'",
        "NEW.holder := 'somebody else'",
        "NEW.role := 'postgres2'",
        "NEW.first_token := NEW.first_token - 1",
        "NEW.renewal_tokens := NEW.renewal_tokens || NEW.first_token + 5",
        "NEW.expires_at := NEW.expires_at + interval '1 us'",
        "NEW.ttl_us := NEW.ttl_us + 1",
        "NEW.metadata := '{\"other\": true}'",
        "NEW.closing_token := 1",
    ];
    let token =
        session.granted("SELECT lease_acquire('there', 'me', '1 h', metadata => '{\"a\": 1}')")?;
    for change in changes {
        let body = format!("{change}; RETURN NEW;");
        meddle(&mut session, "BEFORE INSERT OR UPDATE ON fence.lease", &body)?;
        is_refused(&mut session, "SELECT lease_acquire('job', 'me')", "fence.lease")?;
        is_refused(&mut session, &format!("SELECT lease_renew('there', {token})"), "fence.lease")?;
    }
    // By an AFTER trigger that writes the row again, too.
    let again =
        "UPDATE fence.lease SET expires_at = 'infinity' WHERE name = NEW.name; RETURN NULL;";
    session.run("DROP TRIGGER meddle ON fence.lease")?;
    meddle(&mut session, "AFTER INSERT ON fence.lease", again)?;
    is_refused(&mut session, "SELECT lease_acquire('job', 'me')", "fence.lease")?;
    session.run("DROP TRIGGER meddle ON fence.lease")?;
    ensure!(session.speaks("there", token)?);
    // What is large, and so stored elsewhere, is compared by what it says.
    meddle(&mut session, "BEFORE INSERT ON fence.lease", "RETURN NEW;")?;
    let large = "jsonb_build_object('a', (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 1500) n))";
    session.granted(&format!("SELECT lease_acquire('large', metadata => {large})"))?;
    ensure!(session
        .truth(&format!("SELECT metadata = {large} FROM fence.leases WHERE name = 'large'"))?);
    Ok(())
}

#[lab_test]
fn a_trigger_may_fill_columns_that_were_added(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("ALTER TABLE fence.lease ADD touched int")?;
    let body = "NEW.touched := coalesce(NEW.touched, 0) + 1; RETURN NEW;";
    meddle(&mut session, "BEFORE INSERT OR UPDATE ON fence.lease", body)?;
    let token = session.acquire("job", "1 h")?;
    session.renew("job", token)?.expect("held");
    session.release("job", token)?.expect("held");
    session.acquire("job", "1 h")?;
    ensure!(session.text("SELECT touched FROM fence.lease")?.as_deref() == Some("4"));
    Ok(())
}

#[lab_test]
fn a_trigger_that_keeps_rows_from_pruning_keeps_them(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let keep = "IF OLD.name = 'kept' THEN RETURN NULL; END IF; RETURN OLD;";
    meddle(&mut session, "BEFORE DELETE ON fence.lease", keep)?;
    for name in ["kept", "gone"] {
        let token = session.acquire(name, "1 h")?;
        session.release(name, token)?.expect("held");
    }
    ensure!(session.granted("SELECT lease_prune('0')")? == 1);
    ensure!(session.text("SELECT name FROM fence.lease")?.as_deref() == Some("kept"));
    session.acquire("kept", "1 h")?;
    Ok(())
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

#[lab_test]
fn a_deferred_trigger_fires_at_commit(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    session.run(
        "CREATE FUNCTION check_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF (SELECT count(*) FROM fence.lease WHERE closing_token IS NULL) > 1 THEN
                RAISE EXCEPTION 'one at a time' USING ERRCODE = 'XY124';
            END IF; RETURN NULL; END $$;
         CREATE CONSTRAINT TRIGGER one AFTER INSERT OR UPDATE ON fence.lease DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION check_it()",
    )?;
    let first = session.acquire("first", "1 h")?;
    session.run("BEGIN; SELECT lease_acquire('second', ttl => '1 h')")?;
    session.refused("COMMIT", "XY124")?;
    session.run("BEGIN; SELECT lease_acquire('second', ttl => '1 h')")?;
    session.run(&format!("SELECT lease_release('first', {first}); COMMIT"))?;
    ensure!(other.is_taken("second")? && !session.speaks("first", first)?);
    Ok(())
}

#[lab_test]
fn check_constraints_hold(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.acquire("prod:job", "1 min")?;
    session.run(
        "ALTER TABLE fence.lease ADD CONSTRAINT named CHECK (name LIKE '%:%') NOT VALID,
            ADD CONSTRAINT short CHECK (ttl_us <= 3600000000)",
    )?;
    session.refused("SELECT lease_acquire('job')", "23514")?;
    session.refused("SELECT lease_acquire('prod:other', ttl => '61 min')", "23514")?;
    session.refused(&format!("SELECT lease_renew('prod:job', {token}, '2 h')"), "23514")?;
    ensure!(session.speaks("prod:job", token)?);
    session.renew("prod:job", token)?.expect("held");
    session.acquire("prod:other", "1 h")?;
    Ok(())
}

#[lab_test]
fn foreign_keys_hold_both_ways(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE workers (name text PRIMARY KEY); INSERT INTO workers VALUES ('known');
         ALTER TABLE fence.lease ADD FOREIGN KEY (holder) REFERENCES workers;
         CREATE TABLE notes (name text COLLATE \"C\", slot int, FOREIGN KEY (name, slot) REFERENCES fence.lease)",
    )?;
    session.refused("SELECT lease_acquire('job', 'unknown')", "23503")?;
    let token = session.granted("SELECT lease_acquire('job', 'known', '1 h')")?;
    session.run("INSERT INTO notes VALUES ('job', 0)")?;
    session.renew("job", token)?.expect("held");
    session.release("job", token)?.expect("held");
    let fault = session.refused("SELECT lease_prune('0')", "23503")?;
    ensure!(fault.table.as_deref() == Some("notes"), "{fault}: {:?}", fault.table);
    session.run("DELETE FROM notes")?;
    ensure!(session.granted("SELECT lease_prune('0')")? == 1);
    Ok(())
}

#[lab_test]
fn not_null_of_a_column_of_ours_holds(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("ALTER TABLE fence.lease ALTER holder SET NOT NULL")?;
    session.refused("SELECT lease_acquire('job')", "23502")?;
    session.granted("SELECT lease_acquire('job', 'me')")?;
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
fn unique_indexes_and_exclusion_constraints_hold(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("CREATE UNIQUE INDEX one ON fence.lease (holder) WHERE closing_token IS NULL")?;
    let token = session.granted("SELECT lease_acquire('a', 'me', '1 h')")?;
    session.refused("SELECT lease_acquire('b', 'me', '1 h')", "23505")?;
    session.renew("a", token)?.expect("held");
    session.release("a", token)?.expect("held");
    let token = session.granted("SELECT lease_acquire('b', 'me', '1 h')")?;
    session.release("b", token)?.expect("held");
    session.run(
        "DROP INDEX fence.one;
         ALTER TABLE fence.lease ADD CONSTRAINT apart EXCLUDE USING btree (holder WITH =) WHERE (closing_token IS NULL)",
    )?;
    let token = session.granted("SELECT lease_acquire('a', 'me', '1 h')")?;
    session.refused("SELECT lease_acquire('b', 'me', '1 h')", "23P01")?;
    session.release("a", token)?.expect("held");
    session.run(
        "ALTER TABLE fence.lease DROP CONSTRAINT apart;
         UPDATE fence.lease SET holder = name;
         ALTER TABLE fence.lease ADD CONSTRAINT later UNIQUE (holder) DEFERRABLE INITIALLY DEFERRED",
    )?;
    session.run("BEGIN; SELECT lease_acquire('c', 'a', '1 h')")?;
    session.refused("COMMIT", "23505")?;
    session.run("BEGIN; SELECT lease_acquire('c', 'a', '1 h'); SELECT lease_acquire('a', 'd', '1 h'); COMMIT")?;
    ensure!(session.is_taken("c")? && session.is_taken("a")?);
    Ok(())
}

#[lab_test]
fn added_columns_get_their_defaults_and_keep_their_values(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "ALTER TABLE fence.lease ADD plain text, ADD fixed text NOT NULL DEFAULT 'x',
            ADD made text DEFAULT upper('y'), ADD id int GENERATED ALWAYS AS IDENTITY,
            ADD doubled interval GENERATED ALWAYS AS ((expires_at - renewed_at) * 2) STORED",
    )?;
    const NEW: &str =
        "SELECT concat_ws(' ', plain, fixed, made, id) FROM fence.lease WHERE name = ";
    const DOUBLED: &str =
        "SELECT bool_and(doubled = (expires_at - renewed_at) * 2) FROM fence.lease";
    let token = session.acquire("job", "1 h")?;
    session.acquire("other", "1 h")?;
    let shown = |session: &mut Session, name: &str| session.text(&format!("{NEW}'{name}'"));
    ensure!(shown(&mut session, "job")?.as_deref() == Some("x Y 1"));
    ensure!(shown(&mut session, "other")?.as_deref() == Some("x Y 2"));
    ensure!(session.truth(DOUBLED)?);
    session
        .run("UPDATE fence.lease SET plain = 'p', fixed = 'f', made = NULL WHERE name = 'job'")?;
    session.token(&format!("SELECT lease_renew('job', {token}, '2 h')"))?.expect("held");
    ensure!(shown(&mut session, "job")?.as_deref() == Some("p f 1") && session.truth(DOUBLED)?);
    session.release("job", token)?.expect("held");
    session.acquire("job", "5 min")?;
    ensure!(shown(&mut session, "job")?.as_deref() == Some("p f 1") && session.truth(DOUBLED)?);
    // A default that the caller may not evaluate, and a value that is asked for.
    session.run("ALTER TABLE fence.lease DROP made, ADD needed int; ALTER TABLE fence.lease ADD CHECK (needed > 0);
                 ALTER TABLE fence.lease ALTER needed SET DEFAULT 0")?;
    session.refused("SELECT lease_acquire('third')", "23514")?;
    session.run("ALTER TABLE fence.lease ALTER needed SET DEFAULT 1")?;
    session.acquire("third", "1 h")?;
    ensure!(
        session.text("SELECT needed FROM fence.lease WHERE name = 'third'")?.as_deref()
            == Some("1")
    );
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
        // What else is made of the columns goes first.
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

#[lab_test]
fn statement_triggers_rules_and_row_security_are_not_applied(lab: &Lab) -> Result<()> {
    let (db, mut session) = with_log(lab)?;
    let role = db.role("worker")?;
    session.run(&format!("SELECT fence_grant('{role}')"))?;
    session.run(
        "CREATE TRIGGER s AFTER INSERT OR UPDATE ON fence.lease FOR EACH STATEMENT EXECUTE FUNCTION log();
         CREATE RULE nothing AS ON INSERT TO fence.lease DO INSTEAD NOTHING;
         ALTER TABLE fence.lease ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
         CREATE POLICY none ON fence.lease USING (false) WITH CHECK (false)",
    )?;
    let mut worker = db.connect_as(&role)?;
    let token = worker.acquire("job", "1 h")?;
    ensure!(worker.renew("job", token)?.is_some() && worker.speaks("job", token)?);
    ensure!(session.is_taken("job")? && logged(&mut session)?.is_empty());
    Ok(())
}

#[lab_test]
fn writes_are_counted_in_the_statistics(lab: &Lab) -> Result<()> {
    const COUNTS: &str = "SELECT concat_ws(' ', n_tup_ins, n_tup_upd, n_tup_hot_upd, n_tup_del)
        FROM pg_stat_user_tables WHERE relid = 'fence.lease'::regclass";
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.acquire("job", "1 h")?;
    session.renew("job", token)?.expect("held");
    session.release("job", token)?.expect("held");
    session.granted("SELECT lease_prune('0')")?;
    session.run("SELECT pg_stat_force_next_flush()")?;
    let counts = session.text(COUNTS)?;
    ensure!(counts.as_deref() == Some("1 2 2 1"), "{counts:?}");
    Ok(())
}

#[lab_test]
fn writes_are_decoded_whatever_the_replica_identity(lab: &Lab) -> Result<()> {
    let cluster =
        lab.builder().set("wal_level", "logical").set("track_commit_timestamp", "on").start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    session.run("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")?;
    for setup in ["SELECT 1", "ALTER TABLE fence.lease REPLICA IDENTITY FULL"] {
        session.run(setup)?;
        let token = session.acquire("job", "1 h")?;
        session.renew("job", token)?.expect("held");
        session.release("job", token)?.expect("held");
        let stamped =
            "SELECT pg_xact_commit_timestamp(xmin) > now() - interval '1 h' FROM fence.lease";
        ensure!(session.truth(stamped)?);
        ensure!(session.granted("SELECT lease_prune('0')")? == 1);
        let changes = session.rows(
            "SELECT data FROM pg_logical_slot_get_changes('s', NULL, NULL) WHERE data LIKE 'table fence.lease:%'",
        )?;
        let changes: Vec<String> = changes.into_iter().flatten().flatten().collect();
        let kinds: Vec<&str> = changes.iter().filter_map(|c| c.split(' ').nth(2)).collect();
        ensure!(kinds == ["INSERT:", "UPDATE:", "UPDATE:", "DELETE:"], "{setup}: {changes:?}");
        ensure!(changes[3].contains("name[text]:'job' slot[integer]:0"), "{setup}: {}", changes[3]);
    }
    Ok(())
}

#[lab_test]
fn an_update_that_cannot_be_published_is_refused(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().set("wal_level", "logical").start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence; CREATE PUBLICATION p FOR TABLE fence.lease")?;
    let token = session.acquire("job", "1 h")?;
    session.renew("job", token)?.expect("held");
    for (setup, code, mend) in [
        (
            "ALTER TABLE fence.lease REPLICA IDENTITY NOTHING",
            "55000",
            "ALTER TABLE fence.lease REPLICA IDENTITY DEFAULT",
        ),
        (
            "ALTER PUBLICATION p SET TABLE fence.lease WHERE (holder = 'me')",
            "42P10",
            "ALTER PUBLICATION p SET TABLE fence.lease WHERE (name <> '')",
        ),
    ] {
        session.run(setup)?;
        let fault = session.refused(&format!("SELECT lease_renew('job', {token})"), code)?;
        if !fault.message.contains("cannot update table \"lease\"") {
            bail!("{setup}: {fault}");
        }
        ensure!(session.speaks("job", token)?);
        session.run(mend)?;
        session.renew("job", token)?.expect("held");
    }
    Ok(())
}
