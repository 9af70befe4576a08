//! Shared grants, slots, and several leases at once.

pg_test::trials![];
