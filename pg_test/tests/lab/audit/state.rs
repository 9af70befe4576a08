//! `fence_audit` on the state of pg_fence itself, which it looks at when asked for all tables: what was altered,
//! who may write it, whose it is, and leases of roles that are gone.

use crate::support::holes::{AuditedDatabase, Hole, BOUND, HOLE};
use pg_test::clock::Clocked;
use pg_test::{ensure, lab_test, Background, Context, Database, Lab, Result, Session};

/// What `fence_audit()` says to a session: `relation|severity|finding`, and the remedy.
fn audit(session: &mut Session) -> Result<Vec<(String, String)>> {
    let rows = session.rows(
        "SELECT concat_ws('|', coalesce(relation::text, '-'), severity, finding), coalesce(remedy, '') FROM fence_audit()",
    )?;
    let text = |cell: Option<String>| cell.context("a finding with a NULL");
    rows.into_iter().map(|mut row| Ok((text(row.remove(0))?, text(row.remove(0))?))).collect()
}

/// The state is altered, that alone is found, and the remedies put it right.
fn is_found(session: &mut Session, built: &str, wanted: &[&str]) -> Result<()> {
    let outcome = (|| {
        session.run(built)?;
        let rows = audit(session)?;
        let found: Vec<&str> = rows.iter().map(|(found, _)| &**found).collect();
        ensure!(found == wanted, "the audit says {found:#?}, not {wanted:#?}");
        for (_, remedy) in &rows {
            session.run(remedy)?;
        }
        let left = audit(session)?;
        ensure!(left.is_empty(), "after {rows:#?}\nthe audit says {left:#?}");
        // Leases work as before.
        session.run(
            "DO $$ DECLARE token bigint := lease_acquire('job'); BEGIN
                 ASSERT lease_renew('job', token) > token; ASSERT lease_revoke('job') > token;
             END $$",
        )
    })();
    outcome.context(built.to_owned())
}

/// Tables (r) or sequences (S) of the extension, with how each is kept (p, u).
fn parts(session: &mut Session, kind: &str) -> Result<Vec<(String, String)>> {
    let rows = session.rows(&format!(
        "SELECT c.oid::regclass, c.relpersistence FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid
           JOIN pg_class c ON c.oid = d.objid
          WHERE e.extname = 'pg_fence' AND d.classid = 'pg_class'::regclass
            AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND c.relkind = '{kind}' ORDER BY 1"
    ))?;
    ensure!(!rows.is_empty(), "{rows:?}");
    let text = |cell: Option<String>| cell.context("a NULL in the catalog");
    rows.into_iter().map(|mut row| Ok((text(row.remove(0))?, text(row.remove(0))?))).collect()
}

#[lab_test]
fn each_part_that_a_crash_would_treat_otherwise_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    for kind in ["r", "S"] {
        let name = if kind == "r" { "TABLE" } else { "SEQUENCE" };
        for (part, persistence) in parts(&mut admin, kind)? {
            let (to, said) = match persistence.as_str() {
                "p" => ("UNLOGGED", "hole|this part of the state is unlogged: a crash empties it"),
                // Nothing but fence.stats depends on it.
                _ if part == "fence.stats_memory_seq" => {
                    ("LOGGED", "notice|this part of the state is logged: nothing is counted")
                }
                _ => (
                    "LOGGED",
                    "hole|this part of the state is logged: a crash does not empty it, and is not noticed",
                ),
            };
            let found = format!("{part}|{said}");
            is_found(&mut admin, &format!("ALTER {name} {part} SET {to}"), &[&found])?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_primary_key_that_is_gone_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    for (table, _) in parts(&mut admin, "r")? {
        let key = table.replace("fence.", "") + "_pkey";
        let columns = format!(
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = '{table}'::regclass AND contype = 'p'"
        );
        let before = admin.text(&columns)?;
        is_found(
            &mut admin,
            &format!("ALTER TABLE {table} DROP CONSTRAINT {key}"),
            &[&format!("{table}|notice|its primary key is gone: pg_fence cannot work")],
        )?;
        is_found(
            &mut admin,
            &format!("ALTER TABLE {table} RENAME CONSTRAINT {key} TO \"Key\""),
            &[&format!("{table}|notice|its primary key has become \"Key\": pg_fence cannot work")],
        )?;
        ensure!(before.is_some() && admin.text(&columns)? == before, "{before:?}");
        is_found(
            &mut admin,
            &format!(
                "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'fence.{key}'::regclass"
            ),
            &[&format!(
                "{table}|hole|its primary key is invalid: pg_fence may not find a row by it"
            )],
        )?;
    }
    Ok(())
}

#[lab_test]
fn an_altered_sequence_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    for (sequence, _) in parts(&mut admin, "S")? {
        for (built, said) in [
            ("INCREMENT 2", "INCREMENT 2"),
            ("CACHE 10 CYCLE", "CACHE 10, CYCLE"),
            ("MINVALUE -7", "MINVALUE -7"),
            ("MAXVALUE 9223372036854775806", "MAXVALUE 9223372036854775806"),
        ] {
            let found = format!(
                "{sequence}|notice|this sequence was altered ({said}): pg_fence cannot work with it, or not for long"
            );
            is_found(&mut admin, &format!("ALTER SEQUENCE {sequence} {built}"), &[&found])?;
        }
    }
    Ok(())
}

