//! Names that change hands: a superuser renames a schema of the extension, or what is in it, and a role that may create
//! schemas puts its own code and tables under the old name. Nothing of that is ever run, read or written. Renames right
//! before a use, and during a wait: schema_renames.script.

use pg_test::{ensure, lab_test, Context, Database, Lab, Result, Session};

/// A role that may create schemas, a table in which its code would say as whom it ran, and a table to be fenced.
fn waiting_role(db: &Database) -> Result<String> {
    let role = db.role("heir")?;
    db.connect()?.run(&format!(
        "GRANT CREATE ON DATABASE {} TO {role};
         CREATE TABLE public.ran (what text, who name);
         GRANT INSERT, SELECT ON public.ran TO PUBLIC;
         CREATE TABLE public.orders (id int PRIMARY KEY, total int);
         INSERT INTO public.orders VALUES (7, 0)",
        db.name()
    ))?;
    Ok(role)
}

/// The role makes a schema of the old name, with a function of its own for each that the extension has in the schema that
/// bears the new name, of the same arguments.
fn functions_under_the_old_name(
    db: &Database,
    role: &str,
    old: &str,
    new: &str,
) -> Result<Session> {
    let made = db.connect()?.rows(&format!(
        "SELECT format('CREATE FUNCTION {old}.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L', p.proname,
                    CASE WHEN p.proallargtypes IS NULL THEN (
                        -- (What belongs to the state is out of the role's reach.)
                        SELECT string_agg(CASE WHEN t.typnamespace = 'pg_catalog'::regnamespace
                                          THEN format_type(t.oid, NULL) ELSE 'text[]' END, ', ' ORDER BY a.n)
                          FROM unnest(p.proargtypes) WITH ORDINALITY AS a (oid, n) JOIN pg_type t ON t.oid = a.oid)
                    ELSE pg_get_function_arguments(p.oid) END,
                    CASE WHEN p.prorettype = 'trigger'::regtype THEN 'trigger' WHEN p.proretset THEN 'SETOF record'
                         WHEN p.proallargtypes IS NULL AND p.prorettype < 16384 THEN format_type(p.prorettype, NULL)
                         ELSE 'record' END,
                    format('BEGIN INSERT INTO public.ran VALUES (%L, current_user); RETURN%s; END', p.proname,
                        CASE WHEN p.proretset OR p.prorettype = 'void'::regtype OR p.proallargtypes IS NOT NULL
                             THEN '' ELSE ' NULL' END))
           FROM pg_proc p WHERE p.pronamespace = '{new}'::regnamespace"
    ))?;
    ensure!(made.len() >= 8, "{made:?}");
    let mut heir = db.connect_as(role)?;
    heir.run(&format!("SET search_path = pg_catalog; CREATE SCHEMA {old}"))?;
    for mut row in made {
        heir.run(&row.remove(0).context("no statement")?)?;
    }
    heir.run(&format!("GRANT USAGE ON SCHEMA {old} TO PUBLIC"))?;
    Ok(heir)
}

/// The role's code has not run as anybody.
fn nothing_ran(db: &Database) -> Result<()> {
    let ran = db.connect()?.rows("SELECT * FROM public.ran")?;
    ensure!(ran.is_empty(), "it ran: {ran:?}");
    Ok(())
}

