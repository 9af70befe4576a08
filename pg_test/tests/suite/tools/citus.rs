//! Citus, which distributes tables over nodes: leases on the coordinator, leases on the row's node, and both when
//! shards move, when nodes fail, and while a transaction over several nodes is half committed.

use nix::sys::signal::Signal;
use pg_test::citus::Citus;
use pg_test::client::literal;
use pg_test::process::{self, PATIENCE, wait_until};
use pg_test::{Background, Calls, Context, Harness, Result, Session, ensure, harness_test};

/// The SQLSTATEs of a write whose token is not valid on the node. Which one depends on the numbers there.
const REFUSED: [&str; 3] = ["PF001", "PF003", "PF004"];

/// Creates documents with a key on each worker. Calls on leases are sent to the node of the name.
fn documents(harness: &Harness, workers: usize) -> Result<(Citus, Session)> {
    let citus = Citus::start(harness.install_dir(), workers)?;
    let mut session = citus.connect()?;
    session.run("CREATE TABLE docs (id text PRIMARY KEY, body text NOT NULL)")?;
    session.run("SELECT create_distributed_table('docs', 'id')")?;
    session.run("INSERT INTO docs SELECT 'key' || n, 'new' FROM generate_series(0, 99) AS n")?;
    session.run("SELECT fence_protect('docs', lease => '{id}')")?;
    citus.distribute_calls("docs")?;
    Ok((citus, session))
}

/// Returns the statement's answer on that worker.
fn on(citus: &Citus, worker: usize, sql: &str) -> Result<Option<String>> {
    citus.worker(worker).connect("postgres")?.text(sql)
}

/// Adopts the coordinator's lease by this number on every worker.
fn adopt_everywhere(session: &mut Session, name: &str, token: i64) -> Result<()> {
    let call = literal(&format!("SELECT lease_adopt({}, {token}, wait => '1 min')", literal(name)));
    let sql = format!(
        "SELECT string_agg(result, ' ') FROM run_command_on_workers({call}) WHERE NOT success OR result <> '{token}'"
    );
    let answer = session.text(&sql)?;
    ensure!(answer.is_none(), "{answer:?}");
    Ok(())
}

#[harness_test(slow)]
fn the_page_does_what_it_says(harness: &Harness) -> Result<()> {
    let citus = Citus::start(harness.install_dir(), 2)?;
    crate::project::pages::play(
        "docs/operations/citus.md",
        citus.coordinator().conninfo("postgres"),
    )
}

