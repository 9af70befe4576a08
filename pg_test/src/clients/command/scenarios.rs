//! The command's scenarios. Processes are frozen and killed, links cut, servers failed over: the program never outlives
//! its lease, unless all of it is frozen; and then the server refuses its writes. Those of a run without trouble are in
//! `command/scenarios.script`.

use super::fixture::{
    CommandFixture, Ended, Run, freeze, has_ended, is_gone, kill, needs_cgroups, thaw,
};
use crate::Calls;
use crate::clients::tcp_proxy::BOTH;
use crate::process::{self, PATIENCE, output_of, wait_until};
use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

/// Writes when told to.
const WRITES_LATER: &str = "ready; await go; write A1";

/// Disturbs a run whose program would go on for ever: it ends before another session gets its lease.
fn ends_in_time(
    fixture: &CommandFixture,
    options: &str,
    disturb: impl Fn(&Run) -> Result<()>,
) -> Result<Ended> {
    let run = fixture.stubborn(options)?;
    let renewer = run.renewer()?;
    disturb(&run)?;
    fixture.is_outlived()?;
    let ended = run.ends_with(70)?;
    is_gone(renewer).map(|()| ended)
}

pub fn frozen_and_writes(fixture: &mut CommandFixture) -> Result<()> {
    // The command is psql itself, connected and in the middle of its script.
    let script = "mkfifo $DIR/late; exec psql -qAtX -v ON_ERROR_STOP=1 -v VERBOSITY=sqlstate \
              -c \"UPDATE work SET value = 'A1'\" -c \"\\! echo $$ > $DIR/pid\" -f $DIR/late";
    let run = fixture.run_ready("job --ttl 2s", script)?;
    let (renewer, pid) = (run.renewer()?, fixture.pid("pid")?);
    [run.supervisor(), renewer, pid].into_iter().try_for_each(freeze)?;
    fixture.is_written_by_another()?;
    // The program is thawed first, as by an unfortunate scheduler.
    thaw(pid)?;
    std::fs::write(fixture.dir.join("late"), "UPDATE work SET value = 'late';\n")?;
    is_gone(pid)?;
    thaw(renewer)?;
    thaw(run.supervisor())?;
    let ended = run.ended()?;
    ensure!(ended.stderr.contains("PF001") || ended.stderr.contains("PF004"), "{ended:?}");
    fixture.servers.has_written(&["A1", "B1"])
}

pub fn frozen_and_ends(fixture: &mut CommandFixture) -> Result<()> {
    let run = fixture.stubborn("job --ttl 2s")?;
    let all = [run.supervisor(), run.renewer()?, fixture.pid("pid")?, fixture.pid("escaped")?];
    all.into_iter().try_for_each(freeze)?;
    fixture.taken_over()?;
    all.into_iter().try_for_each(thaw)?;
    let ended = run.ends_with(70)?;
    fixture.has_ended()?;
    ended.says("job")
}

pub fn frozen_renewer(fixture: &mut CommandFixture) -> Result<()> {
    ends_in_time(fixture, "job --ttl 3s", |run| freeze(run.renewer()?)).map(drop)
}

pub fn frozen_supervisor(fixture: &mut CommandFixture) -> Result<()> {
    let run = fixture.stubborn("job --ttl 2s")?;
    freeze(run.supervisor())?;
    fixture.wait_for_renewals(2)?;
    fixture.admin()?.nothing("SELECT lease_acquire('job')")?;
    fixture.revoke()?;
    // The heartbeat process does what the supervisor cannot.
    is_gone(fixture.pid("pid")?)?;
    is_gone(fixture.pid("escaped")?)?;
    thaw(run.supervisor())?;
    run.ends_with(70).map(drop)
}

pub fn frozen_supervisor_and_cut(fixture: &mut CommandFixture) -> Result<()> {
    let run = fixture.stubborn("job --ttl 3s")?;
    freeze(run.supervisor())?;
    fixture.link.swallow(BOTH);
    fixture.is_outlived()?;
    thaw(run.supervisor())?;
    run.ends_with(70).map(drop)
}

pub fn frozen_command(fixture: &mut CommandFixture) -> Result<()> {
    let run = fixture.run_ready("job --ttl 2s", &format!("{WRITES_LATER}; exit 6"))?;
    let pid = fixture.pid("pid")?;
    freeze(pid)?;
    fixture.wait_for_renewals(3)?;
    fixture.admin()?.nothing("SELECT lease_acquire('job')")?;
    fixture.touch("go")?;
    thaw(pid)?;
    run.ends_with(6)?;
    fixture.servers.has_written(&["A1"])
}

