//! Which names of leases a role may see and take: those with a prefix that is recorded for the role.
//!
//! Prefixes and names are compared byte by byte, as the database stores them, without regard to collation, case or
//! Unicode normalisation. The empty prefix matches every name. A role without a record may use no name.

/// A role's rights to names with its prefix. Each level includes the ones before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// The role may see leases.
    Monitor,
    /// The role may take leases.
    Worker,
    /// The role may take leases, and adopt those of another lock service.
    Adopter,
    /// The role has all rights.
    Admin,
}

impl Level {
    /// Parses the level in a record of `fence_grant`; `None` for any other text.
    pub fn parse(text: &[u8]) -> Option<Level> {
        match text {
            b"monitor" => Some(Level::Monitor),
            b"worker" => Some(Level::Worker),
            b"adopter" => Some(Level::Adopter),
            b"admin" => Some(Level::Admin),
            _ => None,
        }
    }
}

/// The names that a role may use: the records of the role, and of the roles whose rights it has.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Names(Vec<(Vec<u8>, Level)>);

impl Names {
    /// All names, for a superuser.
    pub fn all() -> Self {
        Names(vec![(Vec::new(), Level::Admin)])
    }

    /// Adds a record.
    pub fn add(&mut self, prefix: &[u8], level: Level) {
        self.0.push((prefix.to_vec(), level));
    }

    /// Returns true if the records give the role this right to that name.
    pub fn allow(&self, name: &[u8], level: Level) -> bool {
        self.0.iter().any(|(prefix, given)| *given >= level && name.starts_with(prefix))
    }

    /// The prefixes with this right, in the order in which they were added.
    pub fn prefixes(&self, level: Level) -> impl Iterator<Item = &[u8]> {
        self.0.iter().filter(move |(_, given)| *given >= level).map(|(prefix, _)| &**prefix)
    }
}
