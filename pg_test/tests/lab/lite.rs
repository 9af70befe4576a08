//! `sql/pg_fence_lite.sql` by itself: how it is installed and taken away, what is weaker in it, how it is left for the
//! extension. That it keeps the promises of the extension is shown by the other tests, with `--edition lite`.

automod::dir!(pub "tests/lab/lite");

use crate::support::set_if_known;
use pg_test::edition::{self, lite_script, move_up_script, with_bug};
use pg_test::process::{wait_until, PATIENCE};
use pg_test::test_case::left_out;
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
    session.run("CREATE TABLE gone (id int); SELECT fence_protect('gone'); DROP TABLE gone")?;
    session.run(&lite_script()?)?;
    let functions = "SELECT count(*) FROM pg_proc WHERE proname ~ '^fenced_[0-9]'";
    ensure!(session.granted(functions)? == 1, "the function of a table that is gone has stayed");
    session.run(&format!("UPDATE orders SET v = 1, fence = {token} WHERE id = 1"))?;
    ensure!(session.speaks("order:1", token)?, "a second installation keeps the leases");

    session.refused("SELECT fence_lite.uninstall()", "2BP01")?;
    // Nobody keeps it from being taken away by what is gone with their session.
    let mut stranger = db.connect_as(&db.role("stranger")?)?;
    stranger.run(
        "CREATE TEMPORARY TABLE t (fence bigint); CREATE TEMPORARY VIEW v AS SELECT lease_check('x', 1);
         CREATE TRIGGER x BEFORE TRUNCATE ON t EXECUTE FUNCTION fence_lite.refuse_truncate()",
    )?;
    session.run("SELECT fence_unprotect('orders'); SELECT fence_lite.uninstall()")?;
    let left = session.text(
        "SELECT count(*) FROM pg_proc WHERE proowner = current_user::regrole
            OR pronamespace = to_regnamespace('fence_lite')",
    )?;
    ensure!(left.as_deref() == Some("0"), "{left:?} functions are left");
    session.run(&lite_script()?)?;
    ensure!(session.acquire("order:1", "1 h")? > token, "a token was handed out again");
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
    keeper.run(&format!("SELECT fence_grant('{role}'), fence_audit()"))?;
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

/// Comments are where people look: at the calls, the state, and what `\df+` shows of a fenced table.
#[lab_test]
fn what_people_look_at_has_a_comment_and_the_file_an_hour_s_length(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run(ORDERS)?;
    let bare = session.rows(
        "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.proowner = current_user::regrole
            AND (p.pronamespace <> 'fence_lite'::regnamespace OR p.proname ~ '^fenced_') AND obj_description(p.oid, 'pg_proc') IS NULL
         UNION ALL
         SELECT c.oid::regclass::text FROM pg_class c
          WHERE c.relnamespace = 'fence'::regnamespace AND c.relkind IN ('r', 'v', 'S') AND obj_description(c.oid, 'pg_class') IS NULL",
    )?;
    ensure!(bare.is_empty(), "{bare:?}");
    let script = lite_script()?;
    let (lines, widest) =
        (script.lines().count(), script.lines().map(|line| line.chars().count()).max());
    let size = (lines, script.len(), widest);
    ensure!(lines <= 1_000 && script.len() <= 60_000 && widest <= Some(140), "{size:?}");
    Ok(())
}

