//! The process that was started as `pg_fence run`: the parent of the command.
//!
//! The supervisor does not talk to PostgreSQL. It waits for events of the renewer, for signals, and for the next moment
//! at which something is due. It adopts orphans (it is a subreaper), so that all processes that the command starts stay
//! its descendants; they also stay in a cgroup, if the system permits one.

use super::cgroup::Cgroup;
use super::exec::HANDLED_SIGNALS;
use super::messages::{Event, Order};
use super::processes::{self, Process};
use super::terminal::Terminal;
use super::times::Times;
use super::{Options, RUN_ID_VARIABLE};
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

/// The file of this program, even if another file has its name now.
const THIS_PROGRAM: &str = "/proc/self/exe";
/// The pause between two scans for processes that are being ended. They need not be children of this process, so no
/// signal reports their end.
const SCAN_INTERVAL: Duration = Duration::from_millis(20);
/// How long a process may take to end after KILL. In an uninterruptible sleep it does not end before the sleep does.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of scans without a pause, if processes of the command end and start others meanwhile.
const MAX_SCANS: usize = 5;

pub struct Supervisor {
    options: Options,
    times: Times,
    terminal: Terminal,
    signals: SignalFd,
    timer: TimerFd,
    renewer: RenewerProcess,
    /// The cgroup of the command.
    cgroup: Option<Cgroup>,
    /// The renewer finds the processes of the command by this id if the supervisor is killed.
    run_id: String,
    phase: Phase,
    /// The deadline of the lease.
    deadline: Option<Moment>,
    command: Option<RunningCommand>,
}

/// The process of the renewer, and the pipes to it.
struct RenewerProcess {
    pid: i32,
    orders: Option<ChildStdin>,
    events: ChildStdout,
    /// The beginning of the line that is being read.
    partial_line: Vec<u8>,
    has_ended: bool,
}

enum Phase {
    /// Waiting for the lease.
    Waiting,
    Running,
    /// The processes of the command have been sent TERM, and are sent KILL from `kill_at` on.
    Ending {
        status: u8,
        kill_at: Moment,
    },
    /// The renewer is releasing the lease.
    Releasing {
        status: u8,
        until: Moment,
    },
    /// The supervisor exits with this status.
    Done(u8),
}

struct RunningCommand {
    group: Pid,
    started: Moment,
    /// The command's exit status, once it has ended.
    status: Option<u8>,
    /// True if its terminal or the supervisor has stopped it, so that the supervisor continues it.
    is_stopped: bool,
    /// True if the command gets the terminal whenever this process group has it.
    has_terminal: bool,
}

