//! What the tests have in common: databases, concurrent sessions, and what holds for many of them.

pub mod c_module;
pub mod concurrency;
pub mod history;
pub mod holes;
pub mod test_database;
pub mod write_statements;
