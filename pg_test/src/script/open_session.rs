//! An open session of a test.

use crate::background::Background;

/// An open session: its role, its database and its server.
pub(super) struct OpenSession {
    pub role: Option<String>,
    pub on: Option<String>,
    pub server: String,
    pub session: Background,
}
