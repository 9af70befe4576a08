//! REPEATABLE READ and SERIALIZABLE: a transaction relies (guard, bound write) only on a grant that its snapshot shows.
//! One that was committed later: 40001. One of its own: 55000.

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{edition, ensure, lab_test, Background, Calls, Database, Lab, Result, Session};

const KEEPING: [&str; 2] = ["REPEATABLE READ", "SERIALIZABLE"];

/// Rows that are bound to their leases: of each, one that the predecessor writes, and one for the transaction that relies on it then.
const TABLE: &str =
    "CREATE TABLE t (lease text, part int, v int DEFAULT 0, PRIMARY KEY (lease, part));
    SELECT fence_protect('t', lease => '{lease}', events => 'update')";

fn database(lab: &Lab) -> Result<Database> {
    let db = lab.database()?;
    db.connect()?.run(TABLE)?;
    Ok(db)
}

fn add_rows(session: &mut Session, lease: &str) -> Result<()> {
    session.run(&format!("INSERT INTO t VALUES ('{lease}', 1), ('{lease}', 2)"))
}

/// What relies on a grant by one of its tokens.
fn relies(lease: &str, token: i64) -> [String; 2] {
    let update =
        format!("UPDATE t SET v = 7, fence = {token} WHERE (lease, part) = ('{lease}', 2)");
    [format!("SELECT lease_guard('{lease}', {token})"), update]
}

/// Begins a transaction whose snapshot is taken now; what the predecessor has written, as it sees it.
fn begin(inside: &mut Session, level: &str, lease: &str) -> Result<i64> {
    inside.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
    inside.granted(&format!("SELECT v FROM t WHERE (lease, part) = ('{lease}', 1)"))
}

/// Relying on the grant is refused with that SQLSTATE, which says why; the transaction goes on.
fn refused(inside: &mut Session, sqlstate: &str, lease: &str, token: i64) -> Result<()> {
    for statement in relies(lease, token) {
        inside.run("SAVEPOINT s")?;
        let fault = inside.refused(&statement, sqlstate)?;
        ensure!(fault.hint.is_some() && fault.json()?["lease"] == lease, "{fault}");
        inside.run("ROLLBACK TO s")?;
    }
    Ok(())
}

fn relied_on(inside: &mut Session, lease: &str, token: i64) -> Result<()> {
    relies(lease, token).iter().try_for_each(|statement| inside.run(statement))
}

/// A way for a predecessor to end, while a transaction that guards its grant is open.
struct Ending {
    what: &'static str,
    /// How the lease was acquired, by a session of its own. `$l` is its name.
    acquired: &'static str,
    /// What ends the grant; `$t` is its token.
    by: &'static [&'static str],
    /// How the successor acquires the lease.
    next: &'static str,
}

const ACQUIRE: &str = "SELECT lease_acquire('$l', ttl => '1 h')";
const ADOPT: &str = "SELECT lease_adopt('$l', 33)";
const RELEASE: &str = "SELECT lease_release('$l', $t)";
const SLOT: &str = "SELECT lease_acquire('$l', ttl => '1 h', slots => 2)";
const SHARED: &str = "SELECT lease_acquire('$l', ttl => '1 h', shared => true)";
const RECLAIM: &str = "SELECT lease_acquire('$l', 'w', '1 h', reclaim => true)";

