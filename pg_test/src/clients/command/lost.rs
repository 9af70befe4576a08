//! Processes are frozen and killed, links cut, servers restarted: the program never outlives its lease, unless all of
//! it is frozen; and then the server refuses its writes.

use super::fixture::{
    Scene, cgroups_are_at_hand, freeze, freeze_all, has_ended, is_gone, kill, thaw,
};
use crate::Calls;
use crate::clients::tcp_proxy::TcpProxy;
use crate::clients::tcp_proxy::{Direction, LinkState};
use crate::clock::Clock;
use crate::pooler::Pooler;
use crate::process::{self, PATIENCE, wait_until};
use crate::skipped::left_out;
use anyhow::{Result, ensure};
use std::time::Duration;

/// Writes once, reports its pid, and runs forever.
const WORKS: &str = "write A1; ready; for_ever";

/// Writes when told to.
const WRITES_LATER: &str = "ready; await go; write A1";

pub fn all_of_it_is_frozen_and_writes_when_it_goes_on(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    // The command is psql itself, connected and in the middle of its script.
    let script = "mkfifo $DIR/late; exec psql -qAtX -v ON_ERROR_STOP=1 -v VERBOSITY=sqlstate \
              -c \"UPDATE work SET value = 'A1'\" -c \"\\! echo $$ > $DIR/pid\" -f $DIR/late";
    let run = fixture.run("job --ttl 2s", script)?;
    let (keeper, pid) = (run.keeper()?, fixture.pid("pid")?);
    freeze_all([run.supervisor(), keeper, pid])?;
    fixture.is_written_by_another()?;
    // The program is thawed first, as by an unfortunate scheduler.
    thaw(pid)?;
    std::fs::write(fixture.dir().join("late"), "UPDATE work SET value = 'late';\n")?;
    is_gone(pid)?;
    thaw(keeper)?;
    thaw(run.supervisor())?;
    let ended = run.ended()?;
    ensure!(ended.stderr.contains("PF001") || ended.stderr.contains("PF004"), "{ended:?}");
    fixture.has_written(&["A1", "B1"])
}

pub fn all_of_it_is_frozen_and_ends_when_it_goes_on(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let run = fixture.stubborn("job --ttl 2s")?;
    let all = [run.supervisor(), run.keeper()?, fixture.pid("pid")?, fixture.pid("escaped")?];
    freeze_all(all)?;
    fixture.taken_over()?;
    all.into_iter().try_for_each(thaw)?;
    let ended = run.ends_with(70)?;
    fixture.has_ended()?;
    ended.says("job")
}

pub fn frozen_keeper(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let run = fixture.stubborn("job --ttl 3s")?;
    let keeper = run.keeper()?;
    freeze(keeper)?;
    fixture.is_outlived()?;
    run.ends_with(70)?;
    is_gone(keeper)
}

