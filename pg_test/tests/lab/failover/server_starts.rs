//! Starts from copies, snapshots and dumps, in crowds and alone: no token is handed out twice. More of it is in
//! server_starts.script.

use crate::failover::restores::{copy_dir, dump, restore};
use crate::support::history::History;
use crate::tokens::jumps::{jumps, race, STRIDE};
use nix::sys::signal::Signal;
use pg_test::cluster::base_backup;
use pg_test::process::{is_alive, is_stopped, signal, wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Calls, Cluster, Context, Lab, Result, Session, Shutdown};
use std::fs;
use std::time::Duration;

const GRANT: &str = "SELECT lease_acquire('job', 'holder', ttl => '1 hour')";

/// A server with the extension, that loses nothing but what a test takes from it.
fn server(lab: &Lab) -> Result<(Cluster, Session)> {
    let cluster = lab.builder().start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    Ok((cluster, session))
}

fn last_value(session: &mut Session) -> Result<i64> {
    session.one("SELECT last_value FROM fence.token_seq", &[])
}

fn draw(session: &mut Session) -> Result<i64> {
    session.granted("SELECT lease_acquire(gen_random_uuid()::text)")
}

#[lab_test]
fn racing_sessions_move_the_sequence_on_once(lab: &Lab) -> Result<()> {
    let (cluster, mut session) = server(lab)?;
    for crash in [false, true, false] {
        let before = last_value(&mut session)?;
        if crash {
            cluster.kill9()?;
            cluster.start()?;
        } else {
            cluster.restart()?;
        }
        let conninfo = cluster.conninfo("postgres");
        let tokens =
            race(&conninfo, 24, |_| "SELECT lease_acquire(gen_random_uuid()::text)".to_owned())?;
        ensure!(tokens[0] > before + STRIDE, "{before}, {tokens:?}");
        ensure!(tokens.windows(2).all(|pair| pair[1] == pair[0] + 1), "{tokens:?}");
        session = cluster.connect("postgres")?;
    }
    Ok(())
}

/// As PostgreSQL up to 15.18 and 16.14 leaves them on a standby that is promoted soon after CREATE EXTENSION.
#[lab_test]
fn marks_that_have_lost_their_pages_are_made_anew_as_the_hint_says(lab: &Lab) -> Result<()> {
    for page in [&[0; 8192][..], &[]] {
        let (cluster, mut session) = server(lab)?;
        let token = session.granted(GRANT)?;
        let files = session.rows(
            "SELECT pg_relation_filepath(oid) FROM pg_class
              WHERE relnamespace = 'fence'::regnamespace AND relkind = 'S' AND relpersistence = 'u'",
        )?;
        ensure!(files.len() == 2, "{files:?}");
        cluster.stop(Shutdown::Fast)?;
        for file in files.iter().flatten().flatten() {
            // Later recoveries find no more in the other one.
            for file in [file.clone(), format!("{file}_init")] {
                fs::write(cluster.data().join(file), page)?;
            }
        }
        cluster.start()?;
        session = cluster.connect("postgres")?;
        let started = started_at(&mut session)?;
        let acquire = "SELECT lease_acquire('other')";
        let mut hints = Vec::new();
        while let Err(fault) = session.try_rows(acquire) {
            let fault = fault.expect("XX001")?;
            let hint = fault.hint.clone().context("a hint")?;
            ensure!(hints.len() < 2, "{hints:?}, and then {hint}");
            session.run(hint.split_once(": ").context("statements")?.1)?;
            hints.push(hint);
        }
        let stats = hints[0].replace("server_start_seq", "stats_memory_seq");
        session.run(stats.split_once(": ").context("statements")?.1)?;
        ensure!(session.speaks("job", token)? && jumps(&mut session)? == 0);
        ensure!(started_at(&mut session)? == started, "the server was restarted");
        for crash in [false, true] {
            if crash {
                cluster.kill9()?;
                cluster.start()?;
            }
            let conninfo = cluster.conninfo("postgres");
            let tokens =
                race(&conninfo, 8, |_| "SELECT lease_acquire(gen_random_uuid()::text)".to_owned())?;
            ensure!(tokens[0] > token + STRIDE, "{token}, {tokens:?}");
            ensure!(tokens.windows(2).all(|pair| pair[1] == pair[0] + 1), "{tokens:?}");
            let mut session = cluster.connect("postgres")?;
            ensure!(session.granted("SELECT grants FROM fence.stats")? >= 8, "nothing is counted");
        }
    }
    Ok(())
}

