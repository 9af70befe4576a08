//! `sql/pg_fence_lite.sql` by itself: how it is installed and taken away, what is weaker in it, how it is left for the
//! extension. That it keeps the promises of the extension is shown by the other tests, with `--edition lite`.

use crate::guards::pipelines::is_taken_after_discard;
use pg_test::edition::{self, lite_script, move_up_script, with_bug};
use pg_test::extension::source_root;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::test_case::{left_out, names};
use pg_test::{
    ensure, lab_test, Background, Calls, Cluster, Context, Database, Lab, Result, Session, Shutdown,
};

/// A database with the script in it, installed by its owner, who is no superuser; and his name.
fn installed(lab: &Lab, script: &str) -> Result<(Database, String)> {
    let db = lab.bare_database()?;
    let owner = db.role("keeper")?;
    db.connect()?.run(&format!("ALTER DATABASE {} OWNER TO {owner}", db.name()))?;
    db.connect_as(&owner)?.run(script)?;
    Ok((db, owner))
}

fn lite(lab: &Lab) -> Result<(Database, String)> {
    installed(lab, &lite_script()?)
}

const ORDERS: &str = "CREATE TABLE orders (id int PRIMARY KEY, v int DEFAULT 0, fence bigint);
    INSERT INTO orders VALUES (1), (2); SELECT fence_protect('orders', lease => 'order:{id}')";

#[lab_test]
fn an_ordinary_owner_installs_it_again_and_takes_it_away(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    ensure!(!session.truth("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")?);
    session.run(ORDERS)?;
    let token = session.acquire("order:1", "1 h")?;
    // Of an older file nothing stays that this one has not: it would be open to all, and nobody mends it.
    session.run(
        "CREATE FUNCTION fence.older() RETURNS int LANGUAGE sql SECURITY DEFINER RETURN 1;
         CREATE FUNCTION fence.on_it() RETURNS int LANGUAGE sql RETURN fence.older()",
    )?;
    session.run(&lite_script()?)?;
    ensure!(session
        .truth("SELECT to_regproc('fence.older') IS NULL AND to_regproc('fence.on_it') IS NULL")?);
    session.run(&format!("UPDATE orders SET v = 1, fence = {token} WHERE id = 1"))?;
    ensure!(session.speaks("order:1", token)?, "a second installation keeps the leases");

    session.refused("SELECT fence.uninstall()", "2BP01")?;
    session.run("SELECT fence_unprotect('orders'); SELECT fence.uninstall()")?;
    let left = session.text(
        "SELECT count(*) FROM pg_proc WHERE proowner = current_user::regrole
            OR pronamespace = to_regnamespace('fence')",
    )?;
    ensure!(left.as_deref() == Some("0"), "{left:?} functions are left");
    session.run(&lite_script()?)?;
    ensure!(session.acquire("order:1", "1 h")? > token, "a token was handed out again");
    Ok(())
}

#[lab_test]
fn a_schema_of_somebody_else_stops_the_installation(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let other = db.role("other")?;
    let mut session = db.connect()?;
    session.run(&format!("CREATE SCHEMA fence AUTHORIZATION {other}"))?;
    session.refused(&lite_script()?, "42P06")?;
    Ok(())
}

/// Where others may create things beside the calls: an operator that fits better than Postgres's own would be called instead.
#[lab_test]
fn what_others_have_made_beside_the_calls_gets_into_none(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let (owner, role) = (db.role("keeper")?, db.role("rogue")?);
    let mut admin = db.connect()?;
    admin.run(&format!(
        "ALTER DATABASE {} OWNER TO {owner}; GRANT CREATE ON SCHEMA public TO {role}",
        db.name()
    ))?;
    let mut rogue = db.connect_as(&role)?;
    rogue.run(EVIL)?;
    let mut keeper = db.connect_as(&owner)?;
    keeper.run("SET search_path = public, pg_catalog")?;
    keeper.run(&lite_script()?)?;
    let path = keeper.text("SHOW search_path")?;
    ensure!(path.as_deref() == Some("public, pg_catalog"), "{path:?} is the path behind it");
    keeper.run("RESET search_path")?;
    keeper.run(&lite_script()?)?;
    keeper.run(ORDERS)?;
    keeper.run(&format!("SELECT fence_grant('{role}', prefix => 'order:'), fence_audit()"))?;
    let token = rogue.acquire("order:1", "1 h")?;
    keeper.acquire("job", "1 h")?;
    if edition::is_lite() {
        return Ok(());
    }
    // Moving up, neither those run, nor calls of the same name, which would fit words without a type.
    rogue.run(
        "CREATE FUNCTION public.fence_protect(relation text, fence_column text, mode text, lease text, events text, always text)
             RETURNS boolean LANGUAGE sql AS 'SELECT public.evil()';
         CREATE FUNCTION public.fence_grant(role text, level text, prefix text)
             RETURNS boolean LANGUAGE sql AS 'SELECT public.evil()'",
    )?;
    admin.run(&move_up_script()?)?;
    ensure!(rogue.speaks("order:1", token)?, "its token was silenced");
    Ok(())
}

/// Whatever calls one of these fails.
const EVIL: &str = r#"
CREATE FUNCTION public.evil() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'run as %', current_user; END $$;
DO $$ DECLARE item record; BEGIN
  FOR item IN SELECT o AS op, l, r, CASE o WHEN '||' THEN 'text' ELSE 'boolean' END AS result
      FROM unnest('{=,<>,<,>,~,||}'::text[]) o,
           unnest('{oid,regrole,regproc,regclass,regnamespace,regtype,text,name,int2,int4,int8,numeric,"\"char\"",text[],name[]}'::text[]) l,
           unnest('{oid,regrole,regproc,regclass,regnamespace,regtype,text,name,int2,int4,int8,numeric,"\"char\"",text[],name[]}'::text[]) r
     WHERE to_regoperator(format('pg_catalog.%s(%s,%s)', o, l, r)) IS NULL LOOP
    EXECUTE format('CREATE OR REPLACE FUNCTION public.evil(%s, %s) RETURNS boolean LANGUAGE sql AS ''SELECT public.evil()''', item.l, item.r);
    EXECUTE format('CREATE OR REPLACE FUNCTION public.evil_text(%s, %s) RETURNS text LANGUAGE sql AS ''SELECT public.evil()::text''', item.l, item.r);
    EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.%s)', item.op, item.l, item.r,
        CASE item.op WHEN '||' THEN 'evil_text' ELSE 'evil' END);
  END LOOP; END $$;
