//! A database with a bound table, and runs of the command against it.

use crate::clients::cable::Cable;
use crate::clients::languages::rust;
use crate::clients::servers::{self, TABLES};
use crate::clients::stage::NotReady;
use crate::process::{self, wait_until, PATIENCE};
use crate::standstill;
use crate::test_case::left_out;
use crate::{Calls, Cluster, Conninfo, Database, Lab, Session};
use anyhow::{ensure, Context, Result};
use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// The words of all scripts.
const WORDS: &str = "write() { psql -qXc \"UPDATE work SET value = '$1'\"; }; \
                     ready() { echo $$ > $DIR/pid; }; \
                     await() { until [ -e $DIR/$1 ]; do sleep 0.05; done; }; \
                     for_ever() { while :; do sleep 0.1; done; };";

/// Writes once, says who it is, and goes on for ever. So does one child, in a session of its own. Neither ends on TERM.
pub const STUBBORN: &str = "trap '' TERM HUP INT; \
    setsid sh -c 'echo $$ > $DIR/escaped; while :; do sleep 0.1; done' & write A1; ready; for_ever";

/// A program that a fresh machine has not built.
pub fn program() -> Result<PathBuf> {
    match rust::command()? {
        Some(program) => Ok(program),
        None => left_out("`cargo run -- clients rust` brings what it needs"),
    }
}

/// The stage of a scenario.
pub struct Scene<'a> {
    lab: &'a Lab,
    program: PathBuf,
    /// How many times longer all times of the options are.
    pace: u32,
    /// Further options of all runs.
    options: &'static str,
}

impl<'a> Scene<'a> {
    pub fn lab(&self) -> &'a Lab {
        self.lab
    }

    /// On the server that all share.
    pub fn stage(&self) -> Result<Stage<'a>> {
        self.stage_on(self.lab.cluster())
    }

    pub fn stage_on(&self, cluster: &Cluster) -> Result<Stage<'a>> {
        let stage = Stage::with(self.lab, cluster, self.program.clone()).context(NotReady)?;
        Ok(Stage { pace: self.pace, options: self.options, ..stage })
    }

    /// So long at this pace.
    pub fn time(&self, time: Duration) -> Duration {
        time * self.pace
    }
}

/// Plays a scenario with that build of the command. A run that fails on a machine that stood still is played again, more
/// slowly: what should have been ended by then may not even have been looked at.
pub fn play(lab: &Lab, program: &Path, scenario: impl Fn(&Scene) -> Result<()>) -> Result<()> {
    play_with("", lab, program, scenario)
}

/// The same, with further options of all runs.
pub fn play_with(
    options: &'static str,
    lab: &Lab,
    program: &Path,
    scenario: impl Fn(&Scene) -> Result<()>,
) -> Result<()> {
    let scene = |pace| Scene { lab, program: program.to_owned(), pace, options };
    standstill::at_some_pace(lab.rundir().path(), "the command", |pace| scenario(&scene(pace)))
}

pub struct Stage<'a> {
    lab: &'a Lab,
    /// How many times longer all times of the options are.
    pace: u32,
    /// Further options of all runs.
    options: &'static str,
    program: PathBuf,
    database: Database,
    role: String,
    dir: PathBuf,
}