fn started_at(session: &mut Session) -> Result<Option<String>> {
    session.text("SELECT pg_postmaster_start_time()")
}

/// Puts a copy of the data directory in its place.
fn roll_back(cluster: &Cluster, kept: &std::path::Path) -> Result<()> {
    cluster.kill9()?;
    fs::remove_dir_all(cluster.data())?;
    fs::rename(kept, cluster.data())?;
    let _ = fs::remove_file(cluster.data().join("postmaster.pid"));
    cluster.start()
}

#[lab_test]
fn a_snapshot_taken_cold_and_rolled_back_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let (cluster, mut session) = server(lab)?;
    let mut seen = session.granted(GRANT)?;
    let token = seen;
    // With the mark of this start in it.
    cluster.stop(Shutdown::Fast)?;
    let kept = cluster.dir().join("snapshot");
    copy_dir(&cluster.data(), &kept)?;
    cluster.start()?;
    session = cluster.connect("postgres")?;
    for _ in 0..60 {
        seen = draw(&mut session)?;
    }
    roll_back(&cluster, &kept)?;
    session = cluster.connect("postgres")?;
    ensure!(session.speaks("job", token)?, "nothing tells this from a crash");
    let next = draw(&mut session)?;
    ensure!(next > seen && jumps(&mut session)? == 0, "{next} after {seen}");
    session.run("SELECT fence_new_epoch()")?;
    ensure!(!session.speaks("job", token)? && jumps(&mut session)? == 1);
    let renewed = session.renew("job", token)?.expect("its holder renews");
    ensure!(renewed > seen && session.speaks("job", renewed)?);
    Ok(())
}

/// Stops all processes of the server; the postmaster first, which then neither starts nor buries any.
fn stop_all(cluster: &Cluster) -> Result<Vec<i32>> {
    let stopped = |pid: i32| {
        signal(pid, Signal::SIGSTOP)?;
        wait_until("the process stands still", PATIENCE, || is_stopped(pid) || !is_alive(pid))
    };
    let postmaster = cluster.pid()?;
    stopped(postmaster)?;
    let children = cluster.processes("")?;
    children.iter().try_for_each(|pid| stopped(*pid))?;
    Ok(std::iter::once(postmaster).chain(children).collect())
}

#[lab_test]
fn a_snapshot_taken_hot_and_rolled_back_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let (cluster, mut session) = server(lab)?;
    session.run("CHECKPOINT")?;
    draw(&mut session)?;
    // A copy is as good as a snapshot while all of its processes stand still.
    let everybody = stop_all(&cluster)?;
    let kept = cluster.dir().join("snapshot");
    copy_dir(&cluster.data(), &kept)?;
    everybody.iter().try_for_each(|pid| signal(*pid, Signal::SIGCONT))?;
    let mut seen = 0;
    for _ in 0..60 {
        seen = draw(&mut session)?;
    }
    roll_back(&cluster, &kept)?;
    let next = draw(&mut cluster.connect("postgres")?)?;
    ensure!(next > seen, "{next} after {seen}");
    Ok(())
}

#[lab_test]
fn a_base_backup_started_as_it_is_gives_no_token_twice(lab: &Lab) -> Result<()> {
    for label in [true, false] {
        let (primary, mut session) = server(lab)?;
        let token = session.granted(GRANT)?;
        let copy = lab.builder().create_by(|prefix, data| base_backup(prefix, &primary, data))?;
        let mut seen = token;
        for _ in 0..60 {
            seen = draw(&mut session)?;
        }
        primary.kill9()?;
        if !label {
            fs::remove_file(copy.data().join("backup_label"))?;
        }
        copy.start()?;
        session = copy.connect("postgres")?;
        let next = draw(&mut session)?;
        ensure!(next > seen && jumps(&mut session)? == 0, "{next} after {seen}");
        ensure!(session.speaks("job", token)?, "nothing tells this from a crash");
        session.run("SELECT fence_new_epoch()")?;
        ensure!(!session.speaks("job", token)? && jumps(&mut session)? == 1);
    }
    Ok(())
}

