//! Processes frozen and killed, cables cut, servers restarted: the program never outlives its lease, but where all of
//! it is frozen; and then the server refuses what it writes.

use super::stage::{cgroups_are_at_hand, freeze, has_ended, is_gone, kill, thaw, Scene};
use crate::clients::cable::Cable;
use crate::clients::scenario::{CableState, Way};
use crate::clock::Clock;
use crate::pooler::Pooler;
use crate::process::{self, wait_until, PATIENCE};
use crate::test_case::left_out;
use crate::Calls;
use anyhow::{ensure, Result};
use std::time::Duration;

/// Writes once, says who it is, and goes on for ever.
const WORKS: &str = "psql -qXc \"UPDATE work SET value = 'A1'\"; echo $$ > $DIR/pid; \
                     while :; do sleep 0.1; done";

/// The same, with one child in a session of its own, and neither of them ends on TERM.
const STUBBORN: &str =
    "trap '' TERM HUP INT; setsid sh -c 'echo $$ > $DIR/escaped; while :; do sleep 0.1; done' & \
                        psql -qXc \"UPDATE work SET value = 'A1'\"; echo $$ > $DIR/pid; \
                        while :; do sleep 0.1; done";

pub fn all_of_it_is_frozen_and_writes_when_it_goes_on(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    // psql itself is the command. It is connected, and in the middle of its script.
    let script = "mkfifo $DIR/late; exec psql -qAtX -v ON_ERROR_STOP=1 -v VERBOSITY=sqlstate \
              -c \"UPDATE work SET value = 'A1'\" -c \"\\! echo $$ > $DIR/pid\" -f $DIR/late";
    let run = stage.run("job --ttl 2s", script)?;
    let (keeper, pid) = (run.keeper()?, stage.pid("pid")?);
    for frozen in [run.supervisor(), keeper, pid] {
        freeze(frozen)?;
    }
    let (mut other, token) = stage.taken_over()?;
    other.run(&format!("UPDATE work SET value = 'B1', fence = {token}"))?;
    // The program goes on first, as it would on a machine whose scheduler is unkind.
    thaw(pid)?;
    std::fs::write(stage.dir().join("late"), "UPDATE work SET value = 'late';\n")?;
    is_gone(pid)?;
    thaw(keeper)?;
    thaw(run.supervisor())?;
    let ended = run.ended()?;
    ensure!(ended.stderr.contains("PF001") || ended.stderr.contains("PF004"), "{ended:?}");
    ensure!(stage.written()? == ["A1", "B1"], "{:?}", stage.written()?);
    Ok(())
}

pub fn all_of_it_is_frozen_and_ends_when_it_goes_on(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --ttl 2s", STUBBORN)?;
    let (keeper, pid, escaped) = (run.keeper()?, stage.pid("pid")?, stage.pid("escaped")?);
    let all = [run.supervisor(), keeper, pid, escaped];
    all.into_iter().try_for_each(freeze)?;
    let (_, _) = stage.taken_over()?;
    all.into_iter().try_for_each(thaw)?;
    let ended = run.ends_with(70)?;
    has_ended(pid)?;
    has_ended(escaped)?;
    ensure!(ended.stderr.contains("job"), "{ended:?}");
    Ok(())
}

pub fn frozen_keeper(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --ttl 3s", STUBBORN)?;
    let (keeper, pid, escaped) = (run.keeper()?, stage.pid("pid")?, stage.pid("escaped")?);
    freeze(keeper)?;
    let (_, _) = stage.taken_over()?;
    has_ended(pid)?;
    has_ended(escaped)?;
    run.ends_with(70)?;
    is_gone(keeper)
}

pub fn the_supervisor_is_frozen_and_the_lease_is_kept_until_it_is_lost(
    scene: &Scene,
) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --ttl 2s", STUBBORN)?;
    let (pid, escaped) = (stage.pid("pid")?, stage.pid("escaped")?);
    freeze(run.supervisor())?;
    stage.wait_for_renewal()?;
    stage.wait_for_renewal()?;
    ensure!(stage.admin()?.token("SELECT lease_acquire('job')")?.is_none());
    stage.revoke()?;
    // The keeper does what the supervisor cannot.
    is_gone(pid)?;
    is_gone(escaped)?;
    thaw(run.supervisor())?;
    run.ends_with(70).map(drop)
}

pub fn the_supervisor_is_frozen_and_the_cable_is_cut(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let cable = Cable::lay(scene.lab().cluster().port())?;
    let run = stage.run_by(&cable, "job --ttl 3s", STUBBORN)?;
    let (pid, escaped) = (stage.pid("pid")?, stage.pid("escaped")?);
    freeze(run.supervisor())?;
    cable.set(CableState::Swallows(Way::Both));
    let (_, _) = stage.taken_over()?;
    has_ended(pid)?;
    has_ended(escaped)?;
    thaw(run.supervisor())?;
    run.ends_with(70).map(drop)
}

