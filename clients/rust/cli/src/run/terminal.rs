//! The controlling terminal, if there is one, and its foreground process group.

use super::processes;
use nix::unistd::{Pid, getpgrp, getpid, tcgetpgrp, tcsetpgrp};
use std::fs::File;

/// The controlling terminal. SIGTTOU must be blocked, because the foreground is also set from the background.
pub struct Terminal(Option<File>);

impl Terminal {
    pub fn open() -> Terminal {
        Terminal(File::open("/dev/tty").ok())
    }

    fn foreground(&self) -> Option<Pid> {
        tcgetpgrp(self.0.as_ref()?).ok()
    }

    /// Returns true if this process group is in the foreground, and so may read from the terminal.
    pub fn is_foreground(&self) -> bool {
        self.foreground() == Some(getpgrp())
    }

    /// Returns true if this process group is in the foreground and has no other process. Then the command gets the
    /// terminal at once. In a pipeline it does not: a pager at its end needs the keyboard.
    pub fn is_foreground_alone(&self) -> bool {
        let group = getpgrp();
        self.is_foreground() && group == getpid() && processes::count_in_group(group.as_raw()) == 1
    }

    /// Puts the process group in the foreground.
    pub fn set_foreground(&self, group: Pid) {
        if let Some(terminal) = &self.0 {
            // This fails if the terminal has hung up. Then there is no foreground.
            let _ = tcsetpgrp(terminal, group);
        }
    }

    /// Puts this process group in the foreground if `group` is there now.
    pub fn take_back_from(&self, group: Pid) {
        if self.foreground() == Some(group) {
            self.set_foreground(getpgrp());
        }
    }
}