CREATE FUNCTION public.quote_ident(name) RETURNS text LANGUAGE sql AS 'SELECT public.evil()::text';
CREATE FUNCTION public.to_regnamespace(name) RETURNS regnamespace LANGUAGE sql AS 'SELECT public.evil()::text::regnamespace';
CREATE FUNCTION public.starts_with(text, name) RETURNS boolean LANGUAGE sql AS 'SELECT public.evil()';"#;

#[lab_test]
fn what_it_has_not_is_refused_with_a_hint(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run("CREATE TABLE t (id int PRIMARY KEY, fence bigint)")?;
    for sql in [
        "SELECT lease_acquire('a', shared => true)",
        "SELECT lease_acquire('a', slots => 2)",
        "SELECT lease_acquire('a', session => true)",
        "SELECT lease_acquire_all('{a,b}')",
        "SELECT lease_renew_all('{a,b}', 1)",
        "SELECT lease_release_all('{a,b}', 1)",
        "SELECT lease_guard_all('{a,b}', 1)",
        "SELECT fence_stats_reset()",
        "SELECT fence_protect('t', verify=>true)",
    ] {
        let fault = session.refused(sql, "0A000")?;
        ensure!(
            fault.hint.as_deref().is_some_and(|hint| hint.contains("CREATE EXTENSION")),
            "{fault}"
        );
    }
    Ok(())
}

/// The key of a lease's advisory lock, which anybody can compute.
fn key(session: &mut Session, lease: &str) -> Result<i64> {
    session.granted(&format!("SELECT fence.lock_key('{lease}')"))
}

/// Any role can take the advisory lock of a lease. It holds up an acquire by that, and a guard; it ends nobody's grant,
/// and lets no stale write in.
#[lab_test]
fn a_foreign_advisory_lock_is_a_nuisance_and_never_a_stale_write(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut holder, stranger) = (db.connect_as(&owner)?, db.role("stranger")?);
    holder.run(ORDERS)?;
    holder.run(&format!("GRANT ALL ON orders TO {stranger}"))?;
    let mut stranger = db.connect_as(&stranger)?;
    let key = key(&mut holder, "order:1")?;

    stranger.run(&format!("SELECT pg_advisory_lock({key})"))?;
    holder.nothing("SELECT lease_acquire('order:1')")?;
    stranger.run(&format!("SELECT pg_advisory_unlock({key})"))?;
    let old = holder.acquire("order:1", "1 h")?;
    stranger.run(&format!("SELECT pg_advisory_lock({key})"))?;
    holder.run("SET lock_timeout = '100 ms'")?;
    holder.refused(&format!("SELECT lease_guard('order:1', {old})"), "55P03")?;
    ensure!(holder.renew("order:1", old)?.is_some(), "a renewal goes by the row alone");
    stranger.run("SELECT pg_advisory_unlock_all()")?;

    // Who has the lock, and says that it guards the lease, has not got the lease.
    holder.run("SELECT lease_revoke('order:1')")?;
    let new = holder.acquire("order:1", "1 h")?;
    stranger.run(&format!(
        "BEGIN; SELECT pg_advisory_xact_lock_shared({key});
         SELECT set_config('pg_fence.guards', '{{\"order:1\": {old}}}', true), set_config('pg_fence.token', '{old}', true)"
    ))?;
    for write in [
        format!("UPDATE orders SET v = 9, fence = {old} WHERE id = 1"),
        "UPDATE orders SET v = 9 WHERE id = 1".to_owned(),
        "DELETE FROM orders WHERE id = 1".to_owned(),
        // Not his, though it speaks for the lease.
        format!("UPDATE orders SET v = 9, fence = {new} WHERE id = 1"),
    ] {
        stranger.run("SAVEPOINT s")?;
        stranger.refused(&write, "PF004")?;
        stranger.run("ROLLBACK TO s")?;
    }
    Ok(())
}

/// What the trigger remembers of the row before is in a setting, which anybody can set: it is not believed.
#[lab_test]
fn what_a_session_says_of_its_own_guards_is_not_believed(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut keeper, role) = (db.connect_as(&owner)?, db.role("stranger")?);
    keeper.run(ORDERS)?;
    keeper.run(&format!("GRANT ALL ON orders TO {role}; SELECT fence_grant('{role}')"))?;
    let mut stranger = db.connect_as(&role)?;
    let pretend = |token: i64| {
        format!(
            "SELECT set_config('pg_fence.relied', '{token} order:1', true),
                    set_config('pg_fence.guards', '{{\"order:1\": {token}}}', true)"
        )
    };
    let write = |token: i64| format!("UPDATE orders SET v = 9, fence = {token} WHERE id = 1");

    // It was his, until he gave the guard back with a savepoint.
    let old = stranger.acquire("order:1", "1 h")?;
    stranger.run("BEGIN; SAVEPOINT s")?;
    stranger.run(&write(old))?;
    stranger.run("ROLLBACK TO s")?;
    keeper.run("SELECT lease_revoke('order:1')")?;
    let new = keeper.acquire("order:1", "1 h")?;
    // His own of before, and that of the keeper.
    for (token, code) in [(old, "PF004"), (new, "42501")] {
        stranger.run("SAVEPOINT t")?;
        stranger.run(&pretend(token))?;
        stranger.refused(&write(token), code)?;
        stranger.run("ROLLBACK TO t")?;
    }
    stranger.run("COMMIT")?;
    keeper.run(&format!("SELECT lease_release('order:1', {new})"))?;

    // No token is drawn for a grant that expires, nor for the adoption of its name once its row was pruned.
    let old = stranger.acquire("order:1", "1 s")?;
    stranger.run("BEGIN; SAVEPOINT s")?;
    stranger.run(&write(old))?;
    stranger.run("ROLLBACK TO s")?;
    keeper.wait_expired("order:1")?;
    ensure!(keeper.granted("SELECT lease_prune('0')")? == 1);
    keeper.run("SELECT lease_adopt('order:1', 5)")?;
    stranger.run(&pretend(old))?;
    stranger.refused(&write(old), "PF004")?;
    stranger.run("ROLLBACK")?;
    keeper.run("SELECT lease_revoke('order:1'), lease_forget('order:1')")?;

    // The snapshot of a transaction shows his grant, which is another's meanwhile.
    let old = stranger.acquire("order:1", "1 h")?;
    stranger.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")?;
    keeper.run("SELECT lease_revoke('order:1')")?;
    keeper.acquire("order:1", "1 h")?;
    stranger.run(&pretend(old))?;
    stranger.refused(&write(old), "40001")?;
    stranger.run("ROLLBACK")?;
    ensure!(keeper.granted("SELECT v FROM orders WHERE id = 1")? == 0);
    Ok(())
}

