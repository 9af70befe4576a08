//! The processes of a command, read from `/proc`.

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getsid};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;

/// A process that is alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    pub name: String,
    pub group: i32,
    parent: i32,
    session: i32,
}

impl Process {
    pub fn read(pid: i32) -> Option<Process> {
        Process::parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(pid: i32, stat: &str) -> Option<Process> {
        // The name is in parentheses, and may contain parentheses itself.
        let (name, fields) = stat.split_once('(')?.1.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let [state, parent, group, session, ..] = fields.as_slice() else { return None };
        let number = |text: &str| text.parse().ok();
        // If only the first thread of a process has ended, the process is shown as a zombie, but its other threads run.
        let threads = fields.get(17).and_then(|text| number(text)).unwrap_or(1);
        if *state == "X" || *state == "Z" && threads < 2 {
            return None;
        }
        Some(Process {
            pid,
            name: name.to_owned(),
            parent: number(parent)?,
            group: number(group)?,
            session: number(session)?,
        })
    }

    /// Signals the process. Errors are ignored: the caller scans for the process again.
    fn signal(&self, signal: Signal) {
        let _: Result<(), Errno> = kill(Pid::from_raw(self.pid), signal);
    }

    fn has_variable(&self, entry: &str) -> bool {
        let environment = fs::read(format!("/proc/{}/environ", self.pid)).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|one| one == entry.as_bytes())
    }
}

/// Returns false if there is no `/proc`, or if it shows another pid namespace, whose pids are those of other processes.
pub fn proc_shows_this_namespace() -> bool {
    let own = std::process::id().to_string();
    fs::read_link("/proc/self").is_ok_and(|pid| pid.as_os_str() == own.as_str())
}

fn all() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Process::read(entry.file_name().to_str()?.parse().ok()?)).collect()
}

/// Returns the pids of the children of this process, without `excluded` and including zombies. Returns None if the
/// kernel does not list children.
pub fn children_except(excluded: i32) -> Option<Vec<i32>> {
    // This process has one thread, whose children are those of the process.
    let text =
        fs::read_to_string(format!("/proc/self/task/{0}/children", std::process::id())).ok()?;
    let pids = text.split_whitespace().filter_map(|pid| pid.parse().ok());
    Some(pids.filter(|pid| *pid != excluded).collect())
}

/// Signals each process once. The group `command` and the groups in sessions that the command has begun contain only
/// processes of the command. Each of these groups is signalled as a whole, so that no process escapes by a fork.
pub fn signal_all(found: &[Process], command: Option<i32>, signal: Signal) {
    let own_session = getsid(None).map_or(0, Pid::as_raw);
    let is_theirs = |one: &Process| Some(one.group) == command || one.session != own_session;
    let (together, others): (Vec<_>, Vec<_>) = found.iter().partition(|one| is_theirs(one));
    let groups: BTreeSet<i32> = together.iter().map(|one| one.group).collect();
    for group in groups {
        // This fails if the whole group has ended.
        let _: Result<(), Errno> = killpg(Pid::from_raw(group), signal);
    }
    others.iter().for_each(|one| one.signal(signal));
}

/// Returns the descendants of this process, without the child `excluded` and its descendants. This process adopts
/// orphans, so that all processes of the command are its descendants. A scan may miss a process that starts meanwhile:
/// that none is left is certain only if no child was reaped during the scan.
pub fn descendants_except(excluded: i32) -> Vec<Process> {
    descendants_in(all(), std::process::id() as i32, excluded)
}

fn descendants_in(all: Vec<Process>, ancestor: i32, excluded: i32) -> Vec<Process> {
    let parents: HashMap<i32, i32> = all.iter().map(|one| (one.pid, one.parent)).collect();
    let descends = |process: &Process| {
        let mut pid = process.pid;
        // The list is not a snapshot, so its parents may form a circle.
        let mut seen = HashSet::new();
        while seen.insert(pid) && pid != excluded {
            match parents.get(&pid) {
                Some(parent) if *parent == ancestor => return pid != excluded,
                Some(parent) => pid = *parent,
                None => return false,
            }
        }
        false
    };
    all.into_iter().filter(descends).collect()
}

/// Returns the processes that are in the process group, or have the entry (`NAME=value`) in their environment.
pub fn in_group_or_with_variable(group: Option<i32>, entry: &str) -> Vec<Process> {
    // In another session the number would be that of another group.
    let session = getsid(None).map_or(0, Pid::as_raw);
    let own = std::process::id() as i32;
    let is_one = |one: &Process| {
        let is_of_group = Some(one.group) == group && one.session == session;
        one.pid != own && (is_of_group || one.has_variable(entry))
    };
    all().into_iter().filter(is_one).collect()
}

/// Returns the number of processes in the group.
pub fn count_in_group(group: i32) -> usize {
    all().iter().filter(|one| one.group == group).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32) -> Process {
        Process::parse(pid, &format!("{pid} (a) b)) S {parent} {pid} 1 0")).unwrap()
    }

    #[test]
    fn a_name_may_hold_anything() {
        assert_eq!(process(7, 1).name, "a) b)");
        assert_eq!(Process::parse(7, "7 (x) Z 1 7 7"), None);
        let threads = |count: u8| format!("7 (x) Z 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 {count} 0");
        assert_eq!(Process::parse(7, &threads(1)), None);
        assert!(Process::parse(7, &threads(2)).is_some());
    }

    #[test]
    fn descendants_are_found_through_any_number_of_parents() {
        let all = [(2, 1), (3, 2), (4, 3), (5, 1), (6, 5), (8, 9), (9, 8)];
        let all = all.map(|(pid, parent)| process(pid, parent)).to_vec();
        let pids = |ancestor, not| -> Vec<i32> {
            descendants_in(all.clone(), ancestor, not).iter().map(|one| one.pid).collect()
        };
        assert_eq!(pids(1, 5), [2, 3, 4]);
        assert_eq!(pids(1, 2), [5, 6]);
        assert_eq!(pids(2, 0), [3, 4]);
    }
}
