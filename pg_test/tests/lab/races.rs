//! Leases under real concurrency: who waits, who does not, and that exactly one wins.

pg_test::trials![];