#[harness_test(slow)]
fn a_fence_requires_the_setting_and_reaches_every_shard_and_the_audit_looks_there(
    harness: &Harness,
) -> Result<()> {
    let citus = Citus::start(harness.install_dir(), 2)?;
    let mut session = citus.coordinator().connect("postgres")?;
    session.run("CREATE TABLE docs (id text PRIMARY KEY, body text)")?;
    session.run("CREATE TABLE kinds (id int PRIMARY KEY)")?;
    session.run("SELECT create_distributed_table('docs', 'id')")?;
    session.run("SELECT create_reference_table('kinds')")?;
    for call in
        ["fence_protect('docs', lease => '{id}')", "fence_protect('kinds', lease => 'kinds')"]
    {
        let fault = session.refused(&format!("SELECT {call}"), "55000")?;
        let hint = fault.hint.clone().unwrap_or_default();
        ensure!(hint.contains("citus.enable_unsafe_triggers = on"), "{hint}");
        session.run(&format!("SET citus.enable_unsafe_triggers = on; SELECT {call}; RESET citus.enable_unsafe_triggers"))?;
    }
    session.refused("SELECT fence_unprotect('docs')", "55000")?;
    let triggers = "SELECT string_agg(DISTINCT success || ' ' || result, ', ')
                      FROM run_command_on_placements('docs', $$SELECT count(*) FROM pg_trigger
                           WHERE tgrelid = '%s'::regclass AND tgfoid = 'fenced'::regproc$$)";
    // The TRUNCATE trigger is on the table itself on every node: Citus puts none on shards.
    ensure!(session.text(triggers)?.as_deref() == Some("true 1"), "{:?}", session.text(triggers)?);
    for place in [citus.coordinator(), citus.worker(0), citus.worker(1)] {
        place.connect("postgres")?.refused("TRUNCATE docs", "PF005")?;
    }

    let findings = |session: &mut Session, table: &str| {
        session.rows(&format!("SELECT severity, finding, remedy FROM fence_audit({table}) WHERE finding LIKE 'on % of %'"))
    };
    let found = findings(&mut session, "'docs'")?;
    ensure!(found.is_empty(), "all is well, but: {found:?}");
    let found = findings(&mut session, "NULL")?;
    ensure!(found.is_empty(), "all is well, but: {found:?}");
    // A role on the node itself drops the fence of one shard.
    let home = citus.home_of("docs", "a")?;
    let mut there = citus.worker(home).connect("postgres")?;
    let shard = session.text(
        "SELECT shard_name('docs', get_shard_id_for_distribution_column('docs', 'a'::text))",
    )?;
    let shard = shard.context("no shard")?;
    there.run("SET citus.enable_manual_changes_to_shards = on")?;
    there.run(&format!("ALTER TABLE {shard} DISABLE TRIGGER ALL"))?;
    for table in ["'docs'", "NULL"] {
        let found = findings(&mut session, table)?;
        let bypasses = found.iter().filter(|row| row[0].as_deref() == Some("hole")).count();
        let text = format!("{found:?}");
        ensure!(bypasses > 0 && text.contains("on 1 of 4 shards"), "{text}");
        ensure!(text.contains(&citus.worker(home).port().to_string()), "{text}");
    }
    there.run(&format!("ALTER TABLE {shard} ENABLE TRIGGER ALL"))?;
    ensure!(findings(&mut session, "'docs'")?.is_empty());
    // The node reports that it cannot audit the others.
    there.notices();
    there.run("SELECT fence_audit('docs')")?;
    let notices = there.notices();
    ensure!(
        notices.iter().any(|n| n.message.contains("not looked at: the shards of")),
        "{notices:?}"
    );
    drop(there);
    // The coordinator reports that a node does not answer.
    citus.worker(home).kill9()?;
    let found = format!("{:?}", findings(&mut citus.connect()?, "'docs'")?);
    ensure!(found.contains("on 2 of 4 shards: not looked at"), "{found}");
    citus.worker(home).start()?;
    session = citus.connect()?;
    session.run("SELECT fence_unprotect('docs')")?;
    ensure!(session.text(triggers)?.as_deref() == Some("true 0"));
    Ok(())
}

#[harness_test(slow)]
fn a_lease_on_the_node_of_its_row_fences_the_row(harness: &Harness) -> Result<()> {
    let (citus, mut session) = documents(harness, 2)?;
    for worker in [0, 1] {
        let key = citus.key_on("docs", worker)?;
        // As clients call it, with parameters.
        let token: i64 = session.one("SELECT lease_acquire($1, ttl => '1 h')", &[&key])?;
        let there = on(&citus, worker, "SELECT string_agg(name, ' ') FROM fence.leases")?;
        ensure!(there.as_deref() == Some(&*key), "worker {worker} has {there:?}");
        let held = session.rows(&format!("SELECT state FROM lease_info('{key}')"))?;
        ensure!(held == [[Some("held".to_owned())]], "{held:?}");
        // On each node, for each role.
        for place in [citus.coordinator(), citus.worker(0), citus.worker(1)] {
            let mut other = place.connect("postgres")?;
            other.nothing(&format!("SELECT lease_acquire('{key}')"))?;
            other.refused(&format!("UPDATE docs SET body = 'x' WHERE id = '{key}'"), "PF002")?;
        }
        session
            .run(&format!("UPDATE docs SET body = 'one', fence = {token} WHERE id = '{key}'"))?;
        // The guard is in the same transaction as the row, on its node.
        session.run("BEGIN")?;
        ensure!(session.one::<i64>("SELECT lease_guard($1, $2)", &[&key, &token])? == token);
        session.run(&format!("UPDATE docs SET body = 'two' WHERE id = '{key}'"))?;
        let mut admin = citus.connect()?;
        ensure!(admin.token(&format!("SELECT lease_revoke('{key}')"))?.is_some());
        admin.nothing(&format!("SELECT lease_acquire('{key}')"))?;
        session.run("COMMIT")?;
        let next = admin.acquire(&key, "1 h")?;
        ensure!(next > token);
        for refused in ["body = 'late'", "body = 'late', fence = NULL"] {
            session.refused(&format!("UPDATE docs SET {refused} WHERE id = '{key}'"), "PF002")?;
        }
        let late = format!("UPDATE docs SET body = 'late', fence = {token} WHERE id = '{key}'");
        let fault = session.try_rows(&late).err().context("a stale write landed")?;
        ensure!(REFUSED.contains(&&*fault.sqlstate), "{fault}");
        session.run("BEGIN")?;
        session.refused(&format!("SELECT lease_guard('{key}', {token})"), "PF004")?;
        session.run("ROLLBACK")?;
        ensure!(admin.renew(&key, next)?.is_some_and(|renewed| renewed > next));
        // A last write and the release, in two statements: Citus accepts no function call in a SET.
        admin.run("BEGIN")?;
        let closing = admin.release(&key, next)?.context("the lease was lost")?;
        admin
            .run(&format!("UPDATE docs SET body = 'last', fence = {closing} WHERE id = '{key}'"))?;
        admin.run("COMMIT")?;
        let body = session.text(&format!("SELECT body FROM docs WHERE id = '{key}'"))?;
        ensure!(body.as_deref() == Some("last"), "{body:?}");
    }
    let here = session.text("SELECT count(*) FROM fence.leases")?;
    ensure!(here.as_deref() == Some("0"), "the coordinator has {here:?} leases");

    // A call that is not sent to the node is granted by the coordinator, and has no effect on the node.
    let key = citus.key_on("docs", 0)?;
    let mine: i64 = session.one("SELECT coalesce(lease_acquire($1), 0)", &[&key])?;
    ensure!(mine > 0);
    let write = format!("UPDATE docs SET body = 'x', fence = {mine} WHERE id = '{key}'");
    let fault = session
        .try_rows(&write)
        .err()
        .context("a lease of the coordinator wrote a row of a node")?;
    ensure!(REFUSED.contains(&&*fault.sqlstate), "{fault}");
    Ok(())
}

