//! The errors of the program, and the exit status of each.

use pg_fence_client::{Error, Refused};
use std::fmt;

pub type Result<T> = std::result::Result<T, Failure>;

/// The exit statuses, as in `sysexits.h`, `timeout`, `env` and shells.
pub mod status {
    /// The command line, or what it names, cannot be used.
    pub const USAGE: u8 = 64;
    /// The database cannot be reached.
    pub const UNAVAILABLE: u8 = 69;
    /// The lease was lost.
    pub const LOST: u8 = 70;
    /// The system gave no process, or no descriptor.
    pub const SYSTEM: u8 = 71;
    /// Another holder has the lease.
    pub const TAKEN: u8 = 75;
    /// The database refuses, and would refuse again.
    pub const REFUSED: u8 = 78;
    /// The command took longer than it may.
    pub const TOO_LONG: u8 = 124;
    /// The command cannot be executed.
    pub const NOT_EXECUTABLE: u8 = 126;
    /// The command does not exist.
    pub const NOT_FOUND: u8 = 127;
    /// Added to the number of the signal that ended the command.
    pub const SIGNAL: u8 = 128;
}

/// A message of one line, with the status to exit with.
#[derive(Debug, Clone)]
pub struct Failure {
    pub status: u8,
    pub message: String,
}

