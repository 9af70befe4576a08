//! A database with a bound table, and runs of the command against it.

use crate::clients::fixture::NotReady;
use crate::clients::languages::rust;
use crate::clients::scenario_servers::ScenarioServers;
use crate::clients::tcp_proxy::TcpProxy;
use crate::process::{self, ChildProcess, PATIENCE, output_of, wait_until};
use crate::skipped::left_out;
use crate::{Calls, Harness, Session, stall_detector};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

pub use crate::process::{freeze_living as freeze, resume as thaw};

/// Shell functions for all scripts.
const WORDS: &str = "write() { psql -qXc \"UPDATE work SET value = '$1'\"; }; \
                     ready() { echo $$ > $DIR/pid; }; \
                     await() { until [ -e $DIR/$1 ]; do sleep 0.05; done; }; \
                     for_ever() { while :; do sleep 0.1; done; };";

/// Writes once, reports its pid, and runs forever; so does a child in a session of its own. Both ignore TERM.
const STUBBORN: &str = "trap '' TERM HUP INT; \
    setsid sh -c 'echo $$ > $DIR/escaped; while :; do sleep 0.1; done' & write A1; ready; for_ever";

/// The program, for whose first build a test has no time.
pub fn program() -> Result<PathBuf> {
    if !(rust::LANGUAGE.is_there)() {
        return left_out("`cargo run -- clients rust` brings what it needs");
    }
    rust::command()
}

/// Plays a scenario with this build of the command, [this need](ScenarioServers::start) and further options of all
/// runs. If it fails on a machine that stalled, it is played again more slowly: what should have ended may not even
/// have been scheduled.
pub fn play(
    harness: &Harness,
    program: &Path,
    need: Option<&str>,
    options: &'static str,
    scenario: impl Fn(&mut CommandFixture) -> Result<()>,
) -> Result<()> {
    stall_detector::at_some_pace(harness.rundir().path(), "the command", |pace| {
        let servers = ScenarioServers::start(harness, need).context(NotReady)?;
        let fixture = CommandFixture::with(servers, program.to_owned()).context(NotReady)?;
        scenario(&mut CommandFixture { pace, options, ..fixture })
    })
}

/// The servers, and what is needed for runs of the command.
pub struct CommandFixture<'a> {
    pub servers: ScenarioServers<'a>,
    /// The network link by which runs reach the server.
    pub link: TcpProxy,
    /// The factor by which all durations are multiplied.
    pub pace: u32,
    /// Further options of all runs.
    options: &'static str,
    program: PathBuf,
    /// A directory for the test's files.
    pub dir: PathBuf,
}

