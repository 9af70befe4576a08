//! fence_protect, fence_unprotect and fence_audit.

pg_test::trials![];