#[lab_test]
fn what_it_has_not_is_refused_with_the_way_up(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run("CREATE TABLE t (id int PRIMARY KEY, fence bigint); CREATE TABLE by_hand (id int, fence bigint);
        CREATE TRIGGER fenced BEFORE INSERT ON by_hand FOR EACH ROW EXECUTE FUNCTION fenced()")?;
    session.acquire("held", "1 h")?;
    let snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT";
    for sql in [
        "SELECT lease_acquire('a', shared => true)".to_owned(),
        "SELECT lease_acquire('a', slots => 2)".to_owned(),
        "SELECT lease_acquire('a', session => true)".to_owned(),
        "SELECT * FROM lease_acquire_any('{a,b}', session => true)".to_owned(),
        "SELECT lease_acquire_all('{a,b}')".to_owned(),
        "SELECT lease_renew_all('{a,b}', 1)".to_owned(),
        "SELECT lease_release_all('{a,b}', 1)".to_owned(),
        "SELECT lease_guard_all('{a,b}', 1)".to_owned(),
        "SELECT lease_adopt('a', 1)".to_owned(),
        "SELECT lease_forget('a')".to_owned(),
        "SELECT lease_forget_older('1 day')".to_owned(),
        "SELECT lease_evict('a', 1)".to_owned(),
        "SELECT fence_stats_reset()".to_owned(),
        "SELECT fence_protect('t', verify=>true)".to_owned(),
        format!("SELECT fence_grant('{owner}', 'admin')"),
        format!("SELECT fence_grant('{owner}', prefix => 'a:')"),
        format!("SELECT fence_revoke('{owner}', 'a:')"),
        "INSERT INTO by_hand VALUES (1, 1)".to_owned(),
        format!("{snapshot} lease_acquire('held', wait => '1 s')"),
        format!("{snapshot} lease_check('held', 1)"),
    ] {
        let fault = session.refused(&sql, "0A000")?;
        session.run("ROLLBACK")?;
        let hint = fault.hint.clone().unwrap_or_default();
        ensure!(
            hint.contains("pg_fence_lite--pg_fence.sql") && !hint.contains("CREATE EXTENSION"),
            "{sql}: {fault}"
        );
    }
    for call in ["fence_grant", "fence_revoke"] {
        session.refused(&format!("SELECT {call}(NULL)"), "22004")?;
    }
    Ok(())
}

/// One schema has the calls: run again for another, or where others have functions of such names, the file changes nothing.
#[lab_test]
fn it_is_installed_once_in_one_schema(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let (owner, other) = (db.role("keeper")?, db.role("other")?);
    let mut admin = db.connect()?;
    admin.run(&format!("ALTER DATABASE {} OWNER TO {owner}", db.name()))?;
    let mut keeper = db.connect_as(&owner)?;
    let script = lite_script()?;
    for (obstacle, code, way_out) in [
        (format!("CREATE SCHEMA fence AUTHORIZATION {other}"), "42P06", "DROP SCHEMA fence"),
        ("CREATE SCHEMA fence".to_owned(), "42P06", "DROP SCHEMA fence"),
        ("CREATE SCHEMA fence_lite".to_owned(), "42P06", "DROP SCHEMA fence_lite"),
        (
            format!(
                "CREATE FUNCTION public.lease_acquire(text, int) RETURNS int LANGUAGE sql RETURN 1;
                     ALTER FUNCTION public.lease_acquire(text, int) OWNER TO {other}"
            ),
            "42723",
            "DROP FUNCTION public.lease_acquire(text, int)",
        ),
    ] {
        admin.run(&obstacle)?;
        keeper.refused(&script, code)?;
        admin.run(way_out)?;
    }
    keeper.run("SET search_path = nowhere")?;
    keeper.refused(&script, "3F000")?;
    keeper.run("CREATE SCHEMA calls; CREATE SCHEMA second; SET search_path = calls")?;
    keeper.run(&script)?;
    let token = keeper.acquire("job", "1 h")?;
    keeper.run("SET search_path = second")?;
    keeper.refused(&script, "42P06")?;
    keeper.run("SET search_path = calls")?;
    ensure!(keeper.speaks("job", token)?, "the calls of the one schema go on");
    ensure!(keeper
        .truth("SELECT count(*) = 0 FROM pg_proc WHERE pronamespace = 'second'::regnamespace")?);
    Ok(())
}

/// Run again while sessions acquire, guard, write and release: none of their calls fails.
#[lab_test]
fn it_is_run_again_over_itself_under_load(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut keeper = db.connect_as(&owner)?;
    keeper.run(ORDERS)?;
    let work = "DO $$ DECLARE t bigint; BEGIN FOR i IN 1..400 LOOP
            t := lease_acquire('order:' || 1 + i % 2, ttl => '1 h', wait => '1 min');
            UPDATE orders SET v = v + 1, fence = t WHERE id = 1 + i % 2;
            PERFORM lease_release('order:' || 1 + i % 2, t); COMMIT;
        END LOOP; END $$";
    let mut workers = Vec::new();
    for _ in 0..2 {
        let mut worker = Background::connect(&db.conninfo().user(&owner))?;
        worker.send(work)?;
        workers.push(worker);
    }
    for _ in 0..5 {
        keeper.run(&format!("BEGIN; {}; COMMIT", lite_script()?))?;
    }
    for worker in &mut workers {
        worker.rows()?;
    }
    ensure!(keeper.granted("SELECT sum(v) FROM orders")? == 800);
    Ok(())
}

/// A role without rights, one with them but without the token, and one whose lease was revoked: what each tries against a
/// holder locks nothing and writes nothing.
#[lab_test]
fn who_has_no_token_locks_nothing_and_no_setting_is_believed(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut keeper, worker, stranger) =
        (db.connect_as(&owner)?, db.role("worker")?, db.role("stranger")?);
    keeper.run(ORDERS)?;
    keeper.run(&format!(
        "GRANT ALL ON orders TO {worker}, {stranger}; SELECT fence_grant('{worker}')"
    ))?;
    let (mut worker, mut stranger) = (db.connect_as(&worker)?, db.connect_as(&stranger)?);
    let old = worker.acquire("order:1", "1 h")?;
    keeper.run("SELECT lease_revoke('order:1')")?;
    let token = keeper.acquire("order:1", "1 h")?;
    worker.run(&format!(
        "SET pg_fence.guards = '{{\"order:1\": {old}}}'; SET pg_fence.relied = '{old} order:1'; SET fence_lite.named = 'orders 1';
         SET pg_fence.token = '{old}'; BEGIN; SAVEPOINT s"
    ))?;
    for call in ["lease_release", "lease_renew"] {
        worker.nothing(&format!("SELECT {call}('order:1', {old})"))?;
    }
    ensure!(
        worker.granted(&format!(
            "SELECT count(*) FROM lease_keep('{{order:1}}', '{{{old}}}') WHERE outcome = 'lost'"
        ))? == 1
    );
    for write in [
        "UPDATE orders SET v = 9 WHERE id = 1".to_owned(),
        format!("UPDATE orders SET v = 9, fence = {old} WHERE id = 1"),
        format!("SELECT lease_guard('order:1', {old})"),
    ] {
        worker.refused(&write, "PF004")?;
        worker.run("ROLLBACK TO s")?;
    }
    worker.run("SELECT FROM fence.leases")?;
    stranger.run("SET lock_timeout = '1 s'; BEGIN; SAVEPOINT s")?;
    for attack in [
        format!("UPDATE orders SET v = 9, fence = {token} WHERE id = 1"),
        format!("SELECT lease_guard('order:1', {token})"),
        format!("SELECT fence_lite.relies('order:1', {token}, '')"),
        "SELECT FROM fence.lease FOR UPDATE".to_owned(),
        "LOCK TABLE fence.lease IN ACCESS SHARE MODE".to_owned(),
        "LOCK TABLE fence.turn IN ACCESS SHARE MODE".to_owned(),
        "SELECT fence_lite.move_on(0, true)".to_owned(),
        "SELECT fence_lite.draw(0)".to_owned(),
        "SELECT fence_lite.attempt('x', 'me', '1 h', NULL, false, true)".to_owned(),
        "SELECT fence_lite.put_function('fence_lite.mine', 'BEGIN END')".to_owned(),
        "SELECT fence_lite.write_trigger('orders'::regclass, 'fence', 'strict')".to_owned(),
        "SELECT fence_lite.sweep('')".to_owned(),
        "SELECT nextval('fence.token_seq')".to_owned(),
        "SELECT lease_revoke('order:1')".to_owned(),
        "SELECT FROM fence.leases".to_owned(),
        // These lock what they name before any right is asked.
        "PREPARE p AS TABLE fence.lease".to_owned(),
        "PREPARE p AS TABLE fence.turn".to_owned(),
        "CREATE RULE r AS ON INSERT TO fence.lease DO NOTHING".to_owned(),
    ] {
        stranger.refused(&attack, "42501")?;
        stranger.run("ROLLBACK TO s")?;
    }
    // Beside both open transactions.
    keeper.run("SET lock_timeout = '1 s'")?;
    let renewed = keeper.renew("order:1", token)?.context("a renewal waits for nobody")?;
    keeper.run(&format!("UPDATE orders SET v = 1, fence = {renewed} WHERE id = 1"))?;
    keeper.release("order:1", token)?;
    ensure!(keeper.acquire("order:1", "1 h")? > renewed);
    Ok(())
}