impl Supervisor {
    /// Starts the renewer.
    pub fn start(options: Options, times: Times) -> Result<Supervisor> {
        let system = |error| Failure::system("cannot prepare to run a command", error);
        if !processes::proc_shows_this_namespace() {
            return Err(Failure::new(
                status::SYSTEM,
                "/proc does not show this process, so nor would it show what the command starts: mount it anew",
            ));
        }
        // A signal that was ignored when the run began (as by `nohup`) stays ignored in the command.
        let ignored = ignored_signals();
        if ignored & (1 << (Signal::SIGCHLD as u64 - 1)) != 0 {
            return Err(Failure::new(
                status::SYSTEM,
                "SIGCHLD is ignored here: the end of the command would not be seen",
            ));
        }
        let is_handled = |signal: &Signal| ignored & (1 << (*signal as u64 - 1)) == 0;
        let mut handled: SigSet = HANDLED_SIGNALS.iter().copied().filter(is_handled).collect();
        handled.thread_block().map_err(system)?;
        // The kernel sends SIGTTOU when this process sets the terminal's foreground. It stays blocked and unread.
        handled.remove(Signal::SIGTTOU);
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&handled, flags).map_err(system)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_BOOTTIME, flags).map_err(system)?;
        set_child_subreaper(true).map_err(system)?;
        let now = Moment::now().as_duration().as_nanos();
        let run_id = format!("{}-{now}", std::process::id());
        let renewer = RenewerProcess::start(&run_id)?;
        let is_wanted = !options.no_cgroup && !planted::GROUP_ONLY && !planted::NO_CGROUP;
        let cgroup = is_wanted.then(|| Cgroup::make(&run_id)).flatten();
        Ok(Supervisor {
            options,
            times,
            terminal: Terminal::open(),
            signals,
            timer,
            renewer,
            cgroup,
            run_id,
            phase: Phase::Waiting,
            deadline: None,
            command: None,
        })
    }

    /// Runs until the end, and returns the status to exit with.
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
        self.handle_events()?;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            self.handle_signal(signal.ssi_signo)?;
        }
        self.reap()?;
        // This process may have been frozen, and the lease renewed meanwhile.
        if has_passed(self.term_at()) {
            self.handle_events()?;
        }
        self.advance()
    }

    /// Waits until a signal or an event comes, or something is due.
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
        if !self.renewer.has_ended {
            watched.push(PollFd::new(self.renewer.events.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut watched, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(system(error)),
        }
    }

    fn next_moment(&self) -> Option<Moment> {
        match &self.phase {
            Phase::Waiting | Phase::Done(_) => None,
            Phase::Running => self.term_at().into_iter().chain(self.at_most_end()).min(),
            Phase::Ending { .. } => Some(Moment::now() + SCAN_INTERVAL),
            Phase::Releasing { until, .. } => Some(*until),
        }
    }

    /// When the command is sent TERM, if the lease is not renewed before.
    fn term_at(&self) -> Option<Moment> {
        let at = self.deadline.map(|deadline| self.times.term_at(deadline));
        at.filter(|_| !planted::NO_DEADLINE)
    }

    fn at_most_end(&self) -> Option<Moment> {
        Some(self.command.as_ref()?.started + self.options.at_most?)
    }

    // Events of the renewer.

    /// Handles all events that have arrived.
    fn handle_events(&mut self) -> Result<()> {
        while let Some(event) = self.renewer.next_event()? {
            self.handle_event(event)?;
        }
        Ok(())
    }

    fn handle_event(&mut self, event: Event) -> Result<()> {
        match event {
            // A grant that comes too late is not used: the renewer has been told to release it.
            Event::Granted { token, deadline } if matches!(self.phase, Phase::Waiting) => {
                self.deadline = deadline;
                self.start_command(token)?;
            }
            Event::Granted { .. } => {}
            Event::Renewed { deadline } => self.deadline = Some(deadline),
            Event::Lost => self.end_as_lost(&format!("the lease {} is lost", self.options.lease())),
            Event::Failed { status, message } => {
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

    // The command.

    fn start_command(&mut self, token: i64) -> Result<()> {
        let has_terminal = self.terminal.is_foreground_alone();
        let mut command = Command::new(THIS_PROGRAM);
        command.arg0("pg_fence").args(["exec", "--parent"]);
        command.arg(std::process::id().to_string());
        if has_terminal {
            command.arg("--foreground");
        }
        if let Some(cgroup) = &self.cgroup {
            command.arg("--cgroup").arg(cgroup.path());
        }
        command
            .arg("--")
            .args(&self.options.command)
            .process_group(0)
            .env(RUN_ID_VARIABLE, &self.run_id);
        command.env("PG_FENCE_TOKEN", token.to_string());
        command.env("PG_FENCE_LEASE", self.options.names.join(","));
        if !planted::NO_TOKEN {
            command.envs(self.options.pgoptions(token).map(|options| ("PGOPTIONS", options)));
        }
        let child = command.spawn();
        let child = child.map_err(|error| Failure::system("cannot start a process", error))?;
        let group = Pid::from_raw(child.id() as i32);
        self.renewer.send(&Order::Started { group: group.as_raw() });
        self.command = Some(RunningCommand {
            group,
            started: Moment::now(),
            status: None,
            is_stopped: false,
            has_terminal,
        });
        self.phase = Phase::Running;
        Ok(())
    }

    /// Records which children have ended or stopped. Adopted orphans are among them. Returns true if there was any.
    fn reap(&mut self) -> Result<bool> {
        let mut has_reaped = false;
        // rustix, because nix has no name for a real-time signal, and returns an error for a child that died of one.
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

    /// Stops this process with the command, so that the shell sees a stopped job. The renewer goes on meanwhile, and so
    /// the lease is renewed.
    fn has_stopped(&mut self, pid: Pid, signal: i32) -> Result<()> {
        let Some(command) = self.command.as_mut().filter(|command| command.group == pid) else {
            return Ok(());
        };
        let wants_terminal = match Signal::try_from(signal) {
            Ok(Signal::SIGTTIN | Signal::SIGTTOU) => true,
            Ok(Signal::SIGTSTP) => false,
            // Another process has stopped the command, and will continue it.
            _ => return Ok(()),
        };
        command.is_stopped = true;
        if wants_terminal {
            command.has_terminal = true;
        }
        if !(wants_terminal && self.terminal.is_foreground()) {
            self.terminal.take_back_from(pid);
            stop_this_process()?;
        }
        // A command that needs the terminal, and cannot get it, would only be stopped again.
        if !wants_terminal || self.terminal.is_foreground() {
            self.continue_command();
        }
        Ok(())
    }

    fn continue_command(&mut self) {
        let Some(command) = self.command.as_mut().filter(|command| command.is_stopped) else {
            return;
        };
        command.is_stopped = false;
        if command.has_terminal && self.terminal.is_foreground() {
            self.terminal.set_foreground(command.group);
        }
        self.signal_command(Signal::SIGCONT);
    }

    /// Signals the command's process group while the command runs. Later the number may be that of another group.
    fn signal_command(&self, signal: Signal) {
        if let Some(command) = self.command.as_ref().filter(|command| command.status.is_none()) {
            // This fails if the whole group has ended.
            let _ = killpg(command.group, signal);
        }
    }

    // Signals.

    fn handle_signal(&mut self, number: u32) -> Result<()> {
        let Ok(signal) = Signal::try_from(number as i32) else { return Ok(()) };
        match (signal, &self.phase) {
            (Signal::SIGCHLD, _) => {}
            (Signal::SIGCONT, _) => self.continue_command(),
            (Signal::SIGTSTP, Phase::Waiting | Phase::Releasing { .. }) => stop_this_process()?,
            (_, Phase::Running) => self.signal_command(signal),
            (_, Phase::Waiting) => self.release(status::SIGNAL + signal as u8),
            // The command is ending already.
            (_, Phase::Ending { .. } | Phase::Done(_)) => {}
            // The user need not wait for a network that does not answer.
            (_, Phase::Releasing { status, .. }) => self.phase = Phase::Done(*status),
        }
        Ok(())
    }

    // What is due.

    fn advance(&mut self) -> Result<()> {
        match self.phase {
            Phase::Waiting if self.renewer.has_ended => {
                let died = "the process that renews the lease has died";
                return Err(Failure::new(status::LOST, died));
            }
            Phase::Running => self.advance_running()?,
            Phase::Ending { status, kill_at } => self.advance_ending(status, kill_at)?,
            Phase::Releasing { status, .. } if self.renewer.has_ended => {
                self.phase = Phase::Done(status);
            }
            Phase::Releasing { status, until } if until.has_passed() => {
                // The renewer hangs, or is frozen.
                let _ = kill(Pid::from_raw(self.renewer.pid), Signal::SIGKILL);
                self.phase = Phase::Done(status);
            }
            _ => {}
        }
        Ok(())
    }

    fn advance_running(&mut self) -> Result<()> {
        let lease = self.options.lease();
        // The deadline is checked first: if this process was frozen, the renewer may have ended the command.
        if has_passed(self.term_at()) {
            self.end_as_lost(&format!("the lease {lease} could not be renewed"));
        } else if let Some(status) = self.command.as_ref().and_then(|command| command.status) {
            match self.remaining_processes()?.filter(|_| !planted::RELEASE_FIRST) {
                None => self.release(status),
                Some(left) => {
                    say(&format!("ending what the command has left behind: {}", list_of(&left)));
                    self.end(status);
                }
            }
        } else if self.renewer.has_ended {
            self.end_as_lost(&format!("the process that renews the lease {lease} has died"));
        } else if has_passed(self.at_most_end()) {
            say("the command takes longer than --at-most: it is ended");
            self.end(status::TOO_LONG);
        }
        Ok(())
    }

    fn end_as_lost(&mut self, why: &str) {
        if let Phase::Running = self.phase {
            say(&format!("{why}: the command is ended"));
            self.end(status::LOST);
        }
    }

    /// Sends TERM to all processes of the command. KILL follows after the grace, or just before the deadline.
    fn end(&mut self, status: u8) {
        let after_grace = Moment::now() + self.times.grace;
        let before_deadline = self.deadline.map(|deadline| self.times.kill_at(deadline));
        let kill_at = before_deadline.map_or(after_grace, |moment| moment.min(after_grace));
        // A stopped process would not handle TERM.
        self.signal_all(Signal::SIGTERM);
        self.signal_all(Signal::SIGCONT);
        self.phase = Phase::Ending { status, kill_at };
    }

    fn advance_ending(&mut self, status: u8, kill_at: Moment) -> Result<()> {
        // The scan for remaining processes comes later, because there may be no time for it.
        if kill_at.has_passed() && !planted::TERM_ONLY {
            self.signal_all(Signal::SIGKILL);
            self.kill_children()?;
        }
        match self.remaining_processes()? {
            None => self.release(status),
            Some(left) if (kill_at + KILL_TIMEOUT).has_passed() => {
                say(&format!("KILL does not end {}: the lease is left to its ttl", list_of(&left)));
                self.renewer.send(&Order::LetExpire);
                self.await_renewer(status);
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Signals each process of the command once: first its process group as a whole, then the processes that have left
    /// the group.
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

    /// Kills all children of this process, again and again for a short time. A process that starts another one and ends
    /// is gone before a scan finds it, but then its child is a child of this process.
    fn kill_children(&mut self) -> Result<()> {
        if planted::GROUP_ONLY {
            return Ok(());
        }
        let until = Moment::now() + SCAN_INTERVAL;
        while let Some(children) = processes::children_except(self.renewer.pid)
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
        // A command that was ended by a signal, or could not be executed, has not failed to connect.
        let has_failed = own == Some(status) && (1..status::NOT_EXECUTABLE).contains(&status);
        self.renewer.send(&Order::Release { has_failed });
        self.await_renewer(status);
    }

    /// Waits for the renewer to end. It is killed at the deadline, when there is no lease left to release.
    fn await_renewer(&mut self, status: u8) {
        self.renewer.orders = None;
        let until = self.deadline.unwrap_or(Moment::now() + self.times.ttl);
        self.phase = Phase::Releasing { status, until };
    }

    /// Returns the remaining processes of the command, or None if there are none. A process that starts another one and
    /// ends too fast for a scan leaves its child to this process, and is reaped. If a child was reaped during a scan,
    /// the scan is repeated. The list is empty if there is a process that no scan has found.
    fn remaining_processes(&mut self) -> Result<Option<Vec<Process>>> {
        for _ in 0..MAX_SCANS {
            self.reap()?;
            let found = self.descendants();
            if !found.is_empty() {
                return Ok(Some(found));
            }
            let children = processes::children_except(self.renewer.pid).unwrap_or_default();
            let is_populated = self.cgroup.as_ref().is_some_and(Cgroup::is_populated);
            if planted::GROUP_ONLY
                || planted::ONE_SCAN
                || !self.reap()? && children.is_empty() && !is_populated
            {
                return Ok(None);
            }
        }
        Ok(Some(Vec::new()))
    }

    fn descendants(&self) -> Vec<Process> {
        let mut all = processes::descendants_except(self.renewer.pid);
        // The cgroup also has processes whose parent has ended since the list was read.
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

impl RenewerProcess {
    /// Starts the same program with the same arguments, in its own process group, which the terminal does not signal.
    fn start(run_id: &str) -> Result<RenewerProcess> {
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        let mut child = Command::new(THIS_PROGRAM)
            .arg0("pg_fence")
            .arg(crate::RENEWER)
            .args(arguments)
            .env(RUN_ID_VARIABLE, run_id)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| Failure::system("cannot start a process", error))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (orders, events) = pipes.ok_or_else(|| Failure::system("there are no", "pipes"))?;
        fcntl(&events, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .map_err(|error| Failure::system("a pipe", error))?;
        let pid = child.id() as i32;
        Ok(RenewerProcess {
            pid,
            orders: Some(orders),
            events,
            partial_line: Vec::new(),
            has_ended: false,
        })
    }

    fn send(&mut self, order: &Order) {
        let Some(orders) = &mut self.orders else { return };
        if let Ok(line) = serde_json::to_string(order) {
            // This fails if the renewer is dead, which is noticed by the end of its events.
            let _ = writeln!(orders, "{line}");
        }
    }

    /// Returns the next event, if one has arrived.
    fn next_event(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(end) = self.partial_line.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.partial_line.drain(..=end).collect();
                let event = serde_json::from_slice(&line);
                return event
                    .map(Some)
                    .map_err(|error| Failure::system("the process that renews the lease", error));
            }
            let mut bytes = [0; 4096];
            match self.events.read(&mut bytes) {
                Ok(0) => {
                    self.has_ended = true;
                    return Ok(None);
                }
                Ok(count) => self.partial_line.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(Failure::system("the process that renews the lease", error));
                }
            }
        }
    }
}

fn has_passed(moment: Option<Moment>) -> bool {
    moment.is_some_and(Moment::has_passed)
}

/// Stops this process, as Ctrl-Z does. If no shell could continue it, the kernel does not stop it.
fn stop_this_process() -> Result<()> {
    let stop: SigSet = [Signal::SIGTSTP].into_iter().collect();
    let system = |error| Failure::system("cannot stop", error);
    // The signal is unblocked, so its default action is taken before `raise` returns.
    stop.thread_unblock().map_err(system)?;
    raise(Signal::SIGTSTP).map_err(system)?;
    stop.thread_block().map_err(system)
}

/// Returns the mask of the signals that this process ignores, one bit for each.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn list_of(processes: &[Process]) -> String {
    if processes.is_empty() {
        return "processes that start others and end, too fast to be seen".to_owned();
    }
    let one = |process: &Process| format!("{} ({})", process.name, process.pid);
    processes.iter().map(one).collect::<Vec<_>>().join(", ")
}