pub fn frozen_and_revoked(fixture: &mut CommandFixture) -> Result<()> {
    let run = fixture.stubborn("job --ttl 30s --grace 500ms")?;
    freeze(fixture.pid("pid")?)?;
    fixture.revoke()?;
    let ended = run.ends_with(70)?;
    fixture.has_ended()?;
    ended.says("the lease job is lost (gone)")?;
    ended.says("the command is ended")
}

pub fn grace(fixture: &mut CommandFixture) -> Result<()> {
    let script = "trap 'echo cleaned up; exit 0' TERM; ready; for_ever";
    let run = fixture.run_ready("job --ttl 60s --grace 15s", script)?;
    fixture.revoke()?;
    let ended = run.ends_with(70)?;
    ensure!(ended.stdout == "cleaned up\n", "{ended:?}");
    Ok(())
}

pub fn killed_supervisor(fixture: &mut CommandFixture) -> Result<()> {
    let run = fixture.stubborn("job --ttl 10m --grace 1s")?;
    let renewer = run.renewer()?;
    kill(run.supervisor())?;
    // Long before the ttl, the heartbeat process ends the command and releases the lease.
    fixture.is_outlived()?;
    is_gone(renewer)?;
    run.ends_killed()
}

pub fn killed_renewer(fixture: &mut CommandFixture) -> Result<()> {
    ends_in_time(fixture, "job --ttl 6s", |run| kill(run.renewer()?))?.says("has died")
}

/// Both processes of a run are killed at once, and the program with them. The processes that it has started continue,
/// and the server refuses their writes.
pub fn killed(fixture: &mut CommandFixture, options: &str) -> Result<()> {
    let run = fixture.run_ready(options, "write A1; ready; for_ever")?;
    let both = [run.supervisor(), run.renewer()?];
    both.into_iter().try_for_each(freeze)?;
    both.into_iter().try_for_each(kill)?;
    is_gone(fixture.pid("pid")?)?;
    fixture.is_written_by_another()?;
    run.ends_killed()?;
    fixture.servers.has_written(&["A1", "B1"])
}

/// Nobody is notified of the cut.
pub fn cut(fixture: &mut CommandFixture) -> Result<()> {
    let swallow = |_: &Run| {
        fixture.link.swallow(BOTH);
        Ok(())
    };
    ends_in_time(fixture, "job --ttl 3s --wait 1m", swallow).map(drop)
}

pub fn mended_in_time(fixture: &mut CommandFixture) -> Result<()> {
    let run = fixture.run_ready("job --ttl 48s", WRITES_LATER)?;
    fixture.wait_for_renewals(1)?;
    fixture.link.swallow(BOTH);
    // A renewal is due meanwhile, after a third of the ttl.
    sleep(Duration::from_secs(17) * fixture.pace);
    fixture.link.restore();
    fixture.wait_for_renewals(1)?;
    fixture.touch("go")?;
    run.ends_with(0)?;
    fixture.servers.has_written(&["A1"])
}

/// In the new epoch no token speaks before a renewal, and an adopted one before another adoption: an earlier write is
/// refused, and a later one lands.
pub fn fails_over(fixture: &mut CommandFixture, options: &str) -> Result<()> {
    let role = &fixture.servers.role;
    fixture.admin()?.run(&format!("SELECT fence_grant('{role}', 'adopter')"))?;
    let script = "write A1; ready; await go; read PGPORT < $DIR/port; export PGPORT; \
                  until write A2; do sleep 0.2; done";
    let run = fixture.run_ready(&format!("job {options}"), script)?;
    fixture.servers.fail_over()?;
    let port = fixture.servers.port();
    std::fs::write(fixture.dir.join("port"), format!("{port}\n"))?;
    fixture.link.redirect(port);
    fixture.touch("go")?;
    run.ends_with(0)?;
    fixture.servers.has_written(&["A1", "A2"])
}

/// It renews in transactions of its own. The command's writes through the pooler present no token and are refused,
/// because the pooler accepts no options.
pub fn through_a_pooler(fixture: &mut CommandFixture) -> Result<()> {
    let script = format!(
        "ready; await go; export PGPORT={}; \
         psql -qXv VERBOSITY=sqlstate -c \"UPDATE work SET value = 'wrong'\"; \
         psql -qX -c \"BEGIN; SET LOCAL pg_fence.token = $PG_FENCE_TOKEN; \
         UPDATE work SET value = 'A1'; COMMIT\"",
        fixture.servers.port()
    );
    let run = fixture.run_ready("job --ttl 2s", &script)?;
    fixture.wait_for_renewals(2)?;
    fixture.touch("go")?;
    run.ends_with(0)?.says("PF002")?;
    fixture.servers.has_written(&["A1"])
}

