//! Leases at every isolation level.

pg_test::trials![];
