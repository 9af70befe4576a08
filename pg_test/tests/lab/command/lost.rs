//! Processes frozen and killed, cables cut, servers restarted: the command never outlives its lease, but where all of
//! it is frozen; and then the server refuses what it writes.

use pg_test::clients::command::stage::{
    cgroups_are_at_hand, kill, play, play_with, program, Stage,
};
use pg_test::clients::command::{lost, plain};
use pg_test::clients::scenario::Way;
use pg_test::process::{output_of, wait_until, PATIENCE};
use pg_test::test_case::left_out;
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn all_of_it_is_frozen_and_writes_when_it_goes_on(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::all_of_it_is_frozen_and_writes_when_it_goes_on)
}

#[lab_test]
fn all_of_it_is_frozen_and_ends_when_it_goes_on(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::all_of_it_is_frozen_and_ends_when_it_goes_on)
}

#[lab_test]
fn the_keeper_is_frozen_and_the_command_ends_before_the_lease(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::frozen_keeper)
}

#[lab_test]
fn the_supervisor_is_frozen_and_the_lease_is_kept_until_it_is_lost(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::the_supervisor_is_frozen_and_the_lease_is_kept_until_it_is_lost)
}

#[lab_test]
fn the_supervisor_is_frozen_and_the_cable_is_cut(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::the_supervisor_is_frozen_and_the_cable_is_cut)
}

#[lab_test]
fn the_command_alone_is_frozen_and_keeps_its_lease(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::the_command_alone_is_frozen_and_keeps_its_lease)
}

#[lab_test]
fn a_frozen_command_that_ignores_term_ends_when_its_lease_is_revoked(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::a_frozen_command_that_ignores_term_ends_when_its_lease_is_revoked)
}

#[lab_test]
fn a_command_that_listens_has_the_grace_to_end_by_itself(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::a_command_that_listens_has_the_grace_to_end_by_itself)
}

#[lab_test]
fn the_supervisor_is_killed(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::killed_supervisor)
}

#[lab_test]
fn the_keeper_is_killed(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::killed_keeper)
}

#[lab_test]
fn both_are_killed_at_once_and_the_command_with_them(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::both_are_killed_at_once_and_the_command_with_them)
}

#[lab_test]
fn the_command_is_killed(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::the_command_is_killed)
}

#[lab_test]
fn the_cable_is_cut_and_the_command_ends_before_the_lease(lab: &Lab) -> Result<()> {
    for way in [Way::Both, Way::Requests, Way::Answers] {
        play(lab, &program()?, |scene| lost::cut(scene, way))?;
    }
    Ok(())
}

#[lab_test]
fn a_cut_that_is_mended_in_time_ends_nothing(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::a_cut_that_is_mended_in_time_ends_nothing)
}

#[lab_test]
fn the_server_is_restarted_and_the_command_goes_on(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::the_server_is_restarted_and_the_command_goes_on)
}

#[lab_test]
fn the_server_fails_over_and_the_command_goes_on(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::the_server_fails_over_and_the_command_goes_on)
}

#[lab_test]
fn through_a_pooler_the_lease_is_kept_and_writes_need_the_token_set(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::through_a_pooler_the_lease_is_kept_and_writes_need_the_token_set)
}

#[lab_test]
fn a_session_lease_passes_on_when_its_connection_ends(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::a_session_lease_passes_on_when_its_connection_ends)
}

#[lab_test]
fn all_of_it_is_killed_and_its_session_lease_passes_on(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::killed_with_a_session_lease)
}

#[lab_test]
fn all_of_it_is_frozen_in_a_guarded_transaction(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::frozen_in_a_guarded_transaction)
}

#[lab_test]
fn the_session_of_the_program_ends_and_the_lease_is_held(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::the_program_s_session_ends)
}

#[lab_test]
fn answers_are_slow_and_the_command_ends_before_the_lease(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::slow_answers)
}

#[lab_test]
fn the_lease_is_renewed_beside_an_open_transaction(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::renewed_beside_an_open_transaction)
}

#[lab_test]
fn the_server_s_clock_is_set_back_and_the_command_ends_by_its_own(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::the_server_s_clock_is_set_back)
}

#[lab_test]
fn leases_are_denied_and_the_command_ends_before_its_own(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::denied)
}

#[lab_test]
fn a_process_that_hides_from_the_keeper_is_ended_by_its_cgroup(lab: &Lab) -> Result<()> {
    play(lab, &program()?, lost::hidden_from_the_keeper)
}

/// As on a machine where none can be made.
#[lab_test]
fn without_a_cgroup_descendants_and_marks_are_found(lab: &Lab) -> Result<()> {
    for scenario in [lost::frozen_keeper, lost::killed_supervisor, plain::left_behind] {
        play_with("--no-cgroup", lab, &program()?, scenario)?;
    }
    Ok(())
}

/// Neither while nothing goes wrong, nor when the supervisor was killed.
#[lab_test]
fn no_cgroup_is_left_behind(lab: &Lab) -> Result<()> {
    if !cgroups_are_at_hand() {
        return left_out("no cgroup (version 2, Linux 5.14) can be made here");
    }
    let stage = Stage::new(lab)?;
    let script = "sed -n s/^0:://p /proc/self/cgroup > $DIR/cgroup; echo $$ > $DIR/pid; \
                  until [ -e $DIR/go ]; do sleep 0.05; done";
    let mount = "awk '$3 == \"cgroup2\" { printf \"%s\", $2; exit }' /proc/self/mounts";
    let mount = output_of(std::process::Command::new("sh").args(["-c", mount]))?;
    for is_killed in [false, true] {
        let run = stage.run("job", script)?;
        stage.pid("pid")?;
        let name = stage.file("cgroup")?;
        let directory = std::path::PathBuf::from(format!("{mount}{name}"));
        ensure!(name.contains("/pg_fence-") && directory.is_dir(), "{directory:?}");
        if is_killed {
            kill(run.supervisor())?;
        } else {
            stage.touch("go")?;
            run.ends_with(0)?;
        }
        wait_until("it is gone", PATIENCE, || !directory.exists())?;
        for file in ["pid", "cgroup", "go"] {
            let _ = std::fs::remove_file(stage.dir().join(file));
        }
    }
    Ok(())
}

#[lab_test]
fn a_program_that_was_replaced_meanwhile_still_starts_the_command(lab: &Lab) -> Result<()> {
    let copy = lab.prefix().new_dir("replaced")?.join("pg_fence");
    std::fs::copy(program()?, &copy)?;
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