impl<'a> CommandFixture<'a> {
    /// A fixture on the shared server.
    pub fn new(harness: &'a Harness) -> Result<CommandFixture<'a>> {
        CommandFixture::with(ScenarioServers::on(harness, None)?, program()?)
    }

    /// A fixture with these servers and this build of the command.
    pub fn with(servers: ScenarioServers<'a>, program: PathBuf) -> Result<CommandFixture<'a>> {
        let link = TcpProxy::start(servers.port())?;
        let dir = servers.harness.install_dir().new_dir("command")?;
        Ok(CommandFixture { servers, link, pace: 1, options: "", program, dir })
    }

    pub fn admin(&self) -> Result<Session> {
        self.servers.admin()
    }

    /// `pg_fence`, connected by the network link.
    pub fn command(&self) -> Command {
        let mut command = self.servers.harness.rundir().command(&self.program);
        let conninfo = self.servers.database.conninfo().user(&self.servers.role);
        self.surround(&mut command).arg("--dbname");
        command.arg(conninfo.port(self.link.port()).to_string());
        command
    }

    /// Child processes find the command, psql and the server in their environment.
    pub fn surround<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let servers = &self.servers;
        command
            .envs([("PGHOST", "127.0.0.1"), ("PGPORT", &servers.cluster().port().to_string())])
            .envs([("PGUSER", &*servers.role), ("PGDATABASE", servers.database.name())])
            .env("PATH", servers.harness.install_dir().path(self.program.parent()))
            .env("DIR", &self.dir)
            .env_remove("PGOPTIONS")
            .stdin(Stdio::null())
    }

    /// Starts `pg_fence run OPTIONS -- sh -c SCRIPT`.
    pub fn run(&self, options: &str, script: &str) -> Result<Run> {
        let mut command = self.command();
        let slower = options.split_whitespace().map(|word| slowed_down(word, self.pace));
        command.arg("run").args(self.options.split_whitespace()).args(slower);
        command.args(["--", "sh", "-c", &format!("{WORDS}{script}")]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Run::start(command)
    }

    /// Starts a run, and waits until its script is ready.
    pub fn run_ready(&self, options: &str, script: &str) -> Result<Run> {
        let run = self.run(options, script)?;
        self.pid("pid").map(|_| run)
    }

    /// Starts `STUBBORN`, and waits until it has written.
    pub fn stubborn(&self, options: &str) -> Result<Run> {
        let run = self.run_ready(options, STUBBORN)?;
        self.pid("escaped").map(|_| run)
    }

    /// Checks that `STUBBORN` has ended.
    pub fn has_ended(&self) -> Result<()> {
        has_ended(self.pid("pid")?)?;
        has_ended(self.pid("escaped")?)
    }

    /// Checks that another session gets the lease, and that `STUBBORN` has ended by then.
    pub fn is_outlived(&self) -> Result<()> {
        self.taken_over()?;
        self.has_ended()
    }

    /// Waits until a script has made a file of that name, and returns its content.
    pub fn file(&self, name: &str) -> Result<String> {
        let mut text = String::new();
        wait_until(&format!("{name} is there"), PATIENCE, || {
            text = fs::read_to_string(self.dir.join(name)).unwrap_or_default();
            text.ends_with('\n')
        })?;
        Ok(text.trim().to_owned())
    }

    /// The pid that a script has written into a file.
    pub fn pid(&self, name: &str) -> Result<i32> {
        Ok(self.file(name)?.parse()?)
    }

    /// Creates the file for which a script waits.
    pub fn touch(&self, name: &str) -> Result<()> {
        Ok(fs::write(self.dir.join(name), "\n")?)
    }

    /// Acquires the lease in another session, waiting as long as necessary.
    pub fn taken_over(&self) -> Result<(Session, i64)> {
        let mut other = self.admin()?;
        let token =
            other.granted("SELECT lease_acquire('job', 'other', '1 h', wait => '2 min')")?;
        Ok((other, token))
    }

    pub fn is_held(&self) -> Result<bool> {
        self.admin()?.one("SELECT EXISTS (SELECT FROM lease_info('job') WHERE state = 'held')", &[])
    }

    pub fn wait_until_free(&self) -> Result<()> {
        wait_until("the lease is free", PATIENCE, || !self.is_held().unwrap_or(true))
    }

    /// The number of renewals of the grant.
    pub fn renewals(&self) -> Result<i64> {
        self.admin()?.one("SELECT coalesce(max(renewals), 0)::bigint FROM lease_info('job')", &[])
    }

    pub fn wait_for_renewals(&self, more: i64) -> Result<()> {
        let wanted = self.renewals()? + more;
        wait_until("it is renewed", PATIENCE, || self.renewals().is_ok_and(|now| now >= wanted))
    }

    /// Checks that another session gets the lease and can write.
    pub fn is_written_by_another(&self) -> Result<()> {
        let (mut other, token) = self.taken_over()?;
        other.run(&format!("UPDATE work SET value = 'B1', fence = {token}"))
    }

    pub fn revoke(&self) -> Result<()> {
        self.admin()?.one::<Option<i64>>("SELECT lease_revoke('job')", &[]).map(drop)
    }
}

/// Multiplies a duration: `3s` becomes `9s`. Other words are unchanged.
fn slowed_down(word: &str, times: u32) -> String {
    let digits = word.chars().take_while(char::is_ascii_digit).count();
    match (word[..digits].parse::<u32>(), &word[digits..]) {
        (Ok(number), unit @ ("ms" | "s")) => format!("{}{unit}", number * times),
        _ => word.to_owned(),
    }
}

/// A run of the command.
pub struct Run(ChildProcess);

/// The result of a run.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Checks that these words are in its standard error.
    pub fn says(&self, words: &str) -> Result<()> {
        ensure!(self.stderr.contains(words), "not {words:?}, but {self:?}");
        Ok(())
    }
}

impl Run {
    pub fn start(mut command: Command) -> Result<Run> {
        Ok(Run(ChildProcess::start(&mut command)?))
    }

    pub fn supervisor(&self) -> i32 {
        self.0.pid()
    }

    /// The pid of the heartbeat process.
    pub fn renewer(&self) -> Result<i32> {
        let mut found = None;
        wait_until("there is a renewer", PATIENCE, || {
            let children = process::children_of(self.supervisor());
            found = children.into_iter().find(|pid| process::title(*pid).contains("renew-lease"));
            found.is_some()
        })?;
        found.context("no renewer")
    }

    /// Waits for the end of the run.
    pub fn ended(mut self) -> Result<Ended> {
        let status = self.0.ended()?;
        let mut ended = Ended { status, stdout: String::new(), stderr: String::new() };
        // A process left behind in violation of the requirements would keep these open.
        let (stdout, stderr) = (self.0.stdout.take(), self.0.stderr.take());
        stdout.context("no pipe")?.read_to_string(&mut ended.stdout)?;
        stderr.context("no pipe")?.read_to_string(&mut ended.stderr)?;
        Ok(ended)
    }

    pub fn ends_with(self, code: i32) -> Result<Ended> {
        let ended = self.ended()?;
        ensure!(ended.status.code() == Some(code), "not {code}, but {ended:?}");
        Ok(ended)
    }

    pub fn ends_killed(self) -> Result<()> {
        let ended = self.ended()?;
        ensure!(ended.status.signal() == Some(9), "{ended:?}");
        Ok(())
    }
}

pub fn kill(pid: i32) -> Result<()> {
    process::signal(pid, nix::sys::signal::Signal::SIGKILL)
}

pub fn is_gone(pid: i32) -> Result<()> {
    wait_until(&format!("{pid} is gone"), PATIENCE, || !process::is_alive(pid))
}

/// Checks that a process has ended, because another session has the lease.
pub fn has_ended(pid: i32) -> Result<()> {
    ensure!(!process::is_alive(pid), "{pid} ({}) still runs", process::title(pid));
    Ok(())
}

/// Leaves a test out if processes may not create cgroups here, with which the kernel can kill.
pub fn needs_cgroups() -> Result<()> {
    let probe = r#"mount=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/self/mounts)
        probe=$mount$(sed -n s/^0:://p /proc/self/cgroup)/probe-$$
        mkdir "$probe"; found=$(ls "$probe/cgroup.kill") || :; rmdir "$probe"; test "$found""#;
    let made = output_of(Command::new("sh").args(["-ec", probe]));
    made.map(drop).or_else(|_| left_out("no cgroup (version 2, Linux 5.14) can be made here"))
}
