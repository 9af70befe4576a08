//! The life of a lease, and what is shown of it, one session at a time: leases.script.
//!
//! The files of this folder: each kind of grant, the clock, and what is refused as input.

automod::dir!(pub "tests/lab/leases");
