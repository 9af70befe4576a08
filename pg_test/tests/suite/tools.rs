//! pg_fence beside other tools: poolers, object-relational mappers, job queues, lock services, test suites, auditing,
//! partition maintenance, backups.
//!
//! Tools from Debian's packages run with Debian's PostgreSQL, whatever version the other tests run on.

automod::dir!(pub "tests/suite/tools");