/// Any role can take advisory locks. It costs a waiter its own time, and a try nothing; a renewal, a guard and a write do not
/// know of them.
#[lab_test]
fn an_advisory_lock_of_a_stranger_s_is_a_nuisance_with_a_bound(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut holder, stranger) = (db.connect_as(&owner)?, db.role("stranger")?);
    holder.run(ORDERS)?;
    let mut stranger = db.connect_as(&stranger)?;
    for lease in ["order:1", "order:2"] {
        let key = key(&mut holder, lease)?;
        stranger.run(&format!("SELECT pg_advisory_lock({key})"))?;
    }
    let token = holder.acquire("order:1", "1 h")?;
    holder.run(&format!("BEGIN; SELECT lease_guard('order:1', {token}); UPDATE orders SET v = 1 WHERE id = 1; COMMIT"))?;
    ensure!(holder.renew("order:1", token)?.is_some());
    ensure!(holder.granted("SELECT lease_acquire('order:2', wait => '1 min')")? > token);
    holder.nothing("SELECT lease_acquire('order:2', wait => '10 ms')")?;
    // Of two first grants of a name neither waits for the other's transaction.
    let key = key(&mut holder, "new")?;
    stranger.run(&format!("SELECT pg_advisory_lock({key})"))?;
    let mut other = db.connect_as(&owner)?;
    other.run("BEGIN; SELECT lease_acquire('new')")?;
    holder.run("SET statement_timeout = '30 s'")?;
    for wait in ["0", "1 s"] {
        holder.nothing(&format!("SELECT lease_acquire('new', wait => '{wait}')"))?;
    }
    // Nor do two that meet crosswise end in a deadlock.
    for lease in ["third", "fourth"] {
        let key = self::key(&mut holder, lease)?;
        stranger.run(&format!("SELECT pg_advisory_lock({key})"))?;
    }
    other.run("ROLLBACK; BEGIN; SELECT lease_acquire('third')")?;
    let mut crosses = Background::connect(&db.conninfo().user(&owner))?;
    crosses.run("BEGIN; SELECT lease_acquire('fourth')")?;
    crosses.send("SELECT lease_acquire('third')")?;
    other.nothing("SELECT lease_acquire('fourth')")?;
    ensure!(crosses.rows()?[0][0].is_none());
    other.run("ROLLBACK")?;
    holder.acquire("new", "1 h")?;
    let expiring = holder
        .granted("SELECT lease_acquire('order:2', ttl => '1 us', holder => 'me', reclaim => true)");
    ensure!(expiring.is_err() || expiring? > token);
    Ok(())
}

/// A copy has the same oids, and a waiter of it stands in nobody's way here; nor where its name and the lease's read together the same.
#[lab_test]
fn who_waits_in_a_copy_of_the_database_counts_there_alone(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut here, role) = (db.connect_as(&owner)?, db.role("stranger")?);
    let token = here.acquire("job", "1 h")?;
    here.acquire("ob", "1 h")?;
    drop(here);
    let (copy, longer) = (db.copy()?, format!("{}j", db.name()));
    let mut admin = db.connect()?;
    admin.run(&format!("ALTER DATABASE {} RENAME TO {longer}", copy.name()))?;
    let mut here = db.connect_as(&owner)?;
    let mut waiters = Vec::new();
    for lease in ["job", "ob"] {
        let mut waits = Background::connect(&copy.conninfo().dbname(&longer).user(&owner))?;
        waits.send(&format!("SELECT lease_acquire('{lease}', wait => '1 min')"))?;
        wait_until_it_sleeps(&mut here, &waits)?;
        waiters.push(waits);
    }
    here.release("job", token)?;
    let key = key(&mut here, "job")?;
    let mut stranger = db.connect_as(&role)?;
    stranger.run(&format!("SELECT pg_advisory_lock({key})"))?;
    ensure!(here.acquire("job", "1 h")? > token);
    for waits in &mut waiters {
        waits.cancel()?;
        waits.refused("57014")?;
    }
    drop(waiters);
    admin.run(&format!("DROP DATABASE {longer} WITH (FORCE)"))
}

