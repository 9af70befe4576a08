//! A database with a bound table, and runs of the command against it.

use crate::clients::fixture::NotReady;
use crate::clients::languages::rust;
use crate::clients::scenario_servers::{self, TABLES};
use crate::clients::tcp_proxy::TcpProxy;
use crate::process::{self, PATIENCE, wait_until};
use crate::skipped::left_out;
use crate::stall_detector;
use crate::{Calls, Cluster, Conninfo, Database, Harness, Session};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// Shell functions for all scripts.
const WORDS: &str = "write() { psql -qXc \"UPDATE work SET value = '$1'\"; }; \
                     ready() { echo $$ > $DIR/pid; }; \
                     await() { until [ -e $DIR/$1 ]; do sleep 0.05; done; }; \
                     for_ever() { while :; do sleep 0.1; done; };";

/// Writes once, reports its pid, and runs forever; so does a child in a session of its own. Both ignore TERM.
pub const STUBBORN: &str = "trap '' TERM HUP INT; \
    setsid sh -c 'echo $$ > $DIR/escaped; while :; do sleep 0.1; done' & write A1; ready; for_ever";

/// The program, which a fresh machine has not built.
pub fn program() -> Result<PathBuf> {
    match rust::command()? {
        Some(program) => Ok(program),
        None => left_out("`cargo run -- clients rust` brings what it needs"),
    }
}

/// The settings of a scenario.
pub struct Scene<'a> {
    harness: &'a Harness,
    program: PathBuf,
    /// The factor by which all durations in the options are multiplied.
    pace: u32,
    /// Further options of all runs.
    options: &'static str,
}

impl<'a> Scene<'a> {
    pub fn harness(&self) -> &'a Harness {
        self.harness
    }

    /// A fixture on the shared server.
    pub fn fixture(&self) -> Result<CommandFixture<'a>> {
        self.fixture_on(self.harness.cluster())
    }

    pub fn fixture_on(&self, cluster: &Cluster) -> Result<CommandFixture<'a>> {
        let fixture =
            CommandFixture::with(self.harness, cluster, self.program.clone()).context(NotReady)?;
        Ok(CommandFixture { pace: self.pace, options: self.options, ..fixture })
    }

    /// A duration at this pace.
    pub fn time(&self, time: Duration) -> Duration {
        time * self.pace
    }
}

/// Plays a scenario with this build of the command. If it fails on a machine that stalled, it is played again more
/// slowly: what should have ended may not even have been scheduled.
pub fn play(
    harness: &Harness,
    program: &Path,
    scenario: impl Fn(&Scene) -> Result<()>,
) -> Result<()> {
    play_with("", harness, program, scenario)
}

/// Plays a scenario with further options for all runs.
pub fn play_with(
    options: &'static str,
    harness: &Harness,
    program: &Path,
    scenario: impl Fn(&Scene) -> Result<()>,
) -> Result<()> {
    let scene = |pace| Scene { harness, program: program.to_owned(), pace, options };
    stall_detector::at_some_pace(harness.rundir().path(), "the command", |pace| {
        scenario(&scene(pace))
    })
}

pub struct CommandFixture<'a> {
    harness: &'a Harness,
    /// The factor by which all durations in the options are multiplied.
    pace: u32,
    /// Further options of all runs.
    options: &'static str,
    program: PathBuf,
    database: Database,
    role: String,
    dir: PathBuf,
}

