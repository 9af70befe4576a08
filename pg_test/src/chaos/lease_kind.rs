//! The kinds of leases in a run, which are encoded in their numbers.

use std::ops::Range;

/// A kind of lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseKind {
    /// A lease with exclusive grants.
    Exclusive,
    /// A lease with shared grants, and sometimes an exclusive one.
    Shared,
    /// A lease with this number of slots.
    Slots(usize),
    /// A lease that a lock service grants and that is adopted here.
    Adopted,
}

/// The numbers of the adopted leases.
pub fn adopted(number: usize) -> Range<i32> {
    300..300 + number as i32
}

/// The leases with several holders. All others have lower numbers.
pub const MULTI_HOLDER: [i32; 3] = [100, 202, 203];

impl LeaseKind {
    /// The kind of a lease.
    pub fn of(lease: i32) -> LeaseKind {
        match lease / 100 {
            0 => LeaseKind::Exclusive,
            1 => LeaseKind::Shared,
            2 => LeaseKind::Slots(lease as usize % 100),
            _ => LeaseKind::Adopted,
        }
    }
}

/// The row that a worker writes under a lease. If a lease has several holders, each has its own row.
pub fn row_of(lease: i32, worker: u32) -> (&'static str, i32) {
    match LeaseKind::of(lease) {
        LeaseKind::Exclusive | LeaseKind::Adopted => ("bound", lease),
        _ => ("desk", lease * 100 + worker as i32),
    }
}
