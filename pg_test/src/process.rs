//! Processes of this machine, seen through `/proc`, and the user that runs servers.

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User, geteuid};
use std::fs;
use std::ops::{Deref, DerefMut};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Set in the environment of every process of a run, so that the watchdog finds them all.
pub const RUNDIR_VARIABLE: &str = "PG_FENCE_RUNDIR";

/// How long a test waits for an expected event. It is no requirement on speed: it turns an endless wait into an error.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the user that owns a server's files and runs it. `None` means this process's own user.
///
/// PostgreSQL refuses to run as root, so root runs it as `postgres`, a user that Debian's package adds.
pub fn server_user() -> Result<Option<User>> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let user = User::from_name("postgres")?.context("there is no user `postgres`")?;
    Ok(Some(user))
}

/// Makes `command` run as the server's user, in its own process group.
pub fn as_server_user(command: &mut Command) -> Result<&mut Command> {
    if let Some(user) = server_user()? {
        // With a uid given and root calling, std also drops the supplementary groups.
        command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    Ok(command.current_dir("/").process_group(0))
}

/// Runs `command` to its end and returns its standard output. If it fails, the error shows both output streams.
pub fn output_of(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {shown}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{shown}: {}\n{stderr}{stdout}", output.status);
    }
    Ok(stdout)
}

/// Sends a signal to one process.
pub fn signal(pid: i32, signal: Signal) -> Result<()> {
    kill(Pid::from_raw(pid), signal).with_context(|| format!("cannot send {signal} to {pid}"))
}

/// Freezes a process (SIGSTOP) and waits until it is stopped. Returns false if it has died.
///
/// A child that ends under a frozen parent stays a zombie: it can never be stopped, so it is not waited for.
pub fn freeze(pid: i32) -> Result<bool> {
    match kill(Pid::from_raw(pid), Signal::SIGSTOP) {
        Err(Errno::ESRCH) => return Ok(false),
        sent => sent.with_context(|| format!("cannot freeze {pid}"))?,
    }
    wait_until("the process is frozen", PATIENCE, || is_stopped(pid) || !is_alive(pid))?;
    Ok(is_alive(pid))
}

/// Freezes a process that must be alive.
pub fn freeze_living(pid: i32) -> Result<()> {
    ensure!(freeze(pid)?, "process {pid} is to be frozen, and has died");
    Ok(())
}

/// Resumes a frozen process.
pub fn resume(pid: i32) -> Result<()> {
    signal(pid, Signal::SIGCONT)
}

/// A process, as `/proc/<pid>/stat` describes it.
struct Stat {
    state: char,
    parent: i32,
    /// The CPU time of all its threads, ended ones included, in the kernel's ticks.
    ran: u64,
    started: u64,
}

fn stat(pid: i32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name is in parentheses and may contain any character, so the fields begin after the last
    // parenthesis.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some(Stat {
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        ran: fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?,
        started: fields.get(19)?.parse().ok()?,
    })
}

/// Returns true if the process exists and is not a zombie.
pub fn is_alive(pid: i32) -> bool {
    stat(pid).is_some_and(|stat| stat.state != 'Z' && stat.state != 'X')
}

/// Returns true if the process is stopped by a signal.
pub fn is_stopped(pid: i32) -> bool {
    stat(pid).is_some_and(|stat| stat.state == 'T')
}

/// Returns the CPU time of a process. The kernel reports it in hundredths of a second.
pub fn cpu_time(pid: i32) -> Duration {
    Duration::from_millis(stat(pid).map_or(0, |stat| stat.ran * 10))
}

/// Returns when the process started, in the kernel's ticks. Pids are reused: the pid and this time together identify a
/// process.
pub fn started_at(pid: i32) -> Option<u64> {
    stat(pid).map(|stat| stat.started)
}

/// Returns the title of a process, as `ps` shows it.
pub fn title(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
    text.trim().to_owned()
}

fn all_pids() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Returns the living children of a process.
pub fn children_of(parent: i32) -> Vec<i32> {
    all_pids()
        .into_iter()
        .filter(|&pid| stat(pid).is_some_and(|stat| stat.parent == parent && stat.state != 'Z'))
        .collect()
}

/// Returns a process and all its descendants, each after its parent.
pub fn family_of(pid: i32) -> Vec<i32> {
    let mut family = vec![pid];
    let mut at = 0;
    while at < family.len() {
        family.extend(children_of(family[at]));
        at += 1;
    }
    family
}

/// Returns the living processes of a run: those that execute a program below its directory, and those with it in
/// [`RUNDIR_VARIABLE`].
pub fn belonging_to(rundir: &Path) -> Vec<i32> {
    let marker = format!("{RUNDIR_VARIABLE}={}", rundir.display());
    let own = std::process::id() as i32;
    all_pids()
        .into_iter()
        .filter(|&pid| pid != own && is_alive(pid))
        .filter(|pid| {
            let below = fs::read_link(format!("/proc/{pid}/exe"))
                .is_ok_and(|program| program.starts_with(rundir));
            let environment = || fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            below || environment().split(|&byte| byte == 0).any(|entry| entry == marker.as_bytes())
        })
        .collect()
}

/// Kills every process of a run and waits until they are gone.
pub fn kill_all_of(rundir: &Path) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let pids = belonging_to(rundir);
        if pids.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in pids {
            let _ = signal(pid, Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A child process, which is killed with this value.
pub struct ChildProcess(Child);

impl ChildProcess {
    pub fn start(command: &mut Command) -> Result<ChildProcess> {
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        Ok(ChildProcess(child))
    }

    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    /// Waits until it has ended.
    pub fn ended(&mut self) -> Result<ExitStatus> {
        let mut status = None;
        wait_until(&format!("the process {} ends", self.pid()), PATIENCE, || {
            status = self.try_wait().ok().flatten();
            status.is_some()
        })?;
        status.context("it runs on")
    }

    /// Kills it and waits for its end.
    pub fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

impl Deref for ChildProcess {
    type Target = Child;
    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for ChildProcess {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

/// Calls `answer` repeatedly until it returns true. After `limit` it fails with an error that names `what`.
pub fn wait_until(what: &str, limit: Duration, mut answer: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !answer() {
        if Instant::now() > deadline {
            bail!("waited {limit:?} in vain: {what}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_died_is_not_waited_for() -> Result<()> {
        let mut zombie = Command::new("true").spawn()?;
        let pid = zombie.id() as i32;
        wait_until("it has ended", PATIENCE, || !is_alive(pid))?;
        assert!(!freeze(pid)?, "nobody has waited for it yet: it is a zombie");
        assert!(freeze_living(pid).is_err());
        zombie.wait()?;
        assert!(!freeze(pid)?, "it is gone");
        Ok(())
    }

    #[test]
    fn a_living_process_is_frozen() -> Result<()> {
        let mut child = Command::new("sleep").arg("600").spawn()?;
        let pid = child.id() as i32;
        let frozen = freeze(pid);
        let is_stopped = is_stopped(pid);
        child.kill()?;
        child.wait()?;
        assert!(frozen? && is_stopped);
        Ok(())
    }
}
