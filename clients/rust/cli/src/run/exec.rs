//! The last steps of a new process before it executes the command.

use super::cgroup::Cgroup;
use super::terminal::Terminal;
use crate::failure::{Failure, Result, status};
use clap::Args;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getpid, getppid};
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The signals that the supervisor handles. They are blocked in the processes that it starts.
pub const HANDLED_SIGNALS: &[Signal] = &[
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
    /// The pid of the supervisor
    #[arg(long)]
    parent: i32,
    /// Put the command in the foreground of the terminal
    #[arg(long)]
    foreground: bool,
    /// The cgroup to enter
    #[arg(long)]
    cgroup: Option<PathBuf>,
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// Executes the command in this process, which has its own process group already. Returns only if that fails.
pub fn exec(options: &Options) -> Result<u8> {
    // If the supervisor and the renewer are killed at the same time, the command dies with the supervisor.
    set_pdeathsig(Signal::SIGKILL).map_err(|error| Failure::system("prctl", error))?;
    if getppid().as_raw() != options.parent {
        return Err(Failure::new(status::LOST, "the supervisor has died"));
    }
    if let Some(cgroup) = &options.cgroup {
        // If this fails, the processes of the command are found as on a system without cgroups.
        let _ = Cgroup::enter(cgroup);
    }
    if options.foreground {
        Terminal::open().set_foreground(getpid());
    }
    let handled: SigSet = HANDLED_SIGNALS.iter().copied().collect();
    handled.thread_unblock().map_err(|error| Failure::system("the signal mask", error))?;
    let [program, arguments @ ..] = options.command.as_slice() else {
        return Err(Failure::usage("there is no command"));
    };
    let error = Command::new(program).args(arguments).exec();
    let status = match error.kind() {
        ErrorKind::NotFound => status::NOT_FOUND,
        _ => status::NOT_EXECUTABLE,
    };
    Err(Failure::new(status, format!("cannot run {}: {error}", program.to_string_lossy())))
}