/// Takes the lease away from its holder, and writes.
const ROB: &str =
    "DELETE FROM fence.lease; UPDATE orders SET v = 33, fence = lease_acquire('order:1')";

#[lab_test]
fn who_may_write_the_state_is_found(lab: &Lab) -> Result<()> {
    let hole = Hole { by_admin: true, write: ROB, after: "42501", ..HOLE };
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "GRANT DELETE ON fence.lease TO :writer",
            found_in_all: Some(&[
                "fence.lease|hole|:writer has DELETE on TABLE fence.lease, which is for pg_fence alone",
            ]),
            ..hole
        },
        Hole {
            built: "GRANT DELETE, SELECT, REFERENCES ON fence.lease TO PUBLIC",
            found_in_all: Some(&[
                "fence.lease|hole|PUBLIC has DELETE on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|notice|PUBLIC has REFERENCES on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|notice|PUBLIC has SELECT on TABLE fence.lease: leases are for the roles that fence_grant names",
            ]),
            ..hole
        },
        // A right passed on goes with that of the role that did.
        Hole {
            built: "GRANT DELETE ON fence.lease TO :owner WITH GRANT OPTION; \
                    SET ROLE :owner; GRANT DELETE ON fence.lease TO :writer; RESET ROLE",
            found_in_all: Some(&[
                "fence.lease|hole|:owner has DELETE on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|hole|:writer has DELETE on TABLE fence.lease, which is for pg_fence alone",
            ]),
            ..hole
        },
        Hole {
            built: "GRANT UPDATE (expires_at), SELECT ON fence.lease TO :writer",
            found_in_all: Some(&[
                "fence.lease|hole|:writer has UPDATE (expires_at) on TABLE fence.lease, which is for pg_fence alone",
            ]),
            write: "UPDATE fence.lease SET expires_at = now(); \
                    UPDATE orders SET v = 33, fence = lease_acquire('order:1')",
            ..hole
        },
        Hole {
            built: "GRANT INSERT, TRUNCATE, TRIGGER ON fence.lease TO :writer",
            found_in_all: Some(&[
                "fence.lease|hole|:writer has INSERT on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|hole|:writer has TRUNCATE on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|hole|:writer has TRIGGER on TABLE fence.lease, which is for pg_fence alone",
            ]),
            write: "TRUNCATE fence.lease; UPDATE orders SET v = 33, fence = lease_acquire('order:1')",
            ..hole
        },
        Hole {
            built: "GRANT CREATE ON SCHEMA fence TO :writer",
            found_in_all: Some(&[
                "orders|notice|:writer has CREATE on SCHEMA fence, which is for pg_fence alone",
            ]),
            write: "CREATE FUNCTION fence.max_column_value(regclass, smallint) RETURNS bigint RETURN 1",
            before: "no effect",
            ..hole
        },
    ])
}

