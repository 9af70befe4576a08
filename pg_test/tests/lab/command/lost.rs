//! Processes frozen and killed, cables cut, servers restarted: the command never outlives its lease, but where all of
//! it is frozen; and then the server refuses what it writes.

use super::stage::{freeze, has_ended, is_gone, kill, paced, pause, thaw, Stage};
use pg_test::clients::cable::Cable;
use pg_test::clients::scenario::{CableState, Way};
use pg_test::pooler::Pooler;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Calls, Lab, Result};

/// Writes once, says who it is, and goes on for ever.
const WORKS: &str = "psql -qXc \"UPDATE work SET value = 'A1'\"; echo $$ > $DIR/pid; \
                     while :; do sleep 0.1; done";

/// The same, with one child in a session of its own, and neither of them ends on TERM.
const STUBBORN: &str =
    "trap '' TERM HUP INT; setsid sh -c 'echo $$ > $DIR/escaped; while :; do sleep 0.1; done' & \
                        psql -qXc \"UPDATE work SET value = 'A1'\"; echo $$ > $DIR/pid; \
                        while :; do sleep 0.1; done";

#[lab_test]
fn all_of_it_is_frozen_and_writes_when_it_goes_on(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
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
    })
}

#[lab_test]
fn all_of_it_is_frozen_and_ends_when_it_goes_on(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
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
    })
}

#[lab_test]
fn the_keeper_is_frozen_and_the_command_ends_before_the_lease(lab: &Lab) -> Result<()> {
    paced(lab, frozen_keeper)
}

pub fn frozen_keeper(stage: &Stage) -> Result<()> {
    let run = stage.run("job --ttl 3s", STUBBORN)?;
    let (keeper, pid, escaped) = (run.keeper()?, stage.pid("pid")?, stage.pid("escaped")?);
    freeze(keeper)?;
    let (_, _) = stage.taken_over()?;
    has_ended(pid)?;
    has_ended(escaped)?;
    run.ends_with(70)?;
    is_gone(keeper)
}

#[lab_test]
fn the_supervisor_is_frozen_and_the_lease_is_kept_until_it_is_lost(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
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
    })
}

#[lab_test]
fn the_supervisor_is_frozen_and_the_cable_is_cut(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
        let cable = Cable::lay(lab.cluster().port())?;
        let run = stage.run_by(&cable, "job --ttl 3s", STUBBORN)?;
        let (pid, escaped) = (stage.pid("pid")?, stage.pid("escaped")?);
        freeze(run.supervisor())?;
        cable.set(CableState::Swallows(Way::Both));
        let (_, _) = stage.taken_over()?;
        has_ended(pid)?;
        has_ended(escaped)?;
        thaw(run.supervisor())?;
        run.ends_with(70).map(drop)
    })
}

#[lab_test]
fn the_command_alone_is_frozen_and_keeps_its_lease(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
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
    })
}

#[lab_test]
fn a_frozen_command_that_ignores_term_ends_when_its_lease_is_revoked(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
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
    })
}

#[lab_test]
fn a_command_that_listens_has_the_grace_to_end_by_itself(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
        let script = "trap 'echo cleaned up; exit 0' TERM; echo $$ > $DIR/pid; \
                  while :; do sleep 0.05; done";
        let run = stage.run("job --ttl 60s --grace 15s", script)?;
        stage.pid("pid")?;
        stage.revoke()?;
        let ended = run.ends_with(70)?;
        ensure!(ended.stdout == "cleaned up\n", "{ended:?}");
        Ok(())
    })
}

#[lab_test]
fn the_supervisor_is_killed(lab: &Lab) -> Result<()> {
    paced(lab, killed_supervisor)
}

pub fn killed_supervisor(stage: &Stage) -> Result<()> {
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

#[lab_test]
fn the_keeper_is_killed(lab: &Lab) -> Result<()> {
    paced(lab, killed_keeper)
}

pub fn killed_keeper(stage: &Stage) -> Result<()> {
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
#[lab_test]
fn both_are_killed_at_once_and_the_command_with_them(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
        let run = stage.run("job --ttl 3s", WORKS)?;
        let (keeper, pid) = (run.keeper()?, stage.pid("pid")?);
        freeze(keeper)?;
        freeze(run.supervisor())?;
        kill(keeper)?;
        kill(run.supervisor())?;
        is_gone(pid)?;
        run.ends_killed()?;
        stage.taken_over().map(drop)
    })
}

