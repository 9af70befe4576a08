//! Scenarios without disturbances. `command/scenarios.script` has more.

use super::fixture::{CommandFixture, has_ended, is_gone};
use crate::process::{PATIENCE, output_of, wait_until};
use anyhow::{Context, Result, ensure};
use std::process::Command;

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

/// The number of attempts to become a daemon: one in three was once missed.
const DAEMONS: usize = 20;

/// All processes of the program inherit the lock on a file, which shows when the last of them is gone.
const LOCKS: &str = "exec 9> $DIR/alive; flock -s 9; exec > /dev/null 2>&1;";

/// Each process ends once it has started the next one, in a session of its own.
const FORKS: &str =
    "perl -MPOSIX=setsid -e '$until = time + 60; while (time < $until) { exit if fork; setsid }' &";

pub fn daemons(fixture: &mut CommandFixture) -> Result<()> {
    for number in 0..DAEMONS {
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

/// The command gets HUP, as without `pg_fence run`.
pub fn terminal_gone(fixture: &mut CommandFixture) -> Result<()> {
    let line = "exec $RUN job --ttl 10m -- sh -c 'echo $$ > $DIR/pid; exec sleep 600'";
    let terminal = super::terminal::Terminal::start(fixture, line)?;
    let pid = fixture.pid("pid")?;
    terminal.is_torn_away()?;
    is_gone(pid)?;
    fixture.wait_until_free()
}