#[lab_test]
fn who_may_draw_tokens_without_a_lease_is_found(lab: &Lab) -> Result<()> {
    let hole = Hole {
        fence: "",
        by_admin: true,
        write: "UPDATE orders SET v = 33, fence = nextval('fence.token_seq')",
        after: "42501",
        ..HOLE
    };
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "GRANT USAGE ON SEQUENCE fence.token_seq TO :writer",
            found_in_all: Some(&[
                "fence.token_seq|hole|:writer has USAGE on SEQUENCE fence.token_seq, which is for pg_fence alone",
            ]),
            ..hole
        },
        Hole {
            built: "GRANT UPDATE ON SEQUENCE fence.token_seq TO PUBLIC",
            found_in_all: Some(&[
                "fence.token_seq|hole|PUBLIC has UPDATE on SEQUENCE fence.token_seq, which is for pg_fence alone",
            ]),
            ..hole
        },
    ])
}

/// Members of that role are the same in all databases, and so this test has a server of its own.
#[lab_test]
fn who_may_write_all_data_is_found(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let mut audited = AuditedDatabase::on(Database::with_extension(cluster.conninfo("postgres"))?)?;
    let found =
        "fence.lease|notice|:writer is a member of pg_write_all_data, and may write the state of pg_fence";
    for write in [
        "UPDATE orders SET v = 33, fence = nextval('fence.token_seq')",
        "UPDATE fence.lease SET expires_at = 'infinity'; UPDATE orders SET v = 33, fence = lease_renew('order:1', :new)",
    ] {
        audited.close_all(&[Hole {
            fence: "",
            by_admin: true,
            built: "GRANT pg_write_all_data TO :writer",
            found_in_all: Some(&[found]),
            write,
            after: "42501",
            ..HOLE
        }])?;
    }
    Ok(())
}

#[lab_test]
fn what_belongs_to_somebody_else_is_found(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.close_all(&[Hole {
        by_admin: true,
        built: "ALTER TABLE fence.lease OWNER TO :writer",
        found_in_all: Some(&[
            "fence.lease|hole|TABLE fence.lease belongs to :writer, not to the owner of pg_fence",
        ]),
        write: ROB,
        after: "42501",
        ..HOLE
    }])?;
    let writer = audited.stage(HOLE.table, BOUND)?[1].1.clone();
    for (what, relation) in [
        ("SEQUENCE fence.token_seq", "fence.token_seq"),
        ("VIEW fence.leases", "fence.leases"),
        ("FUNCTION public.lease_revoke(text)", "-"),
        ("SCHEMA fence", "-"),
    ] {
        let found =
            format!("{relation}|hole|{what} belongs to {writer}, not to the owner of pg_fence");
        is_found(&mut audited.admin, &format!("ALTER {what} OWNER TO {writer}"), &[&found])?;
    }
    Ok(())
}

#[lab_test]
fn what_is_in_the_way_of_rows_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    admin.run(
        "CREATE FUNCTION lets_pass() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
    )?;
    let secured =
        "|notice|row security is on: it keeps rows from dumps, and may keep them from fence.leases";
    for (built, wanted) in [
        ("ALTER TABLE fence.lease ENABLE ROW LEVEL SECURITY", "fence.lease".to_owned() + secured),
        ("ALTER TABLE fence.lease FORCE ROW LEVEL SECURITY", "fence.lease".to_owned() + secured),
        (
            "CREATE TRIGGER \"Each row\" BEFORE UPDATE ON fence.lease FOR EACH ROW EXECUTE FUNCTION lets_pass()",
            "fence.lease|notice|trigger \"Each row\" runs whenever pg_fence writes a row here, \
             and may change or refuse it".to_owned(),
        ),
        (
            "CREATE TRIGGER whole AFTER UPDATE ON fence.lease EXECUTE FUNCTION lets_pass()",
            "fence.lease|notice|trigger \"whole\" is for statements: it does not run when pg_fence writes here"
                .to_owned(),
        ),
        (
            "CREATE RULE \"No\" AS ON DELETE TO fence.lease DO INSTEAD NOTHING",
            "fence.lease|notice|rule \"No\" is not applied when pg_fence writes here".to_owned(),
        ),
    ] {
        is_found(&mut admin, built, &[&wanted])?;
    }
    Ok(())
}