pub fn the_supervisor_is_frozen_and_the_lease_is_kept_until_it_is_lost(
    scene: &Scene,
) -> Result<()> {
    let fixture = &scene.fixture()?;
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

pub fn the_supervisor_is_frozen_and_the_link_is_cut(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let link = TcpProxy::start(scene.harness().cluster().port())?;
    let run = fixture.stubborn_by(&link, "job --ttl 3s")?;
    freeze(run.supervisor())?;
    link.set(LinkState::Swallows(Direction::Both));
    fixture.is_outlived()?;
    thaw(run.supervisor())?;
    run.ends_with(70).map(drop)
}

pub fn the_command_alone_is_frozen_and_keeps_its_lease(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let run = fixture.run("job --ttl 2s", &format!("{WRITES_LATER}; exit 6"))?;
    let pid = fixture.pid("pid")?;
    freeze(pid)?;
    fixture.wait_for_renewals(3)?;
    fixture.admin()?.nothing("SELECT lease_acquire('job')")?;
    fixture.touch("go")?;
    thaw(pid)?;
    run.ends_with(6)?;
    fixture.has_written(&["A1"])
}

pub fn a_frozen_command_that_ignores_term_ends_when_its_lease_is_revoked(
    scene: &Scene,
) -> Result<()> {
    let fixture = &scene.fixture()?;
    let run = fixture.stubborn("job --ttl 30s --grace 500ms")?;
    freeze(fixture.pid("pid")?)?;
    fixture.revoke()?;
    let ended = run.ends_with(70)?;
    fixture.has_ended()?;
    ended.says("the lease job is lost (gone)")?;
    ended.says("the command is ended")
}

pub fn a_command_that_listens_has_the_grace_to_end_by_itself(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let script = "trap 'echo cleaned up; exit 0' TERM; ready; for_ever";
    let run = fixture.run("job --ttl 60s --grace 15s", script)?;
    fixture.pid("pid")?;
    fixture.revoke()?;
    let ended = run.ends_with(70)?;
    ensure!(ended.stdout == "cleaned up\n", "{ended:?}");
    Ok(())
}

pub fn killed_supervisor(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let run = fixture.stubborn("job --ttl 10m --grace 1s")?;
    let keeper = run.keeper()?;
    kill(run.supervisor())?;
    // Long before the ttl, the heartbeat process ends the command and releases the lease.
    fixture.is_outlived()?;
    is_gone(keeper)?;
    run.ends_killed()
}

pub fn killed_keeper(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let run = fixture.stubborn("job --ttl 6s")?;
    kill(run.keeper()?)?;
    fixture.is_outlived()?;
    run.ends_with(70)?.says("has died")
}

/// Only the command is killed: processes that it has started continue, and the server refuses their writes.
pub fn both_are_killed_at_once_and_the_command_with_them(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let run = fixture.run("job --ttl 3s", WORKS)?;
    let (keeper, pid) = (run.keeper()?, fixture.pid("pid")?);
    freeze_all([keeper, run.supervisor()])?;
    kill(keeper)?;
    kill(run.supervisor())?;
    is_gone(pid)?;
    run.ends_killed()?;
    fixture.taken_over().map(drop)
}

/// Nobody is notified of the cut.
pub fn cut(scene: &Scene, direction: Direction) -> Result<()> {
    let fixture = &scene.fixture()?;
    let link = TcpProxy::start(scene.harness().cluster().port())?;
    let run = fixture.stubborn_by(&link, "job --ttl 3s --wait 1m")?;
    link.set(LinkState::Swallows(direction));
    fixture.is_outlived()?;
    run.ends_with(70).map(drop)
}

pub fn a_cut_that_is_mended_in_time_ends_nothing(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let link = TcpProxy::start(scene.harness().cluster().port())?;
    let run = fixture.run_by(&link, "job --ttl 48s", WRITES_LATER)?;
    fixture.pid("pid")?;
    fixture.wait_for_renewal()?;
    link.set(LinkState::Swallows(Direction::Both));
    // A renewal is due meanwhile, after a third of the ttl.
    std::thread::sleep(scene.time(Duration::from_secs(17)));
    link.set(LinkState::Restored);
    fixture.wait_for_renewal()?;
    fixture.touch("go")?;
    run.ends_with(0)?;
    fixture.has_written(&["A1"])
}

pub fn the_server_is_restarted_and_the_command_goes_on(scene: &Scene) -> Result<()> {
    let cluster = scene.harness().builder().start()?;
    let fixture = scene.fixture_on(&cluster)?;
    let run = fixture.run("job --ttl 30s", "write A1; ready; await go; write A2")?;
    fixture.pid("pid")?;
    cluster.restart()?;
    fixture.wait_for_renewal()?;
    fixture.touch("go")?;
    run.ends_with(0)?;
    fixture.has_written(&["A1", "A2"])
}

/// In the new epoch no token speaks before a renewal: an earlier write is refused, and a later one lands.
pub fn the_server_fails_over_and_the_command_goes_on(scene: &Scene) -> Result<()> {
    fails_over(scene, "--ttl 30s")
}

/// The same for an adopted token, which speaks again after another adoption.
pub fn the_server_fails_over_with_an_adopted_token(scene: &Scene) -> Result<()> {
    fails_over(scene, "--ttl 6s --adopt 33")
}

fn fails_over(scene: &Scene, options: &str) -> Result<()> {
    let harness = scene.harness();
    let primary = harness.builder().start()?;
    let fixture = scene.fixture_on(&primary)?;
    fixture.admin()?.run(&format!("SELECT fence_grant('{}', 'adopter')", fixture.role()))?;
    let standby = harness.builder().standby_of(&primary)?;
    standby.start()?;
    let link = TcpProxy::start(primary.port())?;
    let script = "write A1; ready; await go; read PGPORT < $DIR/port; export PGPORT; \
                  until write A2; do sleep 0.2; done";
    let run = fixture.run_by(&link, &format!("job {options}"), script)?;
    fixture.pid("pid")?;
    std::fs::write(fixture.dir().join("port"), format!("{}\n", standby.port()))?;
    standby.wait_replayed(&primary)?;
    primary.kill9()?;
    standby.promote()?;
    link.redirect(standby.port());
    fixture.touch("go")?;
    run.ends_with(0)?;
    let mut admin = standby.connect(fixture.database().name())?;
    let written = admin.rows("SELECT value FROM written ORDER BY n")?;
    ensure!(written.len() == 2, "{written:?}");
    Ok(())
}

/// It renews in transactions of its own. The command's writes through the pooler present no token and are refused,
/// because the pooler accepts no options.
pub fn through_a_pooler_the_lease_is_kept_and_writes_need_the_token_set(
    scene: &Scene,
) -> Result<()> {
    let harness = scene.harness();
    let cluster = harness.builder().start()?;
    let fixture = scene.fixture_on(&cluster)?;
    let pooler = Pooler::start(harness, &cluster, 2)?;
    pooler.admit(fixture.role())?;
    let (port, _) = pooler.conninfo("postgres").place();
    let script = format!(
        "ready; await go; export PGPORT={port}; \
         psql -qXv VERBOSITY=sqlstate -c \"UPDATE work SET value = 'wrong'\"; \
         psql -qX -c \"BEGIN; SET LOCAL pg_fence.token = $PG_FENCE_TOKEN; UPDATE work SET value = 'A1'; COMMIT\""
    );
    let run = fixture.run_to(&fixture.conninfo().port(port), "job --ttl 2s", &script)?;
    fixture.pid("pid")?;
    fixture.wait_for_renewals(2)?;
    fixture.touch("go")?;
    let ended = run.ends_with(0)?;
    ended.says("PF002")?;
    fixture.has_written(&["A1"])
}

pub fn a_session_lease_passes_on_when_its_connection_ends(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let run = fixture.stubborn("job --session --ttl 10m --grace 500ms")?;
    let end = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity \
           WHERE usename = $1 AND query LIKE '%lease_%'";
    ensure!(fixture.admin()?.one::<i64>(end, &[&fixture.role()])? == 1);
    // A successor may begin before the command has ended.
    fixture.is_written_by_another()?;
    let ended = run.ends_with(70)?;
    fixture.has_ended()?;
    ended.says("session")?;
    fixture.has_written(&["A1", "B1"])
}

/// All processes of a run die at once, and so does the session of its lease.
pub fn killed_with_a_session_lease(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let run = fixture.run("job --session --ttl 10m", WORKS)?;
    let (keeper, pid) = (run.keeper()?, fixture.pid("pid")?);
    freeze(run.supervisor())?;
    kill(keeper)?;
    kill(run.supervisor())?;
    // Long before the ttl.
    fixture.is_written_by_another()?;
    is_gone(pid)?;
    run.ends_killed()?;
    fixture.has_written(&["A1", "B1"])
}

/// A process has left its group, session, parents and environment, and then the supervisor dies.
pub fn hidden_from_the_keeper(scene: &Scene) -> Result<()> {
    if !cgroups_are_at_hand() {
        return left_out("no cgroup (version 2, Linux 5.14) can be made here");
    }
    let fixture = &scene.fixture()?;
    // Its environment contains nothing of the run, so the name of the file is passed as an argument.
    let script = "trap '' TERM; setsid env -i sh -c 'echo $$ > $1/hidden; exec sleep 600' hidden $DIR & \
                  ready; for_ever";
    let run = fixture.run("job --ttl 10m --grace 1s", script)?;
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

/// The ttl counts from before a call with a slow answer; otherwise the program would continue after another holder
/// begins.
pub fn slow_answers(scene: &Scene) -> Result<()> {
    let fixture = &scene.fixture()?;
    let link = TcpProxy::start(scene.harness().cluster().port())?;
    // Longer than the reserve for ending the program before a deadline.
    let delay = scene.time(Duration::from_millis(2000));
    let run = fixture.stubborn_by(&link, "job --ttl 15s")?;
    let keeper = run.keeper()?;
    link.set(LinkState::DelaysAnswers(delay));
    fixture.wait_for_renewal()?;
    // Waits for the answer, which may come in two parts, and stops before the next renewal.
    std::thread::sleep(2 * delay + scene.time(Duration::from_millis(500)));
    freeze(keeper)?;
    fixture.is_outlived()?;
    run.ends_with(70)?;
    is_gone(keeper)
}

/// The server then holds the lease for longer; a run that cannot renew goes by its own clock.
pub fn the_server_s_clock_is_set_back(scene: &Scene) -> Result<()> {
    let harness = scene.harness();
    let clock = Clock::new(&harness.install_dir().new_dir("clock")?.join("clock"))?;
    let cluster = clock.give(harness.builder()).start()?;
    let fixture = &scene.fixture_on(&cluster)?;
    let link = TcpProxy::start(cluster.port())?;
    let run = fixture.stubborn_by(&link, "job --ttl 3s")?;
    clock.step(-3600)?;
    fixture.wait_for_renewal()?;
    clock.step(-7200)?;
    link.set(LinkState::Swallows(Direction::Both));
    run.ends_with(70)?;
    fixture.has_ended()?;
    ensure!(fixture.is_held()?);
    fixture.has_written(&["A1"])
}
