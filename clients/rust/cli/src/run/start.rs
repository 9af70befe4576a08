//! The last steps of a new process before it becomes the command.

use super::cgroup::Cgroup;
use super::terminal::Terminal;
use crate::failure::{Failure, Result, status};
use clap::Args;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{close, getpid, getppid};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The signals that a supervisor handles; they are blocked in the processes that it starts.
pub const HANDLED: &[Signal] = &[
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGCONT,
    Signal::SIGTSTP,
    Signal::SIGTTOU,
    Signal::SIGCHLD,
];

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The process that started this one
    #[arg(long)]
    parent: i32,
    /// The descriptor on which it says when to go on
    #[arg(long)]
    go: RawFd,
    /// The cgroup to enter
    #[arg(long)]
    cgroup: Option<PathBuf>,
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// The supervisor's word when the lease is granted, a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct Go {
    /// The variables that the command finds in its environment, beside all that are there.
    pub environment: Vec<(String, String)>,
    /// It is to be the one that reads from the terminal.
    pub foreground: bool,
}

/// Becomes the command. It is in a process group of its own already, and started while the lease is still asked for:
/// to enter a cgroup takes the kernel longer than all the rest.
pub fn start(options: &Options) -> Result<u8> {
    // Where both processes of the run are killed at once, the command itself dies with them.
    set_pdeathsig(Signal::SIGKILL).map_err(|error| Failure::system("prctl", error))?;
    if getppid().as_raw() != options.parent {
        return Err(Failure::new(status::LOST, "the supervisor has died"));
    }
    if let Some(cgroup) = &options.cgroup {
        // Without it the command is looked after as where there are none.
        let _ = Cgroup::enter(cgroup);
    }
    let Some(go) = wait_for_go(options.go)? else { return Ok(0) };
    if go.foreground {
        Terminal::open().give_to(getpid());
    }
    let handled: SigSet = HANDLED.iter().copied().collect();
    handled.thread_unblock().map_err(|error| Failure::system("the signal mask", error))?;
    let [program, arguments @ ..] = options.command.as_slice() else {
        return Err(Failure::usage("there is no command"));
    };
    let error = Command::new(program).args(arguments).envs(go.environment).exec();
    let status = match error.kind() {
        ErrorKind::NotFound => status::NOT_FOUND,
        _ => status::NOT_EXECUTABLE,
    };
    Err(Failure::new(status, format!("cannot run {}: {error}", program.to_string_lossy())))
}

/// Nothing where the lease was not to be had.
fn wait_for_go(descriptor: RawFd) -> Result<Option<Go>> {
    let system = |error| Failure::system("the supervisor's pipe", error);
    let pipe = File::open(format!("/proc/self/fd/{descriptor}")).map_err(system)?;
    // The command is not to have it.
    close(descriptor).map_err(|error| system(error.into()))?;
    let mut line = String::new();
    BufReader::new(pipe).read_line(&mut line).map_err(system)?;
    match line.strip_suffix('\n') {
        None => Ok(None),
        Some(line) => serde_json::from_str(line).map(Some).map_err(|error| system(error.into())),
    }
}
