//! The environment variables with which the program was started.

use crate::failure::{Failure, Result};
use nix::unistd::{User, geteuid};
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::PathBuf;

/// The variables of a process.
#[derive(Debug, Clone, Default)]
pub struct Environment(pub(super) HashMap<String, String>);

impl Environment {
    /// Fails if a variable of libpq is not UTF-8: without the variable the program might connect to another server.
    pub fn of_this_process() -> Result<Environment> {
        Environment::of(std::env::vars_os())
    }

    fn of(variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Environment> {
        let mut all = HashMap::new();
        for (name, value) in variables {
            let Ok(name) = name.into_string() else { continue };
            match value.into_string() {
                Ok(value) => drop(all.insert(name, value)),
                Err(_) if name.starts_with("PG") => {
                    return Err(Failure::usage(format!("{name} is not UTF-8")));
                }
                Err(_) => {}
            }
        }
        Ok(Environment(all))
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub fn home(&self) -> Option<PathBuf> {
        let of_user = || Some(User::from_uid(geteuid()).ok()??.dir);
        let home = self.get("HOME").filter(|path| !path.is_empty());
        home.map(PathBuf::from).or_else(of_user)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn a_variable_of_libpq_that_cannot_be_read_is_named() {
        let read = |name: &str| {
            Environment::of([(name.into(), OsString::from_vec(vec![b'a', 0xff]))].into_iter())
        };
        assert!(read("PGPASSWORD").unwrap_err().message.contains("PGPASSWORD"));
        assert!(read("LESSCHARDEF").unwrap().get("LESSCHARDEF").is_none());
    }
}