pub fn the_command_alone_is_frozen_and_keeps_its_lease(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let script = "echo $$ > $DIR/pid; until [ -e $DIR/go ]; do sleep 0.05; done; \
              psql -qXc \"UPDATE work SET value = 'A1'\"; exit 6";
    let run = stage.run("job --ttl 2s", script)?;
    let pid = stage.pid("pid")?;
    freeze(pid)?;
    stage.wait_for_renewal()?;
    stage.wait_for_renewal()?;
    stage.wait_for_renewal()?;
    ensure!(stage.admin()?.token("SELECT lease_acquire('job')")?.is_none());
    stage.touch("go")?;
    thaw(pid)?;
    run.ends_with(6)?;
    ensure!(stage.written()? == ["A1"]);
    Ok(())
}

pub fn a_frozen_command_that_ignores_term_ends_when_its_lease_is_revoked(
    scene: &Scene,
) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --ttl 30s --grace 500ms", STUBBORN)?;
    let (pid, escaped) = (stage.pid("pid")?, stage.pid("escaped")?);
    freeze(pid)?;
    stage.revoke()?;
    let ended = run.ends_with(70)?;
    has_ended(pid)?;
    has_ended(escaped)?;
    ensure!(ended.stderr.contains("the lease job is lost (gone)"), "{ended:?}");
    ensure!(ended.stderr.contains("the command is ended"), "{ended:?}");
    Ok(())
}

pub fn a_command_that_listens_has_the_grace_to_end_by_itself(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let script = "trap 'echo cleaned up; exit 0' TERM; echo $$ > $DIR/pid; \
              while :; do sleep 0.05; done";
    let run = stage.run("job --ttl 60s --grace 15s", script)?;
    stage.pid("pid")?;
    stage.revoke()?;
    let ended = run.ends_with(70)?;
    ensure!(ended.stdout == "cleaned up\n", "{ended:?}");
    Ok(())
}

pub fn killed_supervisor(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --ttl 10m --grace 1s", STUBBORN)?;
    let (keeper, pid, escaped) = (run.keeper()?, stage.pid("pid")?, stage.pid("escaped")?);
    kill(run.supervisor())?;
    // Long before its ttl: the keeper ends the command, and gives the lease back.
    let (_, _) = stage.taken_over()?;
    has_ended(pid)?;
    has_ended(escaped)?;
    is_gone(keeper)?;
    run.ends_killed()
}

pub fn killed_keeper(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --ttl 6s", STUBBORN)?;
    let (keeper, pid, escaped) = (run.keeper()?, stage.pid("pid")?, stage.pid("escaped")?);
    kill(keeper)?;
    let (_, _) = stage.taken_over()?;
    has_ended(pid)?;
    has_ended(escaped)?;
    let ended = run.ends_with(70)?;
    ensure!(ended.stderr.contains("has died"), "{ended:?}");
    Ok(())
}

/// The command alone: what it has started in turn goes on, and the server refuses what that writes.
pub fn both_are_killed_at_once_and_the_command_with_them(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --ttl 3s", WORKS)?;
    let (keeper, pid) = (run.keeper()?, stage.pid("pid")?);
    freeze(keeper)?;
    freeze(run.supervisor())?;
    kill(keeper)?;
    kill(run.supervisor())?;
    is_gone(pid)?;
    run.ends_killed()?;
    stage.taken_over().map(drop)
}

/// Nobody is told of the cut.
pub fn cut(scene: &Scene, way: Way) -> Result<()> {
    let stage = &scene.stage()?;
    let cable = Cable::lay(scene.lab().cluster().port())?;
    let run = stage.run_by(&cable, "job --ttl 3s --wait 1m", STUBBORN)?;
    let (pid, escaped) = (stage.pid("pid")?, stage.pid("escaped")?);
    cable.set(CableState::Swallows(way));
    let (_, _) = stage.taken_over()?;
    has_ended(pid)?;
    has_ended(escaped)?;
    run.ends_with(70).map(drop)
}

pub fn a_cut_that_is_mended_in_time_ends_nothing(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let cable = Cable::lay(scene.lab().cluster().port())?;
    let script = "echo $$ > $DIR/pid; until [ -e $DIR/go ]; do sleep 0.05; done; \
              psql -qXc \"UPDATE work SET value = 'A1'\"";
    let run = stage.run_by(&cable, "job --ttl 48s", script)?;
    stage.pid("pid")?;
    stage.wait_for_renewal()?;
    cable.set(CableState::Swallows(Way::Both));
    // A renewal is due in it, after a third of the ttl.
    std::thread::sleep(scene.time(Duration::from_secs(17)));
    cable.set(CableState::Mended);
    stage.wait_for_renewal()?;
    stage.touch("go")?;
    run.ends_with(0)?;
    ensure!(stage.written()? == ["A1"]);
    Ok(())
}

