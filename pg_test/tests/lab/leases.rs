//! Acquire, renew, release, revoke, check, info and prune, one session at a time.

pg_test::trials![];