/// The owner of a table has code of theirs run by others: by an index under ANALYZE, by a trigger under a cascade. It gets no lease,
/// for nobody is asked who the session is, and the privilege is that of the role that runs it.
#[lab_test]
fn code_that_others_run_gets_no_lease(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let rogue = db.role("rogue")?;
    let mut admin = db.connect()?;
    admin.run(&format!("CREATE SCHEMA own AUTHORIZATION {rogue}"))?;
    let token = db.connect_as(&owner)?.acquire("job", "1 h")?;
    db.connect_as(&rogue)?.run(&format!(
        "CREATE TABLE own.parent (id int PRIMARY KEY); CREATE TABLE own.t (id int); INSERT INTO own.t VALUES (1);
         CREATE FUNCTION own.evil(n int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
             BEGIN PERFORM public.lease_release('job', {token}); EXCEPTION WHEN insufficient_privilege THEN NULL; END;
             BEGIN PERFORM public.lease_acquire('prey', ttl => '300 days'); EXCEPTION WHEN insufficient_privilege THEN NULL; END;
             RETURN n; END $$;
         CREATE INDEX ON own.t (own.evil(id));
         CREATE TABLE own.child (id int REFERENCES own.parent ON DELETE CASCADE ON UPDATE CASCADE);
         INSERT INTO own.parent VALUES (1), (2); INSERT INTO own.child VALUES (1), (2);
         CREATE FUNCTION own.evil_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             PERFORM own.evil(1); RAISE NOTICE 'as %', current_user; RETURN coalesce(NEW, OLD); END $$;
         CREATE TRIGGER t BEFORE UPDATE OR DELETE ON own.child FOR EACH ROW EXECUTE FUNCTION own.evil_trigger()"
    ))?;
    for code in [
        "ANALYZE own.t",
        "VACUUM own.t",
        "REINDEX TABLE own.t",
        "UPDATE own.parent SET id = 3 WHERE id = 1",
        "DELETE FROM own.parent",
    ] {
        admin.run(code)?;
    }
    // The cascades have run it, as the owner of the table.
    let runs: Vec<String> = admin.notices().iter().map(|n| n.message.clone()).collect();
    ensure!(runs.len() == 3 && runs.iter().all(|run| *run == format!("as {rogue}")), "{runs:?}");
    let mut keeper = db.connect_as(&owner)?;
    ensure!(keeper.speaks("job", token)?, "released by an index");
    ensure!(keeper.acquire("prey", "1 h")? > token);
    Ok(())
}

/// The owner of a table can have another's trigger function called for it, and functions of its own written for it.
#[lab_test]
fn a_table_owner_changes_no_other_s_fence(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut keeper, rogue) = (db.connect_as(&owner)?, db.role("rogue")?);
    keeper.run(ORDERS)?;
    db.connect()?.run(&format!("CREATE SCHEMA own AUTHORIZATION {rogue}"))?;
    let texts = "SELECT string_agg(p.proname || p.prosrc, '' ORDER BY p.proname) FROM pg_proc p WHERE p.proname ~ '^fenced_'";
    let before = keeper.text(texts)?;
    let mut rogue = db.connect_as(&rogue)?;
    rogue.run(
        "CREATE TABLE own.t (id int, fence bigint) PARTITION BY LIST (id); CREATE TEMPORARY TABLE mine (id int);
         DO $$ BEGIN
             EXECUTE (SELECT format('CREATE TRIGGER a BEFORE UPDATE ON own.t FOR EACH ROW EXECUTE FUNCTION fence_lite.%I()', p.proname)
                FROM pg_proc p WHERE p.proname ~ '^fenced_');
             FOR n IN 1..20 LOOP PERFORM fence_lite.write_trigger('mine'::regclass, 'fence', n::text); END LOOP;
         END $$",
    )?;
    // The owner drops a function without a trigger in a transaction that stays open.
    rogue.run("BEGIN; SELECT fence_lite.write_trigger('mine'::regclass)")?;
    keeper.run("SET lock_timeout = '5 s'; SELECT fence_protect('orders')")?;
    rogue.run("ROLLBACK; DROP TABLE mine")?;
    keeper.run(&lite_script()?)?;
    ensure!(keeper.text(texts)? == before, "{before:?}");
    rogue.run("DROP TABLE own.t")?;
    keeper.run("SELECT fence_unprotect('orders')")?;
    ensure!(keeper.text(texts)?.is_none(), "functions are left");
    Ok(())
}

/// Names with all that quotes, in tables, columns and leases, read back under either setting of the client's.
#[lab_test]
fn hostile_names_are_quoted(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    let evil = "x'y\"z\\\n$$ $body$ %s %1$I; DROP TABLE t --";
    let ident = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    let text = |text: &str| format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    let short = |prefix: &str| format!("{prefix}{}", &evil[..40]);
    let (table, key, fence) = (short("t"), short("k"), short("f"));
    let named = text(&ident(&table));
    session.run(&format!(
        "CREATE TABLE {} ({} text PRIMARY KEY, v int);
         SELECT fence_protect({named}, {}, lease => {})",
        ident(&table),
        ident(&key),
        text(&fence),
        text(&format!("{evil}{{{{{{{key}}}}}}}"))
    ))?;
    let lease = format!("{evil}{{{evil}}}");
    let token =
        session.granted(&format!("SELECT lease_acquire({}, ttl => '1 h')", text(&lease)))?;
    for conforming in ["on", "off"] {
        session.run(&set_if_known(&format!("standard_conforming_strings = {conforming}")))?;
        session.run(&set_if_known("escape_string_warning = off"))?;
        let row = format!("{} VALUES ({}, 1, {token})", ident(&table), text(evil));
        session
            .run(&format!("INSERT INTO {row} ON CONFLICT ({}) DO UPDATE SET v = 2", ident(&key)))?;
        let fault = session.refused(
            &format!("INSERT INTO {} VALUES ('other', 1, {token})", ident(&table)),
            "PF004",
        )?;
        ensure!(fault.json()?["key"][&key] == "other", "{fault}");
        session.rows(&format!("SELECT fence_audit({named})"))?;
    }
    session.run(&format!(
        "SET pg_fence.token = {token}; DELETE FROM {}; SELECT fence_unprotect({named})",
        ident(&table)
    ))?;
    Ok(())
}

