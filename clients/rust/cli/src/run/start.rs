//! The last steps of a new process before it becomes the command.

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
    /// It is to be the one that reads from the terminal
    #[arg(long)]
    foreground: bool,
    /// The cgroup to enter
    #[arg(long)]
    cgroup: Option<PathBuf>,
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// Becomes the command. It is in a process group of its own already.
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
    if options.foreground {
        Terminal::open().give_to(getpid());
    }
    let handled: SigSet = HANDLED.iter().copied().collect();
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