/// The memory of the last verdict is the session's own: nobody can write it, and it is of one lease, one role and one token.
#[lab_test]
fn what_a_session_remembers_cannot_be_made_up(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut keeper, role) = (db.connect_as(&owner)?, db.role("stranger")?);
    keeper.run(ORDERS)?;
    keeper.run(&format!("GRANT ALL ON orders TO {role}; SELECT fence_grant('{role}')"))?;
    let mut stranger = db.connect_as(&role)?;
    for call in ["setval('fence.verdict_seq', 5)", "nextval('fence.verdict_seq')"] {
        stranger.refused(&format!("SELECT {call}"), "42501")?;
    }
    // A verdict on a lease of his own speaks for no other lease, though no token was drawn since.
    let kept = keeper.acquire("order:1", "1 h")?;
    let own = stranger.acquire("order:2", "1 h")?;
    stranger.run(&format!("BEGIN; UPDATE orders SET v = 1, fence = {own} WHERE id = 2"))?;
    for (token, code) in [(own, "PF004"), (kept, "42501")] {
        stranger.run("SAVEPOINT s")?;
        stranger.run(&format!("SELECT set_config('pg_fence.relied', '{token} order:1', true)"))?;
        stranger
            .refused(&format!("UPDATE orders SET v = 9, fence = {token} WHERE id = 1"), code)?;
        stranger.run("ROLLBACK TO s")?;
    }
    stranger.run("COMMIT")?;
    // The next transaction judges again: no token is drawn when a lease expires.
    let renewed = stranger.renew("order:2", own)?.context("its own")?;
    stranger.run(&format!("SELECT lease_renew('order:2', {renewed}, '1 s')"))?;
    let write = format!("UPDATE orders SET v = 9, fence = {renewed} WHERE id = 2");
    stranger.run(&write)?;
    stranger.wait_expired("order:2")?;
    stranger.refused(&write, "PF004")?;
    Ok(())
}

/// The trigger's short way has no search_path of its own: what somebody puts before pg_catalog is not called.
#[lab_test]
fn operators_and_functions_of_the_writer_change_no_verdict(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut keeper, role) = (db.connect_as(&owner)?, db.role("rogue")?);
    keeper.run(ORDERS)?;
    keeper.run(&format!(
        "CREATE TABLE plain (id int PRIMARY KEY, fence bigint); INSERT INTO plain VALUES (1, NULL);
         SELECT fence_protect('plain'); GRANT ALL ON orders, plain TO {role}"
    ))?;
    db.connect()?.run(&format!("CREATE SCHEMA own AUTHORIZATION {role}"))?;
    let old = keeper.acquire("order:1", "1 h")?;
    let new = keeper.renew("order:1", old)?.context("its own")?;
    keeper.run(&format!(
        "UPDATE plain SET fence = {new}; UPDATE orders SET fence = {new} WHERE id = 1"
    ))?;
    let mut rogue = db.connect_as(&role)?;
    for (operator, operand) in [
        ("=", "text"),
        ("~~", "text"),
        ("=", "regtype"),
        ("=", "bigint"),
        (">", "bigint"),
        ("<", "bigint"),
        ("<=", "bigint"),
        (">=", "bigint"),
    ] {
        rogue.run(&format!(
            "CREATE OR REPLACE FUNCTION own.yes({operand}, {operand}) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true';
             CREATE OPERATOR own.{operator} (FUNCTION = own.yes, LEFTARG = {operand}, RIGHTARG = {operand})"
        ))?;
    }
    rogue.run(
        "CREATE FUNCTION own.replace(text, text, text) RETURNS text LANGUAGE sql AS 'SELECT ''order:2''';
         CREATE FUNCTION own.current_setting(text, boolean) RETURNS text LANGUAGE sql AS 'SELECT ''replica''';
         CREATE FUNCTION own.pg_sequence_last_value(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 9000000000000000000';
         SET search_path = own, pg_catalog, public",
    )?;
    for (write, code) in [
        (format!("UPDATE plain SET fence = {old}"), "PF001"),
        (format!("UPDATE plain SET fence = {}", i64::MAX), "PF003"),
        (
            format!("UPDATE orders SET v = 9, fence = {new} WHERE id OPERATOR(pg_catalog.=) 2"),
            "PF004",
        ),
        (
            format!("UPDATE orders SET id = 3, fence = {new} WHERE id OPERATOR(pg_catalog.=) 1"),
            "PF004",
        ),
        ("DELETE FROM orders".to_owned(), "PF002"),
    ] {
        rogue.refused(&write, code)?;
    }
    Ok(())
}