/// Code that plpgsql may be told to refuse, by a session that develops functions of its own, and what the client may be
/// told to read.
#[lab_test]
fn settings_of_the_session_change_nothing(lab: &Lab) -> Result<()> {
    let strings = ["standard_conforming_strings = off", "escape_string_warning = off"];
    for settings in [
        "SET plpgsql.extra_errors = 'all'; SET plpgsql.variable_conflict = use_column",
        &format!("{}; SET quote_all_identifiers = on", strings.map(set_if_known).join("; ")),
    ] {
        let (db, owner) = lite(lab)?;
        let mut session = db.connect_as(&owner)?;
        session.run(&format!("{settings}; {ORDERS}"))?;
        let token = session.acquire("order:1", "1 h")?;
        session.run(&format!(
            "BEGIN; SELECT lease_guard('order:1', {token}); UPDATE orders SET v = 1 WHERE id = 1; COMMIT;
             SELECT fence_protect('orders', events => 'insert, update, delete'); SET pg_fence.token = {token}; DELETE FROM orders WHERE id = 1;
             SELECT * FROM lease_keep('{{order:1}}', '{{{token}}}'), lease_acquire_any('{{a,b}}', 2), fence_audit(), fence_status(), fence.leases;
             SELECT lease_check('order:1', {token}), lease_renew('order:1', {token}); SELECT lease_release('order:1', {token});
             SELECT lease_prune('0'), lease_acquire('c', wait => '10 ms'), lease_revoke('c'); SELECT fence_unprotect('orders')"
        ))?;
        session
            .run("CREATE TABLE t (id text, v int); SELECT fence_protect('t', lease => '{id}')")?;
        session.refused("INSERT INTO t VALUES ('')", "PF004")?;
        session.run("DROP TRIGGER fenced ON t")?;
        ensure!(
            session.granted("SELECT count(*) FROM fence_audit() WHERE severity = 'hole'")? == 1,
            "{settings}"
        );
        session.run(&lite_script()?)?;
        session.run("DROP TABLE t; SELECT fence_lite.uninstall()")?;
    }
    Ok(())
}

/// Names that a column's collation takes for alike are leases of their own.
#[lab_test]
fn a_name_of_any_collation_is_compared_by_its_bytes(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run(
        "DO $$ BEGIN
             CREATE COLLATION alike (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
         EXCEPTION WHEN feature_not_supported THEN  -- a build without ICU
             CREATE COLLATION alike (locale = 'POSIX');
         END $$;
         CREATE TABLE job (name text COLLATE alike); INSERT INTO job VALUES ('a')",
    )?;
    session.acquire("A", "1 h")?;
    let token = session.granted("SELECT lease_acquire(name, name) FROM job")?;
    session.nothing("SELECT lease_acquire(name, 'A', reclaim => true) FROM job")?;
    for call in ["lease_renew", "lease_guard"] {
        session.granted(&format!("SELECT {call}(name, {token}) FROM job"))?;
    }
    for truth in [
        format!("lease_check(name, {token})"),
        "(SELECT count(*) = 1 FROM lease_info(name))".to_owned(),
        format!("(SELECT outcome = 'kept' FROM lease_keep(ARRAY[name], '{{{token}}}'))"),
        "(SELECT count(*) = 2 FROM lease_acquire_any(ARRAY[name || 'b', 'AB'], 2))".to_owned(),
    ] {
        ensure!(session.truth(&format!("SELECT {truth} FROM job"))?, "{truth}");
    }
    session.granted(&format!("SELECT lease_release(name, {token}) FROM job"))?;
    session.granted("SELECT lease_revoke(name || 'b') FROM job")?;
    Ok(())
}

#[lab_test]
fn a_renamed_column_is_told_by_the_error_and_by_the_audit(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.run(ORDERS)?;
    let token = session.acquire("order:1", "1 h")?;
    for (from, to) in [("id", "number"), ("fence", "token")] {
        session.run(&format!("ALTER TABLE orders RENAME {from} TO {to}"))?;
        let fault = session.refused(
            &format!(
                "UPDATE orders SET v = 1, {} = {token}",
                if to == "token" { to } else { "fence" }
            ),
            "42703",
        )?;
        ensure!(
            fault.hint.as_deref().is_some_and(|hint| hint.contains("fence_protect again")),
            "{fault}"
        );
        let told = format!("SELECT count(*) FROM fence_audit('orders') WHERE finding LIKE '%\"{from}\"%not there%'");
        ensure!(session.granted(&told)? == 1, "{from}");
        session.run(&format!("ALTER TABLE orders RENAME {to} TO {from}"))?;
    }
    session.run(&format!("UPDATE orders SET v = 1, fence = {token} WHERE id = 1; ALTER TABLE orders ALTER id TYPE bigint"))?;
    let fault = session.refused(&format!("UPDATE orders SET v = 1, fence = {token}"), "42804")?;
    ensure!(
        fault.hint.as_deref().is_some_and(|hint| hint.contains("fence_protect again")),
        "{fault}"
    );
    session.run(&format!(
        "SELECT fence_protect('orders'); UPDATE orders SET v = 1, fence = {token} WHERE id = 1"
    ))?;
    // A session that has not written yet takes the type as it finds it; there are such whose text hangs on a setting.
    session.run("CREATE TABLE days (day text, v int); SELECT fence_protect('days', lease => '{day}'); ALTER TABLE days ALTER day TYPE date USING day::date")?;
    let told = "SELECT count(*) FROM fence_audit() WHERE finding LIKE '%\"day\"%of another type' AND severity = 'hole'";
    ensure!(session.granted(told)? == 1);
    session.run("ALTER TABLE orders RENAME fence TO token")?;
    session.refused("SELECT fence_protect('orders', lease => '')", "42703")?;
    let fault = session.refused("SELECT fence_protect('orders')", "42703")?;
    ensure!(fault.hint.as_deref().is_some_and(|hint| hint.contains("fence_column")), "{fault}");
    session.run("SELECT fence_protect('orders', 'token')")?;
    session.run(&format!("UPDATE orders SET v = 1, token = {token} WHERE id = 1"))?;
    Ok(())
}

/// Loaded over the live state, by itself or in part, a dump gives no token twice.
#[lab_test]
fn a_dump_of_the_data_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let mut session = db.connect_as(&owner)?;
    session.acquire("job", "1 h")?;
    let dump = dump(lab, &db, &["--data-only", "--schema=fence"])?;
    let seen = session.acquire("after the dump", "1 h")?;
    session.run("TRUNCATE fence.lease")?;
    restore(lab, &db, &owner, &dump)?;
    ensure!(session.acquire("again", "1 h")? > seen);
    // The tokens' sequence alone, as it was some time ago.
    session.run("SELECT setval('fence.token_seq', fence_lite.clock() - 61 * 1048576)")?;
    let then = session.acquire("then", "1 h")?;
    ensure!(then > seen, "{then} after {seen}");
    Ok(())
}

