//! The end of a command at its keeper's hands: where its supervisor is frozen or dead.

use super::MARK;
use super::cgroup::Cgroup;
use super::processes::{of_group_or_with, signal_all};
use crate::clock::Moment;
use crate::planted;
use nix::sys::signal::Signal;
use std::time::Duration;

/// Between two looks whether what was killed is gone.
const DYING: Duration = Duration::from_millis(20);
/// As often in a row nothing of the command must be seen.
const LOOKS: usize = 3;
/// How long the end may take where nothing depends on it.
pub const GIVING_UP: Duration = Duration::from_secs(2);

/// Ends all that can be found of the command. Whether nothing is left.
pub async fn end(mark: &str, group: Option<i32>, first: Signal, kill_at: Moment) -> bool {
    if planted::NO_WATCHDOG {
        return true;
    }
    // The supervisor may have died before it told the group.
    let variable = format!("{MARK}={mark}");
    let cgroup = Cgroup::find(mark);
    let left = || {
        let mut all = of_group_or_with(group, &variable);
        all.extend(cgroup.iter().flat_map(Cgroup::processes));
        all
    };
    let signal = |signal| {
        // Before all others: to look for processes takes a while on a busy machine.
        if signal == Signal::SIGKILL {
            cgroup.iter().for_each(Cgroup::kill);
        }
        signal_all(&left(), group, signal);
    };
    signal(first);
    signal(Signal::SIGCONT);
    // A process that is born while we look may be missed; it is no child of ours that we could wait for.
    while (0..LOOKS).any(|_| !left().is_empty()) {
        if kill_at.has_passed() {
            signal(Signal::SIGKILL);
        }
        if (kill_at + GIVING_UP).has_passed() {
            log::warn!("KILL does not end all of the command: the lease is left to its ttl");
            return false;
        }
        tokio::time::sleep(DYING).await;
    }
    cgroup.iter().for_each(Cgroup::remove);
    true
}
