//! Tokens are never reissued on one server.

pg_test::trials![];