/// A data-only dump, loaded after the server was started anew, makes a jump: what was revoked since is not had again.
#[lab_test]
fn a_dump_loaded_after_a_restart_is_a_jump_too(lab: &Lab) -> Result<()> {
    let cluster = server(lab, &lite_script()?)?;
    let mut session = cluster.connect("postgres")?;
    let token = session.acquire("job", "1 day")?;
    let kept = session.text(
        "SELECT string_agg(format('setval(%L, %s)', s.seqrelid::regclass, coalesce(pg_sequence_last_value(s.seqrelid), 1)), ', ')
           FROM pg_sequence s",
    )?;
    session.run("SELECT fence_new_epoch()")?;
    drop(session);
    cluster.stop(Shutdown::Fast)?;
    cluster.start()?;
    let mut session = cluster.connect("postgres")?;
    session.run(&format!("SELECT {}", kept.context("there are sequences")?))?;
    session.acquire("another", "1 h")?;
    ensure!(!session.speaks("job", token)?, "what the jump has silenced speaks again");
    session.refused(&format!("SELECT lease_guard('job', {token})"), "PF004")?;
    Ok(())
}

/// Whatever it was at: no lock of the session stays, for no rollback would give that back.
#[lab_test]
fn a_cancelled_try_leaves_no_lock_behind(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut open, mut tries) = (db.connect_as(&owner)?, db.connect_as(&owner)?);
    let names = "SELECT count(*) FROM lease_acquire_any(ARRAY(SELECT 'job' || n FROM generate_series(1, 100) AS n), 100)";
    open.run(&format!("{names}; SELECT lease_revoke(name) FROM fence.leases"))?;
    open.run(&format!("BEGIN; {names}"))?;
    let mut cancels = Background::connect(&db.conninfo().user(&owner))?;
    let pid = tries.pid();
    cancels.send(&format!("DO $$ BEGIN FOR i IN 1..4000 LOOP PERFORM pg_cancel_backend({pid}), pg_sleep(0.001 * random()); END LOOP; END $$"))?;
    let mut cancelled = 0;
    while !cancels.is_finished() {
        cancelled += i32::from(tries.try_rows(names).is_err());
    }
    ensure!(cancelled > 100, "{cancelled} were cancelled");
    let left = format!("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = {pid}");
    ensure!(open.granted(&left)? == 0, "a lock is left");
    Ok(())
}

/// A renewal that waited while the lease was given back has nothing, and is in nobody's way.
#[lab_test]
fn who_has_lost_in_a_race_locks_nothing(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut gives, mut takes) = (db.connect_as(&owner)?, db.connect_as(&owner)?);
    for call in ["lease_renew", "lease_release"] {
        let token = gives.acquire("job", "1 h")?;
        gives.run(&format!("BEGIN; SELECT lease_release('job', {token})"))?;
        let mut late = Background::connect(&db.conninfo().user(&owner))?;
        late.run("BEGIN")?;
        late.send(&format!("SELECT {call}('job', {token})"))?;
        late.wait_until_blocked()?;
        gives.run("COMMIT")?;
        ensure!(late.rows()?[0][0].is_none(), "{call}");
        let next = takes.acquire("job", "1 h")?;
        takes.release("job", next)?;
    }
    Ok(())
}

/// While it waits for who reads the view, nothing that a call takes is locked.
#[lab_test]
fn run_again_it_waits_in_nobody_s_way(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut reads, mut holder) = (db.connect_as(&owner)?, db.connect_as(&owner)?);
    let token = holder.acquire("job", "1 h")?;
    reads.run("BEGIN; SELECT count(*) FROM fence.leases")?;
    let mut installs = Background::connect(&db.conninfo().user(&owner))?;
    installs.send(&format!("BEGIN; {}; COMMIT", lite_script()?))?;
    installs.wait_until_blocked()?;
    holder.run("SET lock_timeout = '10 s'; SELECT fence_new_epoch()")?;
    ensure!(holder.renew("job", token)?.is_some());
    reads.run("COMMIT")?;
    installs.rows()?;
    Ok(())
}

/// At REPEATABLE READ what has changed since the snapshot asks for a retry, one's own heartbeat too; what has not is relied on.
#[lab_test]
fn at_repeatable_read_what_has_changed_asks_for_a_retry(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut inside, mut other) = (db.connect_as(&owner)?, db.connect_as(&owner)?);
    other.run(ORDERS)?;
    other.run("SET lock_timeout = '10 s'")?;
    let mut token = other.acquire("order:1", "1 h")?;
    for change in [
        "SELECT lease_renew('order:1', $)",
        "SELECT lease_release('order:1', $)",
        "SELECT lease_revoke('order:1')",
        "SELECT lease_acquire('order:1', 'me', reclaim => true)",
        "SELECT lease_release('order:1', $); SELECT lease_prune('0')",
    ] {
        inside.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")?;
        inside.run(&format!("SELECT lease_guard('order:1', {token})"))?;
        ensure!(other.is_taken("order:1")?, "granted beside a guard");
        ensure!(other.renew("order:1", token)?.is_some(), "a guard holds up no heartbeat");
        inside.run("COMMIT; BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT 1; SAVEPOINT s")?;
        other.run(&change.replace('$', &token.to_string()))?;
        let now: Option<i64> = other.one("SELECT max(token) FROM fence.leases", &[])?;
        let next = other.token("SELECT lease_acquire('order:1', 'me')")?;
        for stale in [Some(token), now, next].into_iter().flatten() {
            for sql in [
                format!("SELECT lease_guard('order:1', {stale})"),
                format!("UPDATE orders SET v = 1, fence = {stale} WHERE id = 1"),
            ] {
                inside.refused(&sql, "40001")?;
                inside.run("ROLLBACK TO s")?;
            }
        }
        inside.run("ROLLBACK")?;
        other.run("SELECT lease_revoke('order:1')")?;
        token = other.granted("SELECT lease_acquire('order:1', 'me', '1 h')")?;
    }
    // One that the snapshot does not show at all, one that nobody has, and one's own.
    inside.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1; SAVEPOINT s")?;
    let new = other.acquire("new", "1 h")?;
    let mut waiter = Background::connect(&db.conninfo().user(&owner))?;
    waiter.send("SELECT lease_acquire('new', wait => '1 min')")?;
    wait_until_it_sleeps(&mut other, &waiter)?;
    inside.refused(&format!("SELECT lease_guard('new', {new})"), "40001")?;
    inside.run("ROLLBACK TO s")?;
    // No refusal by a row that somebody is at.
    other.run(&format!("BEGIN; SELECT lease_renew('order:1', {token})"))?;
    inside.refused("SELECT lease_guard('order:1', 7)", "55P03")?;
    inside.run("ROLLBACK TO s")?;
    other.run("ROLLBACK")?;
    inside.refused("SELECT lease_guard('never', 7)", "PF004")?;
    inside.run("ROLLBACK TO s")?;
    let own = inside.acquire("own", "1 h")?;
    inside.refused(&format!("SELECT lease_guard('own', {own})"), "55000")?;
    inside.run("ROLLBACK")
}

