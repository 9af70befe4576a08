//! `sql/pg_fence_lite.sql` by itself: how it is installed and taken away, what is weaker in it, how it is left for the
//! extension. That it keeps the promises of the extension is shown by the other tests, with `--edition lite`. Most is in
//! lite.script; here is what needs more than sessions that take turns.

automod::dir!(pub "tests/lab/lite");

use pg_test::client::set_if_known;
use pg_test::edition::{lite_script, with_bug};
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
        waits.waits_asleep = true;
        waits.wait_until_blocked()?;
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

/// The key of a lease's advisory lock, which anybody can compute.
fn key(session: &mut Session, lease: &str) -> Result<i64> {
    session.granted(&format!("SELECT fence_lite.lock_key('{lease}')"))
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
