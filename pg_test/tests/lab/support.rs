//! Shared by the tests: databases, concurrent sessions, and what holds for many of them.

automod::dir!(pub "tests/lab/support");

/// Sets what newer versions of PostgreSQL have no more, where it can still be set.
pub fn set_if_known(setting: &str) -> String {
    format!(
        "DO $$ BEGIN SET {setting}; EXCEPTION WHEN feature_not_supported OR undefined_object THEN NULL; END $$"
    )
}