pub fn session_lost(fixture: &mut CommandFixture) -> Result<()> {
    let run = fixture.stubborn("job --session --ttl 10m --grace 500ms")?;
    let end = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity \
           WHERE usename = $1 AND query LIKE '%lease_%'";
    ensure!(fixture.admin()?.one::<i64>(end, &[&fixture.servers.role])? == 1);
    // A successor may begin before the command has ended.
    fixture.is_written_by_another()?;
    let ended = run.ends_with(70)?;
    fixture.has_ended()?;
    ended.says("session")?;
    fixture.servers.has_written(&["A1", "B1"])
}

/// A process has left its group, session, parents and environment, and then the supervisor dies.
pub fn hidden_from_the_renewer(fixture: &mut CommandFixture) -> Result<()> {
    needs_cgroups()?;
    // Its environment contains nothing of the run, so the name of the file is passed as an argument.
    let script = "trap '' TERM; setsid env -i sh -c 'echo $$ > $1/hidden; exec sleep 600' \
                  hidden $DIR & ready; for_ever";
    let run = fixture.run_ready("job --ttl 10m --grace 1s", script)?;
    let (pid, hidden) = (fixture.pid("pid")?, fixture.pid("hidden")?);
    wait_until("it is itself", PATIENCE, || process::title(hidden).starts_with("sleep"))?;
    kill(run.supervisor())?;
    fixture.taken_over()?;
    has_ended(pid)?;
    let ended = has_ended(hidden);
    // Without a cgroup nobody can find it.
    let _ = kill(hidden);
    ended?;
    run.ends_killed()
}

pub fn presented_by_psql(fixture: &mut CommandFixture) -> Result<()> {
    let script = "write A1; echo $PG_FENCE_TOKEN $PG_FENCE_LEASE; \
                  psql -qAtXc \"SELECT state, holder FROM lease_info('job')\"; exit 3";
    let ended = fixture.run("job --holder me", script)?.ends_with(3)?;
    let token: i64 = fixture.admin()?.one("SELECT fence FROM work", &[])?;
    ensure!(ended.stdout == format!("{token} job\nheld|me\n"), "{ended:?}");
    ensure!(ended.stderr.is_empty(), "{ended:?}");
    ensure!(!fixture.is_held()?);
    fixture.servers.has_written(&["A1"])
}

pub fn left_behind(fixture: &mut CommandFixture) -> Result<()> {
    // Runs in the background, in a session of its own, ignoring signals.
    let script = "sh -c \"trap '' TERM HUP; echo \\$\\$ > $DIR/one; while :; do sleep 0.1; done\" & \
                  setsid sh -c 'echo $$ > $DIR/two; exec sleep 600' & \
                  until [ -s $DIR/one ] && [ -s $DIR/two ]; do sleep 0.05; done; exit 4";
    let run = fixture.run("job --grace 1s", script)?;
    let (one, two) = (fixture.pid("one")?, fixture.pid("two")?);
    fixture.taken_over()?;
    has_ended(one)?;
    has_ended(two)?;
    run.ends_with(4)?.says("left behind")
}

/// All processes of the program inherit the lock on a file, which shows when the last of them is gone.
const LOCKS: &str = "exec 9> $DIR/alive; flock -s 9; exec > /dev/null 2>&1;";

/// Each process ends once it has started the next one, in a session of its own.
const FORKS: &str =
    "perl -MPOSIX=setsid -e '$until = time + 60; while (time < $until) { exit if fork; setsid }' &";

pub fn daemons(fixture: &mut CommandFixture) -> Result<()> {
    // One daemon in three was once missed.
    for number in 0..20 {
        let script = format!("{LOCKS} setsid sh -c 'sleep 60 & exit 0' & exit 0");
        fixture.run("job --no-cgroup --grace 1s", &script)?.ends_with(0)?;
        nothing_is_alive(fixture).with_context(|| format!("daemon {number}"))?;
        ensure!(!fixture.is_held()?);
    }
    for options in ["", "--no-cgroup", "--no-cgroup"] {
        // So that many forks are going on when the program ends.
        let script = format!("{LOCKS} {FORKS} sleep 0.3; exit 3");
        let ended = fixture.run(&format!("job --grace 200ms {options}"), &script)?.ends_with(3)?;
        if ended.stderr.contains("the lease is left to its ttl") {
            // On a busy machine they may escape KILL for two seconds; then the lease is not released.
            ensure!(fixture.is_held()?, "{ended:?}");
            wait_until("they end by themselves", PATIENCE, || nothing_is_alive(fixture).is_ok())?;
            fixture.revoke()?;
        }
        nothing_is_alive(fixture).with_context(|| format!("forks {options}: {ended:?}"))?;
        ensure!(!fixture.is_held()?);
    }
    Ok(())
}

fn nothing_is_alive(fixture: &CommandFixture) -> Result<()> {
    let mut lock = Command::new("flock");
    output_of(lock.args(["-n", "-x"]).arg(fixture.dir.join("alive")).arg("true")).map(drop)
}