const ENDINGS: &[Ending] = &[
    Ending { what: "release", acquired: ACQUIRE, by: &[RELEASE], next: ACQUIRE },
    Ending {
        what: "revocation",
        acquired: ACQUIRE,
        by: &["SELECT lease_revoke('$l')"],
        next: ACQUIRE,
    },
    Ending {
        what: "expiry",
        acquired: ACQUIRE,
        by: &["SELECT lease_renew('$l', $t, '1 us')", "SELECT pg_sleep(0.001)"],
        next: ACQUIRE,
    },
    Ending { what: "reclaim", acquired: RECLAIM, by: &[], next: RECLAIM },
    Ending {
        what: "prune",
        acquired: ACQUIRE,
        by: &[RELEASE, "SELECT lease_prune('0')"],
        next: ACQUIRE,
    },
    // The predecessor has the first slot; the row of the other is deleted.
    Ending {
        what: "prune of one slot",
        acquired: SLOT,
        by: &[
            "SELECT lease_release('$l', lease_acquire('$l', slots => 2))",
            RELEASE,
            "SELECT lease_prune('0')",
        ],
        next: SLOT,
    },
    Ending {
        what: "all slots",
        acquired: SLOT,
        by: &["SELECT lease_revoke('$l')", "SELECT lease_prune('0')"],
        next: ACQUIRE,
    },
    Ending { what: "reader", acquired: SHARED, by: &[RELEASE], next: ACQUIRE },
    Ending { what: "writer before readers", acquired: ACQUIRE, by: &[RELEASE], next: SHARED },
    Ending {
        what: "session",
        acquired: "SELECT lease_acquire('$l', ttl => '1 h', session => true)",
        by: &["SELECT pg_terminate_backend($holder, 10000)"],
        next: ACQUIRE,
    },
    Ending { what: "adoption", acquired: ADOPT, by: &[], next: "SELECT lease_adopt('$l', 34)" },
    // The same number comes again, unless a guard has kept it from being forgotten.
    Ending {
        what: "forgetting",
        acquired: ADOPT,
        by: &["SELECT lease_revoke('$l')", "SELECT lease_forget('$l')"],
        next: "SELECT lease_adopt('$l', 33 + (SELECT count(*) FROM fence.lease WHERE name = '$l'))",
    },
];

/// The predecessor's guarded work is committed after the snapshot, and the successor's grant after that. Its grant ends
/// before the snapshot, or only then.
fn ends(
    db: &Database,
    ending: &Ending,
    lease: &str,
    level: &str,
    first: bool,
    prepared: bool,
) -> Result<()> {
    let mut holder = db.connect()?;
    let (mut guarded, mut other, mut inside) = (db.connect()?, db.connect()?, db.connect()?);
    let pid = holder.pid().to_string();
    let sql = |text: &str, token: i64| {
        text.replace("$l", lease).replace("$t", &token.to_string()).replace("$holder", &pid)
    };
    add_rows(&mut other, lease)?;
    let token = holder.granted(&sql(ending.acquired, 0))?;
    guarded.run(&format!("BEGIN; SELECT lease_guard('{lease}', {token})"))?;
    guarded.run(&format!("UPDATE t SET v = 50 WHERE (lease, part) = ('{lease}', 1)"))?;
    let end = |other: &mut Session| ending.by.iter().try_for_each(|by| other.run(&sql(by, token)));
    if first {
        end(&mut other)?;
    }
    if prepared {
        guarded.run(&format!("PREPARE TRANSACTION '{lease}'"))?;
    }
    ensure!(begin(&mut inside, level, lease)? == 0, "the predecessor's world");
    guarded.run(&if prepared { format!("COMMIT PREPARED '{lease}'") } else { "COMMIT".into() })?;
    if !first {
        end(&mut other)?;
    }
    let next = other.granted(&sql(ending.next, 0))?;
    is_later(&mut inside, level, lease, next)
}

/// The transaction must not rely on the grant; tried again, it may, and sees what the predecessor wrote.
fn is_later(inside: &mut Session, level: &str, lease: &str, token: i64) -> Result<()> {
    refused(inside, "40001", lease, token)?;
    inside.run("ROLLBACK")?;
    ensure!(begin(inside, level, lease)? == 50, "a new snapshot");
    relied_on(inside, lease, token)?;
    inside.run("COMMIT")
}

