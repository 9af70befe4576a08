//! Beside the tools of others: poolers, object mappers, job queues, lock services, test suites, auditing, partitions
//! that are maintained, backups.
//!
//! Tools of Debian's packages run with Debian's PostgreSQL, whatever version the other tests run on.

automod::dir!(pub "tests/lab/tools");
