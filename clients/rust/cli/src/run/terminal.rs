//! The terminal, if there is one, and whose it is.

use super::processes;
use nix::unistd::{Pid, getpgrp, getpid, tcgetpgrp, tcsetpgrp};
use std::fs::File;

/// The controlling terminal. SIGTTOU must be blocked: we set its foreground from the background, too.
pub struct Terminal(Option<File>);

impl Terminal {
    pub fn open() -> Terminal {
        Terminal(File::open("/dev/tty").ok())
    }

    fn foreground(&self) -> Option<Pid> {
        tcgetpgrp(self.0.as_ref()?).ok()
    }

    /// Whether our own process group may read from it now.
    pub fn is_ours(&self) -> bool {
        self.foreground() == Some(getpgrp())
    }

    /// Whether to hand it to the command at once. Not where others share our process group, as in a pipeline: a
    /// pager at its end wants the keyboard.
    pub fn is_ours_alone(&self) -> bool {
        let group = getpgrp();
        self.is_ours() && group == getpid() && processes::count_in_group(group.as_raw()) == 1
    }

    /// Makes that process group the one that may read from it.
    pub fn give_to(&self, group: Pid) {
        if let Some(terminal) = &self.0 {
            // A terminal that has hung up belongs to nobody.
            let _ = tcsetpgrp(terminal, group);
        }
    }

    /// After the command that had it.
    pub fn take_back_from(&self, group: Pid) {
        if self.foreground() == Some(group) {
            self.give_to(getpgrp());
        }
    }
}