/// Draws a token. Some minor releases copy a template's unlogged sequences without what a crash makes of them: then the
/// error has the statements that make such a sequence anew.
fn draw_once_mended(session: &mut Session) -> Result<i64> {
    for _ in 0..3 {
        match session.try_rows("SELECT lease_acquire('probe', ttl => '1 us')") {
            Err(fault) if fault.sqlstate == "XX001" => {
                let hint = fault.hint.clone().unwrap_or_default();
                let (_, statements) = hint.split_once("Make it anew: ").context(hint.clone())?;
                session.run(statements)?;
            }
            _ => break,
        }
    }
    draw(session)
}

fn template_survives_a_crash(lab: &Lab, wal_level: &str) -> Result<()> {
    let senders = if wal_level == "minimal" { "0" } else { "10" };
    let cluster = lab
        .builder()
        .set("wal_level", wal_level)
        .set("max_wal_senders", senders)
        .set("autovacuum", "off")
        .start()?;
    let mut admin = cluster.connect("postgres")?;
    admin.run("CREATE DATABASE app")?;
    let mut original = cluster.connect("app")?;
    original.run("CREATE EXTENSION pg_fence")?;
    let token = original.granted(GRANT)?;
    drop(original);
    for (n, strategy) in ["wal_log", "file_copy"].iter().enumerate() {
        let name = format!("copy{n}");
        let copy = format!("CREATE DATABASE {name} TEMPLATE app STRATEGY {strategy}");
        wait_until("the original is free", PATIENCE, || admin.run(&copy).is_ok())?;
        let mut seen = token;
        // Once before anybody has looked at the copy, once after.
        for crash in 0..2 {
            cluster.kill9()?;
            cluster.start()?;
            let mut session = cluster.connect(&name)?;
            let next = draw_once_mended(&mut session)?;
            ensure!(next > seen, "{strategy}: {next} after {seen} was seen, crash {crash}");
            ensure!(!session.speaks("job", token)?, "{strategy}: of the original's grant");
            ensure!(jumps(&mut session)? == 1, "{strategy}: a copy jumps once");
            seen = draw(&mut cluster.connect(&name)?)?;
            ensure!(seen > next);
        }
        admin = cluster.connect("postgres")?;
    }
    Ok(())
}

#[lab_test]
fn a_template_copied_through_the_log_survives_a_crash(lab: &Lab) -> Result<()> {
    template_survives_a_crash(lab, "replica")
}

#[lab_test]
fn a_template_copied_without_wal_survives_a_crash(lab: &Lab) -> Result<()> {
    template_survives_a_crash(lab, "minimal")
}

#[lab_test]
fn copies_made_in_one_second_differ(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    db.connect()?.run(GRANT)?;
    // Had the original itself moved on within that second, they would all go by its last value.
    std::thread::sleep(Duration::from_millis(1100));
    let mut copies = Vec::new();
    for _ in 0..3 {
        copies.push(db.copy()?);
    }
    let mut seen = Vec::new();
    for copy in &copies {
        let mut session = copy.connect()?;
        for _ in 0..3 {
            seen.push(draw(&mut session)?);
        }
    }
    ensure!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
    Ok(())
}