#[harness_test(slow)]
fn a_shard_that_moves_leaves_its_leases_behind_and_no_stale_write_lands(
    harness: &Harness,
) -> Result<()> {
    let (mut citus, mut session) = documents(harness, 1)?;
    session.run("CREATE TABLE notes (id text PRIMARY KEY, body text)")?;
    session.run("SELECT create_distributed_table('notes', 'id', colocate_with => 'docs')")?;
    session.run("SELECT fence_protect('notes')")?;
    // The first node has drawn many tokens; the sequence of the younger second one is behind.
    on(&citus, 0, "SELECT fence_new_epoch()")?;
    let key = citus.key_on("docs", 0)?;
    let old = session.acquire(&key, "1 h")?;
    session.run(&format!("INSERT INTO notes VALUES ('{key}', 'one', {old})"))?;
    session.run(&format!("UPDATE docs SET body = 'old', fence = {old} WHERE id = '{key}'"))?;
    let new = citus.add_worker()?;
    ensure!(
        on(&citus, new, "SELECT extversion FROM pg_extension WHERE extname = 'pg_fence'")?
            .is_some()
    );
    on(&citus, 0, "SELECT fence_new_epoch()")?;
    let old = session.renew(&key, old)?.context("the lease was lost")?;
    session.run(&format!("UPDATE docs SET body = 'old', fence = {old} WHERE id = '{key}'"))?;
    session.run(&format!("UPDATE notes SET fence = {old} WHERE id = '{key}'"))?;
    let behind = on(&citus, new, &format!("SELECT last_token < {old} FROM fence_status()"))?;
    ensure!(behind.as_deref() == Some("t"), "the new node's sequence should be behind {old}");

    // A guard is open on the old node when the shard moves.
    let mut frozen = citus.connect()?;
    frozen.run("BEGIN")?;
    frozen.run(&format!("SELECT lease_guard('{key}', {old})"))?;
    citus.move_shard("docs", &key, new)?;
    let late = frozen.try_rows(&format!("UPDATE docs SET body = 'late' WHERE id = '{key}'"));
    ensure!(late.is_err(), "the guard of the node that had the shard let a write pass");
    frozen.run("ROLLBACK")?;
    session.refused(
        &format!("UPDATE docs SET body = 'late', fence = {old} WHERE id = '{key}'"),
        "PF003",
    )?;
    let unspoken = session.try_rows(&format!("SELECT lease_renew('{key}', {old})"));
    ensure!(unspoken.is_ok_and(|rows| rows == [[None]]), "a renewal found the lease");
    session.refused(&format!("DELETE FROM docs WHERE id = '{key}'"), "PF002")?;

    // The new node grants it with a smaller number, and the row keeps the greater one.
    let granted = session.acquire(&key, "1 h")?;
    ensure!(granted < old, "{granted}, {old}");
    session.run(&format!("UPDATE docs SET body = 'new', fence = {granted} WHERE id = '{key}'"))?;
    let kept =
        session.text(&format!("SELECT body || ' ' || fence FROM docs WHERE id = '{key}'"))?;
    ensure!(kept == Some(format!("new {old}")), "{kept:?}");
    let late = format!("UPDATE docs SET body = 'late', fence = {} WHERE id = '{key}'", old - 1);
    let fault = session.try_rows(&late).err().context("a stale write landed")?;
    ensure!(REFUSED.contains(&&*fault.sqlstate), "{fault}");

    // Unbound rows cannot be written there, which the audit reports.
    session
        .refused(&format!("UPDATE notes SET fence = {} WHERE id = '{key}'", old + 1), "PF003")?;
    let ahead = |session: &mut Session| {
        session.rows("SELECT finding FROM fence_audit('notes') WHERE finding LIKE 'on 1 of 4 shards: rows hold fences up to%'")
    };
    ensure!(
        ahead(&mut session)?.len() == 1,
        "{:?}",
        session.rows("SELECT * FROM fence_audit('notes')")?
    );
    on(&citus, new, "SELECT fence_new_epoch()")?;
    let renewed = session.renew(&key, granted)?.context("the lease was lost")?;
    if renewed > old {
        ensure!(ahead(&mut session)?.is_empty());
        session.run(&format!("UPDATE notes SET fence = {renewed} WHERE id = '{key}'"))?;
    }

    // The other shards move to where there is room.
    session.run("SELECT rebalance_table_shards('docs', shard_transfer_mode => 'block_writes')")?;
    let found = session.rows("SELECT finding FROM fence_audit('docs') WHERE severity = 'hole'")?;
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

#[harness_test(slow)]
fn a_transaction_over_two_nodes_keeps_both_leases_until_it_has_ended(
    harness: &Harness,
) -> Result<()> {
    let (citus, mut session) = documents(harness, 2)?;
    let keys = [citus.key_on("docs", 0)?, citus.key_on("docs", 1)?];
    let tokens = [session.acquire(&keys[0], "1 h")?, session.acquire(&keys[1], "1 h")?];
    let mut both = Background::connect(&citus.coordinator().conninfo("postgres"))?;
    let transaction = |both: &mut Background, body: &str| -> Result<()> {
        both.run("BEGIN")?;
        for (key, token) in keys.iter().zip(tokens) {
            both.run(&format!("SELECT lease_guard('{key}', {token})"))?;
            both.run(&format!("UPDATE docs SET body = '{body}' WHERE id = '{key}'"))?;
        }
        Ok(())
    };
    transaction(&mut both, "both")?;
    both.run("COMMIT")?;
    let bodies = format!(
        "SELECT string_agg(DISTINCT body, ' ') FROM docs WHERE id IN ('{}', '{}')",
        keys[0], keys[1]
    );
    ensure!(session.text(&bodies)?.as_deref() == Some("both"));

    // The second node freezes before it has prepared. The first has prepared, and the coordinator dies.
    transaction(&mut both, "half")?;
    for key in &keys {
        ensure!(session.token(&format!("SELECT lease_revoke('{key}')"))?.is_some());
    }
    let backend = "SELECT pid::text FROM pg_stat_activity WHERE state = 'idle in transaction' AND application_name LIKE 'citus_internal%'";
    let backend: i32 = on(&citus, 1, backend)?.context("no backend")?.parse()?;
    process::freeze_living(backend)?;
    both.send("COMMIT")?;
    let mut first = citus.worker(0).connect("postgres")?;
    wait_until("the first node has prepared", PATIENCE, || {
        first
            .text("SELECT count(*) FROM pg_prepared_xacts")
            .is_ok_and(|n| n.as_deref() == Some("1"))
    })?;
    citus.coordinator().kill9()?;
    process::signal(backend, Signal::SIGCONT)?;
    // A write on its way to the second node may have arrived there, or be lost with the connection.
    wait_until("the second node's backend is gone", PATIENCE, || !process::is_alive(backend))?;
    for (worker, key) in keys.iter().enumerate() {
        let mut there = citus.worker(worker).connect("postgres")?;
        let prepared =
            there.text("SELECT count(*) FROM pg_prepared_xacts")?.as_deref() == Some("1");
        ensure!(prepared || worker == 1, "the first node has forgotten what it has prepared");
        let granted = there.token(&format!("SELECT lease_acquire('{key}')"))?;
        ensure!(granted.is_none() == prepared, "prepared: {prepared}, granted: {granted:?}");
        if let Some(token) = granted {
            there.release(key, token)?;
        }
    }
    citus.coordinator().start()?;
    let mut session = citus.connect()?;
    wait_until("Citus has put right what was left", PATIENCE, || {
        let _ = session.run("SELECT recover_prepared_transactions()");
        (0..2).all(|worker| {
            on(&citus, worker, "SELECT count(*) FROM pg_prepared_xacts")
                .is_ok_and(|n| n.as_deref() == Some("0"))
        })
    })?;
    let body = session.text(&bodies)?;
    ensure!(body.as_deref() == Some("both"), "it was never committed, but: {body:?}");
    for (key, token) in keys.iter().zip(tokens) {
        ensure!(session.acquire(key, "1 h")? > token);
    }
    Ok(())
}

#[harness_test(slow)]
fn a_node_that_dies_holds_up_its_own_rows_and_no_others(harness: &Harness) -> Result<()> {
    let (citus, mut session) = documents(harness, 2)?;
    let keys = [citus.key_on("docs", 0)?, citus.key_on("docs", 1)?];
    let tokens = [session.acquire(&keys[0], "1 h")?, session.acquire(&keys[1], "1 h")?];
    citus.worker(0).kill9()?;
    let write = |n: usize, body: &str| {
        format!("UPDATE docs SET body = '{body}', fence = {} WHERE id = '{}'", tokens[n], keys[n])
    };
    ensure!(session.try_rows(&format!("SELECT lease_acquire('{}')", keys[0])).is_err());
    ensure!(session.try_rows(&write(0, "down")).is_err());
    session.run(&write(1, "up"))?;
    session.nothing(&format!("SELECT lease_acquire('{}')", keys[1]))?;
    citus.worker(0).start()?;
    session.nothing(&format!("SELECT lease_acquire('{}')", keys[0]))?;
    session.run(&write(0, "again"))?;
    let renewed = session.renew(&keys[0], tokens[0])?.context("the lease was lost")?;
    ensure!(renewed > tokens[0] + 1000, "{renewed} follows {} in another life", tokens[0]);
    Ok(())
}

#[harness_test(slow)]
fn leases_of_the_coordinator_are_adopted_on_every_node(harness: &Harness) -> Result<()> {
    let mut citus = Citus::start(harness.install_dir(), 2)?;
    let mut a = citus.connect()?;
    a.run("CREATE TABLE orders (id bigint PRIMARY KEY, total int)")?;
    a.run("CREATE TABLE rates (id bigint PRIMARY KEY, rate int)")?;
    a.run("CREATE TABLE jobs (id bigint PRIMARY KEY, state int)")?;
    a.run("SELECT create_distributed_table('orders', 'id')")?;
    a.run("SELECT create_reference_table('rates')")?;
    for table in ["orders", "rates", "jobs"] {
        a.run(&format!("INSERT INTO {table} SELECT n, 0 FROM generate_series(1, 20) AS n"))?;
        a.run(&format!("SELECT fence_protect('{table}', lease => 'the books')"))?;
    }
    let write = |token: i64, by: &str| -> Vec<String> {
        // All rows on all nodes, every copy of a reference table, and a table that only the coordinator has.
        ["orders SET total", "rates SET rate", "jobs SET state"]
            .map(|set| format!("UPDATE {set} = {by}, fence = {token}"))
            .into()
    };
    let old = a.acquire("the books", "1 h")?;
    a.refused(&write(old, "1")[0], "PF004")?;
    adopt_everywhere(&mut a, "the books", old)?;
    for sql in write(old, "1") {
        a.run(&sql)?;
    }
    // The token is presented by the setting, for programs that know no fence column. Citus passes the setting on if it
    // is told to.
    a.run("BEGIN; SET LOCAL citus.propagate_set_commands = 'local'")?;
    a.run(&format!("SET LOCAL pg_fence.token = {old}"))?;
    a.run("UPDATE orders SET total = 2 WHERE id = 7")?;
    a.run("COMMIT")?;

    // A freezes in a transaction that has written, and B takes over once that has ended.
    a.run("BEGIN")?;
    a.run(&format!("SELECT lease_guard('the books', {old})"))?;
    a.run(&format!("UPDATE orders SET total = 3, fence = {old} WHERE id = 7"))?;
    let mut b = citus.connect()?;
    ensure!(b.token("SELECT lease_revoke('the books')")?.is_some());
    b.nothing("SELECT lease_acquire('the books')")?;
    a.run("COMMIT")?;
    let new = b.acquire("the books", "1 h")?;
    adopt_everywhere(&mut b, "the books", new)?;
    for sql in write(old, "4") {
        let fault = a.try_rows(&sql).err().with_context(|| format!("landed: {sql}"))?;
        ensure!(REFUSED.contains(&&*fault.sqlstate), "{fault}");
    }
    for sql in write(new, "5") {
        b.run(&sql)?;
    }

    // A call that is selected from a row runs on the row's node: it is adopted and guarded there, in the transaction.
    b.run("SELECT fence_protect('orders', lease => 'order:{id}')")?;
    let one = b.acquire("order:7", "1 h")?;
    b.refused(&format!("UPDATE orders SET total = 8, fence = {one} WHERE id = 7"), "PF004")?;
    b.run("BEGIN")?;
    b.run(&format!("SELECT lease_guard('order:7', {one})"))?;
    b.granted(&format!(
        "SELECT lease_adopt('order:7', {one}, wait => '1 min') FROM orders WHERE id = 7"
    ))?;
    b.run(&format!("UPDATE orders SET total = 8, fence = {one} WHERE id = 7"))?;
    b.run("COMMIT")?;
    let two = b.granted("SELECT lease_acquire('order:8') FROM orders WHERE id = 8")?;
    let here = b.text("SELECT count(*) FROM fence.leases WHERE name = 'order:8'")?;
    ensure!(here.as_deref() == Some("0"), "the coordinator has granted it");
    b.run("BEGIN")?;
    b.granted(&format!("SELECT lease_guard('order:8', {two}) FROM orders WHERE id = 8"))?;
    b.run("UPDATE orders SET total = 8 WHERE id = 8")?;
    a.granted("SELECT lease_revoke('order:8') FROM orders WHERE id = 8")?;
    a.nothing("SELECT lease_acquire('order:8') FROM orders WHERE id = 8")?;
    b.run("COMMIT")?;
    ensure!(a.granted("SELECT lease_acquire('order:8') FROM orders WHERE id = 8")? > two);
    b.refused(&format!("UPDATE orders SET total = 9, fence = {two} WHERE id = 8"), "PF004")?;
    b.run("SELECT fence_protect('orders', lease => 'the books')")?;

    // What a holder adopts on a new node before it has shards is known when they arrive.
    let added = citus.add_worker()?;
    adopt_everywhere(&mut b, "the books", new)?;
    b.run("SELECT rebalance_table_shards('orders', shard_transfer_mode => 'block_writes')")?;
    let moved = b.text(&format!(
        "SELECT count(*) FROM pg_dist_shard_placement JOIN pg_dist_shard USING (shardid)
          WHERE logicalrelid = 'orders'::regclass AND nodeport = {}",
        citus.worker(added).port()
    ))?;
    ensure!(moved.as_deref() != Some("0"), "nothing was moved");
    let late = a.try_rows(&format!("SELECT result FROM run_command_on_workers('SELECT lease_adopt(''the books'', {old})') WHERE success"))?;
    ensure!(late.is_empty(), "an older number was adopted: {late:?}");
    for sql in write(old, "6") {
        ensure!(a.try_rows(&sql).is_err(), "landed: {sql}");
    }
    for sql in write(new, "7") {
        b.run(&sql)?;
    }
    let found = b.rows("SELECT relation, finding FROM fence_audit() WHERE severity = 'hole'")?;
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

#[harness_test(slow)]
fn a_row_that_is_a_lease_is_claimed_on_its_own_node(harness: &Harness) -> Result<()> {
    let mut citus = Citus::start(harness.install_dir(), 2)?;
    let mut session = citus.connect()?;
    session.run("CREATE TABLE runs (id text PRIMARY KEY, state text NOT NULL)")?;
    session.run("SELECT create_distributed_table('runs', 'id')")?;
    session.run("INSERT INTO runs SELECT 'key' || n, 'ready' FROM generate_series(0, 99) AS n")?;
    session.run("SELECT fence_protect('runs', deadline => 'held_until')")?;
    let found = session.rows("SELECT finding FROM fence_audit('runs') WHERE severity = 'hole'")?;
    ensure!(found.is_empty(), "{found:?}");

    // Citus sends no volatile function to a node, and no subquery that locks rows of several nodes.
    session.refused(
        "UPDATE runs SET held_until = clock_timestamp() + '1 h' WHERE id = 'key1'",
        "0A000",
    )?;
    session.refused(
        "UPDATE runs SET held_until = now() + '1 h'
          WHERE id = (SELECT id FROM runs WHERE state = 'ready' LIMIT 1 FOR UPDATE SKIP LOCKED)",
        "0A000",
    )?;
    let claim = |key: &str, ttl: &str| {
        format!(
            "UPDATE runs SET state = 'running', held_until = now() + '{ttl}'
              WHERE id = '{key}' AND state IN ('ready', 'running') RETURNING fence"
        )
    };
    for worker in [0, 1] {
        let key = citus.key_on("runs", worker)?;
        let token: i64 = session.one(&claim(&key, "1 h"), &[])?;
        // Who holds a row shows its token, on the coordinator and on each node.
        for place in [citus.coordinator(), citus.worker(0), citus.worker(1)] {
            let mut other = place.connect("postgres")?;
            other.refused(&claim(&key, "1 h"), "PF006")?;
            other.refused(&format!("DELETE FROM runs WHERE id = '{key}'"), "PF006")?;
            other.refused(
                &format!("UPDATE runs SET fence = {} WHERE id = '{key}'", token - 1),
                "PF001",
            )?;
        }
        let renew = format!(
            "UPDATE runs SET held_until = now() + '2 h', fence = {token} WHERE id = '{key}'"
        );
        session.run(&renew)?;
        // Evicted, claimed by another: the late worker is refused.
        session
            .run(&format!("UPDATE runs SET held_until = NULL, fence = fence WHERE id = '{key}'"))?;
        session.refused(&renew, "PF004")?;
        let next: i64 = citus.connect()?.one(&claim(&key, "1 h"), &[])?;
        ensure!(next > token, "{next} follows {token}");
        session.refused(
            &format!("UPDATE runs SET state = 'late', fence = {token} WHERE id = '{key}'"),
            "PF001",
        )?;
        session.run(&format!(
            "UPDATE runs SET state = 'done', held_until = NULL, fence = {next} WHERE id = '{key}'"
        ))?;
    }

    // A row that moves keeps its fence and deadline. Where the new node's sequence is behind, nobody claims it
    // until that is moved on, and its holder goes on meanwhile.
    let key = citus.key_on("runs", 0)?;
    session.run(&format!("UPDATE runs SET state = 'ready' WHERE id = '{key}'"))?;
    let new = citus.add_worker()?;
    on(&citus, 0, "SELECT fence_new_epoch()")?;
    let token: i64 = session.one(&claim(&key, "1 h"), &[])?;
    let behind = on(&citus, new, &format!("SELECT last_token < {token} FROM fence_status()"))?;
    ensure!(behind.as_deref() == Some("t"), "the new node's sequence should be behind {token}");
    citus.move_shard("runs", &key, new)?;
    session.refused(&claim(&key, "1 h"), "PF006")?;
    let give_up = "state = 'ready', held_until = NULL";
    session.run(&format!("UPDATE runs SET {give_up}, fence = {token} WHERE id = '{key}'"))?;
    let fault = session.refused(&claim(&key, "1 h"), "PF003")?;
    let found = session.rows("SELECT finding FROM fence_audit('runs') WHERE finding LIKE 'on 1 of % shards: rows hold fences up to%'")?;
    ensure!(found.len() == 1, "{found:?}");
    ensure!(fault.hint.as_deref().unwrap_or_default().contains("fence_new_epoch"), "{fault:?}");
    on(&citus, new, "SELECT fence_new_epoch()")?;
    let next: i64 = session.one(&claim(&key, "1 h"), &[])?;
    ensure!(next > token, "{next} follows {token}");
    session.refused(
        &format!("UPDATE runs SET state = 'late', fence = {token} WHERE id = '{key}'"),
        "PF001",
    )?;
    Ok(())
}