/// A lease that was given back after the statement began is passed over: the statement may have read what its holder changed.
#[lab_test]
fn acquire_any_passes_over_what_was_just_finished(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut claims, mut other) =
        (Background::connect(&db.conninfo().user(&owner))?, db.connect_as(&owner)?);
    for lease in ["a", "b", "c"] {
        let token = other.acquire(lease, "1 h")?;
        if lease != "b" {
            other.release(lease, token)?;
        }
    }
    other.run("SELECT pg_advisory_lock(7)")?;
    claims.send("SELECT name FROM (SELECT pg_advisory_lock(7) IS NULL OFFSET 0) AS x (no), LATERAL lease_acquire_any('{b,a,c,a}', CASE WHEN no THEN 9 ELSE 2 END)")?;
    claims.wait_until_blocked()?;
    other.run("SELECT lease_revoke('b'); SELECT pg_advisory_unlock(7)")?;
    ensure!(claims.rows()? == [[Some("a".to_owned())], [Some("c".to_owned())]]);
    ensure!(other.granted("SELECT place FROM lease_acquire_any('{a,c,b}')")? == 3);
    ensure!(other.rows("SELECT FROM lease_acquire_any('{a,b,c}', 3)")?.is_empty());
    Ok(())
}

fn wait_until_it_sleeps(looks: &mut Session, other: &Background) -> Result<()> {
    let query =
        format!("SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = {}", other.pid());
    wait_until("it sleeps", PATIENCE, || looks.truth(&query).unwrap_or(false))
}

/// The key of a lease's advisory lock, which anybody can compute.
fn key(session: &mut Session, lease: &str) -> Result<i64> {
    session.granted(&format!("SELECT fence_lite.lock_key('{lease}')"))
}

/// The trigger's short way has no search_path of its own: what somebody puts before pg_catalog is not called.
#[lab_test]
fn operators_and_functions_of_the_writer_change_no_verdict(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut keeper, role) = (db.connect_as(&owner)?, db.role("rogue")?);
    keeper.run(ORDERS)?;
    keeper.run(&format!(
        "CREATE TABLE plain (id int PRIMARY KEY, fence bigint); INSERT INTO plain VALUES (1, NULL);
         SELECT fence_protect('plain'); GRANT ALL ON orders, plain TO {role}; SELECT fence_grant('{role}')"
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
         SELECT fence_protect('invoices', lease => 'invoice'), fence_grant('{role}');
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
                          WHERE p.pronamespace = 'fence_lite'::regnamespace AND l.lanname = 'plpgsql' AND p.prokind = 'f'
                            AND p.prorettype <> 'trigger'::regtype LOOP
                 BEGIN
                     EXECUTE format('SELECT fence_lite.%I(%s)', item.proname,
                         array_to_string(array_fill('NULL'::pg_catalog.text, ARRAY[item.pronargs::int]), ','));
                 EXCEPTION WHEN OTHERS THEN NULL; END;
             END LOOP; END $$",
    )?;
    let token = rogue.acquire("a", "1 h")?;
    rogue.nothing("SELECT lease_acquire('invoice', wait => '10 ms')")?;
    rogue.renew("a", token)?;
    for call in ["fence_new_epoch()", "lease_revoke('a')", "lease_prune('0')"] {
        rogue.run(&format!("SELECT {call}"))?;
    }
    Ok(())
}

/// A refusal shows the row's key, and a type may bring a cast with code of its own: it is not called, neither as the writer.
#[lab_test]
fn a_cast_of_a_type_s_owner_is_not_run_by_the_trigger(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let rogue = db.role("rogue")?;
    db.connect()?.run(&format!("CREATE SCHEMA own AUTHORIZATION {rogue}"))?;
    db.connect_as(&owner)?.run(&format!("SELECT fence_grant('{rogue}')"))?;
    let mut session = db.connect_as(&rogue)?;
    session.run(
        "SET search_path = own, public;
         CREATE TYPE evil AS ENUM ('x');
         CREATE FUNCTION to_json(evil) RETURNS json LANGUAGE plpgsql AS $$
             BEGIN RAISE NOTICE 'runs as %', current_user; RETURN '0'; END $$;
         CREATE CAST (evil AS json) WITH FUNCTION to_json(evil);
         CREATE TABLE t (id int, e evil, fence bigint, PRIMARY KEY (id, e));
         INSERT INTO t VALUES (1, 'x', NULL);
         SELECT fence_protect('t', lease => 't:{id}')",
    )?;
    session.notices();
    for write in ["UPDATE t SET fence = 1", "DELETE FROM t", "INSERT INTO t VALUES (2, 'x', 1)"] {
        let fault = session.refused(&format!("SET pg_fence.token = 1; {write}"), "PF004")?;
        ensure!(fault.json()?["key"]["id"].is_number(), "{fault}");
        ensure!(fault.json()?["key"].get("e").is_none(), "{fault}");
    }
    let notices = session.notices();
    ensure!(notices.is_empty(), "{notices:?}");
    Ok(())
}

