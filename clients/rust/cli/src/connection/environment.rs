//! The environment in which the command was started.

use nix::unistd::{User, geteuid};
use std::collections::HashMap;
use std::path::PathBuf;

/// The variables of a process.
#[derive(Debug, Clone, Default)]
pub struct Environment(pub(super) HashMap<String, String>);

impl Environment {
    pub fn of_this_process() -> Environment {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Environment(std::env::vars_os().filter_map(text).collect())
    }

    /// A variable that is empty counts as one that is not set.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub fn home(&self) -> Option<PathBuf> {
        let of_user = || Some(User::from_uid(geteuid()).ok()??.dir);
        self.get("HOME").map(PathBuf::from).or_else(of_user)
    }
}