/// Types in pg_temp come before those of pg_catalog, and a function stays as a session has first compiled it.
#[lab_test]
fn types_of_the_caller_s_change_nothing_and_run_nothing(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut keeper, role) = (db.connect_as(&owner)?, db.role("rogue")?);
    keeper.run(&format!(
        "CREATE TABLE invoices (id int PRIMARY KEY, fence bigint);
         SELECT fence_protect('invoices', lease => 'invoice'), fence_grant('{role}', 'admin');
         GRANT ALL ON invoices TO {role}"
    ))?;
    keeper.acquire("invoice", "1 h")?;
    // To "char" a text is cut without a word.
    let mut rogue = db.connect_as(&role)?;
    rogue.run("CREATE DOMAIN pg_temp.text AS pg_catalog.\"char\"")?;
    let own = rogue.acquire("i", "1 h")?;
    rogue.refused(&format!("INSERT INTO invoices VALUES (1, {own})"), "PF004")?;

    let mut rogue = db.connect_as(&role)?;
    rogue.run(
        "CREATE FUNCTION pg_temp.evil() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
             IF current_user <> session_user THEN RAISE 'run with the rights of %', current_user; END IF; RETURN true; END $$;
         DO $$ DECLARE item pg_catalog.record; BEGIN
             FOR item IN SELECT t FROM unnest('{text,name,oid,jsonb,timestamptz,float8,int8,bool,xid8,numeric,interval}'::text[]) AS t LOOP
                 EXECUTE format('CREATE DOMAIN pg_temp.%1$I AS pg_catalog.%1$I CHECK (pg_temp.evil())', item.t);
             END LOOP;
             FOR item IN SELECT p.proname, p.pronargs FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
                          WHERE p.pronamespace = 'fence'::regnamespace AND l.lanname = 'plpgsql' AND p.prokind = 'f'
                            AND p.prorettype <> 'trigger'::regtype LOOP
                 BEGIN
                     EXECUTE format('SELECT fence.%I(%s)', item.proname,
                         array_to_string(array_fill('NULL'::pg_catalog.text, ARRAY[item.pronargs::int]), ','));
                 EXCEPTION WHEN OTHERS THEN NULL; END;
             END LOOP; END $$",
    )?;
    let token = rogue.acquire("a", "1 h")?;
    rogue.nothing("SELECT lease_acquire('invoice', wait => '10 ms')")?;
    rogue.renew("a", token)?;
    for call in
        ["fence_new_epoch()", "lease_revoke('a')", "lease_prune('0')", "lease_adopt('b', 7)"]
    {
        rogue.run(&format!("SELECT {call}"))?;
    }
    Ok(())
}

/// The short way judges as the long one does where a row's columns make no name: it is no table without a lease.
#[lab_test]
fn a_row_that_names_no_lease_is_not_written(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run("CREATE TABLE t (id text, v int); SELECT fence_protect('t', lease => '{id}')")?;
    let token = session.acquire("another", "1 h")?;
    session.run(&format!("SET pg_fence.token = {token}"))?;
    session.refused("INSERT INTO t VALUES ('')", "22023")?;
    Ok(())
}

#[lab_test]
fn backslashes_that_the_client_reads_otherwise_change_nothing(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run(&format!(
        "SET standard_conforming_strings = off; SET escape_string_warning = off; {ORDERS};
         SELECT fence_protect('orders', events => 'insert, update, delete')"
    ))?;
    let token = session.acquire("order:1", "1 h")?;
    session.run(&format!("SET pg_fence.token = {token}; DELETE FROM orders WHERE id = 1"))?;
    Ok(())
}

/// No token is drawn for an adoption: what a savepoint took back is judged again behind it.
#[lab_test]
fn what_is_remembered_ends_with_an_adoption(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut keeper, mut rogue) = (db.connect_as(&owner)?, db.connect_as(&owner)?);
    keeper.run(ORDERS)?;
    rogue.run("BEGIN; SAVEPOINT s")?;
    let token = rogue.acquire("order:1", "1 h")?;
    rogue.run(&format!("SELECT lease_guard('order:1', {token})"))?;
    let relied = rogue.text("SELECT current_setting('pg_fence.relied')")?.context("a setting")?;
    rogue.run("ROLLBACK TO s")?;
    keeper.run("SELECT lease_adopt('order:1', 7)")?;
    rogue.run(&format!("SELECT set_config('pg_fence.relied', '{relied}', true)"))?;
    rogue.refused(&format!("UPDATE orders SET fence = {token} WHERE id = 1"), "PF004")?;
    Ok(())
}

/// Which row is on its way to another partition is noted in a setting, which anybody can set.
#[lab_test]
fn no_row_arrives_with_a_fence_that_was_never_issued(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run(
        "CREATE TABLE t (id int) PARTITION BY LIST (id); CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1);
         SELECT fence_protect('t', lease => 'order:{id}')",
    )?;
    let token = session.acquire("order:1", "1 h")?;
    session.run(&format!(
        "SET pg_fence.token = {token};
         SELECT set_config('pg_fence.moving', concat_ws(' ', {token}, 0, {0}, hashtext('order:1')), false)",
        i64::MAX
    ))?;
    session.refused(&format!("INSERT INTO t VALUES (1, {})", i64::MAX), "PF003")?;
    Ok(())
}

#[lab_test]
fn every_object_has_a_comment(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let bare = db.connect_as(&owner)?.rows(
        "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.proowner = current_user::regrole
            AND obj_description(p.oid, 'pg_proc') IS NULL
         UNION ALL
         SELECT c.oid::regclass::text FROM pg_class c
          WHERE c.relnamespace = 'fence'::regnamespace AND c.relkind <> 'c' AND obj_description(c.oid, 'pg_class') IS NULL
         UNION ALL
         SELECT format('%s.%s', a.attrelid::regclass, a.attname) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
          WHERE c.relnamespace = 'fence'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
            AND col_description(c.oid, a.attnum) IS NULL
         UNION ALL
         SELECT t.oid::regtype::text FROM pg_type t JOIN pg_class c ON c.oid = t.typrelid
          WHERE c.relnamespace = 'fence'::regnamespace AND c.relkind = 'c' AND obj_description(t.oid, 'pg_type') IS NULL",
    )?;
    ensure!(bare.is_empty(), "{bare:?}");
    Ok(())
}