impl<'a> CommandFixture<'a> {
    /// A fixture on the shared server.
    pub fn new(harness: &'a Harness) -> Result<CommandFixture<'a>> {
        CommandFixture::on(harness, harness.cluster())
    }

    pub fn on(harness: &'a Harness, cluster: &Cluster) -> Result<CommandFixture<'a>> {
        CommandFixture::with(harness, cluster, program()?)
    }

    /// A fixture with another build of the command.
    pub fn with(
        harness: &'a Harness,
        cluster: &Cluster,
        program: PathBuf,
    ) -> Result<CommandFixture<'a>> {
        let database = Database::with_extension(cluster.conninfo("postgres"))?;
        let role = database.role("runner")?;
        let mut admin = database.connect()?;
        admin.run(TABLES)?;
        admin.run(&format!(
            "SELECT fence_grant('{role}'); GRANT SELECT, UPDATE ON work TO {role}"
        ))?;
        let dir = harness.install_dir().new_dir("command")?;
        Ok(CommandFixture { harness, pace: 1, options: "", program, database, role, dir })
    }

    pub fn role(&self) -> &str {
        &self.role
    }

    pub fn database(&self) -> &Database {
        &self.database
    }

    /// The connection of the role that runs commands.
    pub fn conninfo(&self) -> Conninfo {
        self.database.conninfo().user(&self.role)
    }

    pub fn admin(&self) -> Result<Session> {
        self.database.connect()
    }

    /// A directory for the test's files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `pg_fence` with this connection. Its child processes find psql and the same server in their environment.
    pub fn command_to(&self, conninfo: &Conninfo) -> Command {
        let mut command = self.harness.rundir().command(&self.program);
        let path = std::env::var("PATH").unwrap_or_default();
        let place = self.database.conninfo();
        let (port, dbname) = place.place();
        command
            .arg("--dbname")
            .arg(conninfo.to_string())
            .env("PATH", format!("{}:{path}", self.harness.install_dir().bin_dir().display()))
            .envs([("PGHOST", "127.0.0.1"), ("PGUSER", &self.role), ("PGDATABASE", dbname)])
            .env("PGPORT", port.to_string())
            .env("DIR", &self.dir)
            .env_remove("PGOPTIONS")
            .stdin(Stdio::null());
        command
    }

    pub fn command(&self) -> Command {
        self.command_to(&self.conninfo())
    }

    /// Starts `pg_fence run OPTIONS -- sh -c SCRIPT`.
    pub fn run(&self, options: &str, script: &str) -> Result<Run> {
        self.run_to(&self.conninfo(), options, script)
    }

    /// Starts a run through a network link.
    pub fn run_by(&self, link: &TcpProxy, options: &str, script: &str) -> Result<Run> {
        self.run_to(&self.conninfo().port(link.port()), options, script)
    }

    pub fn run_to(&self, conninfo: &Conninfo, options: &str, script: &str) -> Result<Run> {
        let mut command = self.command_to(conninfo);
        command
            .arg("run")
            .args(self.options.split_whitespace())
            .args(options.split_whitespace().map(|word| slowed_down(word, self.pace)));
        command.args(["--", "sh", "-c", &format!("{WORDS}{script}")]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Run::start(command)
    }

    /// Starts [`STUBBORN`], and waits until it has written.
    pub fn stubborn(&self, options: &str) -> Result<Run> {
        self.are_there(self.run(options, STUBBORN)?)
    }

    /// Starts [`STUBBORN`] through a network link.
    pub fn stubborn_by(&self, link: &TcpProxy, options: &str) -> Result<Run> {
        self.are_there(self.run_by(link, options, STUBBORN)?)
    }

    fn are_there(&self, run: Run) -> Result<Run> {
        self.pid("pid")?;
        self.pid("escaped").map(|_| run)
    }

    /// Checks that [`STUBBORN`] has ended.
    pub fn has_ended(&self) -> Result<()> {
        has_ended(self.pid("pid")?)?;
        has_ended(self.pid("escaped")?)
    }

    /// Checks that another session gets the lease, and that [`STUBBORN`] has ended by then.
    pub fn is_outlived(&self) -> Result<()> {
        self.taken_over()?;
        self.has_ended()
    }

    /// Waits until a script has made a file of that name, and returns its content.
    pub fn file(&self, name: &str) -> Result<String> {
        let path = self.dir.join(name);
        let mut text = String::new();
        wait_until(&format!("{name} is there"), PATIENCE, || {
            text = fs::read_to_string(&path).unwrap_or_default();
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

    /// All values that landed, in order; tokens must never decrease.
    pub fn written(&self) -> Result<Vec<String>> {
        scenario_servers::written(&mut self.admin()?)
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

    pub fn wait_for_renewal(&self) -> Result<()> {
        self.wait_for_renewals(1)
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

    /// Checks that exactly these values have landed.
    pub fn has_written(&self, values: &[&str]) -> Result<()> {
        let written = self.written()?;
        ensure!(written == values, "what landed: {written:?}");
        Ok(())
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
pub struct Run {
    child: Child,
}

/// The result of a run.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Checks that these words are in its standard error.
    pub fn says(&self, words: &str) -> Result<()> {
        ensure!(self.stderr.contains(words), "not {words:?}, but {self:?}");
        Ok(())
    }
}

impl Run {
    pub fn start(mut command: Command) -> Result<Run> {
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        Ok(Run { child })
    }

    pub fn supervisor(&self) -> i32 {
        self.child.id() as i32
    }

    /// The pid of the heartbeat process.
    pub fn keeper(&self) -> Result<i32> {
        let mut found = None;
        wait_until("there is a keeper", PATIENCE, || {
            let children = process::children_of(self.supervisor());
            found = children.into_iter().find(|pid| process::title(*pid).contains("keep-lease"));
            found.is_some()
        })?;
        found.context("no keeper")
    }

    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for the end of the run.
    pub fn ended(mut self) -> Result<Ended> {
        let status = process::ended(&mut self.child)?;
        let mut ended = Ended { status, stdout: String::new(), stderr: String::new() };
        // A process left behind in violation of the requirements would keep these open.
        if let Some(mut stdout) = self.child.stdout.take() {
            stdout.read_to_string(&mut ended.stdout)?;
        }
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut ended.stderr)?;
        }
        Ok(ended)
    }

    pub fn ends_with(self, code: i32) -> Result<Ended> {
        let ended = self.ended()?;
        ensure!(ended.code() == Some(code), "not {code}, but {ended:?}");
        Ok(ended)
    }

    pub fn ends_killed(self) -> Result<()> {
        let ended = self.ended()?;
        ensure!(ended.status.signal() == Some(9), "{ended:?}");
        Ok(())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Stops a process, and waits until it is stopped.
pub fn freeze(pid: i32) -> Result<()> {
    process::freeze_living(pid)
}

/// Stops several processes, one after the other.
pub fn freeze_all<const N: usize>(pids: [i32; N]) -> Result<()> {
    pids.into_iter().try_for_each(freeze)
}

pub fn thaw(pid: i32) -> Result<()> {
    process::resume(pid)
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

/// Waits to see whether something forbidden happens.
pub fn pause(seconds: u64) {
    std::thread::sleep(Duration::from_secs(seconds));
}

/// Returns true if processes may create cgroups here, with which the kernel can kill.
pub fn cgroups_are_at_hand() -> bool {
    let (Ok(mounts), Ok(own)) =
        (fs::read_to_string("/proc/self/mounts"), fs::read_to_string("/proc/self/cgroup"))
    else {
        return false;
    };
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"));
    let mount = mount.and_then(|line| line.split(' ').nth(1));
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    let (Some(mount), Some(own)) = (mount, own) else { return false };
    let probe = Path::new(mount).join(own).join(format!("probe-{}", std::process::id()));
    let made = fs::create_dir(&probe).is_ok();
    let kills = made && probe.join("cgroup.kill").exists();
    let _ = fs::remove_dir(&probe);
    kills
}
