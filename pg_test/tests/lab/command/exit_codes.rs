//! The environment of a command, and the exit status for each end.

use nix::sys::signal::Signal;
use pg_test::clients::command::stage::{is_gone, pause, Run, Stage};
use pg_test::process;
use pg_test::{ensure, lab_test, Calls, Conninfo, Lab, Result};
use std::io::Write;
use std::process::Stdio;

#[lab_test]
fn what_psql_presents_is_added_to_the_options_that_it_had(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let mut command = stage.command();
    command.env("PGOPTIONS", "-c statement_timeout=1234").args(["run", "job", "--"]);
    command.args([
        "psql",
        "-qAtXc",
        "SHOW statement_timeout",
        "-c",
        "UPDATE work SET value = 'A1'",
    ]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let ended = Run::start(command)?.ends_with(0)?;
    ensure!(ended.stdout == "1234ms\n" && stage.written()? == ["A1"], "{ended:?}");
    Ok(())
}

#[lab_test]
fn a_copy_that_is_restored_presents_the_token_too(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let mut admin = stage.admin()?;
    let role = stage.role();
    admin.run(&format!(
        "CREATE TABLE copied (id int PRIMARY KEY, value text);
         INSERT INTO copied SELECT g, 'x' FROM generate_series(1, 3) g;
         GRANT SELECT, INSERT ON copied TO {role}"
    ))?;
    let dump = stage.dir().join("copied.dump");
    let conninfo = stage.database().conninfo().to_string();
    let file = format!("--file={}", dump.display());
    lab.run("pg_dump", &["-Fc", "-a", "-t", "copied", &file, &conninfo])?;
    admin.run("TRUNCATE copied; SELECT fence_protect('copied', lease => 'copied', events => 'insert,update')")?;
    let restore = format!("pg_restore -a -d \"$PGDATABASE\" {}", dump.display());
    stage.run("job", &restore)?.ends_with(1)?;
    stage.run("copied", &restore)?.ends_with(0)?;
    ensure!(admin.one::<bool>("SELECT count(*) = 3 AND min(fence) > 0 FROM copied", &[])?);
    Ok(())
}

#[lab_test]
fn the_input_is_the_command_s(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let mut command = stage.command();
    command.args(["run", "job", "--", "cat"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut stdin = child.stdin.take().expect("it was asked for");
    stdin.write_all(b"what is said\n")?;
    drop(stdin);
    let output = child.wait_with_output()?;
    ensure!(output.status.success() && output.stdout == b"what is said\n", "{output:?}");
    Ok(())
}

#[lab_test]
fn a_lease_that_is_taken_has_a_status_of_its_own(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    stage.admin()?.acquire("job", "1 h")?;
    let ended = stage.run("job", "echo ran")?.ends_with(75)?;
    ensure!(ended.stdout.is_empty() && ended.stderr.contains("job is taken"), "{ended:?}");
    let ended = stage.run("job --if-taken 0 --quiet", "echo ran")?.ends_with(0)?;
    ensure!(ended.stdout.is_empty() && ended.stderr.is_empty(), "{ended:?}");
    // Of several none is taken.
    stage.run("free job", "echo ran")?.ends_with(75)?;
    ensure!(stage.admin()?.token("SELECT lease_acquire('free')")?.is_some());
    Ok(())
}

#[lab_test]
fn a_command_that_cannot_be_run_is_told_as_a_shell_does(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let run = |program: &str| -> Result<Run> {
        let mut command = stage.command();
        command.args(["run", "job", "--", program]);
        Run::start({
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command
        })
    };
    let ended = run("/no/such/program")?.ends_with(127)?;
    ensure!(ended.stderr.contains("/no/such/program"), "{ended:?}");
    run("/etc/passwd")?.ends_with(126)?;
    ensure!(!stage.is_held()?);
    stage.run("job", "kill -KILL $$")?.ends_with(128 + 9)?;
    ensure!(!stage.is_held()?);
    Ok(())
}

/// The database refuses each command, which says what would help.
fn all_are_refused(stage: &Stage, conninfo: &Conninfo, help: &str) -> Result<()> {
    let views = ["leases", "show job", "release job 1", "revoke job", "refusals", "status"];
    for arguments in ["run job -- echo ran"].iter().chain(&views) {
        let ended = stage.command_to(conninfo).args(arguments.split(' ')).output()?;
        let said = String::from_utf8_lossy(&ended.stderr);
        let is_told = ended.status.code() == Some(78) && said.contains(help);
        ensure!(is_told && ended.stdout.is_empty(), "{arguments}: {ended:?}");
    }
    Ok(())
}

#[lab_test]
fn a_database_that_is_away_is_told_from_one_that_refuses(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let nowhere = stage.conninfo().port(1);
    let ended = stage.run_to(&nowhere, "job", "echo ran")?.ends_with(69)?;
    ensure!(ended.stdout.is_empty() && ended.stderr.contains("refused"), "{ended:?}");
    // As a standby.
    let read_only = stage.conninfo().set("default_transaction_read_only", "on");
    let ended = stage.run_to(&read_only, "job", "echo ran")?.ends_with(69)?;
    ensure!(ended.stderr.contains("target_session_attrs=read-write"), "{ended:?}");
    stage.admin()?.run(&format!("SELECT fence_revoke('{}')", stage.role()))?;
    all_are_refused(&stage, &stage.conninfo(), "SELECT fence_grant('")?;
    let elsewhere = lab.bare_database()?;
    all_are_refused(&stage, &elsewhere.conninfo(), "is pg_fence created in this database?")?;
    let ended = stage.run("job --ttl 30s --grace 10s", "echo ran")?.ends_with(64)?;
    ensure!(ended.stderr.contains("--grace 10s does not fit"), "{ended:?}");
    Ok(())
}

#[lab_test]
fn signals_go_through(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let script = "trap 'echo $NAME; exit 5' USR1 TERM; echo $$ > $DIR/pid; \
                  while :; do sleep 0.05; done";
    for (name, signal) in [("one", Signal::SIGUSR1), ("two", Signal::SIGTERM)] {
        let run = stage.run("job", &format!("NAME={name}; {script}"))?;
        stage.pid("pid")?;
        process::signal(run.supervisor(), signal)?;
        let ended = run.ends_with(5)?;
        ensure!(ended.stdout == format!("{name}\n"), "{ended:?}");
        std::fs::remove_file(stage.dir().join("pid"))?;
    }
    let run = stage.run("job", "echo $$ > $DIR/pid; exec sleep 600")?;
    stage.pid("pid")?;
    process::signal(run.supervisor(), Signal::SIGTERM)?;
    run.ends_with(128 + 15)?;
    ensure!(!stage.is_held()?);
    Ok(())
}

#[lab_test]
fn one_that_waits_leaves_the_line_when_it_is_told_to_end(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let token = stage.admin()?.acquire("job", "1 h")?;
    for how in [Signal::SIGTERM, Signal::SIGKILL] {
        let run = stage.run("job --wait 1h", "echo ran")?;
        let keeper = run.keeper()?;
        stage.wait_for_line(1)?;
        process::signal(run.supervisor(), how)?;
        match how {
            Signal::SIGTERM => run.ends_with(128 + 15).map(drop)?,
            _ => run.ends_killed()?,
        }
        stage.wait_for_line(0)?;
        is_gone(keeper)?;
    }
    stage.admin()?.run(&format!("SELECT lease_release('job', {token})"))?;
    ensure!(stage.admin()?.token("SELECT lease_acquire('job')")?.is_some());
    Ok(())
}

/// A reader of cron's mail wants to know it, too.
#[lab_test]
fn who_has_a_lease_that_is_taken_is_said(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let mut holder = stage.admin()?;
    let token = holder.granted("SELECT lease_acquire('job', 'web-3', '2 h')")?;
    let said =
        |options: &str| -> Result<String> { Ok(stage.run(options, "true")?.ends_with(75)?.stderr) };
    let taken = said("job")?;
    ensure!(taken.contains("job is taken: held by web-3, for "), "{taken}");
    let taken = said("other job --wait 500ms")?;
    ensure!(taken.contains("other, job is taken: held by web-3"), "{taken}");
    ensure!(said("job --quiet")?.is_empty());
    // Nobody has it, and an open transaction keeps it all the same.
    holder.run(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
    stage.revoke()?;
    let taken = said("job")?;
    ensure!(taken.contains(&format!("pid {}", holder.pid())), "{taken}");
    Ok(())
}

#[lab_test]
fn a_command_can_take_too_long(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let ended = stage
        .run("job --at-most 1s --grace 0s", "trap '' TERM; sleep 600; echo $?")?
        .ends_with(124)?;
    ensure!(ended.stderr.contains("--at-most") && !stage.is_held()?, "{ended:?}");
    Ok(())
}

#[lab_test]
fn a_lease_can_outlast_the_command(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    stage.run("job --at-least 1h", "true")?.ends_with(0)?;
    let left = "SELECT remaining BETWEEN '50 min' AND '1 h' AND metadata = '{\"at_least\": 3600}' \
                   AND abs(extract(epoch FROM expires_at - acquired_at) - 3600) < 3 \
                  FROM lease_info('job')";
    ensure!(stage.is_held()? && stage.admin()?.one::<bool>(left, &[])?);
    stage.run("a b --at-least 1h", "true")?.ends_with(0)?;
    stage.run("b", "true")?.ends_with(75)?;
    // One that took longer gives it back at once.
    stage.run("other --at-least 100ms", "sleep 0.3")?.ends_with(0)?;
    ensure!(stage.admin()?.token("SELECT lease_acquire('other')")?.is_some());
    Ok(())
}

#[lab_test]
fn it_waits_for_the_lease_and_for_the_database(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let stage = Stage::on(lab, &cluster)?;
    cluster.stop(pg_test::Shutdown::Fast)?;
    let run = stage.run("job --wait 5m", "psql -qXc \"UPDATE work SET value = 'A1'\"")?;
    pause(2);
    cluster.start()?;
    let ended = run.ends_with(0)?;
    ensure!(ended.stderr.contains("tried again") && stage.written()? == ["A1"], "{ended:?}");
    // And through a restart while it stands in line.
    let token = stage.admin()?.acquire("job", "1 h")?;
    let mut run = stage.run("job --wait 5m", "psql -qXc \"UPDATE work SET value = 'A2'\"")?;
    pause(1);
    cluster.restart()?;
    ensure!(!run.has_ended(), "it has given up");
    stage.admin()?.run(&format!("SELECT lease_release('job', {token})"))?;
    run.ends_with(0)?;
    ensure!(stage.written()? == ["A1", "A2"]);
    Ok(())
}