#[lab_test]
fn a_restore_over_the_state_while_workers_draw_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut history = History::begin(&mut db.connect()?)?;
    let file = dump(lab, lab.cluster(), db.name())?;
    history.draw_more(&mut db.connect()?, 60)?;
    for jobs in ["1", "3"] {
        let other = lab.bare_database()?;
        // The extension is there and works; then the old state is loaded over it.
        restore(lab, lab.cluster(), other.name(), &file, &["--section=pre-data"])?;
        let stop = std::sync::atomic::AtomicBool::new(false);
        let mut sessions: Vec<Session> = (0..4).map(|_| other.connect()).collect::<Result<_>>()?;
        let mut drawn: Vec<i64> = std::thread::scope(|scope| -> Result<Vec<i64>> {
            let workers: Vec<_> = sessions
                .iter_mut()
                .enumerate()
                .map(|(n, session)| {
                    let (stop, other) = (&stop, &other);
                    scope.spawn(move || -> Result<Vec<i64>> {
                        let mut drawn = Vec::new();
                        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                            drawn.push(draw(session)?);
                            if n == 0 {
                                drawn.push(draw(&mut other.connect()?)?);
                            }
                        }
                        for _ in 0..10 {
                            drawn.push(draw(session)?);
                        }
                        Ok(drawn)
                    })
                })
                .collect();
            let restored = restore(
                lab,
                lab.cluster(),
                other.name(),
                &file,
                &["-j", jobs, "--section=data", "--section=post-data"],
            );
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            let mut all = Vec::new();
            for worker in workers {
                all.extend(worker.join().expect("no panic")?);
            }
            restored.map(|()| all)
        })?;
        let count = drawn.len();
        drawn.sort_unstable();
        drawn.dedup();
        ensure!(drawn.len() == count, "{} of {count} tokens were drawn twice", count - drawn.len());
        ensure!(drawn[0] > history.seen, "{} after {} was seen", drawn[0], history.seen);
        // Neither who was there before nor who comes later takes the old grants for current ones.
        for session in &mut sessions {
            ensure!(!session.speaks("order:7", history.token)?, "it speaks");
            session
                .refused(&format!("SELECT lease_guard('order:7', {})", history.token), "PF004")?;
        }
        history.see(drawn[count - 1]);
        history.see(history.goes_on(&mut other.connect()?)?);
    }
    Ok(())
}

#[lab_test]
fn what_a_restore_loads_first_does_not_speak(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let history = History::begin(&mut db.connect()?)?;
    let file = dump(lab, lab.cluster(), db.name())?;
    let other = lab.bare_database()?;
    restore(lab, lab.cluster(), other.name(), &file, &["--section=pre-data"])?;
    let mut early = other.connect()?;
    draw(&mut early)?;
    restore(
        lab,
        lab.cluster(),
        other.name(),
        &file,
        &["--data-only", "-t", "lease", "-n", "fence"],
    )?;
    for session in [&mut early, &mut other.connect()?] {
        ensure!(
            session.text("SELECT state FROM lease_info('order:7')")?.as_deref() == Some("held")
        );
        ensure!(!session.speaks("order:7", history.token)?, "it speaks");
        let refusal = session
            .refused(&format!("SELECT lease_guard('order:7', {})", history.token), "PF004")?;
        let hint = refusal.hint.as_deref().unwrap_or_default();
        ensure!(hint.contains("call lease_renew"), "{refusal}");
    }
    // The sequences one by one, in each order; then all tokens of before are silenced.
    let sequences = ["dumped_token_seq", "database_identity_seq"];
    for order in [[0, 1], [1, 0]] {
        for n in order {
            let options = ["--data-only", "-n", "fence", "-t", sequences[n]];
            restore(lab, lab.cluster(), other.name(), &file, &options)?;
            for session in [&mut early, &mut other.connect()?] {
                ensure!(
                    !session.speaks("order:7", history.token)?,
                    "it speaks after {}",
                    sequences[n]
                );
                session.refused(
                    &format!("SELECT lease_guard('order:7', {})", history.token),
                    "PF004",
                )?;
            }
        }
    }
    Ok(())
}

#[lab_test]
fn single_user_mode_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let (cluster, mut session) = server(lab)?;
    let mut seen = draw(&mut session)?;
    for how in [Shutdown::Fast, Shutdown::Immediate] {
        cluster.stop(how)?;
        let script = "SELECT lease_acquire(clock_timestamp()::text) AS token\n";
        let shown = cluster.single_user("postgres", script)?;
        let token = shown.split("token = \"").nth(1).and_then(|rest| rest.split('"').next());
        let alone: i64 = token.unwrap_or_default().parse()?;
        ensure!(alone > seen + STRIDE / 2, "{alone} after {seen}");
        cluster.start()?;
        seen = draw(&mut cluster.connect("postgres")?)?;
        ensure!(seen > alone, "{seen} after {alone}");
    }
    Ok(())
}