/// All that looks up other parts of the extension is called, and does what it should. `api` and `state` are the schemas
/// of the functions and of the state, `gone` a role.
fn all_calls_work(
    db: &Database,
    session: &mut Session,
    (api, state, gone): (&str, &str, &str),
) -> Result<()> {
    let ours = |session: &mut Session, name: &str| -> Result<String> {
        let oid = format!(
            "SELECT p.oid FROM pg_proc p WHERE p.prosrc = '{name}' AND EXISTS (
            SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
             WHERE d.objid = p.oid AND d.deptype = 'e' AND e.extname = 'pg_fence')"
        );
        session.text(&oid)?.context("no such function")
    };
    let lease = "lease => 'order:{id}', verify => true";
    // Twice: the second call takes off what the first one has attached.
    for _ in 0..2 {
        session.run(&format!("SELECT {api}.fence_protect('public.orders', {lease})"))?;
        nothing_ran(db)?;
    }
    let fenced = ours(session, "fenced")?;
    let triggers = "SELECT count(*) || ' ' || bool_and(tgfoid = $) FROM pg_trigger
                     WHERE tgrelid = 'public.orders'::regclass AND NOT tgisinternal";
    let triggers = triggers.replace('$', &fenced);
    ensure!(
        session.text(&triggers)?.as_deref() == Some("3 true"),
        "{:?}",
        session.text(&triggers)?
    );

    // Leases, and the fence at work.
    let token: i64 = session.one(&format!("SELECT {api}.lease_acquire('order:7')"), &[])?;
    session.run(&format!("UPDATE public.orders SET total = 1, fence = {token} WHERE id = 7"))?;
    session.refused("UPDATE public.orders SET total = 2, fence = 9000000000000000000", "PF003")?;
    let seen = format!("SELECT token = {token} FROM {state}.leases WHERE name = 'order:7'");
    ensure!(session.text(&seen)?.as_deref() == Some("t"));
    let info = format!("SELECT token = {token} FROM {api}.lease_info('order:7')");
    ensure!(session.text(&info)?.as_deref() == Some("t"));
    let closed: i64 =
        session.one(&format!("SELECT {api}.lease_release('order:7', {token})"), &[])?;
    let last = format!("SELECT last_token FROM {api}.fence_status()");
    ensure!(closed == token + 1 && session.one::<i64>(&last, &[])? == closed);

    // The audit: a row ahead of the sequence, a lease whose role is gone, a trigger switched off.
    let findings = format!("SELECT finding, remedy FROM {api}.fence_audit()");
    let before = session.rows(&findings)?;
    session.run(&format!(
        "ALTER TABLE public.orders DISABLE TRIGGER fenced; ALTER TABLE public.orders DISABLE TRIGGER fenced_verify;
         UPDATE public.orders SET fence = {closed} + 1000;
         SELECT {api}.fence_grant('{gone}', 'admin'); GRANT USAGE ON SCHEMA {api} TO {gone}"
    ))?;
    nothing_ran(db)?;
    let mut worker = db.connect_as(gone)?;
    worker.run(&format!(
        "SELECT {api}.lease_acquire('left'), {api}.lease_info('left'); SELECT count(*) FROM {state}.refusals"
    ))?;
    drop(worker);
    let found = session.rows(&findings)?;
    let fresh: Vec<&str> = found
        .iter()
        .filter(|row| !before.contains(row))
        .filter_map(|row| row[0].as_deref())
        .collect();
    ensure!(
        fresh.len() == 3
            && fresh[0] == "trigger \"fenced\" is disabled"
            && fresh[1] == "trigger \"fenced_verify\" is disabled"
            && fresh[2].starts_with("rows hold fences up to"),
        "{fresh:?}"
    );
    // (The remedies name the schema as it is now.)
    let jump = format!("SELECT {api}.fence_new_epoch();");
    ensure!(found.iter().any(|row| row[1].as_deref() == Some(&jump)), "{found:?}");
    session.run(&format!("ALTER ROLE {gone} RENAME TO {gone}_2"))?;
    let orphans =
        session.rows(&format!("{findings} WHERE finding LIKE 'lease \"left\" is held by%'"))?;
    session.run(&format!("ALTER ROLE {gone}_2 RENAME TO {gone}"))?;
    let revoke = format!("SELECT {api}.lease_revoke('left');");
    ensure!(
        orphans.len() == 1 && orphans[0][1].as_deref().is_some_and(|r| r.starts_with(&revoke)),
        "{orphans:?}"
    );
    session.run(&format!("SELECT {api}.lease_revoke('left')"))?;
    nothing_ran(db)?;
    for row in found.iter().filter(|row| !before.contains(row)) {
        session.run(row[1].as_deref().unwrap_or_default())?;
    }
    let left = session.rows(&findings)?;
    ensure!(left == before, "{left:?}");

    // The rights are taken back.
    let rights = format!(
        "SELECT count(*) FROM pg_shdepend WHERE refobjid = '{gone}'::regrole AND deptype = 'a'
                             AND objid <> '{api}'::regnamespace"
    );
    let granted: i64 = session.one(&rights, &[])?;
    ensure!(granted >= 20, "{granted}");
    session.run(&format!("SELECT {api}.fence_revoke('{gone}')"))?;
    let kept: i64 = session.one(&rights, &[])?;
    ensure!(kept == 0, "{kept} rights of {granted} are left");
    nothing_ran(db)?;

    session.run(&format!("SELECT {api}.fence_unprotect('public.orders')"))?;
    ensure!(session.text(&triggers)?.is_none_or(|text| text.starts_with("0")));
    session.run("UPDATE public.orders SET fence = NULL")?;
    nothing_ran(db)
}

