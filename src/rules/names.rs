//! Which names of leases a role may see and take: those that begin with a prefix that is recorded for it.
//!
//! Prefixes and names are compared byte by byte, as the database stores them: no collation, no case, no Unicode
//! normalisation. The empty prefix is one of every name. No record, no name.

/// A role's rights to the names of its prefix. Each level includes the ones before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// See.
    Monitor,
    /// Take.
    Worker,
    /// Take, and make known what somebody else has granted.
    Adopter,
    /// All.
    Admin,
}

impl Level {
    /// As a record of `fence_grant` has it; None for anything else.
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

/// The names of a role: what is recorded for it and for the roles whose rights it has.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Names(Vec<(Vec<u8>, Level)>);

impl Names {
    /// The names of a superuser: all.
    pub fn all() -> Self {
        Names(vec![(Vec::new(), Level::Admin)])
    }

    /// Adds a record.
    pub fn add(&mut self, prefix: &[u8], level: Level) {
        self.0.push((prefix.to_vec(), level));
    }

    /// Do the records let the role do this with that name?
    pub fn allow(&self, name: &[u8], level: Level) -> bool {
        self.0.iter().any(|(prefix, given)| *given >= level && name.starts_with(prefix))
    }

    /// The prefixes that let it do this, in the order in which they were added.
    pub fn prefixes(&self, level: Level) -> impl Iterator<Item = &[u8]> {
        self.0.iter().filter(move |(_, given)| *given >= level).map(|(prefix, _)| &**prefix)
    }
}