/// A cascade runs as the owner of the table, who sees more than the session's role does.
#[lab_test]
fn a_refusal_within_a_cascade_shows_nothing_of_the_row(lab: &Lab) -> Result<()> {
    let (db, owner) = lite(lab)?;
    let (mut keeper, role) = (db.connect_as(&owner)?, db.role("stranger")?);
    let token = keeper.acquire("s:777", "1 h")?;
    keeper.run(&format!(
        "CREATE TABLE p (id int PRIMARY KEY); INSERT INTO p VALUES (1);
         CREATE TABLE c (id int PRIMARY KEY, p int REFERENCES p ON DELETE CASCADE, seen boolean); INSERT INTO c VALUES (777, 1);
         ALTER TABLE c ENABLE ROW LEVEL SECURITY; CREATE POLICY those ON c FOR SELECT USING (seen);
         GRANT SELECT, DELETE ON p TO {role}; GRANT SELECT ON c TO {role};
         SELECT fence_protect('c', lease => 's:{{id}}'); SET pg_fence.token = {token}; UPDATE c SET seen = false"
    ))?;
    for (session, shows) in [(&mut db.connect_as(&role)?, false), (&mut keeper, true)] {
        let fault = session.refused("SET pg_fence.token = 5; DELETE FROM p", "PF001")?;
        ensure!(fault.json()?["key"].is_object() == shows, "{fault}");
        ensure!(fault.json()?["stored"].is_number() == shows, "{fault}");
        session.run("RESET pg_fence.token")?;
    }
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

/// A restore sets the sequences one after the other. A value that it sets while a session moves the tokens on must not
/// pass for that session's own.
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
    wait_until_it_sleeps(&mut session, &moves)?;
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

/// A token seen before a crash is not handed out after it.
fn no_token_recurs_after_a_crash(cluster: &Cluster) -> Result<()> {
    let mut session = cluster.connect("postgres")?;
    session.run("CHECKPOINT")?;
    // The numbers that nextval logs ahead are in the log of a transaction that is still open, and not on disk.
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
         GRANT ALL ON orders, plain TO {worker}; SELECT fence_grant('{worker}')"
    ))?;
    let mut holder = db.connect_as(&worker)?;
    let token = holder.acquire("order:1", "1 h")?;
    holder.run(&format!("UPDATE orders SET v = 1, fence = {token} WHERE id = 1"))?;
    let last = keeper.last_token()?;

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
    holder.refused("SELECT lease_revoke('order:1')", "42501")?;
    holder.refused("UPDATE plain SET token = 4", "PF001")?;
    let triggers = admin.text(
        "SELECT string_agg(tgrelid::regclass || ' ' || tgname, ', ' ORDER BY tgrelid::regclass::text, tgname) FROM pg_trigger t JOIN pg_proc p ON p.oid = tgfoid
          WHERE p.proname = 'fenced' AND p.prolang = (SELECT oid FROM pg_language WHERE lanname = 'c')",
    )?;
    ensure!(
        triggers.as_deref() == Some("orders fenced, orders fenced_truncate, plain fenced"),
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
        let rows = session.rows("SELECT severity || ': ' || finding FROM fence_audit()")?;
        Ok(rows.into_iter().filter_map(|mut row| row.remove(0)).collect())
    };
    ensure!(findings(&mut session)?.is_empty(), "{:?}", findings(&mut session)?);
    for (hole, says) in [
        ("ALTER TABLE orders DISABLE TRIGGER fenced", "fires on insert, update, delete"),
        ("DROP TRIGGER fenced_truncate ON orders", "truncate"),
        (
            "CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
          CREATE TRIGGER zz BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION later()",
            "after the fence",
        ),
        (
            "CREATE FUNCTION skips() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
          CREATE TRIGGER fence_x BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION skips()",
            "after the fence",
        ),
        ("SELECT fence_protect('orders', lease => '')", "bound to no lease"),
        ("CREATE TABLE child () INHERITS (orders)", "fires on insert, update, delete, truncate"),
    ] {
        session.run(&format!("BEGIN; {hole}"))?;
        let found = findings(&mut session)?;
        session.run("ROLLBACK")?;
        ensure!(matches!(&found[..], [only] if only.contains(says)), "{hole}: {found:?}");
    }
    session.run("CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent)")?;
    for table in ["parent", "child"] {
        session.refused(&format!("SELECT fence_protect('{table}')"), "42809")?;
    }
    // Of partitions nothing false, and no remedy that cannot run.
    session.run(
        "CREATE TABLE parts (id int, k int) PARTITION BY LIST (k); CREATE TABLE part PARTITION OF parts FOR VALUES IN (1);
         SELECT fence_protect('parts', lease => 'p:{id}')",
    )?;
    ensure!(findings(&mut session)?.is_empty(), "{:?}", findings(&mut session)?);
    session.run(
        "CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
         CREATE TRIGGER zz BEFORE UPDATE ON parts FOR EACH ROW EXECUTE FUNCTION later();
         CREATE FUNCTION fence_protect(text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'another''s'; END $$;
         ALTER TABLE orders DISABLE TRIGGER fenced",
    )?;
    for remedy in session.rows("SELECT remedy FROM fence_audit()")? {
        session.run(remedy[0].as_deref().context("a remedy")?)?;
    }
    ensure!(findings(&mut session)?.is_empty(), "{:?}", findings(&mut session)?);
    session.run("DROP FUNCTION fence_protect(text)")?;
    // For apply workers: with always, which NULL keeps, and so does the audit's remedy.
    let fires = "SELECT string_agg(DISTINCT tgenabled, '') FROM pg_trigger WHERE tgrelid = 'orders'::regclass";
    for (always, enabled) in [("true", "A"), ("NULL", "A"), ("false", "O")] {
        session.run(&format!("SELECT fence_protect('orders', always => {always})"))?;
        ensure!(session.text(fires)?.as_deref() == Some(enabled), "always => {always}");
    }
    let notices = session.notices();
    ensure!(notices.iter().any(|notice| notice.message.contains("no longer")), "{notices:?}");
    Ok(())
}