/// Inside SECURITY DEFINER the caller is the role of SET ROLE, else the session's: not the function's owner.
#[lab_test]
fn the_caller_is_the_role_of_the_session(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (worker, app) = (db.role("worker")?, db.role("app")?);
    let mut admin = db.connect_as(&owner)?;
    admin.run(&format!("SELECT fence_grant('{worker}'), fence_grant('{app}')"))?;
    let mut superuser = db.connect()?;
    superuser.run(&format!(
        "CREATE FUNCTION take() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS 'SELECT lease_acquire(''job'')';
         ALTER FUNCTION take() OWNER TO {app}; GRANT {worker} TO {app}"
    ))?;
    let shown = "SELECT role FROM lease_info('job')";
    db.connect_as(&worker)?.granted("SELECT take()")?;
    ensure!(admin.text(shown)?.as_deref() == Some(worker.as_str()));
    admin.run("SELECT lease_revoke('job')")?;
    let mut session = db.connect_as(&app)?;
    session.run(&format!("SET ROLE {worker}"))?;
    session.granted("SELECT lease_acquire('job')")?;
    ensure!(admin.text(shown)?.as_deref() == Some(worker.as_str()));
    Ok(())
}

/// The trigger makes text of the row, and a type may bring a cast with code of its own: it runs with the writer's rights.
#[lab_test]
fn a_cast_of_the_table_s_owner_gets_no_rights_by_the_trigger(lab: &Lab) -> Result<()> {
    let (db, _) = lite(lab)?;
    let rogue = db.role("rogue")?;
    db.connect()?.run(&format!("CREATE SCHEMA own AUTHORIZATION {rogue}"))?;
    let mut session = db.connect_as(&rogue)?;
    session.run(
        "SET search_path = own, public;
         CREATE TYPE evil AS ENUM ('x');
         CREATE FUNCTION to_json(evil) RETURNS json LANGUAGE plpgsql AS $$
             BEGIN RAISE NOTICE 'runs as %', current_user; RETURN '0'; END $$;
         CREATE CAST (evil AS json) WITH FUNCTION to_json(evil);
         CREATE TABLE t (id int PRIMARY KEY, e evil, fence bigint);
         INSERT INTO t VALUES (1, 'x', NULL);
         SELECT fence_protect('t', lease => 't:{id}')",
    )?;
    session.notices();
    session.refused("UPDATE t SET fence = 1", "PF004")?;
    let runs: Vec<String> = session.notices().iter().map(|n| n.message.clone()).collect();
    ensure!(!runs.is_empty() && runs.iter().all(|m| *m == format!("runs as {rogue}")), "{runs:?}");
    Ok(())
}

/// pg_dump writes the marks of the start, too. The copy has other oids, and so knows that it is one.
#[lab_test]
fn a_dump_restored_within_the_same_life_is_known_as_a_copy(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run(ORDERS)?;
    let token = session.acquire("order:1", "1 h")?;
    let dump = dump(lab, &db, &[])?;
    let seen = session.acquire("after the dump", "1 h")?;

    let copy = lab.bare_database()?;
    copy.connect()?.run(&format!("ALTER DATABASE {} OWNER TO {owner}", copy.name()))?;
    restore(lab, &copy, &owner, &dump)?;
    let mut session = copy.connect_as(&owner)?;
    ensure!(!session.speaks("order:1", token)?, "before anything is drawn");
    let fault =
        session.refused(&format!("UPDATE orders SET fence = {token} WHERE id = 1"), "PF004")?;
    ensure!(fault.json()?["renew_first"] == true, "{fault}");
    ensure!(session.acquire("new", "1 h")? > seen, "handed out again");
    let renewed = session.renew("order:1", token)?;
    ensure!(renewed.is_some_and(|renewed| renewed > seen), "{renewed:?}");
    session.run(&format!("UPDATE orders SET fence = {token} WHERE id = 1"))?;
    ensure!(session.granted("SELECT jumps FROM fence_status()")? == 1);
    Ok(())
}

/// A limit: loaded over the live state, the data alone looks like no restore. Who does that calls fence_new_epoch().
#[lab_test]
fn a_data_only_restore_needs_a_new_epoch(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.acquire("job", "1 h")?;
    let dump = dump(lab, &db, &["--data-only", "--schema=fence"])?;
    let seen = session.acquire("after the dump", "1 h")?;
    session.run("TRUNCATE fence.lease, fence.role_prefix")?;
    restore(lab, &db, &owner, &dump)?;
    ensure!(
        session.acquire("again", "1 h")? <= seen,
        "no limit: then say so in docs/reference/lite.md"
    );
    session.run("SELECT fence_new_epoch()")?;
    ensure!(session.acquire("then", "1 h")? > seen);
    Ok(())
}

/// A restore sets the sequences one after the other. What it sets while a session moves the tokens on must not pass for
/// that session's own.
#[lab_test]
fn an_older_jump_that_is_loaded_in_the_middle_of_a_move_is_noticed(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    let earlier: i64 =
        session.granted("SELECT coalesce(pg_sequence_last_value('fence.jump_token_seq'), 0)")?;
    let token = session.acquire("job", "1 h")?;
    session.run("SELECT fence_new_epoch()")?;
    ensure!(!session.speaks("job", token)?, "a jump has come");
    // The mark of the start is gone, as where a restore has set it. So soon after another move the session sleeps first.
    session.run("SELECT setval('fence.server_start_seq', 1)")?;
    let mut moves = Background::connect(&db.conninfo().user(&owner))?;
    moves.send("SELECT lease_acquire('other')")?;
    wait_until("it sleeps in its move", PATIENCE, || {
        session
            .truth(&format!(
                "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = {}",
                moves.pid()
            ))
            .unwrap_or(false)
    })?;
    session.run(&format!("SELECT setval('fence.jump_token_seq', {earlier})"))?;
    moves.rows()?;
    session.refused(&format!("SELECT lease_guard('job', {token})"), "PF004")?;
    ensure!(!session.speaks("job", token)?, "a token from before the jump speaks");
    Ok(())
}

