//! No argument of any size and no damaged page ends a process: the server and the session live on.

use pg_test::{Cluster, Context, Harness, Result, Session, bail, ensure, harness_test};
use std::fs;

fn server(harness: &Harness) -> Result<(Cluster, Session)> {
    let cluster = harness.builder().start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    Ok((cluster, session))
}

/// Limits the session's memory to `more` kilobytes above its present size, as `ulimit -v` or strict overcommitment
/// would. The server's own user sets the limit. (`cat`, because PostgreSQL complains about a program that ends before
/// it has read.)
fn limit_memory(admin: &mut Session, session: &Session, more: u64) -> Result<()> {
    let pid = session.pid();
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let has = status.lines().find_map(|line| line.strip_prefix("VmSize:")).context("a size")?;
    let kilobytes: u64 = has.split_whitespace().next().context("a number")?.parse()?;
    let bytes = (kilobytes + more) * 1024;
    admin.run(&format!("COPY (SELECT) TO PROGRAM 'cat; prlimit --pid={pid} --as={bytes}'"))
}

/// Each call that takes a text or an array, with `{}` in its place.
const TEXTS: &[&str] = &[
    "lease_acquire({})",
    "lease_acquire('job', {})",
    "lease_acquire('job', metadata => to_jsonb({}))",
    "lease_renew({}, 1)",
    "lease_release({}, 1)",
    "lease_revoke({})",
    "lease_guard({}, 1)",
    "lease_check({}, 1)",
    "lease_info({})",
    "lease_adopt({}, 1)",
    "lease_adopt('adopted', 1, {})",
    "lease_forget({})",
    "lease_acquire_all(ARRAY[{}])",
    "lease_guard_all(ARRAY['a', {}], 1)",
    "fence_protect('t', mode => {})",
    "fence_protect('t', lease => {})",
    "fence_protect('t', events => {})",
    "fence_grant('postgres', 'worker', {})",
    "fence.is_visible({})",
    "fence.blocking_pids({}, 0)",
    "fence.queue_key({})",
    "fence.uncommitted_grants({})",
    "fence.checked_lease_name({}, 1)",
    "fence.grant_state({}, 'x', 1, '{}', 2, now(), false)",
    "set_config('pg_fence.token', {}, false)",
];
const ARRAYS: &[&str] = &[
    "lease_acquire_all({})",
    "lease_renew_all({}, 1)",
    "lease_release_all({}, 1)",
    "lease_guard_all({}, 1)",
    "lease_keep({}, '{1}')",
];

#[harness_test]
fn no_argument_is_too_large_to_be_refused(harness: &Harness) -> Result<()> {
    let (cluster, mut probe) = server(harness)?;
    probe.run(
        "CREATE TABLE t (id int PRIMARY KEY);
         CREATE TABLE stored AS SELECT repeat('x', 450000000) AS v",
    )?;
    let started = probe.text("SELECT pg_postmaster_start_time()")?;
    let mut calls = Vec::new();
    for call in TEXTS {
        for value in [
            "repeat('x', 450000000 + (random() * 0)::int)",
            "(SELECT v FROM stored)",
            "repeat('x', 8193)",
            "''",
        ] {
            calls.push(call.replacen("{}", value, 1));
        }
    }
    for call in ARRAYS {
        for value in [
            "array_fill('x'::text, ARRAY[14000000 + (random() * 0)::int])",
            "array_fill('x'::text, ARRAY[1001])",
            "array_fill('x'::text, ARRAY[40, 30])",
            "array_fill(repeat('x', 513), ARRAY[1000])",
            "array_fill(NULL::text, ARRAY[14000000 + (random() * 0)::int])",
        ] {
            calls.push(call.replacen("{}", value, 1));
        }
    }
    calls.push(
        "fence.grant_state('a', 'x', 1, array_fill(1::bigint, ARRAY[30000000 + (random() * 0)::int]), 2, now(), false)"
            .into(),
    );
    for call in calls {
        let mut session = cluster.connect("postgres")?;
        session.run("SELECT lease_check('warm', 1)")?;
        // Enough memory for the value, but not for a copy of it. (The stored value is compressed.)
        let megabytes = if call.contains("stored") { 300 } else { 700 };
        limit_memory(&mut probe, &session, megabytes * 1024)?;
        let outcome = session.try_rows(&format!("SELECT {call}"));
        if let Err(fault) = &outcome {
            ensure!(!fault.is_disconnect() && !fault.sqlstate.starts_with("XX"), "{call}: {fault}");
        }
        // pg_fence checks the length first and allocates nothing for these.
        let is_fit = call.contains("metadata") || call.contains("8193") || call.contains("''");
        if call.starts_with("lease_") && !is_fit {
            let Err(fault) = outcome else { bail!("{call} is not refused") };
            // PostgreSQL copies what it puts into an array, and from 18 on also the arguments of SQL functions.
            let copied = call.contains("ARRAY[") || call.starts_with("lease_info");
            let by_server = copied && fault.sqlstate == "53200";
            let refused = ["22023", "22004"].contains(&fault.sqlstate.as_str());
            ensure!(refused || by_server && fault.detail.is_some(), "{call}: {fault}");
        }
        session.run("SELECT 1")?;
    }
    ensure!(probe.text("SELECT pg_postmaster_start_time()")? == started, "it was restarted");
    Ok(())
}

