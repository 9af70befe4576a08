//! Known faults, planted to show that the tests catch each of them: a build with `--cfg planted="<name>"` has one, any
//! other has none. (`Cargo.toml` lists the names.)

/// The deadline of the lease is ignored.
pub const NO_DEADLINE: bool = cfg!(planted = "no-deadline");
/// The keeper ends nothing.
pub const NO_WATCHDOG: bool = cfg!(planted = "no-watchdog");
/// A process that has left the command's process group is not looked for.
pub const GROUP_ONLY: bool = cfg!(planted = "group-only");
/// Nothing is killed that does not end by itself.
pub const TERM_ONLY: bool = cfg!(planted = "term-only");
/// The lease is released while processes of the command still run.
pub const RELEASE_FIRST: bool = cfg!(planted = "release-first");
/// The command's writes present no token.
pub const NO_TOKEN: bool = cfg!(planted = "no-token");
/// No cgroup is made.
pub const NO_CGROUP: bool = cfg!(planted = "no-cgroup");
/// Processes that are left are looked for once.
pub const ONE_LOOK: bool = cfg!(planted = "one-look");