#[lab_test]
fn a_table_asked_for_by_name_says_nothing_of_the_state(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(HOLE.table, BOUND)?;
    audited.admin.run("ALTER TABLE fence.lease ENABLE ROW LEVEL SECURITY")?;
    ensure!(audited.audit("'orders'")?.is_empty());
    // Of all tables everybody hears of it, who is to be told to ask.
    ensure!(audited.audit("")?.len() == 1);
    Ok(())
}

#[lab_test]
fn no_setting_makes_a_fault_of_a_sound_state(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    for setting in [
        "quote_all_identifiers = on",
        "search_path = ''",
        "DateStyle = 'SQL, DMY'",
        "IntervalStyle = iso_8601",
    ] {
        admin.run(&format!("RESET ALL; SET {setting}"))?;
        let found = admin.rows("SELECT * FROM public.fence_audit()")?;
        ensure!(found.is_empty(), "{setting}: {found:#?}");
    }
    Ok(())
}

#[lab_test]
fn a_sequence_ahead_of_the_clock_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let ahead = |hours: u32| {
        format!(
            "SELECT setval('fence.token_seq', (1048576 * extract(epoch FROM clock_timestamp() \
                 + interval '{hours} h' - timestamptz '2026-01-01 00:00+00'))::bigint)"
        )
    };
    admin.run("SELECT lease_acquire('job')")?;
    admin.run(&ahead(23))?;
    ensure!(audit(&mut admin)?.is_empty());
    admin.run(&ahead(25))?;
    let rows = audit(&mut admin)?;
    ensure!(
        rows.len() == 1
            && rows[0].0.starts_with(
                "fence.token_seq|notice|the last token drawn is where the clock will be on 2"
            ),
        "{rows:?}"
    );
    // There is nothing to be done but to know of it.
    ensure!(rows[0].1.is_empty(), "{rows:?}");
    // Who may not use leases sees nothing of their tokens.
    let role = db.role("stranger")?;
    ensure!(audit(&mut db.connect_as(&role)?)?.is_empty());
    Ok(())
}

#[lab_test]
fn a_lease_of_a_role_that_is_gone_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (role, user) = (db.role("worker")?, db.role("user")?);
    let mut admin = db.connect()?;
    admin.run(&format!("SELECT fence_grant('{role}'), fence_grant('{user}')"))?;
    let mut worker = db.connect_as(&role)?;
    worker.run(
        "SELECT lease_acquire('job', ttl => '1 h'), lease_acquire('free', ttl => '1 h');
         SELECT lease_acquire('many', slots => 3, ttl => '1 h') FROM generate_series(1, 3)",
    )?;
    let token: i64 = worker.one("SELECT token FROM fence.leases WHERE name = 'job'", &[])?;
    admin.run("SELECT lease_revoke('free')")?;
    ensure!(audit(&mut admin)?.is_empty());

    let renamed = format!("{role}_new");
    admin.run(&format!("ALTER ROLE {role} RENAME TO {renamed}"))?;
    let outcome = (|| {
        let said = |lease: &str| {
            format!(
                "fence.lease|notice|lease \"{lease}\" is held by role \"{role}\", which is dropped or renamed: \
                 its holder can neither renew nor release it"
            )
        };
        let wanted = [said("job"), said("many")];
        let mut other = db.connect_as(&user)?;
        let rows = audit(&mut other)?;
        ensure!(rows.iter().map(|row| &row.0).eq(&wanted), "{rows:#?}");
        // It is as it says. (The names stay with the old name, too.)
        let mut worker = db.connect_as(&renamed)?;
        let renew = format!("SELECT lease_renew('job', {token})");
        ensure!(worker.one::<Option<i64>>(&renew, &[])?.is_none());
        admin.run(&format!("SELECT fence_grant('{renamed}')"))?;
        worker.refused(&renew, "42501")?;
        let kept_by_name = audit(&mut admin)?.remove(2);
        ensure!(kept_by_name.0.contains("which is dropped or renamed"), "{kept_by_name:?}");
        admin.run(&kept_by_name.1)?;
        // Who may not use leases sees none.
        admin.run(&format!("SELECT fence_revoke('{user}')"))?;
        ensure!(audit(&mut other)?.is_empty());

        // The way back, for the first; for the second what the remedy does.
        admin.run(&rows[1].1)?;
        let rows = audit(&mut admin)?;
        ensure!(rows.iter().map(|row| &row.0).eq(&wanted[..1]), "{rows:#?}");
        admin.run(&format!("ALTER ROLE {renamed} RENAME TO {role}"))?;
        admin.run(&format!("SELECT fence_grant('{role}')"))?;
        admin.run(&format!("DELETE FROM fence.role_prefix WHERE role = '{renamed}'"))?;
        ensure!(audit(&mut admin)?.is_empty());
        worker.run(&renew)?;
        Ok(())
    })();
    if outcome.is_err() {
        admin.run(&format!("ALTER ROLE {renamed} RENAME TO {role}")).ok();
    }
    outcome
}