impl Failure {
    pub fn new(status: u8, message: impl Into<String>) -> Failure {
        Failure { status, message: message.into() }
    }

    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::new(status::USAGE, message)
    }

    pub fn system(what: &str, error: impl fmt::Display) -> Failure {
        Failure::new(status::SYSTEM, format!("{what}: {error}"))
    }

    /// Returns the failure for an error of the client, except a lost or taken lease.
    pub fn of_client(error: &Error) -> Failure {
        let text = error.to_string();
        match error {
            Error::NoConnection(..) if text.contains(PASSWORD_MISSING) => {
                Failure::new(status::REFUSED, text.replace(PASSWORD_MISSING, NO_PASSWORD))
            }
            // The driver has no type for this error. Another attempt would fail, too.
            Error::NoConnection(..) if text.contains(NO_DESCRIPTOR) => {
                Failure::new(status::SYSTEM, text)
            }
            Error::NoConnection(..) if options_refused(error).is_some() => {
                Failure::new(status::REFUSED, format!("{text} ({NO_OPTIONS})"))
            }
            Error::NotInstalled(message) => Failure::not_installed(message),
            Error::NotGranted { .. } | Error::Invalid(_) => Failure::new(status::REFUSED, text),
            error => match error.sqlstate().as_deref() {
                Some("25006") => Failure::new(status::UNAVAILABLE, format!("{text} ({READ_ONLY})")),
                state => Failure::new(status_of(state), text),
            },
        }
    }

    /// Returns the failure for an error of a statement that the program itself has sent.
    pub fn of_driver(error: tokio_postgres::Error) -> Failure {
        let told = error.as_db_error().map(|told| (told.code().code(), told.message()));
        match told {
            Some(("42883", message)) => Failure::not_installed(message),
            // Any other missing relation is a table that the user has named.
            Some(("42P01", message)) if message.contains("\"fence.") => {
                Failure::not_installed(message)
            }
            Some(("42501", message)) if message.starts_with("permission denied") => {
                let grants = match message {
                    _ if message.contains("lease_adopt") => ADOPTS,
                    _ if message.contains("lease_release") => RELEASES,
                    _ => GRANTS,
                };
                Failure::new(status::REFUSED, format!("{message} ({grants})"))
            }
            // The statement was no transaction of the client's, so no TransactionLost is needed.
            _ => Failure::of_client(&refused(error)),
        }
    }

    fn not_installed(message: &str) -> Failure {
        Failure::new(status::REFUSED, format!("{message} ({INSTALLED})"))
    }

    /// Returns true if the same call may succeed a little later.
    pub fn is_transient(&self) -> bool {
        self.status == status::UNAVAILABLE
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Returns the server's error as one of the client, whose text is one line with the hint. The driver's own text has a
/// line for each part.
fn refused(error: tokio_postgres::Error) -> Error {
    let Some(told) = error.as_db_error() else { return Error::other(error) };
    Error::Refused(Refused {
        sqlstate: told.code().code().to_owned(),
        message: told.message().to_owned(),
        hint: told.hint().map(str::to_owned),
        detail: Default::default(),
    })
}

/// Returns the errors of all attempts to connect, if a pooler refused the connection because of its options (PgBouncer:
/// 08P01, the proxy of RDS: 0A000).
pub fn options_refused(error: &Error) -> Option<&str> {
    match error {
        Error::NoConnection(tries, Some(state))
            if matches!(state.get(..2), Some("08" | "0A")) && tries.contains("options") =>
        {
            Some(tries)
        }
        _ => None,
    }
}

/// Part of the driver's message if the server requests a password and there is none. The driver has no type for that.
const PASSWORD_MISSING: &str = "password missing";

/// Part of the message of EMFILE in Rust's standard library.
const NO_DESCRIPTOR: &str = "(os error 24)";

/// The user is not prompted for a password, because a command that runs at night has no user.
const NO_PASSWORD: &str = "the server asks for a password, and there is none: it comes from ~/.pgpass (readable for its \
     owner alone) or PGPASSWORD, and is not asked for";

const NO_OPTIONS: &str = "they come from PGOPTIONS or the connection string, and a pooler refuses them; a pg_fence run around \
     this one sets PGOPTIONS, unless it has --no-pgoptions";

const INSTALLED: &str = "is pg_fence created in this database? If it is, its schema is neither in the search_path nor named by \
     --schema, or its version is another one, or it is pg_fence_lite, which has less";

const GRANTS: &str = "an administrator grants it: SELECT fence_grant('role', 'monitor'); for refused writes and revocations \
     it takes 'admin'";

const ADOPTS: &str = "an administrator grants it: SELECT fence_grant('role', 'adopter')";

const RELEASES: &str = "an administrator grants it: SELECT fence_grant('role')";

const READ_ONLY: &str = "is it a standby? Name all servers, and target_session_attrs=read-write";

/// Returns REFUSED for the errors that the clients call permanent, which another attempt would bring again.
fn status_of(sqlstate: Option<&str>) -> u8 {
    let state = sqlstate.unwrap_or_default();
    let is_permanent = matches!(state.get(..2), Some("22" | "28" | "3D" | "3F" | "42" | "PF"))
        || matches!(state, "0A000" | "55000");
    if is_permanent { status::REFUSED } else { status::UNAVAILABLE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pooler_that_takes_no_options_is_known_by_its_words() {
        let refused = |state: &str, words: &str| {
            let error =
                Error::NoConnection(format!("\"db\", port 1: {words}"), Some(state.to_owned()));
            options_refused(&error).is_some()
        };
        assert!(refused("08P01", "unsupported startup parameter: options"));
        assert!(refused("08P01", "unsupported startup parameter in options: pg_fence.token"));
        assert!(refused("0A000", "RDS Proxy currently doesn't support command-line options."));
        assert!(!refused("08P01", "no such database"));
        assert!(!refused("22023", "invalid command-line argument in options"));
    }

    #[test]
    fn without_a_descriptor_it_is_this_machine_that_refuses() {
        let failed = |words: &str| Failure::of_client(&Error::NoConnection(words.to_owned(), None));
        assert_eq!(
            failed("\"db\", port 1: Too many open files (os error 24)").status,
            status::SYSTEM
        );
        assert!(failed("\"db\", port 1: Connection refused (os error 111)").is_transient());
    }

    #[test]
    fn what_helps_later_is_told_from_what_does_not() {
        for state in [None, Some("08006"), Some("57P03"), Some("53300"), Some("25006")] {
            assert_eq!(status_of(state), status::UNAVAILABLE, "{state:?}");
        }
        for state in ["42501", "28P01", "3D000", "22023", "55000", "42883"] {
            assert_eq!(status_of(Some(state)), status::REFUSED, "{state}");
        }
    }
}