#[lab_test]
fn the_schema_of_the_functions_may_be_renamed(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let (role, gone) = (waiting_role(&db)?, db.role("gone")?);
    let mut before = db.connect()?;
    before.run("CREATE SCHEMA \"The API\"; CREATE EXTENSION pg_fence SCHEMA \"The API\"")?;
    // This session has all of it in its caches.
    all_calls_work(&db, &mut before, ("\"The API\"", "fence", &gone))?;
    before.run("ALTER SCHEMA \"The API\" RENAME TO \"New Place\"")?;
    let _heir = functions_under_the_old_name(&db, &role, "\"The API\"", "\"New Place\"")?;
    for session in [&mut before, &mut db.connect()?] {
        all_calls_work(&db, session, ("\"New Place\"", "fence", &gone))?;
    }
    Ok(())
}

#[lab_test]
fn the_schema_of_the_state_may_be_renamed(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (role, gone) = (waiting_role(&db)?, db.role("gone")?);
    let mut before = db.connect()?;
    all_calls_work(&db, &mut before, ("public", "fence", &gone))?;
    before.run(&format!(
        "ALTER SCHEMA fence RENAME TO \"The State\"; SELECT fence_grant('{role}', 'admin')"
    ))?;
    let mut heir = functions_under_the_old_name(&db, &role, "fence", "\"The State\"")?;
    heir.run(
        "CREATE TABLE fence.lease (LIKE \"The State\".lease INCLUDING ALL);
         CREATE FUNCTION fence.spring() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
             INSERT INTO public.ran VALUES ('spring', current_user); RETURN NEW; END$$;
         CREATE TRIGGER spring BEFORE INSERT OR UPDATE ON fence.lease FOR EACH ROW EXECUTE FUNCTION fence.spring();
         CREATE FUNCTION fence.tells() RETURNS text LANGUAGE plpgsql AS $$BEGIN
             INSERT INTO public.ran VALUES ('view', current_user); RETURN 'x'; END$$;
         CREATE VIEW fence.leases AS SELECT fence.tells() AS name, 'held' AS state, fence.tells()::name AS role;
         CREATE SEQUENCE fence.token_seq; CREATE SEQUENCE fence.database_identity_seq;
         CREATE SEQUENCE fence.jump_token_seq; CREATE SEQUENCE fence.jump_count_seq;
         CREATE UNLOGGED SEQUENCE fence.server_start_seq; CREATE SEQUENCE fence.dumped_token_seq;
         CREATE UNLOGGED SEQUENCE fence.stats_memory_seq;
         GRANT ALL ON ALL TABLES IN SCHEMA fence TO PUBLIC; GRANT ALL ON ALL SEQUENCES IN SCHEMA fence TO PUBLIC",
    )?;
    let found = "SELECT finding, remedy FROM fence_audit() WHERE finding LIKE 'the schema%'";
    let named = [[
        "the schema \"fence\" is now named \"The State\": a dump of this database does not load",
        "ALTER SCHEMA \"The State\" RENAME TO fence;",
    ]
    .map(|text| Some(text.to_owned()))];
    let mut after = db.connect()?;
    for session in [&mut before, &mut after] {
        ensure!(session.rows(found)? == named, "{:?}", session.rows(found)?);
        ensure!(session.one::<bool>("SELECT lease_acquire('mine') IS NOT NULL", &[])?);
        ensure!(session.one::<bool>("SELECT lease_revoke('mine') IS NOT NULL", &[])?);
        session.run(
            "SELECT fence_stats_reset(), lease_prune('0'); SELECT * FROM \"The State\".stats",
        )?;
        nothing_ran(&db)?;
    }
    // Nothing of the role's was written.
    ensure!(heir.one::<i64>("SELECT count(*) FROM fence.lease", &[])? == 0);
    let drawn = "SELECT count(last_value) FROM pg_sequences WHERE schemaname = 'fence'";
    ensure!(heir.one::<i64>(drawn, &[])? == 0);
    before.run("DROP SCHEMA fence CASCADE; ALTER SCHEMA \"The State\" RENAME TO fence")?;
    for session in [&mut before, &mut after] {
        all_calls_work(&db, session, ("public", "fence", &gone))?;
    }
    ensure!(before.rows(found)?.is_empty());
    Ok(())
}