#[lab_test]
fn a_grant_after_the_snapshot_is_not_relied_on(lab: &Lab) -> Result<()> {
    let db = database(lab)?;
    for level in KEEPING {
        for first in [true, false] {
            let endings =
                ENDINGS.iter().filter(|e| edition::has(e.acquired) && edition::has(e.next));
            for (n, ending) in endings.enumerate() {
                // Half of them by a prepared transaction, the other half the other time.
                let prepared = first == (n % 2 == 0);
                let lease = format!("{} {first} {level}", ending.what);
                ends(&db, ending, &lease, level, first, prepared).map_err(|e| e.context(lease))?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn a_predecessor_whose_commit_waits_for_a_standby_is_not_overlooked(lab: &Lab) -> Result<()> {
    let cluster = lab
        .builder()
        .set("synchronous_commit", "local")
        .set("synchronous_standby_names", "nobody")
        .start()?;
    let mut admin = cluster.connect("postgres")?;
    admin.run("CREATE EXTENSION pg_fence")?;
    admin.run(TABLE)?;
    add_rows(&mut admin, "job")?;
    let token = admin.acquire("job", "1 h")?;
    let mut guarded = Background::connect(&cluster.conninfo("postgres"))?;
    guarded.send("SET synchronous_commit = on")?;
    guarded.rows()?;
    guarded.send(&format!(
        "BEGIN; SELECT lease_guard('job', {token}); UPDATE t SET v = 50 WHERE part = 1; COMMIT"
    ))?;
    let waits = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = {} AND wait_event = 'SyncRep'",
        guarded.pid()
    );
    wait_until("the commit waits", PATIENCE, || admin.granted(&waits).is_ok_and(|n| n == 1))?;
    admin.release("job", token)?.expect("held");
    let mut inside = cluster.connect("postgres")?;
    ensure!(begin(&mut inside, "REPEATABLE READ", "job")? == 0, "the predecessor's world");
    ensure!(admin.is_taken("job")?, "its locks stay until its work is visible");
    admin.run(&format!("SELECT pg_cancel_backend({})", guarded.pid()))?;
    guarded.rows()?;
    let next = admin.acquire("job", "1 h")?;
    is_later(&mut inside, "REPEATABLE READ", "job", next)
}

/// The one warning that the session got, of that SQLSTATE.
fn warned(session: &mut Session, lease: &str) -> Result<()> {
    let notices = session.notices();
    ensure!(notices.len() == 1, "{notices:?}");
    let warning = &notices[0];
    ensure!(warning.sqlstate == "01000" && warning.json()?["lease"] == lease, "{warning}");
    ensure!(warning.hint.as_ref().is_some_and(|hint| hint.contains("commit")), "{warning}");
    Ok(())
}

#[lab_test]
fn several_grants_are_warned_of_once(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("BEGIN ISOLATION LEVEL REPEATABLE READ")?;
    session.notices();
    session.granted("SELECT lease_acquire_all('{a, b, c}')")?;
    warned(&mut session, "a")
}

#[lab_test]
fn a_grant_of_one_s_own_is_relied_on_once_it_is_committed(lab: &Lab) -> Result<()> {
    let db = database(lab)?;
    let (mut outside, mut inside) = (db.connect()?, db.connect()?);
    let all = "SELECT lease_acquire_all('{$l}', ttl => '1 h')";
    for level in KEEPING {
        let ways =
            [ACQUIRE, SLOT, SHARED, RECLAIM, all].into_iter().filter(|way| edition::has(way));
        for (n, acquire) in ways.enumerate() {
            let lease = &format!("{level} {n}");
            add_rows(&mut outside, lease)?;
            // There may be a grant that the snapshot shows, and that this one reclaims or follows.
            let seen = outside.granted(&acquire.replace("$l", lease))?;
            if acquire != RECLAIM {
                outside.release(lease, seen)?.expect("held");
            }
            ensure!(begin(&mut inside, level, lease)? == 0);
            inside.notices();
            let token = inside.granted(&acquire.replace("$l", lease))?;
            warned(&mut inside, lease)?;
            refused(&mut inside, "55000", lease, token)?;
            let renewed = inside.renew(lease, token)?.expect("held");
            refused(&mut inside, "55000", lease, renewed)?;
            inside.run("COMMIT")?;
            begin(&mut inside, level, lease)?;
            relied_on(&mut inside, lease, token)?;
            inside.run("COMMIT")?;
            ensure!(inside.notices().is_empty());
        }
    }
    Ok(())
}

#[lab_test]
fn who_acquires_nothing_or_reads_anew_is_not_warned(lab: &Lab) -> Result<()> {
    let db = database(lab)?;
    let (mut outside, mut inside) = (db.connect()?, db.connect()?);
    outside.acquire("job", "1 h")?;
    inside.notices();
    for level in KEEPING {
        inside.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
        inside.nothing("SELECT lease_acquire('job')")?;
        inside.nothing("SELECT lease_acquire_all('{free, job}')")?;
        inside.run("COMMIT; BEGIN")?;
        let token = inside.acquire("mine", "1 h")?;
        inside.run(&format!("SELECT lease_guard('mine', {token}); ROLLBACK"))?;
    }
    ensure!(inside.notices().is_empty());
    Ok(())
}

#[lab_test]
fn a_prune_of_one_slot_hides_nobody_s_work(lab: &Lab) -> Result<()> {
    let db = database(lab)?;
    for level in KEEPING {
        let (mut a, mut b, mut inside) = (db.connect()?, db.connect()?, db.connect()?);
        let lease = level;
        add_rows(&mut a, lease)?;
        let slot = SLOT.replace("$l", lease);
        let (first, second) = (a.granted(&slot)?, b.granted(&slot)?);
        a.run(&format!("BEGIN; SELECT lease_guard('{lease}', {first})"))?;
        a.run(&format!("UPDATE t SET v = 50 WHERE (lease, part) = ('{lease}', 1)"))?;
        for token in [first, second] {
            b.release(lease, token)?.expect("held");
        }
        ensure!(begin(&mut inside, level, lease)? == 0);
        a.run("COMMIT")?;
        b.run("SELECT lease_prune('0')")?;
        // Granted, but what it read is no ground to write on.
        let token = inside.granted(&slot)?;
        refused(&mut inside, "55000", lease, token)?;
        inside.run("COMMIT")?;
        ensure!(begin(&mut inside, level, lease)? == 50);
        relied_on(&mut inside, lease, token)?;
        inside.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn what_a_savepoint_took_back_vouches_for_nothing(lab: &Lab) -> Result<()> {
    let db = database(lab)?;
    for level in KEEPING {
        let (mut outside, mut inside) = (db.connect()?, db.connect()?);
        let lease = level;
        add_rows(&mut outside, lease)?;
        ensure!(begin(&mut inside, level, lease)? == 0);
        inside.run("SAVEPOINT a")?;
        inside.acquire(lease, "1 h")?;
        inside.run("ROLLBACK TO a")?;
        // A predecessor, whose work the snapshot does not show.
        let token = outside.acquire(lease, "1 h")?;
        outside.run(&format!(
            "UPDATE t SET v = 50, fence = {token} WHERE (lease, part) = ('{lease}', 1)"
        ))?;
        refused(&mut inside, "40001", lease, token)?;
        outside.release(lease, token)?.expect("held");
        inside.run("SAVEPOINT b")?;
        let own = inside.acquire(lease, "1 h")?;
        refused(&mut inside, "55000", lease, own)?;
        inside.run("RELEASE b")?;
        refused(&mut inside, "55000", lease, own)?;
        inside.run("ROLLBACK TO a")?;
        let token = outside.acquire(lease, "1 h")?;
        is_later(&mut inside, level, lease, token)?;
    }
    Ok(())
}

#[lab_test]
fn it_is_the_grant_that_counts_not_its_latest_token(lab: &Lab) -> Result<()> {
    let db = database(lab)?;
    for level in KEEPING {
        let (mut outside, mut inside) = (db.connect()?, db.connect()?);
        let lease = level;
        add_rows(&mut outside, lease)?;
        let first = outside.acquire(lease, "1 h")?;
        let mut tokens = vec![first, outside.renew(lease, first)?.expect("held")];
        ensure!(begin(&mut inside, level, lease)? == 0);
        tokens.push(outside.renew(lease, first)?.expect("held"));
        tokens.push(inside.renew(lease, first)?.expect("held"));
        for token in tokens {
            relied_on(&mut inside, lease, token)?;
        }
        // Its closing token, and a last write by it.
        inside.run(&format!(
            "UPDATE t SET v = 8, fence = lease_release('{lease}', {first}) WHERE (lease, part) = ('{lease}', 2)"
        ))?;
        // A grant that followed is another one, and a renewal by this transaction does not change that.
        inside.run("COMMIT")?;
        begin(&mut inside, level, lease)?;
        let later = outside.acquire(lease, "1 h")?;
        refused(&mut inside, "40001", lease, later)?;
        let renewed = inside.renew(lease, later)?.expect("held");
        refused(&mut inside, "40001", lease, renewed)?;
        let closing = inside.release(lease, renewed)?.expect("held");
        refused(&mut inside, "40001", lease, closing)?;
        let own = inside.acquire(lease, "1 h")?;
        let closing = inside.release(lease, own)?.expect("held");
        refused(&mut inside, "55000", lease, closing)?;
        inside.run("ROLLBACK")?;
    }
    Ok(())
}

#[lab_test]
fn grants_beside_it_do_not_matter(lab: &Lab) -> Result<()> {
    let db = database(lab)?;
    for level in KEEPING {
        for acquire in [SLOT, SHARED] {
            let (mut outside, mut inside) = (db.connect()?, db.connect()?);
            let lease = format!("{acquire} {level}").replace(['\'', '$'], "");
            let acquire = acquire.replace("$l", &lease);
            add_rows(&mut outside, &lease)?;
            let shown = outside.granted(&acquire)?;
            begin(&mut inside, level, &lease)?;
            let fellow = outside.granted(&acquire)?;
            refused(&mut inside, "40001", &lease, fellow)?;
            relied_on(&mut inside, &lease, shown)?;
            // One more of its own, in the slot that the fellow had.
            outside.release(&lease, fellow)?.expect("held");
            let own = inside.granted(&acquire)?;
            refused(&mut inside, "55000", &lease, own)?;
            inside.run("ROLLBACK")?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_rewritten_table_shows_what_it_showed(lab: &Lab) -> Result<()> {
    for level in KEEPING {
        let db = database(lab)?;
        let (mut outside, mut inside) = (db.connect()?, db.connect()?);
        add_rows(&mut outside, "job")?;
        add_rows(&mut outside, "later")?;
        let token = outside.acquire("job", "1 h")?;
        begin(&mut inside, level, "job")?;
        outside.renew("job", token)?.expect("held");
        let later = outside.acquire("later", "1 h")?;
        for rewrite in [
            "VACUUM FULL fence.lease",
            "CLUSTER fence.lease USING lease_pkey",
            "REINDEX TABLE fence.lease",
            "VACUUM fence.lease",
        ] {
            outside.run(rewrite)?;
            inside.run("SAVEPOINT r")?;
            relied_on(&mut inside, "job", token).map_err(|e| e.context(rewrite))?;
            refused(&mut inside, "40001", "later", later).map_err(|e| e.context(rewrite))?;
            inside.run("ROLLBACK TO r")?;
        }
        inside.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn changing_a_lease_is_never_too_late(lab: &Lab) -> Result<()> {
    let db = database(lab)?;
    for level in KEEPING {
        let mut sessions: Vec<Session> = (0..6).map(|_| db.connect()).collect::<Result<_>>()?;
        // Twice: the first time the names are new.
        for _ in 0..2 {
            for session in &mut sessions {
                session.run(&format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM t"))?;
            }
            let mut other = db.connect()?;
            for (n, session) in sessions.iter_mut().enumerate() {
                let lease = format!("job{n}");
                let later = other.acquire(&lease, "1 h")?;
                session.nothing(&format!("SELECT lease_acquire('{lease}')"))?;
                ensure!(session.speaks(&lease, later)?, "a check is of this instant");
                let renewed = session.renew(&lease, later)?.expect("held");
                session.release(&lease, renewed)?.expect("held");
                let own = session.acquire(&lease, "1 h")?;
                session.granted(&format!("SELECT lease_revoke('{lease}')"))?;
                ensure!(session.renew(&lease, own)?.is_none());
            }
            for session in &mut sessions {
                session.run("COMMIT").map_err(|e| e.context(level))?;
            }
        }
    }
    Ok(())
}