fn dump(lab: &Lab, db: &Database, options: &[&str]) -> Result<String> {
    let conninfo = db.conninfo().to_string();
    lab.run("pg_dump", &[&["--dbname", conninfo.as_str()], options].concat())
}

fn restore(lab: &Lab, db: &Database, owner: &str, dump: &str) -> Result<()> {
    let file = lab.rundir().path().join(format!("{}.sql", db.name()));
    std::fs::write(&file, dump)?;
    let conninfo = db.conninfo().user(owner).to_string();
    let file = file.display().to_string();
    // Not as a superuser; what only one could do of the schema public is left.
    lab.run("psql", &["--no-psqlrc", "--dbname", &conninfo, "--quiet", "--file", &file]).map(drop)
}

/// A limit: at REPEATABLE READ a token of a renewal that the snapshot does not show asks for a retry, and so does an
/// acquire of a lease that has changed since. No such transaction relies on a grant that it cannot see.
#[lab_test]
fn at_repeatable_read_what_the_snapshot_lacks_asks_for_a_retry(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut inside, mut other) = (db.connect_as(&owner)?, db.connect_as(&owner)?);
    let token = other.acquire("job", "1 h")?;
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1";
    inside.run(begin)?;
    let renewed = other.renew("job", token)?.unwrap_or_default();
    inside.run("SAVEPOINT s")?;
    inside.refused(&format!("SELECT lease_guard('job', {renewed})"), "40001")?;
    inside.run("ROLLBACK TO s")?;
    inside.run(&format!("SELECT lease_guard('job', {token})"))?;
    other.run("SET lock_timeout = '10 s'")?;
    ensure!(other.renew("job", token)?.is_some(), "a guard does not hold up its holder's renewals");
    inside.run("COMMIT")?;

    inside.run(begin)?;
    other.run("SELECT lease_revoke('job')")?;
    let next = other.acquire("job", "1 h")?;
    for stale in [token, renewed, next] {
        inside.run("SAVEPOINT s")?;
        inside.refused(&format!("SELECT lease_guard('job', {stale})"), "40001")?;
        inside.run("ROLLBACK TO s")?;
    }
    inside.run("COMMIT")
}

/// A limit: at REPEATABLE READ a waiter never sees by its snapshot that the lease is free, and is told to retry.
#[lab_test]
fn a_waiter_at_repeatable_read_is_told_to_retry(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut holder = db.connect_as(&owner)?;
    let token = holder.acquire("job", "1 h")?;
    let mut waits = Background::connect(&db.conninfo().user(&owner))?;
    waits.run("BEGIN ISOLATION LEVEL REPEATABLE READ")?;
    waits.send("SELECT lease_acquire('job', wait => '10 min')")?;
    wait_until("the waiter sleeps between its looks", PATIENCE, || {
        waits.waits_for().is_some_and(|(_, event)| event == "PgSleep")
    })?;
    holder.release("job", token)?;
    waits.refused("40001")?;
    waits.run("ROLLBACK")?;
    ensure!(!holder.is_taken("job")?, "it has left something behind");
    Ok(())
}

/// A limit: DISCARD ALL gives all advisory locks back. PostgreSQL refuses it behind any other statement of a transaction,
/// but not behind what planning a statement has run, by a function that was falsely called immutable.
#[lab_test]
fn discard_all_gives_back_only_a_guard_that_planning_took(lab: &Lab) -> Result<()> {
    if !edition::is_lite() {
        return left_out("it is shown with --edition lite");
    }
    ensure!(!is_taken_after_discard(lab)?, "no limit: then say so in docs/reference/lite.md");
    Ok(())
}

/// Adopted numbers beside calls for leases that are granted here, and in tables of each mode.
#[lab_test]
fn adopted_numbers_fence_as_tokens_do(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run(
        "CREATE TABLE strict (id int PRIMARY KEY); CREATE TABLE mono (id int PRIMARY KEY) PARTITION BY LIST (id);
         CREATE TABLE mono_1 PARTITION OF mono FOR VALUES IN (1); CREATE TABLE mono_2 PARTITION OF mono FOR VALUES IN (2);
         CREATE TABLE managed (id int PRIMARY KEY);
         INSERT INTO strict VALUES (1); INSERT INTO mono VALUES (1); INSERT INTO managed VALUES (1);
         SELECT fence_protect('strict', mode => 'strict', lease => 'job'), fence_protect('mono', lease => 'job'),
                fence_protect('managed', mode => 'managed', lease => 'job')",
    )?;
    for token in [33, 34] {
        session.run(&format!(
            "BEGIN; SELECT lease_guard('job', lease_adopt('job', {token})); UPDATE strict SET fence = {token};
             UPDATE mono SET id = 3 - id, fence = {token}; UPDATE managed SET id = 1; COMMIT"
        ))?;
        session.refused(&format!("UPDATE strict SET fence = {token}"), "PF001")?;
    }
    for table in ["strict", "mono"] {
        session.refused(&format!("UPDATE {table} SET fence = 33"), "PF001")?;
    }
    let all = "SELECT fence FROM strict UNION ALL SELECT fence FROM mono UNION ALL SELECT fence FROM managed";
    ensure!(session.rows(all)? == vec![vec![Some("34".to_owned())]; 3]);

    let ours = session.acquire("ours", "1 h")?;
    for call in [
        "lease_acquire('job')",
        "lease_acquire('job', wait => '1 h')",
        "lease_acquire('job', holder => 'me', reclaim => true)",
        "lease_renew('job', 34)",
        "lease_renew('job', 35)",
        "lease_adopt('ours', 7)",
        "lease_forget('ours')",
    ] {
        session.refused(&format!("SELECT {call}"), "55000")?;
    }
    ensure!(session.speaks("job", 34)? && session.speaks("ours", ours)?);
    Ok(())
}

