//! The tables that store leases: maintenance, DDL, and what a DBA adds to them.

automod::dir!(pub "tests/suite/state");
