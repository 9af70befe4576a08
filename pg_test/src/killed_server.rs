//! What a killed server leaves outside of its directory: System V and POSIX shared memory. The machine has room for a
//! few thousand such segments. When they are used up, no PostgreSQL starts any more.

use crate::process;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Removes the shared memory of a killed server by PostgreSQL's own means: with `--check` the server's program takes
/// over the data directory as a restart would, and ends at once, without recovery. Does nothing for a server that ended
/// by itself. If the program cannot run, the memory stays.
pub fn remove_shared_memory(data: &Path) {
    if !data.join("postmaster.pid").exists() {
        return;
    }
    let Some(program) = program_of(data) else { return };
    let mut command = Command::new(program);
    command.arg("--check").arg("-D").arg(data);
    if process::as_server_user(&mut command).is_ok() {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let _ = command.status();
    }
}

/// Calls [`remove_shared_memory`] for each data directory at or below `dir`.
pub fn remove_shared_memory_below(dir: &Path) {
    if dir.join("PG_VERSION").exists() {
        return remove_shared_memory(dir);
    }
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let is_directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    entries.filter(is_directory).for_each(|entry| remove_shared_memory_below(&entry.path()));
}

/// Returns the program that last ran on a data directory: the first word of the command in `postmaster.opts`.
fn program_of(data: &Path) -> Option<String> {
    let command = fs::read_to_string(data.join("postmaster.opts")).ok()?;
    command.split_whitespace().next().map(str::to_owned)
}