impl<'a> Stage<'a> {
    /// On the server that all share.
    pub fn new(lab: &'a Lab) -> Result<Stage<'a>> {
        Stage::on(lab, lab.cluster())
    }

    pub fn on(lab: &'a Lab, cluster: &Cluster) -> Result<Stage<'a>> {
        Stage::with(lab, cluster, program()?)
    }

    /// With another build of the command.
    pub fn with(lab: &'a Lab, cluster: &Cluster, program: PathBuf) -> Result<Stage<'a>> {
        let database = Database::with_extension(cluster.conninfo("postgres"))?;
        let role = database.role("runner")?;
        let mut admin = database.connect()?;
        admin.run(TABLES)?;
        admin.run(&format!(
            "SELECT fence_grant('{role}'); GRANT SELECT, UPDATE ON work TO {role}"
        ))?;
        let dir = lab.prefix().new_dir("command")?;
        Ok(Stage { lab, pace: 1, options: "", program, database, role, dir })
    }

    pub fn role(&self) -> &str {
        &self.role
    }

    pub fn database(&self) -> &Database {
        &self.database
    }

    /// As the role that runs commands.
    pub fn conninfo(&self) -> Conninfo {
        self.database.conninfo().user(&self.role)
    }

    pub fn admin(&self) -> Result<Session> {
        self.database.connect()
    }

    /// A directory for a test's files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `pg_fence`, connecting there; what it starts finds psql and the same server in its environment.
    pub fn command_to(&self, conninfo: &Conninfo) -> Command {
        let mut command = self.lab.rundir().command(&self.program);
        let path = std::env::var("PATH").unwrap_or_default();
        let place = self.database.conninfo();
        let (port, dbname) = place.place();
        command
            .arg("--dbname")
            .arg(conninfo.to_string())
            .env("PATH", format!("{}:{path}", self.lab.prefix().bin_dir().display()))
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

    /// The same through a cable.
    pub fn run_by(&self, cable: &Cable, options: &str, script: &str) -> Result<Run> {
        self.run_to(&self.conninfo().port(cable.port()), options, script)
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

    /// The same through a cable.
    pub fn stubborn_by(&self, cable: &Cable, options: &str) -> Result<Run> {
        self.are_there(self.run_by(cable, options, STUBBORN)?)
    }

    fn are_there(&self, run: Run) -> Result<Run> {
        self.pid("pid")?;
        self.pid("escaped").map(|_| run)
    }

    /// [`STUBBORN`] has ended by now.
    pub fn has_ended(&self) -> Result<()> {
        has_ended(self.pid("pid")?)?;
        has_ended(self.pid("escaped")?)
    }

    /// Somebody else gets the lease, and by then [`STUBBORN`] has ended.
    pub fn is_outlived(&self) -> Result<()> {
        self.taken_over()?;
        self.has_ended()
    }

    /// Waits until a script has made a file of that name, and returns what is in it.
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

    /// Has a script go on that waits for this file.
    pub fn touch(&self, name: &str) -> Result<()> {
        Ok(fs::write(self.dir.join(name), "\n")?)
    }

    /// All that landed, in order; tokens must never go back.
    pub fn written(&self) -> Result<Vec<String>> {
        servers::written(&mut self.admin()?)
    }

    /// Somebody else's acquire, which waits for as long as it takes.
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

    /// How often the grant has been renewed.
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

    /// Somebody else gets the lease, and writes.
    pub fn is_written_by_another(&self) -> Result<()> {
        let (mut other, token) = self.taken_over()?;
        other.run(&format!("UPDATE work SET value = 'B1', fence = {token}"))
    }

    /// All that landed is this.
    pub fn has_written(&self, values: &[&str]) -> Result<()> {
        let written = self.written()?;
        ensure!(written == values, "what landed: {written:?}");
        Ok(())
    }

    pub fn revoke(&self) -> Result<()> {
        self.admin()?.one::<Option<i64>>("SELECT lease_revoke('job')", &[]).map(drop)
    }
}

/// `3s`, three times slower, is `9s`. Any other word is as it was.
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

/// The outcome of a run.
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

    /// It has said so to its standard error.
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

    /// The process that keeps the lease.
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

    /// Waits for its end.
    pub fn ended(mut self) -> Result<Ended> {
        let status = process::ended(&mut self.child)?;
        let mut ended = Ended { status, stdout: String::new(), stderr: String::new() };
        // A process that the command has left behind, against all promises, would keep these open.
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

/// Stops a process, and waits for that.
pub fn freeze(pid: i32) -> Result<()> {
    process::freeze_living(pid)
}

/// The same of several, one after the other.
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

/// It has ended by now: somebody else has the lease.
pub fn has_ended(pid: i32) -> Result<()> {
    ensure!(!process::is_alive(pid), "{pid} ({}) still runs", process::title(pid));
    Ok(())
}

/// How long to look whether something happens that must not.
pub fn pause(seconds: u64) {
    std::thread::sleep(Duration::from_secs(seconds));
}

/// Whether a process may make a cgroup here, by which the kernel can kill.
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
