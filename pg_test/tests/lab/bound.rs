//! Tables bound to a lease.

pg_test::trials![];
