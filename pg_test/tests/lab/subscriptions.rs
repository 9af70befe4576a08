//! Promotion, restore and copies: the token sequence jumps.

pg_test::trials![];
