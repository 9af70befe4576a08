//! The trigger: every kind of write with the outcome that it must have.

pg_test::trials![];