pub fn the_server_is_restarted_and_the_command_goes_on(scene: &Scene) -> Result<()> {
    let lab = scene.lab();
    let cluster = lab.builder().start()?;
    let stage = scene.stage_on(&cluster)?;
    let script = "psql -qXc \"UPDATE work SET value = 'A1'\"; echo $$ > $DIR/pid; \
                  until [ -e $DIR/go ]; do sleep 0.05; done; \
                  psql -qXc \"UPDATE work SET value = 'A2'\"";
    let run = stage.run("job --ttl 30s", script)?;
    stage.pid("pid")?;
    cluster.restart()?;
    stage.wait_for_renewal()?;
    stage.touch("go")?;
    run.ends_with(0)?;
    ensure!(stage.written()? == ["A1", "A2"]);
    Ok(())
}

/// No token speaks for the lease until it has been renewed: a write before that is refused, and goes through later.
pub fn the_server_fails_over_and_the_command_goes_on(scene: &Scene) -> Result<()> {
    fails_over(scene, "--ttl 30s")
}

/// The same of a token that was adopted: it speaks again once it was adopted again.
pub fn the_server_fails_over_with_an_adopted_token(scene: &Scene) -> Result<()> {
    fails_over(scene, "--ttl 6s --adopt 33")
}

fn fails_over(scene: &Scene, options: &str) -> Result<()> {
    let lab = scene.lab();
    let primary = lab.builder().start()?;
    let stage = scene.stage_on(&primary)?;
    stage.admin()?.run(&format!("SELECT fence_grant('{}', 'adopter')", stage.role()))?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    let cable = Cable::lay(primary.port())?;
    let script = "psql -qXc \"UPDATE work SET value = 'A1'\"; echo $$ > $DIR/pid; \
                  until [ -e $DIR/go ]; do sleep 0.05; done; read PGPORT < $DIR/port; export PGPORT; \
                  until psql -qXc \"UPDATE work SET value = 'A2'\"; do sleep 0.2; done";
    let run = stage.run_by(&cable, &format!("job {options}"), script)?;
    stage.pid("pid")?;
    std::fs::write(stage.dir().join("port"), format!("{}\n", standby.port()))?;
    standby.wait_replayed(&primary)?;
    primary.kill9()?;
    standby.promote()?;
    cable.lead_to(standby.port());
    stage.touch("go")?;
    run.ends_with(0)?;
    let mut admin = standby.connect(stage.database().name())?;
    let written = admin.rows("SELECT value FROM written ORDER BY n")?;
    ensure!(written.len() == 2, "{written:?}");
    Ok(())
}

/// It renews by transactions of its own. The command's writes through the pooler present nothing, for the pooler
/// takes no options: it is refused.
pub fn through_a_pooler_the_lease_is_kept_and_writes_need_the_token_set(
    scene: &Scene,
) -> Result<()> {
    let lab = scene.lab();
    let cluster = lab.builder().start()?;
    let stage = scene.stage_on(&cluster)?;
    let pooler = Pooler::start(lab, &cluster, 2)?;
    pooler.admit(stage.role())?;
    let (port, _) = pooler.conninfo("postgres").place();
    let script = format!(
        "echo $$ > $DIR/pid; until [ -e $DIR/go ]; do sleep 0.05; done; export PGPORT={port}; \
         psql -qXv VERBOSITY=sqlstate -c \"UPDATE work SET value = 'wrong'\"; \
         psql -qX -c \"BEGIN; SET LOCAL pg_fence.token = $PG_FENCE_TOKEN; UPDATE work SET value = 'A1'; COMMIT\""
    );
    let run = stage.run_to(&stage.conninfo().port(port), "job --ttl 2s", &script)?;
    stage.pid("pid")?;
    stage.wait_for_renewal()?;
    stage.wait_for_renewal()?;
    stage.touch("go")?;
    let ended = run.ends_with(0)?;
    ensure!(ended.stderr.contains("PF002") && stage.written()? == ["A1"], "{ended:?}");
    Ok(())
}

pub fn a_session_lease_passes_on_when_its_connection_ends(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --session --ttl 10m --grace 500ms", STUBBORN)?;
    let (pid, escaped) = (stage.pid("pid")?, stage.pid("escaped")?);
    let end = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity \
           WHERE usename = $1 AND query LIKE '%lease_%'";
    ensure!(stage.admin()?.one::<i64>(end, &[&stage.role()])? == 1);
    // A successor may begin before the command has ended.
    let (mut other, token) = stage.taken_over()?;
    other.run(&format!("UPDATE work SET value = 'B1', fence = {token}"))?;
    let ended = run.ends_with(70)?;
    has_ended(pid)?;
    has_ended(escaped)?;
    ensure!(ended.stderr.contains("session"), "{ended:?}");
    ensure!(stage.written()? == ["A1", "B1"]);
    Ok(())
}

