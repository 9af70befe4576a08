//! A control group of the run (cgroup v2), if the system lets this process make one.
//!
//! Every process that the command starts stays in the cgroup, even if it changes its session, its environment or its
//! user, and one write to the kernel kills all of them. Without a cgroup the supervisor finds its descendants, and the
//! renewer finds processes by the run's id in their environment.

use super::processes::Process;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The beginning of the directory's name. The run's id follows.
const PREFIX: &str = "pg_fence-";

#[derive(Debug, Clone)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes the cgroup of a run below the cgroup of this process. Returns None if the system does not permit it.
    pub fn make(run_id: &str) -> Option<Cgroup> {
        let own = own_directory()?;
        remove_left_behind(&own);
        let cgroup = Cgroup(own.join(format!("{PREFIX}{run_id}")));
        fs::create_dir(&cgroup.0).ok()?;
        // Linux has this file since 5.14.
        if cgroup.0.join("cgroup.kill").exists() {
            return Some(cgroup);
        }
        cgroup.remove();
        None
    }

    /// Returns the cgroup of a run, if the run made one. The renewer is in the same cgroup as the supervisor.
    pub fn find(run_id: &str) -> Option<Cgroup> {
        let path = own_directory()?.join(format!("{PREFIX}{run_id}"));
        path.is_dir().then_some(Cgroup(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Moves this process into the cgroup at `path`.
    pub fn enter(path: &Path) -> io::Result<()> {
        fs::write(path.join("cgroup.procs"), "0")
    }

    /// Returns the live processes of the cgroup and of the cgroups below it.
    pub fn processes(&self) -> Vec<Process> {
        let pids = directories(&self.0).into_iter().flat_map(|directory| {
            let text = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
            text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<i32>>()
        });
        pids.filter_map(Process::read).collect()
    }

    /// Returns true if any process is alive in the cgroup. This includes processes that end too fast to be listed.
    pub fn is_populated(&self) -> bool {
        let events = fs::read_to_string(self.0.join("cgroup.events")).unwrap_or_default();
        events.lines().any(|line| line == "populated 1")
    }

    /// Kills every process in the cgroup, whoever owns it. A failure is ignored: the caller also signals the processes
    /// one by one.
    pub fn kill(&self) {
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
    }

    /// Removes the cgroup. The kernel refuses that while a process is in it.
    pub fn remove(&self) {
        // The innermost directory has to be removed first.
        directories(&self.0).iter().rev().for_each(|directory| drop(fs::remove_dir(directory)));
    }
}

/// Returns the directory and all directories below it, each before those that it contains.
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

/// Removes the cgroups of runs whose supervisor and renewer were both killed.
fn remove_left_behind(own: &Path) {
    for entry in fs::read_dir(own).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let run_id = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let pid = run_id.and_then(|run_id| run_id.split('-').next()?.parse().ok());
        if pid.is_some_and(|pid| kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH)) {
            Cgroup(entry.path()).remove();
        }
    }
}

/// Returns the directory of this process's cgroup, if it is mounted: version 2 alone, or beside version 1.
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
    fn a_directory_comes_before_those_that_it_contains() {
        let top = std::env::temp_dir().join(format!("pg_fence-cgroup-{}", std::process::id()));
        fs::create_dir_all(top.join("a/b")).unwrap();
        assert_eq!(directories(&top), [top.clone(), top.join("a"), top.join("a/b")]);
        Cgroup(top.clone()).remove();
        assert!(!top.exists());
    }
}
