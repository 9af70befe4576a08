//! The purpose of a lease of a run, which its number says.

use std::ops::Range;

/// A kind of lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Its grants are exclusive.
    Exclusive,
    /// Its grants are shared; sometimes one is exclusive.
    Shared,
    /// It has so many slots.
    Slots(usize),
    /// A lock service grants it, and it is adopted here.
    Adopted,
}

/// So many leases that a lock service grants.
pub fn adopted(number: usize) -> Range<i32> {
    300..300 + number as i32
}

/// The leases that several may hold at once. All others are below.
pub const MULTI_HOLDER: [i32; 3] = [100, 202, 203];

impl Kind {
    /// The kind of a lease.
    pub fn of(lease: i32) -> Kind {
        match lease / 100 {
            0 => Kind::Exclusive,
            1 => Kind::Shared,
            2 => Kind::Slots(lease as usize % 100),
            _ => Kind::Adopted,
        }
    }
}

/// The row that a worker writes under a lease: where several hold it, each has one of its own.
pub fn row_of(lease: i32, worker: u32) -> (&'static str, i32) {
    match Kind::of(lease) {
        Kind::Exclusive | Kind::Adopted => ("bound", lease),
        _ => ("desk", lease * 100 + worker as i32),
    }
}
