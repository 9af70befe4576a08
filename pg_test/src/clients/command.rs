//! The command `pg_fence`. The tests play its scenarios (`command::scenarios`), and plant faults with which these must
//! fail (`command::faults`).
//!
//! | module | its noun |
//! | --- | --- |
//! | [`fixture`] | a database with a bound table, and runs of the command against it |
//! | [`scenarios`] | the scenarios |

pub mod fixture;
pub mod scenarios;