/// All processes of a run die at once, and so does the session of its lease.
pub fn killed_with_a_session_lease(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --session --ttl 10m", WORKS)?;
    let (keeper, pid) = (run.keeper()?, stage.pid("pid")?);
    freeze(run.supervisor())?;
    kill(keeper)?;
    kill(run.supervisor())?;
    // Long before the ttl.
    let (mut other, token) = stage.taken_over()?;
    other.run(&format!("UPDATE work SET value = 'B1', fence = {token}"))?;
    is_gone(pid)?;
    run.ends_killed()?;
    ensure!(stage.written()? == ["A1", "B1"]);
    Ok(())
}

/// A process that has left its group, its session, its parents and its environment, while the supervisor dies.
pub fn hidden_from_the_keeper(scene: &Scene) -> Result<()> {
    if !cgroups_are_at_hand() {
        return left_out("no cgroup (version 2, Linux 5.14) can be made here");
    }
    let stage = &scene.stage()?;
    // Nothing of the run is in its environment, so it hands over the name of the file as an argument.
    let script =
        "trap '' TERM; setsid env -i sh -c 'echo $$ > $1/hidden; exec sleep 600' hidden $DIR & \
                  echo $$ > $DIR/pid; while :; do sleep 0.1; done";
    let run = stage.run("job --ttl 10m --grace 1s", script)?;
    let (pid, hidden) = (stage.pid("pid")?, stage.pid("hidden")?);
    wait_until("it is itself", PATIENCE, || process::title(hidden).starts_with("sleep"))?;
    kill(run.supervisor())?;
    let (_, _) = stage.taken_over()?;
    has_ended(pid)?;
    let ended = has_ended(hidden);
    // It is nobody's to end where no cgroup was made.
    let _ = kill(hidden);
    ended?;
    run.ends_killed()
}

/// The ttl counts from before a call whose answer takes long: else the program would go on when somebody else begins.
pub fn slow_answers(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let cable = Cable::lay(scene.lab().cluster().port())?;
    // Longer than the reserve that a deadline leaves for dying.
    let delay = scene.time(Duration::from_millis(2000));
    let run = stage.run_by(&cable, "job --ttl 15s", STUBBORN)?;
    let (keeper, pid, escaped) = (run.keeper()?, stage.pid("pid")?, stage.pid("escaped")?);
    cable.set(CableState::DelaysAnswers(delay));
    stage.wait_for_renewal()?;
    // Until the answer is there, which may come in two parts; and before the next renewal.
    std::thread::sleep(2 * delay + scene.time(Duration::from_millis(500)));
    freeze(keeper)?;
    let (_, _) = stage.taken_over()?;
    has_ended(pid)?;
    has_ended(escaped)?;
    run.ends_with(70)?;
    is_gone(keeper)
}

/// The server then holds the lease for longer; a run that cannot renew goes by its own clock.
pub fn the_server_s_clock_is_set_back(scene: &Scene) -> Result<()> {
    let lab = scene.lab();
    let clock = Clock::new(&lab.prefix().new_dir("clock")?.join("clock"))?;
    let cluster = clock.give(lab.builder()).start()?;
    let stage = &scene.stage_on(&cluster)?;
    let cable = Cable::lay(cluster.port())?;
    let run = stage.run_by(&cable, "job --ttl 3s", STUBBORN)?;
    let (pid, escaped) = (stage.pid("pid")?, stage.pid("escaped")?);
    clock.step(-3600)?;
    stage.wait_for_renewal()?;
    clock.step(-7200)?;
    cable.set(CableState::Swallows(Way::Both));
    run.ends_with(70)?;
    has_ended(pid)?;
    has_ended(escaped)?;
    ensure!(stage.is_held()? && stage.written()? == ["A1"]);
    Ok(())
}

/// An administrator takes the right to use leases away: the lease runs out, and the program is ended before that.
pub fn denied(scene: &Scene) -> Result<()> {
    let stage = &scene.stage()?;
    let run = stage.run("job --ttl 6s", STUBBORN)?;
    let (pid, escaped) = (stage.pid("pid")?, stage.pid("escaped")?);
    stage.admin()?.run(&format!("SELECT fence_revoke('{}')", stage.role()))?;
    let (_, _) = stage.taken_over()?;
    has_ended(pid)?;
    has_ended(escaped)?;
    let ended = run.ends_with(70)?;
    ensure!(ended.stderr.contains("refused"), "{ended:?}");
    Ok(())
}