#[lab_test]
fn the_command_is_killed(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
        let run = stage.run("job --ttl 10m", WORKS)?;
        kill(stage.pid("pid")?)?;
        run.ends_with(128 + 9)?;
        ensure!(!stage.is_held()?);
        Ok(())
    })
}

#[lab_test]
fn the_cable_is_cut_and_the_command_ends_before_the_lease(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
        for way in [Way::Both, Way::Requests, Way::Answers] {
            let cable = Cable::lay(lab.cluster().port())?;
            let run = stage.run_by(&cable, "job --ttl 3s --wait 1m", STUBBORN)?;
            let (pid, escaped) = (stage.pid("pid")?, stage.pid("escaped")?);
            cable.set(CableState::Swallows(way));
            let (mut other, token) = stage.taken_over()?;
            has_ended(pid)?;
            has_ended(escaped)?;
            run.ends_with(70)?;
            other.run(&format!("SELECT lease_release('job', {token})"))?;
            for file in ["pid", "escaped"] {
                std::fs::remove_file(stage.dir().join(file))?;
            }
        }
        Ok(())
    })
}

#[lab_test]
fn a_cut_that_is_mended_in_time_ends_nothing(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
        let cable = Cable::lay(lab.cluster().port())?;
        let script = "echo $$ > $DIR/pid; until [ -e $DIR/go ]; do sleep 0.05; done; \
                  psql -qXc \"UPDATE work SET value = 'A1'\"";
        let run = stage.run_by(&cable, "job --ttl 24s", script)?;
        stage.pid("pid")?;
        stage.wait_for_renewal()?;
        cable.set(CableState::Swallows(Way::Both));
        pause(9);
        cable.set(CableState::Mended);
        stage.wait_for_renewal()?;
        stage.touch("go")?;
        run.ends_with(0)?;
        ensure!(stage.written()? == ["A1"]);
        Ok(())
    })
}

#[lab_test]
fn the_server_is_restarted_and_the_command_goes_on(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let stage = Stage::on(lab, &cluster)?;
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
#[lab_test]
fn the_server_fails_over_and_the_command_goes_on(lab: &Lab) -> Result<()> {
    let primary = lab.builder().start()?;
    let stage = Stage::on(lab, &primary)?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    let cable = Cable::lay(primary.port())?;
    let script = "psql -qXc \"UPDATE work SET value = 'A1'\"; echo $$ > $DIR/pid; \
                  until [ -e $DIR/go ]; do sleep 0.05; done; read PGPORT < $DIR/port; export PGPORT; \
                  until psql -qXc \"UPDATE work SET value = 'A2'\"; do sleep 0.2; done";
    let run = stage.run_by(&cable, "job --ttl 30s", script)?;
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

/// It renews by transactions of its own. What the command sends through the pooler presents nothing, for the pooler
/// takes no options: it is refused.
#[lab_test]
fn through_a_pooler_the_lease_is_kept_and_writes_need_the_token_set(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let stage = Stage::on(lab, &cluster)?;
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

#[lab_test]
fn a_session_lease_passes_on_when_its_connection_ends(lab: &Lab) -> Result<()> {
    paced(lab, |stage| {
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
    })
}

#[lab_test]
fn a_program_that_was_replaced_meanwhile_still_starts_the_command(lab: &Lab) -> Result<()> {
    let copy = lab.prefix().new_dir("replaced")?.join("pg_fence");
    std::fs::copy(super::stage::program()?, &copy)?;
    let stage = Stage::with(lab, lab.cluster(), copy.clone())?;
    let mut admin = stage.admin()?;
    let token = admin.acquire("job", "1 h")?;
    let run = stage.run("job --wait 5m", "exit 7")?;
    run.keeper()?;
    wait_until("it waits", PATIENCE, || {
        let waiting =
            "SELECT count(*) FROM pg_stat_activity WHERE usename = $1 AND state = 'active'";
        admin.one::<i64>(waiting, &[&stage.role()]).is_ok_and(|count| count == 1)
    })?;
    std::fs::remove_file(&copy)?;
    admin.run(&format!("SELECT lease_release('job', {token})"))?;
    run.ends_with(7).map(drop)
}
