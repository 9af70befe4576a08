//! A server clock that steps while leases live.

pg_test::trials![];
