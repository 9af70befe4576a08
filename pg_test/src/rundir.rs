//! The run directory: all files of a test run, and their removal.
//!
//! It lies below the temporary directory, which the server's user can reach even if the clone is in a private
//! directory. A watchdog process removes it when the run ends, whether it finishes or is ended by Ctrl-C or SIGKILL.
//! What is left after a crash of the machine is removed by the next run.

use crate::{killed_server, process};
use anyhow::{Context, Result, bail};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

const NAME: &str = "pg_fence-";
/// The file with the pid of the run's process and its start time.
const OWNER: &str = "owner";
/// Marks a run directory whose servers were left running on purpose.
const KEPT: &str = "kept";
/// Tells the watchdog to exit without removing anything.
const LEAVE: u8 = b'L';

/// The directory of one test run.
pub struct RunDir {
    path: PathBuf,
    /// This crate's program, which is also the watchdog and the workers.
    program: PathBuf,
    watchdog: Mutex<Option<Child>>,
}

impl RunDir {
    /// Makes a new run directory, after removing those of dead runs. `program` is this crate's binary.
    pub fn create(program: &Path) -> Result<RunDir> {
        let base = base();
        for path in run_dirs(&base) {
            if !path.join(KEPT).exists() && !owner_is_alive(&path) {
                clear(&path);
            }
        }
        let own = std::process::id();
        let path = base.join(format!("{NAME}{own}-{:06x}", rand::random::<u32>() >> 8));
        make_dir(&path)?;
        let started = process::started_at(own as i32).unwrap_or_default();
        fs::write(path.join(OWNER), format!("{own} {started}"))?;
        let watchdog = Command::new(program)
            .arg("watchdog")
            .arg(&path)
            .env_remove(process::RUNDIR_VARIABLE)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start the watchdog {}", program.display()))?;
        Ok(RunDir { path, program: program.to_owned(), watchdog: Mutex::new(Some(watchdog)) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns this crate's program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns a command for a process of this run, which is killed at the latest when the run ends.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env(process::RUNDIR_VARIABLE, &self.path);
        command
    }

    /// Makes a directory in the run directory that belongs to the server's user.
    pub fn server_dir(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        make_dir(&path)?;
        if let Some(user) = process::server_user()? {
            std::os::unix::fs::chown(&path, Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
        }
        Ok(path)
    }

    /// Kills the remaining processes and removes the directory. Dropping the value does the same.
    pub fn close(&self) {
        if let Some(mut child) = self.take_watchdog() {
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }

    /// Leaves the directory and its servers behind. [`stop_kept`] ends them.
    pub fn keep(&self) -> Result<()> {
        fs::write(self.path.join(KEPT), "")?;
        if let Some(mut child) = self.take_watchdog() {
            if let Some(mut stdin) = child.stdin.take() {
                stdin.write_all(&[LEAVE])?;
            }
            child.wait()?;
        }
        Ok(())
    }

    fn take_watchdog(&self) -> Option<Child> {
        let mut watchdog = self.watchdog.lock().unwrap_or_else(|e| e.into_inner());
        watchdog.take()
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        self.close();
    }
}

/// The main function of the watchdog: it waits until its standard input closes, then removes the directory.
pub fn watchdog(rundir: &Path) -> Result<()> {
    let named_so = rundir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(NAME));
    if !named_so || !rundir.join(OWNER).exists() {
        bail!("{} is no run directory", rundir.display());
    }
    let mut word = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut word);
    if word != [LEAVE] {
        clear(rundir);
    }
    Ok(())
}

/// Stops the servers that earlier runs left behind and returns their directories.
pub fn stop_kept() -> Vec<PathBuf> {
    let mut kept = run_dirs(&base());
    kept.retain(|path| path.join(KEPT).exists());
    for path in &kept {
        clear(path);
    }
    kept
}

fn clear(rundir: &Path) {
    process::kill_all_of(rundir);
    killed_server::remove_shared_memory_below(rundir);
    if std::env::var_os("PG_FENCE_KEEP_FILES").is_none() {
        let _ = fs::remove_dir_all(rundir);
    }
}

/// Returns the temporary directory, if the server's user can reach it and a socket's path is not too long.
fn base() -> PathBuf {
    let wanted = std::env::temp_dir();
    let open = |path: &Path| fs::metadata(path).is_ok_and(|meta| meta.mode() & 0o001 != 0);
    let reachable = !nix::unistd::geteuid().is_root() || wanted.ancestors().all(open);
    if reachable && wanted.as_os_str().len() <= 60 { wanted } else { PathBuf::from("/tmp") }
}

/// Returns the run directories of this user below `base`.
fn run_dirs(base: &Path) -> Vec<PathBuf> {
    let own = nix::unistd::geteuid().as_raw();
    let Ok(entries) = fs::read_dir(base) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(NAME))
        .filter(|entry| entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == own))
        .map(|entry| entry.path())
        .filter(|path| path.join(OWNER).exists())
        .collect()
}

fn owner_is_alive(rundir: &Path) -> bool {
    let Ok(text) = fs::read_to_string(rundir.join(OWNER)) else {
        return false;
    };
    let mut words = text.split_whitespace();
    let pid = words.next().and_then(|word| word.parse::<i32>().ok());
    let started = words.next().and_then(|word| word.parse::<u64>().ok());
    pid.is_some_and(|pid| process::is_alive(pid) && process::started_at(pid) == started)
}

/// Makes a directory that everyone can read, whatever the umask.
pub(crate) fn make_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_clears_nothing_but_run_directories() {
        assert!(watchdog(Path::new("/tmp")).is_err());
    }
}
