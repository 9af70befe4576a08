//! A control group of a run's own (cgroup v2), where the system lets this process make one.
//!
//! All that the command starts stays in it, whatever it does to its session, its environment or its user, and one word
//! to the kernel kills all of it. Without one, the supervisor finds its descendants, and the keeper finds processes by
//! their mark.

use super::processes::Process;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Before the run's mark, in the directory's name.
const PREFIX: &str = "pg_fence-";

#[derive(Debug, Clone)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes that of a run, below the cgroup of this process. None where that cannot be.
    pub fn make(mark: &str) -> Option<Cgroup> {
        let own = own_directory()?;
        remove_left_behind(&own);
        let cgroup = Cgroup(own.join(format!("{PREFIX}{mark}")));
        fs::create_dir(&cgroup.0).ok()?;
        // From Linux 5.14 on.
        if cgroup.0.join("cgroup.kill").exists() {
            return Some(cgroup);
        }
        cgroup.remove();
        None
    }

    /// That of a run, where it made one. The keeper is in the same cgroup as the supervisor.
    pub fn find(mark: &str) -> Option<Cgroup> {
        let path = own_directory()?.join(format!("{PREFIX}{mark}"));
        path.is_dir().then_some(Cgroup(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Has this process enter one.
    pub fn enter(path: &Path) -> io::Result<()> {
        fs::write(path.join("cgroup.procs"), "0")
    }

    /// All that is alive in it, and in those below it.
    pub fn processes(&self) -> Vec<Process> {
        let pids = directories(&self.0).into_iter().flat_map(|directory| {
            let text = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
            text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<i32>>()
        });
        pids.filter_map(Process::read).collect()
    }

    /// Whether anything is alive in it, also what is born and gone too fast to be listed.
    pub fn is_populated(&self) -> bool {
        let events = fs::read_to_string(self.0.join("cgroup.events")).unwrap_or_default();
        events.lines().any(|line| line == "populated 1")
    }

    /// Whosever processes they are. Where it fails, they are signalled one by one all the same.
    pub fn kill(&self) {
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
    }

    /// The kernel refuses while anything is in it.
    pub fn remove(&self) {
        // The innermost first.
        directories(&self.0).iter().rev().for_each(|directory| drop(fs::remove_dir(directory)));
    }
}

/// This one and those below it, from the outside in.
fn directories(top: &Path) -> Vec<PathBuf> {
    let mut found = vec![top.to_owned()];
    let mut at = 0;
    while at < found.len() {
        let entries = fs::read_dir(&found[at]).into_iter().flatten().flatten();
        let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        found.extend(below.map(|entry| entry.path()).collect::<Vec<_>>());
        at += 1;
    }
    found
}

/// The cgroups of runs whose supervisor and keeper were both killed.
fn remove_left_behind(own: &Path) {
    for entry in fs::read_dir(own).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let mark = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let pid = mark.and_then(|mark| mark.split('-').next()?.parse().ok());
        if pid.is_some_and(|pid| kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH)) {
            Cgroup(entry.path()).remove();
        }
    }
}

/// Where the cgroup of this process is, if it is in reach: version 2 alone, or beside version 1.
fn own_directory() -> Option<PathBuf> {
    let cgroups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mut mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new).into_iter();
    Some(mounts.find(|mount| mount.join("cgroup.procs").exists())?.join(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_within_come_after_those_around_them() {
        let top = std::env::temp_dir().join(format!("pg_fence-cgroup-{}", std::process::id()));
        fs::create_dir_all(top.join("a/b")).unwrap();
        assert_eq!(directories(&top), [top.clone(), top.join("a"), top.join("a/b")]);
        Cgroup(top.clone()).remove();
        assert!(!top.exists());
    }
}