#[harness_test]
fn where_memory_ends_in_the_midst_of_work_the_session_ends_at_most(
    harness: &Harness,
) -> Result<()> {
    let (cluster, mut probe) = server(harness)?;
    let started = probe.text("SELECT pg_postmaster_start_time()")?;
    for kilobytes in (0..6400).step_by(32) {
        let mut session = cluster.connect("postgres")?;
        session.run("SELECT lease_check('warm', 1)")?;
        limit_memory(&mut probe, &session, kilobytes)?;
        let keep = "SELECT count(*) FROM lease_keep((SELECT array_agg('n' || n) FROM generate_series(1, 10000) n),
                                                    (SELECT array_agg(n) FROM generate_series(1, 10000::bigint) n))";
        if let Err(fault) = session.try_rows(keep) {
            // There may not be enough memory to report the error.
            let has_ended = fault.sqlstate == "53200" || fault.is_disconnect();
            ensure!(has_ended, "{kilobytes} kB: {fault}");
        }
    }
    ensure!(probe.text("SELECT pg_postmaster_start_time()")? == started, "it was restarted");
    Ok(())
}

#[harness_test]
fn a_trigger_s_arguments_and_a_row_s_columns_may_have_any_size(harness: &Harness) -> Result<()> {
    let (cluster, mut probe) = server(harness)?;
    let started = probe.text("SELECT pg_postmaster_start_time()")?;
    probe.run(
        "CREATE TABLE long (id int, v text, fence bigint);
         ALTER TABLE long ALTER v SET STORAGE external;
         DO $$ BEGIN EXECUTE format('CREATE TRIGGER f BEFORE INSERT ON long FOR EACH ROW EXECUTE FUNCTION
                                     fenced(%L, %L, %L)', 'fence', 'managed', repeat('x', 200000000)); END $$;
         CREATE TABLE bound (id int, v text, fence bigint);
         SELECT fence_protect('bound', lease => 'v:{v}')",
    )?;
    for call in [
        "INSERT INTO long VALUES (1)",
        "INSERT INTO bound VALUES (1, repeat('x', 400000000), 1)",
        "SELECT count(*) FROM fence_audit()",
        "SELECT count(*) FROM fence_audit('long')",
        "SELECT fence_unprotect('long')",
    ] {
        let mut session = cluster.connect("postgres")?;
        session.run("SELECT lease_check('warm', 1)")?;
        limit_memory(&mut probe, &session, 600 * 1024)?;
        if let Err(fault) = session.try_rows(call) {
            ensure!(!fault.is_disconnect() && !fault.sqlstate.starts_with("XX"), "{call}: {fault}");
        }
        session.run("SELECT 1")?;
    }
    ensure!(probe.text("SELECT pg_postmaster_start_time()")? == started, "it was restarted");
    Ok(())
}

/// The statement, the relations that it reads (by the ends of their names), and the damage to a page.
type Damage = (&'static str, &'static str, fn(&mut [u8]));

/// The kinds of damage to a page.
const DAMAGES: [Damage; 5] = [
    ("zeroes", "", |page| page.fill(0)),
    ("no magic number", "_seq", |page| page[8184..].fill(0)),
    ("an item beyond the page", "_seq", |page| {
        page[24..28].copy_from_slice(&[0xff, 0xff, 0x7f, 0x00]);
    }),
    ("a header beyond the page", "_seq", |page| {
        let at = usize::from(u16::from_le_bytes([page[24], page[25]]) & 0x7fff);
        page[at + 22] = 0xf8;
    }),
    ("an array beyond the page", ".lease", |page| {
        // The header of an array of bigint with one dimension and no NULLs. The number of elements follows.
        const HEADER: [u8; 12] = [1, 0, 0, 0, 0, 0, 0, 0, 20, 0, 0, 0];
        let at = page.windows(12).position(|bytes| bytes == HEADER).expect("tokens of renewals");
        page[at + 12..at + 16].copy_from_slice(&i32::MAX.to_le_bytes());
    }),
];

#[harness_test]
fn a_damaged_page_of_the_state_is_an_error(harness: &Harness) -> Result<()> {
    let (cluster, mut session) = server(harness)?;
    let acquire = "lease_acquire('job', ttl => '1 h')";
    let token: i64 = session.one(&format!("SELECT lease_renew('job', {acquire})"), &[])?;
    let files = session.rows(
        "SELECT oid::regclass::text, pg_relation_filepath(oid) FROM pg_class
          WHERE relnamespace = 'fence'::regnamespace AND relkind IN ('S', 'r', 'i')
          ORDER BY relname",
    )?;
    let asserts = session.text("SHOW debug_assertions")?.as_deref() == Some("on");
    drop(session);
    for row in files {
        let (name, file) = (row[0].clone().unwrap_or_default(), row[1].clone().unwrap_or_default());
        let path = cluster.data().join(file);
        for (what, of, damage) in DAMAGES {
            if !name.ends_with(of) {
                continue;
            }
            cluster.stop()?;
            let good = fs::read(&path)?;
            let mut page = good.clone();
            if page.is_empty() {
                cluster.start()?;
                continue;
            }
            damage(&mut page[..8192]);
            fs::write(&path, &page)?;
            cluster.start()?;
            let mut probe = cluster.connect("postgres")?;
            let started = probe.text("SELECT pg_postmaster_start_time()")?;
            let mut errors = 0;
            for call in [
                "SELECT lease_acquire('other')".to_owned(),
                format!("SELECT lease_check('job', {token})"),
                format!("SELECT lease_renew('job', {token})"),
                format!("SELECT lease_guard('job', {token})"),
                "SELECT * FROM fence_status()".to_owned(),
                "SELECT fence_new_epoch()".to_owned(),
                "SELECT * FROM fence.leases".to_owned(),
                "SELECT * FROM fence.stats".to_owned(),
            ] {
                // Built with assertions, PostgreSQL's own setval asserts that the page is intact.
                if asserts && call.contains("new_epoch") {
                    continue;
                }
                let mut session = cluster.connect("postgres")?;
                if let Err(fault) = session.try_rows(&call) {
                    errors += 1;
                    ensure!(!fault.is_disconnect(), "{name}, {what}: {call}: {fault}");
                }
                session.run("SELECT 1")?;
            }
            ensure!(errors > 0 || !name.ends_with("_seq"), "{name}, {what}: nobody has seen it");
            ensure!(probe.text("SELECT pg_postmaster_start_time()")? == started, "{name}, {what}");
            drop(probe);
            cluster.stop()?;
            fs::write(&path, &good)?;
            cluster.start()?;
        }
    }
    Ok(())
}