#[lab_test]
fn the_trigger_function_may_be_renamed_or_moved(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (role, gone) = (waiting_role(&db)?, db.role("gone")?);
    let mut admin = db.connect()?;
    admin.run(&format!(
        "CREATE SCHEMA other; GRANT CREATE, USAGE ON SCHEMA public TO {role};
         SELECT fence_protect('public.orders')"
    ))?;
    for (moved, named) in [
        ("ALTER FUNCTION public.fenced() RENAME TO \"judged so\"", "\"judged so\""),
        ("ALTER FUNCTION public.\"judged so\"() SET SCHEMA other", "other.\"judged so\""),
    ] {
        admin.run(moved)?;
        db.connect_as(&role)?.run(
            "CREATE OR REPLACE FUNCTION public.fenced() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN INSERT INTO public.ran VALUES (''fenced'', current_user); RETURN NEW; END'",
        )?;
        for session in [&mut admin, &mut db.connect()?] {
            all_calls_work(&db, session, ("public", "fence", &gone))?;
            session.run("SELECT fence_protect('public.orders')")?;
            let calls = "SELECT DISTINCT tgfoid::regproc::text FROM pg_trigger
                          WHERE tgrelid = 'public.orders'::regclass";
            ensure!(session.text(calls)?.as_deref() == Some(named), "{:?}", session.text(calls)?);
        }
    }
    Ok(())
}

#[lab_test]
fn what_is_gone_from_the_extension_is_missed_and_nothing_is_taken_for_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (role, gone) = (waiting_role(&db)?, db.role("gone")?);
    let mut admin = db.connect()?;
    admin.run(&format!("CREATE SCHEMA other; GRANT CREATE ON SCHEMA other TO {role}; SELECT fence_protect('public.orders')"))?;
    let mut refused = |alter: &str, mend: &str, calls: &[&str]| -> Result<()> {
        admin.run(alter)?;
        for call in calls {
            for session in [&mut admin, &mut db.connect()?] {
                let fault = session.refused(call, "55000")?;
                let said = format!("{fault}");
                ensure!(
                    said.contains("back") || said.contains("is no sequence"),
                    "{alter}: {call}: {said}"
                );
            }
        }
        admin.run(mend)
    };
    refused(
        "ALTER EXTENSION pg_fence DROP FUNCTION fenced()",
        "ALTER EXTENSION pg_fence ADD FUNCTION fenced()",
        &[
            "SELECT fence_audit()",
            "SELECT fence_protect('orders')",
            "SELECT fence_unprotect('orders')",
        ],
    )?;
    refused(
        "ALTER FUNCTION fence.audit_tables RENAME TO audited",
        "ALTER FUNCTION fence.audited RENAME TO audit_tables",
        &["SELECT fence_audit()"],
    )?;
    refused(
        "ALTER TABLE fence.lease SET SCHEMA other",
        "ALTER TABLE other.lease SET SCHEMA fence",
        &["SELECT lease_acquire('job')", "SELECT lease_renew('job', 1)"],
    )?;
    refused(
        "ALTER SEQUENCE fence.token_seq RENAME TO tokens",
        "ALTER SEQUENCE fence.tokens RENAME TO token_seq",
        &["SELECT lease_acquire('job')", "SELECT fence_audit()"],
    )?;
    refused(
        "ALTER SEQUENCE fence.token_seq RENAME TO tokens; CREATE TABLE fence.token_seq (last_value bigint)",
        "DROP TABLE fence.token_seq; ALTER SEQUENCE fence.tokens RENAME TO token_seq",
        &["SELECT lease_acquire('job')"],
    )?;
    all_calls_work(&db, &mut admin, ("public", "fence", &gone))
}
