//! Known faults, planted to show that the tests catch each of them: a build with `--cfg planted="<name>"` has one, any
//! other has none. (`Cargo.toml` lists the names.)

/// The deadline of the lease is ignored.
pub const NO_DEADLINE: bool = cfg!(planted = "no-deadline");
/// The renewer ends no process.
pub const NO_WATCHDOG: bool = cfg!(planted = "no-watchdog");
/// Processes that have left the command's process group are not looked for.
pub const GROUP_ONLY: bool = cfg!(planted = "group-only");
/// Processes that ignore TERM are not killed.
pub const TERM_ONLY: bool = cfg!(planted = "term-only");
/// The lease is released while processes of the command still run.
pub const RELEASE_FIRST: bool = cfg!(planted = "release-first");
/// The command's writes present no token.
pub const NO_TOKEN: bool = cfg!(planted = "no-token");
/// No cgroup is made.
pub const NO_CGROUP: bool = cfg!(planted = "no-cgroup");
/// One scan decides that no process is left.
pub const ONE_SCAN: bool = cfg!(planted = "one-scan");