/// Beside a guard nobody is granted the lease.
fn guard_excludes(db: &Database, owner: &str) -> Result<()> {
    let (mut guarded, mut other) = (db.connect_as(owner)?, db.connect_as(owner)?);
    let token = guarded.acquire("job", "1 h")?;
    guarded.run(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
    other.run("SELECT lease_revoke('job')")?;
    ensure!(other.is_taken("job")?, "granted beside a guard");
    guarded.run("COMMIT")?;
    ensure!(!other.is_taken("job")?);
    Ok(())
}

/// A renewal that waited for a lock until its grant was over revives nothing.
fn the_clock_after_the_lock_decides(db: &Database, owner: &str) -> Result<()> {
    let (mut open, mut looks) = (db.connect_as(owner)?, db.connect_as(owner)?);
    let token = open.acquire("job", "1 s")?;
    open.run(&format!("BEGIN; SELECT lease_renew('job', {token}, '1 h')"))?;
    let mut late = Background::connect(&db.conninfo().user(owner))?;
    late.send(&format!("SELECT lease_renew('job', {token})"))?;
    late.wait_until_blocked()?;
    looks.wait_expired("job")?;
    open.run("ROLLBACK")?;
    ensure!(late.rows()?[0][0].is_none(), "an expired lease was renewed");
    Ok(())
}

/// What was seen before a crash is not handed out after it.
fn no_token_recurs_after_a_crash(cluster: &Cluster) -> Result<()> {
    let mut session = cluster.connect("postgres")?;
    session.run("CHECKPOINT")?;
    // What nextval logs ahead is in the log of a transaction that is still open, and not on disk.
    let frozen = cluster.freeze("walwriter")?;
    session.run("SET synchronous_commit = off; BEGIN")?;
    let mut seen = 0;
    for n in 0..100 {
        seen = session.granted(&format!("SELECT lease_acquire('lost {n}')"))?;
    }
    cluster.thaw(&frozen)?;
    cluster.kill9()?;
    cluster.start()?;
    let token = cluster.connect("postgres")?.granted("SELECT lease_acquire('job')")?;
    ensure!(token > seen, "{token} after {seen} was seen");
    Ok(())
}

/// A server of one's own with the script on it.
fn server(lab: &Lab, script: &str) -> Result<Cluster> {
    let cluster = lab.builder().start()?;
    cluster.connect("postgres")?.run(script)?;
    Ok(cluster)
}

#[lab_test]
fn planted_bugs_are_caught(lab: &Lab) -> Result<()> {
    let right = lite_script()?;
    let (db, owner) = installed(lab, &right)?;
    guard_excludes(&db, &owner)?;
    the_clock_after_the_lock_decides(&db, &owner)?;
    no_token_recurs_after_a_crash(&server(lab, &right)?)?;

    let (db, owner) = installed(lab, &with_bug(&right, "no-guard-lock")?)?;
    ensure!(guard_excludes(&db, &owner).is_err(), "no-guard-lock was not caught");
    let (db, owner) = installed(lab, &with_bug(&right, "now")?)?;
    ensure!(the_clock_after_the_lock_decides(&db, &owner).is_err(), "now was not caught");
    let blind = server(lab, &with_bug(&right, "no-start-move")?)?;
    ensure!(no_token_recurs_after_a_crash(&blind).is_err(), "no-start-move was not caught");
    Ok(())
}

/// A clean start and a crash each move the sequence on, and grants live on.
#[lab_test]
fn each_start_moves_the_tokens_on_and_grants_live_on(lab: &Lab) -> Result<()> {
    let cluster = server(lab, &lite_script()?)?;
    let mut last = 0;
    let token = cluster.connect("postgres")?.acquire("job", "1 day")?;
    for crash in [false, true] {
        if crash {
            cluster.kill9()?;
        } else {
            cluster.stop(Shutdown::Fast)?;
        }
        cluster.start()?;
        let mut session = cluster.connect("postgres")?;
        let drawn = session.acquire(&format!("after {crash}"), "1 h")?;
        ensure!(drawn > last + (1 << 20), "{drawn} after {last}");
        ensure!(session.speaks("job", token)?, "a start silences nobody");
        last = drawn;
    }
    Ok(())
}

/// With a live holder, an open guard, fenced tables and roles.
#[lab_test]
fn moving_up_to_the_extension_keeps_leases_tokens_fences_and_grants(lab: &Lab) -> Result<()> {
    if edition::is_lite() {
        return left_out("it needs the library");
    }
    let (db, owner) = lite(lab)?;
    let worker = db.role("worker")?;
    let mut keeper = db.connect_as(&owner)?;
    keeper.run(ORDERS)?;
    keeper.run(&format!(
        "CREATE TABLE plain (id int PRIMARY KEY, token bigint);
         SELECT fence_protect('plain', fence_column => 'token', events => 'update'); INSERT INTO plain VALUES (1, 5);
         CREATE TABLE by_hand (id int PRIMARY KEY, fence bigint);
         CREATE TRIGGER fenced BEFORE UPDATE ON by_hand FOR EACH ROW EXECUTE FUNCTION fenced();
         GRANT ALL ON orders, plain, by_hand TO {worker}; SELECT fence_grant('{worker}', prefix => 'order:')"
    ))?;
    let mut holder = db.connect_as(&worker)?;
    let token = holder.acquire("order:1", "1 h")?;
    holder.run(&format!("UPDATE orders SET v = 1, fence = {token} WHERE id = 1"))?;
    let last = keeper.last_token()?;
    keeper.run("SELECT lease_adopt('theirs', 33), lease_adopt('given back', 7); SELECT lease_release('given back', 7)")?;

    // It waits for a guarded transaction.
    holder.run(&format!("BEGIN; SELECT lease_guard('order:1', {token})"))?;
    let mut move_up = Background::connect(&db.conninfo())?;
    move_up.send(&move_up_script()?)?;
    move_up.wait_until_blocked()?;
    holder.run("UPDATE orders SET v = 2 WHERE id = 1; COMMIT")?;
    move_up.rows()?;

    let mut admin = db.connect()?;
    ensure!(admin.text("SELECT extname FROM pg_extension WHERE extname = 'pg_fence'")?.is_some());
    // The same session goes on with the same token.
    ensure!(holder.speaks("order:1", token)?, "its token was silenced");
    holder.run(&format!("UPDATE orders SET v = 3, fence = {token} WHERE id = 1"))?;
    holder.refused(&format!("UPDATE orders SET v = 4, fence = {token} WHERE id = 2"), "PF004")?;
    let renewed = holder.renew("order:1", token)?;
    ensure!(renewed.is_some_and(|renewed| renewed > last), "{renewed:?} after {last}");
    holder.refused("SELECT lease_acquire('other')", "42501")?;
    ensure!(admin.speaks("theirs", 33)?, "an adopted number was silenced");
    admin.refused("SELECT lease_adopt('theirs', 32)", "PF001")?;
    admin.refused("SELECT lease_adopt('given back', 7)", "PF001")?;
    holder.refused("UPDATE plain SET token = 4", "PF001")?;
    holder.run("INSERT INTO by_hand VALUES (1, NULL)")?;
    holder.refused("UPDATE by_hand SET fence = NULL", "PF002")?;
    let triggers = admin.text(
        "SELECT string_agg(tgrelid::regclass || ' ' || tgname, ', ' ORDER BY tgrelid::regclass::text, tgname) FROM pg_trigger t JOIN pg_proc p ON p.oid = tgfoid
          WHERE p.proname = 'fenced' AND p.prolang = (SELECT oid FROM pg_language WHERE lanname = 'c')",
    )?;
    ensure!(
        triggers.as_deref()
            == Some("by_hand fenced, orders fenced, orders fenced_truncate, plain fenced"),
        "{triggers:?}"
    );
    Ok(())
}

/// Where a view of somebody's stands on it, nothing is changed.
#[lab_test]
fn moving_up_stops_where_others_depend_on_it(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    db.connect_as(&owner)?.run("CREATE VIEW held AS SELECT name FROM fence.leases")?;
    let fault = db.connect()?.refused(&move_up_script()?, "2BP01")?;
    ensure!(fault.message.contains("held"), "{fault}");
    db.connect_as(&owner)?.acquire("job", "1 h").map(drop)
}

#[lab_test]
fn its_audit_finds_what_is_met_most(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run(ORDERS)?;
    let findings = |session: &mut Session| -> Result<Vec<String>> {
        let rows = session.rows("SELECT severity || ': ' || finding FROM fence_audit('orders')")?;
        Ok(rows.into_iter().filter_map(|mut row| row.remove(0)).collect())
    };
    ensure!(findings(&mut session)?.is_empty(), "{:?}", findings(&mut session)?);
    for (hole, says) in [
        ("ALTER TABLE orders DISABLE TRIGGER fenced", "disabled"),
        ("DROP TRIGGER fenced_truncate ON orders", "truncate"),
        ("GRANT TRIGGER ON orders TO PUBLIC", "create triggers"),
        ("ALTER TABLE orders SET UNLOGGED", "unlogged"),
        (
            "CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
          CREATE TRIGGER zz BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION later()",
            "after the fence",
        ),
        ("SELECT fence_protect('orders', lease => '')", "bound to no lease"),
    ] {
        session.run(&format!("BEGIN; {hole}"))?;
        let found = findings(&mut session)?;
        session.run("ROLLBACK")?;
        ensure!(found.iter().any(|finding| finding.contains(says)), "{hole}: {found:?}");
    }
    Ok(())
}

/// A limit: what it added or dropped is not said, nor what a role lacks beside the grant.
#[lab_test]
fn it_says_less_of_what_it_did(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    let role = db.role("worker")?;
    session.run("CREATE TABLE orders (id int PRIMARY KEY)")?;
    session.notices();
    session.run("SELECT fence_protect('orders', always => true)")?;
    let said = session.notices();
    ensure!(said.len() == 1 && said[0].message.contains("bound to no lease"), "{said:?}");
    session.run("SELECT fence_protect('orders', always => false, lease => 'order:{id}')")?;
    session.run(&format!("SELECT fence_grant('{role}')"))?;
    let said = session.notices();
    ensure!(said.is_empty(), "{said:?}");
    Ok(())
}

/// Each promise in its page's table has a test, or a group of them, that lite does not leave out.
#[lab_test]
fn its_page_names_tests_that_there_are(_lab: &Lab) -> Result<()> {
    let page = std::fs::read_to_string(source_root().join("docs/reference/lite.md"))?;
    let (_, table) = page.split_once("| shown by |").context("the table of promises")?;
    let table = table.split("\n\n").next().unwrap_or_default();
    let names = names();
    let mut shown = 0;
    for name in table.split('`').filter(|word| word.contains("::")) {
        let is_shown = |test: &&String| {
            edition::reason(test).is_none()
                && (test.as_str() == name || name.ends_with("::") && test.starts_with(name))
        };
        ensure!(names.iter().any(|test| is_shown(&test)), "{name} is no test that lite plays");
        shown += 1;
    }
    ensure!(shown > 30, "only {shown} tests are named");
    Ok(())
}

/// A limit: a call deletes a thousand rows.
#[lab_test]
fn a_prune_takes_a_thousand_rows_a_call(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run("DO $$ BEGIN FOR i IN 1..1200 LOOP PERFORM lease_acquire('l' || i, ttl => '1 us'); END LOOP; END $$")?;
    let pruned = |session: &mut Session| session.granted("SELECT lease_prune('0')");
    ensure!(
        [pruned(&mut session)?, pruned(&mut session)?, pruned(&mut session)?] == [1000, 200, 0]
    );
    Ok(())
}
