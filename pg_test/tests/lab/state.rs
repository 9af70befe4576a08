//! The tables in which leases are kept: maintenance, DDL, and what a DBA adds to them.

automod::dir!(pub "tests/lab/state");
