//! The life of a lease, and what is shown of it, in one session: leases.script.
//!
//! The files of this folder test each kind of grant, the clock, and refused input.

automod::dir!(pub "tests/suite/leases");
