//! All of it behind a transaction-mode pooler.

pg_test::trials![];
