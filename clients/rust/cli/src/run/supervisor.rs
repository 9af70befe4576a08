//! The process that was started as `pg_fence run`: the parent of the command.
//!
//! It knows nothing of PostgreSQL. It waits for three things: what the keeper tells, signals, and the next moment at
//! which something is due. Whatever the command starts stays its descendant, for it adopts orphans (a subreaper), and in
//! a cgroup where there may be one.

use super::cgroup::Cgroup;
use super::messages::{Order, Told};
use super::processes::{self, Process};
use super::start::HANDLED;
use super::terminal::Terminal;
use super::times::Times;
use super::{MARK, Options};
use crate::clock::Moment;
use crate::failure::{Failure, Result, status};
use crate::{planted, say};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{SigSet, Signal, kill, killpg, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::unistd::Pid;
use rustix::process::{WaitOptions, wait};
use std::ffi::OsString;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// This program, also where its file has been replaced since.
const SELF: &str = "/proc/self/exe";
/// While something is being ended: it need not be our child, so that no signal tells of its end.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How long a process may take to die of KILL. In an uninterruptible sleep it takes until that ends.
const DYING: Duration = Duration::from_secs(2);
/// How often to look at once for what is left. Of what goes on after that more than one look is needed anyway.
const LOOKS: usize = 5;

pub struct Supervisor {
    options: Options,
    times: Times,
    terminal: Terminal,
    signals: SignalFd,
    timer: TimerFd,
    keeper: Keeper,
    /// Of all that the command starts.
    cgroup: Option<Cgroup>,
    /// By which the keeper finds what has been started, should this process be killed.
    mark: String,
    phase: Phase,
    /// Of the lease.
    deadline: Option<Moment>,
    command: Option<Running>,
}

/// The keeper's process, and the pipes to it.
struct Keeper {
    pid: i32,
    orders: Option<ChildStdin>,
    told: ChildStdout,
    /// The beginning of a line.
    rest: Vec<u8>,
    has_ended: bool,
}

enum Phase {
    /// For the lease.
    Waiting,
    Running,
    /// All that the command has started is being ended: from TERM on, with KILL from `kill_at` on.
    Ending {
        status: u8,
        kill_at: Moment,
    },
    /// The keeper gives the lease back.
    Releasing {
        status: u8,
        until: Moment,
    },
    /// With this status.
    Done(u8),
}

struct Running {
    group: Pid,
    started: Moment,
    /// Its own status, once it has ended.
    status: Option<u8>,
    /// By its terminal or by us, so that it is for us to continue it.
    is_stopped: bool,
    /// It gets the terminal whenever we have it.
    has_terminal: bool,
}

impl Supervisor {
    /// Starts the keeper.
    pub fn start(options: Options, times: Times) -> Result<Supervisor> {
        let system = |error| Failure::system("cannot prepare to run a command", error);
        if !processes::are_of_our_namespace() {
            return Err(Failure::new(
                status::SYSTEM,
                "/proc does not show this process, so nor would it show what the command starts: mount it anew",
            ));
        }
        // The command is to ignore each signal that its parent ignores (as `nohup` does).
        let ignored = ignored_signals();
        if ignored & (1 << (Signal::SIGCHLD as u64 - 1)) != 0 {
            return Err(Failure::new(
                status::SYSTEM,
                "SIGCHLD is ignored here: the end of the command would not be seen",
            ));
        }
        let is_handled = |signal: &Signal| ignored & (1 << (*signal as u64 - 1)) == 0;
        let mut handled: SigSet = HANDLED.iter().copied().filter(is_handled).collect();
        handled.thread_block().map_err(system)?;
        // It comes when we set the terminal's foreground, and is to do nothing.
        handled.remove(Signal::SIGTTOU);
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&handled, flags).map_err(system)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_BOOTTIME, flags).map_err(system)?;
        set_child_subreaper(true).map_err(system)?;
        let now = Moment::now().as_duration().as_nanos();
        let mark = format!("{}-{now}", std::process::id());
        let keeper = Keeper::start(&mark)?;
        let is_wanted = !options.no_cgroup && !planted::GROUP_ONLY && !planted::NO_CGROUP;
        let cgroup = is_wanted.then(|| Cgroup::make(&mark)).flatten();
        Ok(Supervisor {
            options,
            times,
            terminal: Terminal::open(),
            signals,
            timer,
            keeper,
            cgroup,
            mark,
            phase: Phase::Waiting,
            deadline: None,
            command: None,
        })
    }

    /// Until the end. The status to exit with.
    pub fn run(mut self) -> Result<u8> {
        let outcome = loop {
            match (self.step(), &self.phase) {
                (Err(failure), _) => break Err(failure),
                (Ok(()), Phase::Done(status)) => break Ok(*status),
                _ => {}
            }
        };
        self.cgroup.iter().for_each(Cgroup::remove);
        outcome
    }

    fn step(&mut self) -> Result<()> {
        self.wait()?;
        self.hear_all()?;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            self.handle(signal.ssi_signo)?;
        }
        self.reap()?;
        // We may have been stopped or frozen just now, and the lease renewed meanwhile.
        if has_passed(self.lost_at()) {
            self.hear_all()?;
        }
        self.go_on()
    }

    /// Until anything happens, or something is due.
    fn wait(&mut self) -> Result<()> {
        let system = |error| Failure::system("cannot wait", error);
        match self.next_moment() {
            Some(moment) => {
                let at = Expiration::OneShot(TimeSpec::from_duration(moment.as_duration()));
                self.timer.set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME).map_err(system)?;
            }
            None => self.timer.unset().map_err(system)?,
        }
        let mut watched = vec![
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.timer.as_fd(), PollFlags::POLLIN),
        ];
        if !self.keeper.has_ended {
            watched.push(PollFd::new(self.keeper.told.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut watched, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(system(error)),
        }
    }

    fn next_moment(&self) -> Option<Moment> {
        match &self.phase {
            Phase::Waiting | Phase::Done(_) => None,
            Phase::Running => self.lost_at().into_iter().chain(self.too_long_at()).min(),
            Phase::Ending { .. } => Some(Moment::now() + LOOK_AGAIN),
            Phase::Releasing { until, .. } => Some(*until),
        }
    }

    /// Where nothing is renewed until then.
    fn lost_at(&self) -> Option<Moment> {
        let at = self.deadline.map(|deadline| self.times.term_at(deadline));
        at.filter(|_| !planted::NO_DEADLINE)
    }

    fn too_long_at(&self) -> Option<Moment> {
        Some(self.command.as_ref()?.started + self.options.at_most?)
    }

    // The keeper's messages

    /// All that it has told by now.
    fn hear_all(&mut self) -> Result<()> {
        while let Some(told) = self.keeper.next()? {
            self.hear(told)?;
        }
        Ok(())
    }

    fn hear(&mut self, told: Told) -> Result<()> {
        match told {
            // Or it comes too late: then it is given back.
            Told::Granted { token, deadline } if matches!(self.phase, Phase::Waiting) => {
                self.deadline = deadline;
                self.start_command(token)?;
            }
            Told::Granted { .. } => {}
            Told::Renewed { deadline } => self.deadline = Some(deadline),
            Told::Lost => self.lose(&format!("the lease {} is lost", self.options.lease())),
            Told::Failed { status, message } => {
                if status != status::TAKEN {
                    return Err(Failure::new(status, message));
                }
                if !self.options.quiet {
                    say(&message);
                }
                self.phase = Phase::Done(self.options.if_taken);
            }
        }
        Ok(())
    }

    // The command

    fn start_command(&mut self, token: i64) -> Result<()> {
        let has_terminal = self.terminal.is_ours_alone();
        let mut command = Command::new(SELF);
        command.arg0("pg_fence").args(["become", "--parent"]);
        command.arg(std::process::id().to_string());
        if has_terminal {
            command.arg("--foreground");
        }
        if let Some(cgroup) = &self.cgroup {
            command.arg("--cgroup").arg(cgroup.path());
        }
        command.arg("--").args(&self.options.command).process_group(0).env(MARK, &self.mark);
        command.env("PG_FENCE_TOKEN", token.to_string());
        command.env("PG_FENCE_LEASE", self.options.names.join(","));
        if !planted::NO_TOKEN {
            command.envs(self.options.pgoptions(token).map(|options| ("PGOPTIONS", options)));
        }
        let child = command.spawn();
        let child = child.map_err(|error| Failure::system("cannot start a process", error))?;
        let group = Pid::from_raw(child.id() as i32);
        self.keeper.tell(&Order::Started { group: group.as_raw() });
        self.command = Some(Running {
            group,
            started: Moment::now(),
            status: None,
            is_stopped: false,
            has_terminal,
        });
        self.phase = Phase::Running;
        Ok(())
    }

    /// Notes children that have ended or stopped. Orphans that we have adopted are among them.
    /// Whether there was any.
    fn reap(&mut self) -> Result<bool> {
        let mut has_reaped = false;
        // Not by nix: it has no name for a real-time signal, and returns an error instead of the child that died of it.
        while let Ok(Some((pid, event))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            let pid = Pid::from_raw(pid.as_raw_pid());
            if let Some(code) = event.exit_status() {
                self.has_ended(pid, code as u8);
            } else if let Some(signal) = event.terminating_signal() {
                self.has_ended(pid, status::SIGNAL + signal as u8);
            } else if let Some(signal) = event.stopping_signal() {
                self.has_stopped(pid, signal)?;
            }
            has_reaped = true;
        }
        Ok(has_reaped)
    }

    fn has_ended(&mut self, pid: Pid, status: u8) {
        if let Some(command) = self.command.as_mut().filter(|command| command.group == pid) {
            command.status = Some(status);
            self.terminal.take_back_from(pid);
        }
    }

    /// As a shell's jobs do: with the command we stop, too. The keeper goes on meanwhile, and so the lease is kept.
    fn has_stopped(&mut self, pid: Pid, signal: i32) -> Result<()> {
        let Some(command) = self.command.as_mut().filter(|command| command.group == pid) else {
            return Ok(());
        };
        let wants_terminal = match Signal::try_from(signal) {
            Ok(Signal::SIGTTIN | Signal::SIGTTOU) => true,
            Ok(Signal::SIGTSTP) => false,
            // Somebody froze it on purpose, and will thaw it.
            _ => return Ok(()),
        };
        command.is_stopped = true;
        if wants_terminal {
            command.has_terminal = true;
        }
        if !(wants_terminal && self.terminal.is_ours()) {
            self.terminal.take_back_from(pid);
            stop_ourselves()?;
        }
        // It would only be stopped again where it cannot have what it wants.
        if !wants_terminal || self.terminal.is_ours() {
            self.continue_command();
        }
        Ok(())
    }

    fn continue_command(&mut self) {
        let Some(command) = self.command.as_mut().filter(|command| command.is_stopped) else {
            return;
        };
        command.is_stopped = false;
        if command.has_terminal && self.terminal.is_ours() {
            self.terminal.give_to(command.group);
        }
        self.signal_command(Signal::SIGCONT);
    }

    /// Its process group, as long as that cannot be another's.
    fn signal_command(&self, signal: Signal) {
        if let Some(command) = self.command.as_ref().filter(|command| command.status.is_none()) {
            // All of them may be gone already.
            let _ = killpg(command.group, signal);
        }
    }

    // Signals

    fn handle(&mut self, number: u32) -> Result<()> {
        let Ok(signal) = Signal::try_from(number as i32) else { return Ok(()) };
        match (signal, &self.phase) {
            (Signal::SIGCHLD, _) => {}
            (Signal::SIGCONT, _) => self.continue_command(),
            (Signal::SIGTSTP, Phase::Waiting | Phase::Releasing { .. }) => stop_ourselves()?,
            (_, Phase::Running) => self.signal_command(signal),
            (_, Phase::Waiting) => self.release(status::SIGNAL + signal as u8),
            // It is ending already.
            (_, Phase::Ending { .. } | Phase::Done(_)) => {}
            // A user in a hurry need not wait for a network that does not answer.
            (_, Phase::Releasing { status, .. }) => self.phase = Phase::Done(*status),
        }
        Ok(())
    }

    // The work that is due

    fn go_on(&mut self) -> Result<()> {
        match self.phase {
            Phase::Waiting if self.keeper.has_ended => {
                let died = "the process that keeps the lease has died";
                return Err(Failure::new(status::LOST, died));
            }
            Phase::Running => self.go_on_running()?,
            Phase::Ending { status, kill_at } => self.go_on_ending(status, kill_at)?,
            Phase::Releasing { status, .. } if self.keeper.has_ended => {
                self.phase = Phase::Done(status);
            }
            Phase::Releasing { status, until } if until.has_passed() => {
                // It hangs, or is frozen.
                let _ = kill(Pid::from_raw(self.keeper.pid), Signal::SIGKILL);
                self.phase = Phase::Done(status);
            }
            _ => {}
        }
        Ok(())
    }

    fn go_on_running(&mut self) -> Result<()> {
        let lease = self.options.lease();
        // First of all: a command that ended while we were frozen may have been ended by the keeper.
        if has_passed(self.lost_at()) {
            self.lose(&format!("the lease {lease} could not be renewed"));
        } else if let Some(status) = self.command.as_ref().and_then(|command| command.status) {
            match self.left()?.filter(|_| !planted::RELEASE_FIRST) {
                None => self.release(status),
                Some(left) => {
                    say(&format!("ending what the command has left behind: {}", listed(&left)));
                    self.end(status);
                }
            }
        } else if self.keeper.has_ended {
            self.lose(&format!("the process that keeps the lease {lease} has died"));
        } else if has_passed(self.too_long_at()) {
            say("the command takes longer than --at-most: it is ended");
            self.end(status::TOO_LONG);
        }
        Ok(())
    }

    fn lose(&mut self, why: &str) {
        if let Phase::Running = self.phase {
            say(&format!("{why}: the command is ended"));
            self.end(status::LOST);
        }
    }

    /// TERM to all that the command has started, and KILL after the grace, or just before the deadline.
    fn end(&mut self, status: u8) {
        let after_grace = Moment::now() + self.times.grace;
        let before_deadline = self.deadline.map(|deadline| self.times.kill_at(deadline));
        let kill_at = before_deadline.map_or(after_grace, |moment| moment.min(after_grace));
        // One that is stopped would not hear of it.
        self.signal_all(Signal::SIGTERM);
        self.signal_all(Signal::SIGCONT);
        self.phase = Phase::Ending { status, kill_at };
    }

    fn go_on_ending(&mut self, status: u8, kill_at: Moment) -> Result<()> {
        // There may be no time to look for processes first.
        if kill_at.has_passed() && !planted::TERM_ONLY {
            self.signal_all(Signal::SIGKILL);
            self.kill_children()?;
        }
        match self.left()? {
            None => self.release(status),
            Some(left) if (kill_at + DYING).has_passed() => {
                say(&format!("KILL does not end {}: the lease is left to its ttl", listed(&left)));
                self.keeper.tell(&Order::Leave);
                self.leave(status);
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Each once: the process group of the command, at once, and then whatever has left it.
    fn signal_all(&self, signal: Signal) {
        if let (Some(cgroup), Signal::SIGKILL) = (&self.cgroup, signal) {
            cgroup.kill();
        }
        self.signal_command(signal);
        let group = self.command.as_ref().map(|command| (command.group.as_raw(), command.status));
        let mut others = self.descendants();
        others.retain(|one| Some((one.group, None)) != group);
        processes::signal_all(&others, group.map(|(group, _)| group), signal);
    }

    /// All at once, again and again for a little while: what starts another one and ends is gone before it could be looked
    /// for, but its child has become ours.
    fn kill_children(&mut self) -> Result<()> {
        if planted::GROUP_ONLY {
            return Ok(());
        }
        let until = Moment::now() + LOOK_AGAIN;
        while let Some(children) = processes::children_but(self.keeper.pid)
            && !children.is_empty()
            && !until.has_passed()
        {
            for child in children {
                let _ = kill(Pid::from_raw(child), Signal::SIGKILL);
            }
            self.reap()?;
        }
        Ok(())
    }

    fn release(&mut self, status: u8) {
        let own = self.command.as_ref().and_then(|command| command.status);
        // By a signal, or because there is no such program, it has not failed to connect.
        let has_failed = own == Some(status) && (1..status::NOT_EXECUTABLE).contains(&status);
        self.keeper.tell(&Order::Release { has_failed });
        self.leave(status);
    }

    /// The keeper ends by itself. After the deadline there is nothing to give back.
    fn leave(&mut self, status: u8) {
        self.keeper.orders = None;
        let until = self.deadline.unwrap_or(Moment::now() + self.times.ttl);
        self.phase = Phase::Releasing { status, until };
    }

    /// The processes left of the command; None where none is. One that is born and gone too fast to be seen leaves its
    /// child to us, and is waited for: where that has happened meanwhile, the look was not whole.
    fn left(&mut self) -> Result<Option<Vec<Process>>> {
        for _ in 0..LOOKS {
            self.reap()?;
            let found = self.descendants();
            if !found.is_empty() {
                return Ok(Some(found));
            }
            let children = processes::children_but(self.keeper.pid).unwrap_or_default();
            let is_populated = self.cgroup.as_ref().is_some_and(Cgroup::is_populated);
            if planted::GROUP_ONLY
                || planted::ONE_LOOK
                || !self.reap()? && children.is_empty() && !is_populated
            {
                return Ok(None);
            }
        }
        Ok(Some(Vec::new()))
    }

    fn descendants(&self) -> Vec<Process> {
        let mut all = processes::descendants_but(self.keeper.pid);
        // One that was started by a descendant of ours is one, unless we were frozen for its birth and its parent's end.
        let in_cgroup = self.cgroup.iter().flat_map(Cgroup::processes);
        let others: Vec<Process> = in_cgroup.filter(|one| !all.contains(one)).collect();
        all.extend(others);
        if planted::GROUP_ONLY {
            let group = self.command.as_ref().map(|command| command.group.as_raw());
            all.retain(|one| Some(one.group) == group);
        }
        all
    }
}

impl Keeper {
    /// The same program with the same arguments, in a process group of its own, which no terminal signals.
    fn start(mark: &str) -> Result<Keeper> {
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        let mut child = Command::new(SELF)
            .arg0("pg_fence")
            .arg(crate::KEEPER)
            .args(arguments)
            .env(MARK, mark)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| Failure::system("cannot start a process", error))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (orders, told) = pipes.ok_or_else(|| Failure::system("there are no", "pipes"))?;
        fcntl(&told, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .map_err(|error| Failure::system("a pipe", error))?;
        let pid = child.id() as i32;
        Ok(Keeper { pid, orders: Some(orders), told, rest: Vec::new(), has_ended: false })
    }

    fn tell(&mut self, order: &Order) {
        let Some(orders) = &mut self.orders else { return };
        if let Ok(line) = serde_json::to_string(order) {
            // One that is dead is noticed by the end of what it tells.
            let _ = writeln!(orders, "{line}");
        }
    }

    /// The next message, if one has come.
    fn next(&mut self) -> Result<Option<Told>> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                let told = serde_json::from_slice(&line);
                return told.map(Some).map_err(|error| Failure::system("the keeper", error));
            }
            let mut bytes = [0; 4096];
            match self.told.read(&mut bytes) {
                Ok(0) => {
                    self.has_ended = true;
                    return Ok(None);
                }
                Ok(count) => self.rest.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::system("the keeper", error)),
            }
        }
    }
}

fn has_passed(moment: Option<Moment>) -> bool {
    moment.is_some_and(Moment::has_passed)
}

/// As Ctrl-Z does. Where no shell would continue us the kernel lets us go on.
fn stop_ourselves() -> Result<()> {
    let stop: SigSet = [Signal::SIGTSTP].into_iter().collect();
    let system = |error| Failure::system("cannot stop", error);
    // Unblocked, it comes by the default action before `raise` returns.
    stop.thread_unblock().map_err(system)?;
    raise(Signal::SIGTSTP).map_err(system)?;
    stop.thread_block().map_err(system)
}

/// A bit for each signal that this process has been told to ignore.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn listed(processes: &[Process]) -> String {
    if processes.is_empty() {
        return "processes that start others and end, too fast to be seen".to_owned();
    }
    let one = |process: &Process| format!("{} ({})", process.name, process.pid);
    processes.iter().map(one).collect::<Vec<_>>().join(", ")
}