#[lab_test]
fn a_lease_from_a_clock_that_stood_ahead_is_found(lab: &Lab) -> Result<()> {
    let clocked = Clocked::start(lab.builder(), &lab.prefix().new_dir("clock")?)?;
    let mut admin = clocked.cluster().connect("postgres")?;
    admin.run("CREATE EXTENSION pg_fence; SELECT lease_acquire('before', ttl => '1 day')")?;
    clocked.step(2 * 3600)?;
    admin.run("SELECT lease_release('over', lease_acquire('over', ttl => '1 min'))")?;
    admin.run("SELECT lease_acquire('job', ttl => '1 min')")?;
    let kept: i64 = admin.one("SELECT lease_acquire('kept', ttl => '1 min')", &[])?;
    ensure!(audit(&mut admin)?.is_empty());
    clocked.step(0)?;
    let said = |lease: &str| {
        format!(
            "fence.lease|notice|lease \"{lease}\" has more time left than its ttl: \
             the clock stood ahead when it was granted or renewed"
        )
    };
    let rows = audit(&mut admin)?;
    let wanted = ["job", "kept"].map(said);
    ensure!(rows.iter().map(|row| &row.0).eq(&wanted), "{rows:#?}");
    // A renewal counts from the clock as it is; or the remedies.
    admin.run(&format!("SELECT lease_renew('kept', {kept})"))?;
    admin.run(&rows[0].1)?;
    ensure!(audit(&mut admin)?.is_empty());
    ensure!(admin.one::<bool>("SELECT count(*) = 2 FROM fence.leases WHERE state = 'held'", &[])?);
    Ok(())
}

/// Of the table and of what it keeps out of line.
#[lab_test]
fn an_index_that_was_left_invalid_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    for built in [
        "REINDEX TABLE CONCURRENTLY fence.lease",
        "CREATE INDEX CONCURRENTLY by_role ON fence.lease (role)",
    ] {
        // It waits for the session that has the table, and is cancelled.
        let mut holder = db.connect()?;
        holder.run("BEGIN; SELECT lease_acquire('any')")?;
        let mut builder = Background::connect(&db.conninfo())?;
        builder.send(built)?;
        builder.wait_until_blocked()?;
        builder.cancel()?;
        builder.refused("57014")?;
        holder.run("ROLLBACK")?;
        let rows = audit(&mut admin)?;
        ensure!(!rows.is_empty(), "{built} left nothing");
        for (told, remedy) in &rows {
            ensure!(
                told.starts_with("fence.lease|notice|index ") && told.contains(" is invalid: "),
                "{rows:#?}"
            );
            admin.run(remedy)?;
        }
        let toast = rows.iter().filter(|row| row.1.contains("pg_toast")).count();
        ensure!(
            rows.len() == 1 + toast && toast == usize::from(built.starts_with("REINDEX")),
            "{rows:#?}"
        );
        ensure!(audit(&mut admin)?.is_empty());
        admin.run("SELECT lease_revoke('job') FROM lease_acquire('job')")?;
    }
    Ok(())
}
